"""The section "Tuned": each choice of ``fl tune``, and its candidates with medians and intervals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .files import Source
from .page import Cell, Chart, Part, Section, Table
from .svg import Line, colours, lines

EMPTY = Section(
    "tuned",
    "Tuned",
    "Candidates at the sizes that are deployed, and the winner that the platform's file takes.",
    "fl tune",
)
HIGHEST = 1.15

Row = Mapping[str, Any]


def is_one(data: Mapping[str, Any]) -> bool:
    """Whether a file is the evidence of a platform's file; that of an unfinished run has no choices yet."""
    return any(True for _ in _rows(data))


def parts(sources: Iterable[Source]) -> list[Part]:
    """Make a part for each file."""
    return [_part(source) for source in sources]


def summary(sources: list[Source]) -> tuple[tuple[str, str], str]:
    """Return the number of measured choices."""
    machines = ", ".join(dict.fromkeys(source.origin.machine for source in sources))
    count = sum(1 for source in sources for _ in _rows(source.data))
    return (str(count), f"choices measured on {machines}"), ""


def _rows(data: Mapping[str, Any]) -> Iterator[Row]:
    keys = data.get("keys")
    for row in keys if isinstance(keys, list) else ():
        if isinstance(row, Mapping) and isinstance(row.get("candidates"), Mapping) and "chosen" in row:
            yield row


def _part(source: Source) -> Part:
    rows = list(_rows(source.data))
    colour = colours(sorted({name for row in rows for name in row["candidates"]}))
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(_title(row), []).append(row)
    charts = [_chart(title, of_panel, colour) for title, of_panel in panels.items()]
    lead = [
        f"{len(rows)} choices were measured.",
        "A line is the fastest candidate's time as a share of this candidate's, its band the interval of its median.",
    ]
    heading = ", ".join(filter(None, (source.origin.machine, _model(source.data)))) or source.path.name
    return Part(heading, source.origin, lead, list(colour.items()), charts, [_table(rows)])


def _model(data: Mapping[str, Any]) -> str:
    """Return a short description of the tuned model."""
    model = data.get("model")
    if not isinstance(model, Mapping):
        return str(model or "")
    return ", ".join(
        f"{key.replace('_', ' ')} {model[key]}" for key in ("model_type", "hidden", "heads") if key in model
    )


def _title(row: Row) -> str:
    return ", ".join(str(row[key]) for key in ("op_name", "dtype", "phase") if row.get(key))


def _chart(title: str, rows: list[Row], colour: Mapping[str, str]) -> Chart:
    series: dict[str, dict[str, tuple[float, float, float]]] = {}
    for row in rows:
        timed = {name: one for name, one in row["candidates"].items() if one.get("us")}
        best = min((one["us"] for one in timed.values()), default=0.0)
        for name, one in timed.items():
            shares = best / one["high"], best / one["us"], best / one["low"]
            series.setdefault(name, {})[str(row["tokens"])] = shares
    places = [str(tokens) for tokens in sorted({int(row["tokens"]) for row in rows})]
    drawn = [Line(name, colour[name], points) for name, points in series.items()]
    return Chart(title, lines(title, drawn, places, "tokens", HIGHEST, mark=1.0))


def _table(rows: list[Row]) -> Table:
    headings = ("operator", "#tokens", "winner", "why", "candidate", "#µs a step", "#interval", "not allowed because")
    cells = []
    for row in rows:
        for number, (name, one) in enumerate(row["candidates"].items()):
            key = [Cell(_title(row), code=True), Cell(f"{row['tokens']:,}")]
            winner = [Cell(str(row["chosen"] or "nobody"), "good", code=True), Cell(str(row.get("why", "")))]
            times = [f"{one['us']:,.2f}", f"{one['low']:,.2f} to {one['high']:,.2f}"] if one.get("us") else ["–", ""]
            head = [*key, *winner] if number == 0 else [*key, Cell(""), Cell("")]
            cells.append([*head, Cell(name, code=True), *map(Cell, times), Cell(str(one.get("problem", "")))])
    return Table(
        "Every choice and its candidates", headings, cells, f"all {len(rows)} choices, {len(cells)} candidates"
    )
