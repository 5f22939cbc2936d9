"""``fl explain``: why an operator runs its implementation."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import NoImplementationError
from ..hosting.records import runs
from ..manager import get_default_manager
from ..ops import OPERATORS
from ..settings.names import suggestion
from . import run_view
from .output import AsJson, PidOption, fail, print_json
from .run_view import print_decision, say


def _complete(incomplete: str) -> list[str]:
    return [name for name in OPERATORS if name.startswith(incomplete)]


def explain(
    operator: Annotated[str, typer.Argument(help="The operator, such as rms_norm.", autocompletion=_complete)],
    scope: Annotated[str | None, typer.Option(help="A layer, such as model.layers.3.input_layernorm.")] = None,
    json: AsJson = False,
    run: PidOption = None,
) -> None:
    """Say which implementation of an operator runs here, and why each other one does not.

    The answer is for this machine and this shell's settings; with --run it is for the workers of a running engine.
    """
    if run is not None:
        run_view.explain(operator, scope, runs.named(run), json)
        return
    manager = get_default_manager()
    try:
        decision = manager.explain(operator, scope=scope)
    except NoImplementationError as error:
        if operator in OPERATORS:
            fail(f"'{operator}' is declared, but only a host's plugin implements it, in the engine")
            raise typer.Exit(2) from error
        near = suggestion(operator, manager.registry.list_operators())
        fail(f"no backend registered an operator '{operator}'{near or '; see fl ops'}")
        raise typer.Exit(2) from error
    if json:
        print_json(decision.as_data())
        return
    declared = OPERATORS.get(operator)
    if declared is not None:
        say(f"{operator}{declared.signature}".replace("'", ""))
        say(declared.summary)
    print_decision(operator + (f" in {scope}" if scope else ""), decision.as_data())
    for branch in decision.branches[:-1]:
        say(f"when {branch.rule}: {', '.join(impl.impl_id for impl in branch.candidates)}")
