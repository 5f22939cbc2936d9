"""The section "Right?": verdicts of ``fl verify``, with a row per implementation and a column per dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .files import Source
from .page import Cell, Part, Section, Table

EMPTY = Section(
    "right",
    "Right?",
    "Each implementation's results on the operator's inputs against the reference in float64; "
    "the error is a share of what the operator tolerates.",
    "fl verify --out verify.json",
)
TONES = {"right": "good", "wrong": "bad"}


def is_one(data: Mapping[str, Any]) -> bool:
    """Whether a file is a result of ``fl verify``."""
    return any(True for _ in _rows(data))


def parts(sources: Iterable[Source]) -> list[Part]:
    """Make a matrix for each file, newest first."""
    return [_part(source) for source in sources]


def summary(sources: list[Source]) -> tuple[tuple[str, str], str]:
    """Return the number of right rows in all files, and the tone."""
    verdicts = [row["verdict"] for source in sources for row in _rows(source.data)]
    right, wrong = verdicts.count("right"), verdicts.count("wrong")
    said = "implementations and dtypes are right" + (f", {wrong} wrong" if wrong else "")
    return (f"{right} of {right + wrong}", said), "bad" if wrong else "good"


def _part(source: Source) -> Part:
    rows = list(_rows(source.data))
    columns = list(dict.fromkeys(_column(row) for row in rows))
    matrix: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        matrix.setdefault((row["op_name"], row["impl_id"]), {})[_column(row)] = row
    cells = [
        [Cell(op_name, code=True), Cell(impl_id, code=True), *(_cell(found.get(column)) for column in columns)]
        for (op_name, impl_id), found in sorted(matrix.items())
    ]
    tables = [Table("Verdict by dtype", ("operator", "implementation", *columns), cells)]
    problems = [
        [Cell(row["op_name"], code=True), Cell(row["impl_id"], code=True), Cell(_column(row)), Cell(problem, "bad")]
        for row in rows
        for problem in row["problems"]
    ]
    if problems:
        tables.append(Table("What is wrong", ("operator", "implementation", "dtype", "problem"), problems))
    absent = [[Cell(str(name)) for name in one] for one in _absent(source.data)]
    if absent:
        folded = f"{len(absent)} that cannot run there"
        tables.append(Table("What cannot run there", ("operator", "implementation", "why"), absent, folded))
    return Part(source.origin.machine or source.path.name, source.origin, tables=tables)


def _rows(data: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield rows with a verdict; some files have several runs, each under its name."""
    for run in (data, *data.values()):
        if isinstance(run, Mapping) and isinstance(run.get("results"), list):
            yield from (row for row in run["results"] if isinstance(row, Mapping) and "verdict" in row)


def _absent(data: Mapping[str, Any]) -> list[Any]:
    found = [one for run in (data, *data.values()) if isinstance(run, Mapping) for one in run.get("absent") or ()]
    return [one for one in {tuple(map(str, one)): one for one in found}.values() if len(one) == 3]


def _column(row: Mapping[str, Any]) -> str:
    how = row.get("how", "direct")
    return str(row["dtype"]) if how == "direct" else f"{row['dtype']}, {how}"


def _cell(row: Mapping[str, Any] | None) -> Cell:
    if row is None:
        return Cell("–", "quiet")
    worst = row.get("worst")
    declined = len(row.get("declined") or ())
    notes = [] if not worst or worst["share"] is None else [f"{worst['share']:.2f} of the tolerance"]
    notes += [f"{row['samples']} inputs"] + ([f"{declined} declined"] if declined else [])
    if row.get("prepares"):
        notes.append(f"{row['prepared']} with prepared weights")
    return Cell(row["verdict"], TONES.get(row["verdict"], "quiet"), ", ".join(notes))
