"""A plot of results of ``serve_vllm.py``: engines side by side, as shares of the better vanilla.

    python benchmarks/plot_serve.py RESULT.json ... PICTURE.png

Each result is a row, and each workload a panel. Points are medians over the rounds with their tokens per second, lines
the intervals from ``serve_vllm.py``. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def draw(found: dict[str, Any], row: Any) -> None:
    """Draw one result: a panel for each workload, and a point for each cell with its tokens per second."""
    compared, machine = found["compared"], found["machine"]
    rows = [cell for cells in compared.values() for cell in cells.values()]
    lowest, highest = min(cell["low"] for cell in rows), max(cell["high"] for cell in rows)
    margin = 0.15 * (highest - lowest)
    panels = row.subplots(1, len(compared), sharey=True, squeeze=False)[0]
    for panel, (workload, cells) in zip(panels, compared.items(), strict=True):
        for place, (name, cell) in enumerate(cells.items()):
            below, above = cell["ratio"] - cell["low"], cell["high"] - cell["ratio"]
            colour = "tab:gray" if name.startswith("vanilla") else f"C{place}"
            panel.errorbar(place, cell["ratio"], yerr=[[below], [above]], color=colour, fmt="o", capsize=4)
            label = f"{cell['tokens_per_s']:,.0f}"
            over = (0, 6)  # points of the page, above the line
            panel.annotate(
                label, (place, cell["high"]), over, textcoords="offset points", ha="center", fontsize=8, color=colour
            )
        panel.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        panel.grid(axis="y", linewidth=0.3)
        panel.set_xlim(-0.6, len(cells) - 0.4)
        panel.set_title(workload, fontsize=10)
        panel.set_xticks(range(len(cells)), list(cells), rotation=45, ha="right", fontsize=8)
        panel.set_ylim(lowest - margin, highest + margin)
    panels[0].set_ylabel("tokens a second,\nshare of the better vanilla")
    gpus = machine.get("tensor_parallel") or 1
    where = machine["gpu"] if gpus == 1 else f"{gpus} x {machine['gpu']}"
    row.suptitle(f"{machine['shape']}, vLLM {machine['vllm']}, {where}, {machine['rounds']} rounds", fontsize=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    found = [json.loads(result.read_text()) for result in options.results]
    widest = max(len(one["compared"]) for one in found)
    figure = pyplot.figure(figsize=(3.4 * widest, 3.6 * len(found)), layout="constrained")
    for one, row in zip(found, figure.subfigures(len(found), 1, squeeze=False)[:, 0], strict=True):
        draw(one, row)
    figure.savefig(options.picture, dpi=90)


if __name__ == "__main__":
    main()
