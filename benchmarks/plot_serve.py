"""A plot of results of ``serve_vllm.py``: engines side by side, as shares of the better vanilla.

    python benchmarks/plot_serve.py RESULT.json PICTURE.png

Points are medians over the rounds, lines the intervals from ``serve_vllm.py``. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw(found: dict[str, Any], picture: Path) -> None:
    """Draw one result: a panel for each workload, and a point for each cell with its tokens per second."""
    compared, machine = found["compared"], found["machine"]
    rows = [row for cells in compared.values() for row in cells.values()]
    lowest, highest = min(row["low"] for row in rows), max(row["high"] for row in rows)
    margin = 0.15 * (highest - lowest)
    figure, panels = pyplot.subplots(1, len(compared), figsize=(3.4 * len(compared), 3.6), sharey=True, squeeze=False)
    for panel, (workload, cells) in zip(panels[0], compared.items(), strict=True):
        for place, (name, row) in enumerate(cells.items()):
            below, above = row["ratio"] - row["low"], row["high"] - row["ratio"]
            colour = "tab:gray" if name.startswith("vanilla") else f"C{place}"
            panel.errorbar(place, row["ratio"], yerr=[[below], [above]], color=colour, fmt="o", capsize=4)
            label = f"{row['tokens_per_s']:,.0f}"
            over = (0, 6)  # points of the page, above the line
            panel.annotate(
                label, (place, row["high"]), over, textcoords="offset points", ha="center", fontsize=8, color=colour
            )
        panel.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        panel.grid(axis="y", linewidth=0.3)
        panel.set_xlim(-0.6, len(cells) - 0.4)
        panel.set_title(workload, fontsize=10)
        panel.set_xticks(range(len(cells)), list(cells), rotation=60, ha="right", fontsize=8)
        panel.set_ylim(lowest - margin, highest + margin)
    panels[0][0].set_ylabel("tokens a second,\nshare of the better vanilla")
    gpus = machine.get("tensor_parallel") or 1
    where = machine["gpu"] if gpus == 1 else f"{gpus} x {machine['gpu']}"
    figure.suptitle(f"{machine['shape']}, vLLM {machine['vllm']}, {where}, {machine['rounds']} rounds", fontsize=10)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    draw(json.loads(options.result.read_text()), options.picture)


if __name__ == "__main__":
    main()
