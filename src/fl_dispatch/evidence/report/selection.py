"""What runs, and why: choices on this machine, in workers that ran last, and in engines whose reports are in files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...manager import get_default_manager
from ...ops import OPERATORS
from .files import Source
from .page import Cell, Origin, Part, Section, Table

EMPTY = Section(
    "selected",
    "What runs",
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
    """What engines chose and called whose reports are in files."""
    parts = []
    for source in sources:
        report = source.data["report"]
        lead = f"An engine's worker, process {report.get('pid', '?')}, said this of itself; calls were counted in it."
        tables = _tables(report["decisions"], report.get("counts") or {}, called_only=True)
        parts.append(Part(f"An engine: {_what(source.data)}", source.origin, [lead], tables=tables))
    return parts


def workers(folder: Path) -> list[Part]:
    """Workers that left a record, newest first; a record that cannot be read is passed over."""
    records = sorted(_records(folder), key=lambda record: float(record.get("time") or 0), reverse=True)
    if not records:
        return []
    headings = (
        "when",
        "host",
        "process",
        "model",
        "layers through fl_dispatch",
        "left to the host",
        "never dispatched",
    )
    rows = [
        [
            Cell(_when(record)),
            Cell(str(record.get("host", ""))),
            Cell(str(record.get("pid", "")), note="" if _alive(record) else "has ended"),
            Cell(str(record.get("model", ""))),
            Cell(_layers(record.get("layers"))),
            Cell(_counted(record.get("native")) or "none", "" if record.get("native") else "quiet"),
            Cell(_names(record.get("undispatched")) or "none", "warn" if record.get("undispatched") else "quiet"),
        ]
        for record in records[:SHOWN_RUNS]
    ]
    origin = Origin(str(folder), _when(records[0]), "this machine")
    found = [Part("Workers that ran last", origin, tables=[Table("Workers, newest first", headings, rows)])]
    for record in records[:SHOWN_RUNS]:
        decisions = record.get("decisions")
        if isinstance(decisions, Mapping) and decisions:
            title = f"Process {record.get('pid')} of {record.get('host')}"
            rank = f", rank {record['rank']}" if record.get("rank") is not None else ""
            origin = Origin(str(folder / f"{record.get('pid')}.json"), _when(record), "this machine")
            found.append(Part(title + rank, origin, tables=_tables(decisions, record.get("counts") or {})))
    return found


def glance(part: Part) -> tuple[tuple[str, str], str]:
    """How many operators have a choice here."""
    rows = part.tables[0].rows
    chosen = [row for row in rows if row[1].tone == "good"]
    return (f"{len(chosen)} of {len(rows)}", "operators have an implementation here"), ""


def _tables(decisions: Decisions, counts: Mapping[str, Any], called_only: bool = False) -> list[Table]:
    """What was chosen; and, folded, every implementation with its reason."""
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


def _records(folder: Path) -> Iterator[Mapping[str, Any]]:
    for file in folder.glob("*.json") if folder.is_dir() else ():
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(record, Mapping) and "pid" in record:
            yield record


def _when(record: Mapping[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(float(record.get("time") or 0)))


def _alive(record: Mapping[str, Any]) -> bool:
    return os.path.exists(f"/proc/{record.get('pid')}")


def _layers(layers: Any) -> str:
    if not isinstance(layers, Mapping):
        return ""
    parts = (f"{name} {count} ({operator})" for name, (operator, count) in layers.items())
    return ", ".join(parts)


def _counted(native: Any) -> str:
    return ", ".join(f"{name} {count}" for name, count in native.items()) if isinstance(native, Mapping) else ""


def _names(given: Any) -> str:
    return ", ".join(map(str, given)) if isinstance(given, Mapping | Sequence) else ""


def _what(data: Mapping[str, Any]) -> str:
    said = [data.get("host"), str(data.get("model", "")).rpartition("/")[2], data.get("dtype"), data.get("device")]
    return ", ".join(str(one) for one in said if one)
