"""The workers of an engine, from their records: ``fl explain --run`` and ``fl doctor --run``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, TypeVar

import typer

from ..hosting.records import runs
from ..hosting.records.runs import Run
from .output import console, fail, print_json, print_table

T = TypeVar("T")

COLUMNS = ("rank", "implementation", "kind", "vendor", "priority", "status", "why")


def say(text: str) -> None:
    """Print one line without highlighting or markup."""
    console.print(text, highlight=False, markup=False)


def print_decision(title: str, decision: Mapping[str, Any]) -> None:
    """Print a decision, given as plain data, as a table."""
    say(f"order: {', '.join(decision['order'])}  ({decision['source']}, {decision['origin']})")
    fields = ("rank", "impl_id", "kind", "vendor", "priority", "status", "reason")
    rows = (["" if entry[name] is None else entry[name] for name in fields] for entry in decision["considered"])
    print_table(title, COLUMNS, rows)


# -- fl explain --run -------------------------------------------------------------------------------------------------


def explain(operator: str, scope: str | None, found: Sequence[Run], json: bool) -> None:
    """Say which implementation of an operator each worker runs, and why."""
    decided = [(run, _decision(run, operator, scope)) for run in found]
    missing = [run.pid for run, decision in decided if decision is None]
    if len(missing) == len(decided):
        known = sorted({op_name for run in found for op_name in run.choices.get("decisions", {})})
        fail(f"no worker of this run knows an operator '{operator}'; they know {', '.join(known) or 'none'}")
        raise typer.Exit(2)
    if json:
        print_json(
            [
                {"rank": run.rank, "pid": run.pid, "decision": decision, "layers": _layer_choices(run, operator)}
                for run, decision in decided
            ]
        )
        return
    for ranks, decision in _alike(decided):
        if decision is None:
            say(f"{_named(ranks)}: no such operator")
            continue
        print_decision(f"{operator}{f' in {scope}' if scope else ''}, {_named(ranks)}", decision)
        for branch in decision["conditional"]:
            say(f"when {branch['when']}: {', '.join(branch['candidates'])}")
    for ranks, layers in _alike((run, _layer_choices(run, operator)) for run in found):
        if layers:
            host = ranks[0].host
            rows = [[each["layer"], each["count"], each["host"], each["runs"], each["kept"]] for each in layers]
            columns = ("class", "layers", f"{host}'s own choice", "what runs", "why not ours")
            print_table(f"Layers for which {host} has a choice too, {_named(ranks)}", columns, rows)
    for run in found:
        for failed in run.choices.get("failed", ()):
            if failed["operator"] == operator:
                say(f"rank {run.rank}: '{failed['implementation']}' is banned for {failed['kind']}: {failed['cause']}")
    if operator in runs.differences(list(found)):
        fail(f"the ranks run different implementations of '{operator}'")
        raise typer.Exit(1)


def _decision(run: Run, operator: str, scope: str | None) -> dict[str, Any] | None:
    layers, decisions = run.choices.get("layers", {}), run.choices.get("decisions", {})
    found: dict[str, Any] | None = layers.get(f"{operator}@{scope}") or decisions.get(operator)
    return found


def _layer_choices(run: Run, operator: str) -> list[dict[str, Any]]:
    """Return the host's choices for an operator's layers; ``runs`` names the implementations of those layers."""
    elsewhere = [
        impl_id
        for layer, decision in run.choices.get("layers", {}).items()
        if layer.partition("@")[0] == operator
        for choice in decision["runs"]
        for impl_id in choice["runs"]
    ]
    ours = ", ".join(dict.fromkeys([runs.chosen(run, operator), *elsewhere]))  # rules for single layers add others
    return [
        {**found, "runs": found["host"] if found["kept"] else ours}
        for found in run.layer_choices
        if operator in found["operators"]
    ]


def _alike(decided: Iterable[tuple[Run, T]]) -> list[tuple[list[Run], T]]:
    """Group workers by their answers."""
    groups: list[tuple[list[Run], T]] = []
    for run, decision in decided:
        group = next((group for group, known in groups if known == decision), None)
        if group is None:
            groups.append(([run], decision))
        else:
            group.append(run)
    return groups


def _named(found: Sequence[Run]) -> str:
    ranks = ", ".join(str(run.rank) for run in found)
    processes = ", ".join(str(run.pid) for run in found)
    return f"rank{'s' if len(found) > 1 else ''} {ranks} (process{'es' if len(found) > 1 else ''} {processes})"


# -- fl doctor --run --------------------------------------------------------------------------------------------------


TABLES = (
    ("Workers", "workers", ("rank", "process", "host", "model", "model runner", "device", "recorded")),
    ("Settings that are not the default", "settings", ("setting", "value", "origin", "ranks")),
    ("What runs", "selected", ("operator", "implementation", "ranks")),
    ("Layers that run something else", "layers", ("layer", "implementations", "ranks")),
    ("Bans", "bans", ("rank", "operator", "implementation", "arguments", "fallbacks", "why")),
    (
        "What shadow mode found",
        "findings",
        ("rank", "operator", "implementation", "arguments", "calls", "worst", "example", "outcome"),
    ),
)
"""Tables of the command: title, key of the report, columns."""


def doctor(found: Sequence[Run], json: bool) -> None:
    """Print the state of an engine's workers and their problems; any problem gives exit code 1."""
    report = examine(found)
    if json:
        print_json(report)
    else:
        for title, part, columns in TABLES:
            if report[part]:
                print_table(title, columns, report[part])
        for line in report["shadow"]:
            print(line)
        for problem in report["problems"]:
            fail(problem)
        if not report["problems"]:
            print("No problem found.")
    if report["problems"]:
        raise typer.Exit(1)


def examine(found: Sequence[Run]) -> dict[str, Any]:
    """Return everything that the command prints, as plain data."""
    different = runs.differences(list(found))
    problems = [
        f"ranks run different implementations of '{op_name}': "
        + ", ".join(f"{impl_id} on {ranks}" for impl_id, ranks in choices.items())
        for op_name, choices in different.items()
    ]
    problems += [f"rank {run.rank}: process {run.pid} {run.crash}" for run in found if run.crash]
    problems += [
        f"rank {run.rank}: '{finding['implementation']}' of '{finding['operator']}' gave wrong results "
        f"({finding['kind']}); {finding['outcome']}"
        for run in found
        for finding in _shadow(run).get("findings", ())
    ]
    problems += [
        f"rank {run.rank}: never dispatched although it was to be: {op_name} ({len(layers)} layers)"
        for run in found
        for op_name, layers in run.undispatched.items()
    ]
    return {
        "workers": [_worker(run) for run in found],
        "settings": _by_ranks(
            (run, (name, value, origin))
            for run in found
            for name, (value, origin) in run.choices.get("settings", {}).items()
            if origin != "default"
        ),
        "selected": _by_ranks(
            (run, (op_name, runs.chosen(run, op_name))) for run in found for op_name in runs.used(run)
        ),
        "layers": _by_ranks(
            (run, (layer, "; ".join(", ".join(choice["runs"]) for choice in decision["runs"])))
            for run in found
            for layer, decision in run.choices.get("layers", {}).items()
        ),
        "bans": [
            [run.rank, *(failed[name] for name in ("operator", "implementation", "kind", "fallbacks", "cause"))]
            for run in found
            for failed in run.choices.get("failed", ())
        ],
        "shadow": [line for run in found for line in _shadow_lines(run)],
        "findings": [
            [
                run.rank,
                *(finding[name] for name in ("operator", "implementation", "kind", "calls")),
                "no number" if finding["worst"] is None else f"{finding['worst']:.3g}",
                *(finding[name] for name in ("example", "outcome")),
            ]
            for run in found
            for finding in _shadow(run).get("findings", ())
        ],
        "problems": problems,
        "records": [asdict(run) for run in found],
    }


def _worker(run: Run) -> list[Any]:
    when = datetime.fromtimestamp(run.updated or run.time).astimezone().isoformat(" ", "seconds")
    return [run.rank, f"{run.pid} ({state_of(run)})", run.host, run.model, run.runner, run.device, when]


def state_of(run: Run) -> str:
    """Return ``running``, ``ended`` or ``crashed``."""
    return "running" if run.alive else "crashed" if run.crash else "ended"


def _by_ranks(rows: Iterable[tuple[Run, tuple[str, ...]]]) -> list[list[str]]:
    """Return each row once, with the ranks that have it."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for run, row in rows:
        ranks.setdefault(row, []).append(run.rank)
    return [[*row, ", ".join(map(str, which))] for row, which in sorted(ranks.items())]


def _shadow(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = run.choices.get("shadow") or {}
    return found


def _shadow_lines(run: Run) -> list[str]:
    shadow = _shadow(run)
    if not shadow:
        return []
    compared = sum(shadow["compared"].values())
    did = (
        f"rank {run.rank}: shadow mode compared {compared} calls with '{shadow['second']}', "
        f"{shadow['share_of_time']:.2%} of the time; {shadow['passed_over']} more were over the budget"
    )
    return [did, *(f"rank {run.rank}: not compared: {op}: {why}" for op, why in shadow["not_compared"].items())]
