"""Selected implementations and the reasons: on this machine, in its last workers, and in engines' report files."""

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
"""Number of workers, newest first."""

Decisions = Mapping[str, Mapping[str, Any]]


def is_one(data: Mapping[str, Any]) -> bool:
    """Whether a file has a worker's report, as written by ``fl demo --json`` and ``fl perplexity --out``."""
    report = data.get("report")
    return isinstance(report, Mapping) and isinstance(report.get("decisions"), Mapping)


def here(origin: Origin) -> Part:
    """Show the choices of this machine with this shell's settings."""
    manager = get_default_manager()
    manager.ensure_initialized()
    operators = sorted(set(manager.registry.list_operators()) & set(OPERATORS))
    decisions = {name: manager.explain(name).as_data() for name in operators}
    lead = "These are the choices of this machine under this shell's settings; a serving process may have others."
    return Part("This machine", origin, [lead], tables=_tables(decisions))


def served(sources: Iterable[Source]) -> list[Part]:
    """Show choices and calls of engines, from their report files."""
    parts = []
    for source in sources:
        report = source.data["report"]
        lead = f"An engine's worker, process {report.get('pid', '?')}, said this of itself; calls were counted in it."
        calls = _calls(report.get("counts") or {})
        decisions = {name: one for name, one in report["decisions"].items() if not calls or name in calls}
        tables = _tables(decisions, calls)
        parts.append(Part(f"An engine: {_what(source.data)}", source.origin, [lead], tables=tables))
    return parts


def workers(sources: Sequence[Source]) -> list[Part]:
    """Show workers by their records, newest first, and their recorded choices."""
    if not sources:
        return []
    shown = sources[:SHOWN_RUNS]
    rows = [_worker(source.data) for source in shown]
    origin = replace(shown[0].origin, file=str(shown[0].path.parent))
    found = [Part("Workers that ran last", origin, tables=[Table.of("Workers, newest first", rows)])]
    for choices, sources_of in _by_choices(shown):
        titles = [_process(source.data) for source in sources_of]
        lead = ["These are the choices of the serving process, for the operators that its model calls."]
        if len(titles) > 1:
            lead = ["These are the choices of each, for the operators that its model calls."]
        tables = [*_tables(choices["decisions"]), *_taken_out(choices["failed"])]
        found.append(Part(", ".join(titles), sources_of[0].origin, lead, tables=tables))
    return found


def _by_choices(sources: Iterable[Source]) -> list[tuple[dict[str, Any], list[Source]]]:
    """Group workers by their recorded choices."""
    found: list[tuple[dict[str, Any], list[Source]]] = []
    for source in sources:
        recorded = source.data.get("choices")
        if not isinstance(recorded, Mapping) or not recorded.get("decisions"):
            continue
        called = _called(source.data, recorded)
        decisions = {name: one for name, one in recorded["decisions"].items() if name in called}
        choices = {"decisions": decisions, "failed": list(recorded.get("failed") or ())}
        same = next((others for known, others in found if known == choices), None)
        if same is None:
            found.append((choices, [source]))
        else:
            same.append(source)
    return found


def _called(record: Mapping[str, Any], choices: Mapping[str, Any]) -> set[str]:
    """Return the operators that a worker's model calls; an older record has only those of its layers."""
    return set(choices.get("used") or [operator for operator, _ in record["layers"].values()])


def _process(record: Mapping[str, Any]) -> str:
    return f"Process {record['pid']} of {record['host']}, rank {record.get('rank', 0)}"


def summary(part: Part) -> tuple[tuple[str, str], str]:
    """Return the number of operators with a choice on this machine."""
    having = [(row[0].tone == "good", len(row[-1].text.split(", "))) for row in part.tables[0].rows]
    chosen, every = sum(number for good, number in having if good), sum(number for _, number in having)
    return (f"{chosen} of {every}", "operators have an implementation here"), ""


def _calls(counts: Mapping[str, Any]) -> dict[str, str]:
    """Return operator → its calls by implementation."""
    calls: dict[str, list[str]] = {}
    for key, number in counts.items():
        op_name, _, impl_id = str(key).partition(" ")
        calls.setdefault(op_name, []).append(f"{impl_id}: {number:,}")
    return {op_name: ", ".join(texts) for op_name, texts in calls.items()}


def _tables(decisions: Decisions, calls: Mapping[str, str] | None = None) -> list[Table]:
    """Make tables: choices, in one row per reason; calls; and, folded, every implementation with its reason."""
    chosen: dict[tuple[str, str, str], list[str]] = {}
    considered: list[list[Cell]] = []
    for name in sorted(decisions):
        entries = list(decisions[name].get("considered", ()))
        first = next((entry for entry in entries if entry["status"] == "chosen"), None)
        how = ("", "", "") if first is None else (str(first["impl_id"]), str(first["kind"]), str(first["reason"]))
        chosen.setdefault(how, []).append(name)
        considered += [
            [
                Cell(name, code=True),
                Cell(str(entry["impl_id"]), code=True),
                Cell(str(entry["status"]), TONES.get(entry["status"], "")),
                Cell(str(entry["reason"])),
            ]
            for entry in entries
        ]
    rows = [
        [
            Cell(impl_id, "good", code=True) if impl_id else Cell("nothing", "warn"),
            Cell(kind, "quiet"),
            Cell(why),
            Cell(", ".join(names)),
        ]
        for (impl_id, kind, why), names in sorted(chosen.items(), key=lambda one: -len(one[1]))
    ]
    tables = [Table("Choices", ("runs", "kind", "why", "operators"), rows)]
    if calls:
        counted = [[Cell(name, code=True), Cell(calls[name])] for name in sorted(calls)]
        tables.append(Table("Calls", ("operator", "calls"), counted))
    folded = f"all {len(considered)} implementations, and why each runs or stays out"
    return [*tables, Table("Every implementation", ("operator", "implementation", "status", "why"), considered, folded)]


def _worker(record: Mapping[str, Any]) -> dict[str, Cell]:
    native, undispatched = _counted(record.get("native")), _names(record.get("undispatched"))
    layers = ", ".join(f"{name} {count} ({operator})" for name, (operator, count) in record["layers"].items())
    return {
        "when": Cell(moment(record["time"])),
        "host": Cell(str(record["host"])),
        "process": Cell(str(record["pid"]), note="" if _alive(record) else "has ended"),
        "model": Cell(str(record["model"])),
        "layers through fl_dispatch": Cell(layers),
        "left to the host": Cell(native or "none", "" if native else "quiet"),
        "never dispatched": Cell(undispatched or "none", "warn" if undispatched else "quiet"),
    }


def _taken_out(failed: Iterable[Mapping[str, Any]]) -> list[Table]:
    """Show banned implementations, and the reasons."""
    rows = [
        {
            "operator": Cell(str(one["operator"]), code=True),
            "implementation": Cell(str(one["implementation"]), code=True),
            "arguments": Cell(str(one["kind"])),
            "#calls taken over": Cell(f"{one['fallbacks']:,}"),
            "cause": Cell(str(one["cause"]), "bad"),
        }
        for one in failed
    ]
    return [Table.of("Implementations out of service", rows)] if rows else []


def _alive(record: Mapping[str, Any]) -> bool:
    return os.path.exists(f"/proc/{record.get('pid')}")


def _counted(native: Any) -> str:
    return ", ".join(f"{name} {count}" for name, count in native.items()) if isinstance(native, Mapping) else ""


def _names(given: Any) -> str:
    return ", ".join(map(str, given)) if isinstance(given, Mapping | Sequence) else ""


def _what(data: Mapping[str, Any]) -> str:
    said = [data.get("host"), str(data.get("model", "")).rpartition("/")[2], data.get("dtype"), data.get("device")]
    return ", ".join(str(one) for one in said if one)
