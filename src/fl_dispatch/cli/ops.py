"""``fl ops``: the operators, their implementations, and which one is chosen."""

from __future__ import annotations

from typing import Any

from ..manager import get_default_manager
from ..ops import OPERATORS
from .output import AsJson, print_json, print_table


def ops(json: AsJson = False) -> None:
    """List the operators, their implementations, and which one this machine and these settings choose."""
    rows = [_describe(op_name) for op_name in _names()]
    if json:
        print_json(rows)
        return
    print_table(
        f"{len(rows)} operators",
        ("operator", "chosen", "fallback", "skipped", "what it computes"),
        (
            (
                row["operator"],
                row["chosen"] or "(by the host's plugin)",
                *(", ".join(row[status]) for status in ("fallback", "skipped")),
                row["summary"],
            )
            for row in rows
        ),
    )
    print("Why: fl explain OPERATOR")


def _names() -> list[str]:
    manager = get_default_manager()
    manager.ensure_initialized()
    return list(dict.fromkeys([*OPERATORS, *manager.registry.list_operators()]))


def _describe(op_name: str) -> dict[str, Any]:
    manager = get_default_manager()
    declared = OPERATORS.get(op_name)
    row: dict[str, Any] = {"operator": op_name, "chosen": None, "fallback": [], "skipped": []}
    row["summary"] = declared.summary if declared else "(not declared)"
    if not manager.registry.get_implementations(op_name):
        return row
    for entry in manager.explain(op_name).considered:
        if entry.status == "chosen":
            row["chosen"] = entry.impl.impl_id
        else:
            row[entry.status].append(entry.impl.impl_id)
    return row
