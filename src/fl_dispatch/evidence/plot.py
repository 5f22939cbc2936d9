"""A plot of benchmark results: share of the floor over tokens, one panel per case, one line per implementation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DispatchError

ATTENTION = ("paged_attention", "mla_decode", "mla_prefill", "index_topk", "mla_sparse")
"""Operators with lines over batches; their labels end with the batch."""


def plot(results: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw rows of :meth:`fl_dispatch.evidence.bench.Result.as_data` to an image file.

    Raises:
        DispatchError: matplotlib is not installed, or nothing was measured.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DispatchError("a plot needs matplotlib: pip install 'fl-dispatch[report]'") from error
    panels: dict[str, dict[str, list[tuple[str, float]]]] = {}
    for row in results:
        if row["share_of_floor"] is not None:
            attention = row["op_name"] in ATTENTION
            phase = row["label"].rpartition(",")[0] if attention else row["label"]
            panel = ", ".join(filter(None, (row["op_name"], phase, "" if attention else str(row["width"]))))
            place = f"{row['tokens']}×{row['width']}" if attention else str(row["tokens"])
            lines = panels.setdefault(panel, {})
            name = row["impl_id"] + (", plain weights" if row.get("weights") == "plain" else "")
            lines.setdefault(name, []).append((place, row["share_of_floor"]))
    if not panels:
        raise DispatchError("nothing was measured, so there is nothing to plot")
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.6 * rows + 0.8), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (panel, lines) in zip(axes.flat, panels.items(), strict=False):
        for name, points in lines.items():
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, color=f"C{names.index(name)}", label=name)
        axis.set_title(panel, fontsize=8)
        axis.tick_params(labelsize=6)
        axis.set_ylim(0, 1.1)
        axis.axhline(1.0, color="0.6", linewidth=0.6)
        axis.grid(alpha=0.3)
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles), fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.supylabel("share of the floor (copy or matrix rate)", fontsize=8)
    figure.savefig(path, dpi=72)
