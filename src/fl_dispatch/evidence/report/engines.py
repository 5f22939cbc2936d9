"""Comparison of engines: tokens per second of hosts with and without the plugin, alternating on one machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from .files import Source
from .page import Cell, Chart, Part, Section, Table
from .svg import Interval, colours, intervals

EMPTY = Section(
    "engines",
    "Engines",
    "Engines side by side: tokens a second as a share of the one that the others are compared with, "
    "and the interval of that share over the rounds.",
    "python benchmarks/serve_vllm.py --json serve.json",
)
Workloads = Mapping[str, Mapping[str, tuple[float, float, float, float]]]
"""Workload → engine → tokens a second, and share with its low and high end; NaN in a file without a vanilla engine."""


def is_one(data: Mapping[str, Any]) -> bool:
    """Whether a file is a result of a benchmark of engines."""
    runs = data.get("runs")
    return any(isinstance(data.get(name), Mapping) for name in ("compared", "formats")) or (
        isinstance(runs, list) and any(isinstance(run, Mapping) and "results" in run for run in runs)
    )


def parts(sources: Iterable[Source]) -> list[Part]:
    """Make a part for each comparison, newest first."""
    return [
        _part(source, title, against, workloads)
        for source in sources
        for title, against, workloads in _compared(source.data)
    ]


def summary(sources: list[Source]) -> tuple[tuple[str, str], str]:
    """Count the workloads in which the plugin with shipped settings is faster or slower than the better vanilla."""
    ends = [
        cells["plugin_shipped"][2:]
        for source in sources
        for _, _, workloads in _compared(source.data)
        for cells in workloads.values()
        if "plugin_shipped" in cells and not math.isnan(cells["plugin_shipped"][1])
    ]
    faster, slower = sum(low > 1 for low, _ in ends), sum(high < 1 for _, high in ends)
    if not ends:
        return (str(len(sources)), "comparisons of engines"), ""
    said = "workloads are faster as shipped than the better vanilla" + (f", {slower} slower" if slower else "")
    return (f"{faster} of {len(ends)}", said), "good" if not slower else "warn"


def _compared(data: Mapping[str, Any]) -> Iterable[tuple[str, str, Workloads]]:
    """Yield each comparison of a file: its title, the base of the shares, and the shares."""
    compared = data.get("compared")
    if isinstance(compared, Mapping):
        machine = data.get("machine")
        machine = machine if isinstance(machine, Mapping) else {}
        rounds = f"{machine['rounds']} rounds" if "rounds" in machine else ""
        vanilla = any("ratio" in row for cells in compared.values() for row in cells.values())
        yield (
            ", ".join(filter(None, (str(machine.get("shape", "")), rounds))),
            "the better vanilla of the round",
            {
                workload: {
                    name: (
                        row["tokens_per_s"],
                        *(row[key] if vanilla else math.nan for key in ("ratio", "low", "high")),
                    )
                    for name, row in cells.items()
                }
                for workload, cells in compared.items()
            },
        )
    formats = data.get("formats")
    for name, found in formats.items() if isinstance(formats, Mapping) else ():
        machine = data["machine"]
        (baseline, *_) = (cell for cells in found["rates"].values() for cell in cells if cell.startswith("vanilla"))
        layers, rounds = f"{machine['layers']} layers", f"{machine['rounds']} rounds"
        workloads = {workload: _by_round(cells, baseline) for workload, cells in found["rates"].items()}
        yield ", ".join((name, str(machine["shape"]), layers, rounds)), f"{baseline} of the round", workloads
    for run in data["runs"] if isinstance(data.get("runs"), list) else ():
        if isinstance(run, Mapping) and "results" in run:
            facts = [f"{run['parameters'] / 1e6:.0f} M parameters" if "parameters" in run else ""]
            facts += [str(run.get(key, "")) for key in ("dtype", "mode", "clock")]
            facts += [f"{run['rounds']} rounds" if "rounds" in run else ""]
            found = {name: _shares(cells) for name, cells in run["results"].items()}
            yield ", ".join(filter(None, facts)), _baseline(run["results"]), found


def _by_round(cells: Mapping[str, list[float]], baseline: str) -> dict[str, tuple[float, float, float, float]]:
    """Convert cells of ``serve_quantized.py``: tokens per second of each round."""
    found = {}
    for name, rates in cells.items():
        shares = sorted(own / other for own, other in zip(rates, cells[baseline], strict=True))
        found[name] = (median(rates), median(shares), shares[0], shares[-1])
    return found


def _shares(cells: Mapping[str, Any]) -> dict[str, tuple[float, float, float, float]]:
    """Convert cells of ``serve_cpu.py``: the plugin against vanilla, or the shipped choice against each other one."""
    if "ratio" in cells:
        engines = {name: value for name, value in cells.items() if name not in ("ratio", "interval")}
        first = next(iter(engines))
        own = (cells["ratio"], *cells["interval"])
        return {name: (tokens, *((1.0, 1.0, 1.0) if name == first else own)) for name, tokens in engines.items()}
    gains = ((name, row["tokens_per_s"], row["gain_of_cpu_yaml"], row["gain_quartiles"]) for name, row in cells.items())
    return {name: (tokens, 1 / gain, 1 / high, 1 / low) for name, tokens, gain, (low, high) in gains}


def _baseline(results: Mapping[str, Any]) -> str:
    return "vanilla" if any("ratio" in cells for cells in results.values()) else "the shipped cpu.yaml"


def _part(source: Source, title: str, against: str, workloads: Workloads) -> Part:
    colour = colours(name for cells in workloads.values() for name in cells)
    charts, rows = [], []
    for workload, cells in workloads.items():
        drawn = [
            Interval(name, share, low, high, colour[name], f"{tokens:,.0f}/s")
            for name, (tokens, share, low, high) in cells.items()
        ]
        charts.append(Chart(workload, intervals(workload, drawn, f"share of {against}", mark=1.0)))
        rows += [
            [Cell(workload), Cell(name, code=True), Cell(f"{tokens:,.1f}"),
             *((Cell("–", "quiet"), Cell("")) if math.isnan(share) else
               (Cell(f"{share:.3f}", _tone(low, high)), Cell(f"{low:.3f} to {high:.3f}")))]
            for name, (tokens, share, low, high) in cells.items()
        ]  # fmt: skip
    headings = ("workload", "engine", "#tokens/s", "#share", "#interval")
    table = Table(f"Tokens a second, and the share of {against}", headings, rows, f"all {len(rows)} figures")
    heading = ", ".join(filter(None, (title, source.origin.machine))) or source.path.name
    return Part(
        heading, source.origin, [f"1.0 is {against}. Figures at the right are tokens a second."], (), charts, [table]
    )


def _tone(low: float, high: float) -> str:
    return "good" if low > 1 else "bad" if high < 1 else ""
