"""The section "Fast?": times from ``fl bench`` as shares of the floor over sizes, and every figure in a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from ..weights import PLAIN
from .files import Source
from .page import Cell, Chart, Part, Section, Table
from .svg import Line, colours, lines

EMPTY = Section(
    "fast",
    "Fast?",
    "Shares of the roofline: the floor is the time that no implementation beats at the copy and matrix rates "
    "that were measured in the same run.",
    "fl bench --out bench.json",
)
BY_REQUESTS = ("paged_attention", "mla_decode", "mla_prefill", "index_topk", "mla_sparse")
"""Operators with a line over batches; their labels end with the batch."""
HIGHEST = 1.2
"""Smallest upper end of a chart's axis; a call served by a cache may exceed the floor."""

Row = Mapping[str, Any]


def is_one(data: Mapping[str, Any]) -> bool:
    """Whether a file is a result of ``fl bench``."""
    return "copy_bytes_per_s" in data and any(True for _ in _measured(data.get("results")))


def parts(sources: Iterable[Source]) -> list[Part]:
    """Make a part for each file, newest first; mark a part as earlier if newer files have all of its rows."""
    found: list[Part] = []
    seen: set[tuple[str, str, str, str]] = set()
    for source in sources:
        keys = {(source.origin.machine, source.data["dtype"], row["op_name"], row["label"]) for row in _rows(source)}
        found.append(_part(source, earlier=keys <= seen))
        seen |= keys
    return found


def summary(sources: list[Source]) -> tuple[tuple[str, str], str]:
    """Return the number of measured rows, and the machines."""
    rows = [row for source in sources for row in _rows(source)]
    machines = dict.fromkeys(source.origin.machine for source in sources)
    operators = {row["op_name"] for row in rows}
    return (f"{len(rows):,}", f"measured times of {len(operators)} operators on {', '.join(machines)}"), ""


def _part(source: Source, earlier: bool) -> Part:
    rows = list(_rows(source))
    data = source.data
    colour = colours(sorted({_name(row) for row in rows}))
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        panels.setdefault((row["op_name"], _case(row)), []).append(row)
    charts = [_chart(*panel, of_panel, colour) for panel, of_panel in panels.items()]
    rates = f"{data['copy_bytes_per_s'] / 1e9:,.0f} GB/s and matrix {data['operations_per_s'] / 1e12:,.1f} TFLOP/s"
    lead = [
        f"Copy {rates} were measured in the same run.",
        "Charts show shares of the floor: a line is the median over widths, its band goes from least to largest.",
    ]
    title = f"{source.origin.machine}, {data['dtype']}: {', '.join(dict.fromkeys(row['op_name'] for row in rows))}"
    return Part(title, source.origin, lead, list(colour.items()), charts, [_table(rows)], earlier)


def _rows(source: Source) -> Iterator[Row]:
    yield from _measured(source.data["results"])
    for nested in source.data.values():
        if isinstance(nested, Mapping) and "copy_bytes_per_s" in nested:
            yield from _measured(nested.get("results"))


def _measured(rows: Any) -> Iterator[Row]:
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, Mapping) and "share_of_floor" in row:
            yield row


def _name(row: Row) -> str:
    """Return the implementation's name, marked if it ran with plain weights although it prepares them."""
    return str(row["impl_id"]) + (", plain weights" if row.get("weights") == PLAIN else "")


def _case(row: Row) -> str:
    label = str(row["label"])
    return label.rpartition(",")[0] if row["op_name"] in BY_REQUESTS else label


def _chart(op_name: str, case: str, rows: list[Row], colour: Mapping[str, str]) -> Chart:
    """Draw the share of the floor over tokens, or over batches."""

    def place(row: Row) -> str:
        return (
            str(row["label"].rpartition(", ")[2].partition(" ")[0])
            if row["op_name"] in BY_REQUESTS
            else str(row["tokens"])
        )

    shares: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["share_of_floor"] is not None:
            shares.setdefault(_name(row), {}).setdefault(place(row), []).append(row["share_of_floor"])
    places = sorted({place(row) for row in rows}, key=lambda text: (len(text), text))
    series = [
        Line(name, colour[name], {at: (min(all_), median(all_), max(all_)) for at, all_ in points.items()})
        for name, points in shares.items()
    ]
    highest = max([HIGHEST, *(1.05 * high for line in series for _, _, high in line.points.values())])
    title = f"{op_name}, {case}" if case else op_name
    axis = "requests" if op_name in BY_REQUESTS else "tokens"
    return Chart(title, lines(title, series, places, axis, highest, mark=1.0))


def _table(rows: list[Row]) -> Table:
    headings = (
        "operator",
        "implementation",
        "case",
        "#tokens",
        "#width",
        "#device µs",
        "#low to high",
        "#host µs",
        "#of floor",
        "#of copy",
    )
    cells = []
    for row in rows:
        times, host = row["device_us"], row.get("host_us")
        head = [Cell(row["op_name"], code=True), Cell(_name(row), code=True), Cell(str(row["label"]))]
        size = [Cell(f"{row['tokens']:,}"), Cell(f"{row['width']:,}")]
        if times is None:
            cells.append([*head, *size, Cell("–", "quiet", str(row.get("note", ""))), *(Cell("") for _ in range(4))])
            continue
        figures = [f"{times['median']:,.1f}", f"{times['low']:,.1f} to {times['high']:,.1f}"]
        figures += ["" if host is None else f"{host['median']:,.1f}", f"{row['share_of_floor']:.3f}"]
        copy = row.get("share_of_copy")
        cells.append([*head, *size, *map(Cell, figures), Cell("" if copy is None else f"{copy:.3f}")])
    return Table("Every measured time", headings, cells, f"all {len(rows)} rows")
