"""``fl explain``: why an operator runs what it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import NoImplementationError
from ..manager import get_default_manager
from ..ops import OPERATORS
from ..settings.names import suggestion
from .output import console, fail, print_json, print_table


def _complete(incomplete: str) -> list[str]:
    return [name for name in OPERATORS if name.startswith(incomplete)]


def explain(
    operator: Annotated[str, typer.Argument(help="The operator, such as rms_norm.", autocompletion=_complete)],
    scope: Annotated[str | None, typer.Option(help="A layer, such as model.layers.3.input_layernorm.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Say which implementation of an operator runs here, and why each other one does not.

    It speaks of this shell's settings and of this machine. A serving process logs its choices at start.
    """
    manager = get_default_manager()
    try:
        decision = manager.explain(operator, scope=scope)
    except NoImplementationError as error:
        if operator in OPERATORS:
            fail(f"'{operator}' is declared, but only a host's plugin implements it, in the engine")
            raise typer.Exit(2) from error
        near = suggestion(operator, manager.registry.list_operators())
        fail(f"nobody registered an operator '{operator}'{near or '; see fl ops'}")
        raise typer.Exit(2) from error
    if json:
        print_json(decision.as_data())
        return
    declared = OPERATORS.get(operator)
    if declared is not None:
        console.print(f"{operator}{declared.signature}".replace("'", ""), highlight=False, markup=False)
        console.print(declared.summary, highlight=False, markup=False)
    console.print(
        f"order: {', '.join(decision.order)}  ({decision.source}, {decision.origin})", highlight=False, markup=False
    )
    print_table(
        operator + (f" in {scope}" if scope else ""),
        ("rank", "implementation", "kind", "vendor", "priority", "status", "why"),
        (
            (
                entry.rank or "",
                entry.impl.impl_id,
                entry.impl.kind,
                entry.impl.vendor or "",
                entry.impl.rank,
                entry.status,
                entry.reason,
            )
            for entry in decision.considered
        ),
    )
    for branch in decision.branches[:-1]:
        console.print(
            f"when {branch.rule}: {', '.join(impl.impl_id for impl in branch.candidates)}",
            highlight=False,
            markup=False,
        )
