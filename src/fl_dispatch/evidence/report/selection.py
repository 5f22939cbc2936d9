"""Selected implementations and why: on this machine, in workers that ran last, in engines whose reports are files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...manager import get_default_manager
from ...ops import OPERATORS
from .files import Source, moment
from .page import Cell, Origin, Part, Section, Table

EMPTY = Section(
    "selected",
    "Selected",
    "For each operator the implementation that comes first, the setting that put it there, "
    "and why each other one stays out.",
    "fl report, on the machine that serves",
)
TONES = {"chosen": "good", "fallback": "", "skipped": "quiet"}
SHOWN_RUNS = 8
"""Workers, newest first."""

Decisions = Mapping[str, Mapping[str, Any]]


def is_one(data: Mapping[str, Any]) -> bool:
    """Whether a file has a worker's report, as ``fl demo --json`` and ``fl perplexity --json`` write it."""
    report = data.get("report")
    return isinstance(report, Mapping) and isinstance(report.get("decisions"), Mapping)


def here(origin: Origin) -> Part:
    """The choices of this machine and this shell's settings."""
    manager = get_default_manager()
    manager.ensure_initialized()
    operators = sorted(set(manager.registry.list_operators()) & set(OPERATORS))
    decisions = {name: manager.explain(name).as_data() for name in operators}
    lead = "These are the choices of this machine under this shell's settings; a serving process may have others."
    return Part("This machine", origin, [lead], tables=_tables(decisions, {}))


def served(sources: Iterable[Source]) -> list[Part]:
    """Choices and calls of engines whose reports are in files."""
    parts = []
    for source in sources:
        report = source.data["report"]
        lead = f"An engine's worker, process {report.get('pid', '?')}, said this of itself; calls were counted in it."
        tables = _tables(report["decisions"], report.get("counts") or {}, called_only=True)
        parts.append(Part(f"An engine: {_what(source.data)}", source.origin, [lead], tables=tables))
    return parts


def is_worker(data: Mapping[str, Any]) -> bool:
    """Whether a file is the record of a worker."""
    return {"host", "pid", "model", "time", "layers"} <= set(data)


def workers(sources: Sequence[Source]) -> list[Part]:
    """Workers by their records, newest first; and what each chose, where the record has it."""
    if not sources:
        return []
    shown = sources[:SHOWN_RUNS]
    headings = (
        "when",
        "host",
        "process",
        "model",
        "layers through fl_dispatch",
        "left to the host",
        "never dispatched",
    )
    rows = [_worker(source.data) for source in shown]
    origin = replace(shown[0].origin, file=str(shown[0].path.parent))
    found = [Part("Workers that ran last", origin, tables=[Table("Workers, newest first", headings, rows)])]
    for source in shown:
        record = source.data
        choices = record.get("choices")
        if isinstance(choices, Mapping) and choices.get("decisions"):
            title = f"Process {record['pid']} of {record['host']}, rank {record.get('rank', 0)}"
            tables = [*_tables(choices["decisions"], {}), *_taken_out(choices.get("failed") or ())]
            lead = ["These are the choices of the serving process."]
            found.append(Part(title, source.origin, lead, tables=tables))
    return found


def glance(part: Part) -> tuple[tuple[str, str], str]:
    """The number of operators that have a choice here."""
    rows = part.tables[0].rows
    chosen = [row for row in rows if row[1].tone == "good"]
    return (f"{len(chosen)} of {len(rows)}", "operators have an implementation here"), ""


def _tables(decisions: Decisions, counts: Mapping[str, Any], called_only: bool = False) -> list[Table]:
    """The choices; and, folded, every implementation with its reason."""
    calls: dict[str, list[str]] = {}
    for key, number in counts.items():
        op_name, _, impl_id = str(key).partition(" ")
        calls.setdefault(op_name, []).append(f"{impl_id}: {number:,}")
    named = [name for name in sorted(decisions) if not (called_only and calls and name not in calls)]
    headings = ["operator", "runs", "kind", "why"] + (["calls"] if calls else [])
    chosen: list[list[Cell]] = []
    considered: list[list[Cell]] = []
    last_why = ""
    for name in named:
        decision = decisions[name]
        entries = list(decision.get("considered", ()))
        first = next((entry for entry in entries if entry["status"] == "chosen"), None)
        runs = Cell("nothing", "warn") if first is None else Cell(first["impl_id"], "good", code=True)
        why = "" if first is None else str(first["reason"])
        repeated, last_why = why == last_why, why
        kind = Cell("" if first is None else str(first["kind"]), "quiet")
        row = [Cell(name, code=True), runs, kind, Cell("as above", "quiet") if repeated else Cell(why)]
        chosen.append(row + ([Cell(", ".join(calls.get(name, ())))] if calls else []))
        considered += [
            [
                Cell(name, code=True),
                Cell(str(entry["impl_id"]), code=True),
                Cell(str(entry["status"]), TONES.get(entry["status"], "")),
                Cell(str(entry["reason"])),
            ]
            for entry in entries
        ]
    folded = f"all {len(considered)} implementations, and why each runs or stays out"
    every = ("operator", "implementation", "status", "why")
    return [Table("Choices", headings, chosen), Table("Every implementation", every, considered, folded)]


def _worker(record: Mapping[str, Any]) -> list[Cell]:
    native, undispatched = _counted(record.get("native")), _names(record.get("undispatched"))
    return [
        Cell(moment(record["time"])),
        Cell(str(record["host"])),
        Cell(str(record["pid"]), note="" if _alive(record) else "has ended"),
        Cell(str(record["model"])),
        Cell(", ".join(f"{name} {count} ({operator})" for name, (operator, count) in record["layers"].items())),
        Cell(native or "none", "" if native else "quiet"),
        Cell(undispatched or "none", "warn" if undispatched else "quiet"),
    ]


def _taken_out(failed: Iterable[Mapping[str, Any]]) -> list[Table]:
    """Implementations that are banned, and why."""
    rows = [
        [
            Cell(str(one["operator"]), code=True),
            Cell(str(one["implementation"]), code=True),
            Cell(str(one["kind"])),
            Cell(f"{one['fallbacks']:,}"),
            Cell(str(one["cause"]), "bad"),
        ]
        for one in failed
    ]
    headings = ("operator", "implementation", "arguments", "#calls taken over", "cause")
    return [Table("Implementations out of service", headings, rows)] if rows else []


def _alive(record: Mapping[str, Any]) -> bool:
    return os.path.exists(f"/proc/{record.get('pid')}")


def _counted(native: Any) -> str:
    return ", ".join(f"{name} {count}" for name, count in native.items()) if isinstance(native, Mapping) else ""


def _names(given: Any) -> str:
    return ", ".join(map(str, given)) if isinstance(given, Mapping | Sequence) else ""


def _what(data: Mapping[str, Any]) -> str:
    said = [data.get("host"), str(data.get("model", "")).rpartition("/")[2], data.get("dtype"), data.get("device")]
    return ", ".join(str(one) for one in said if one)
