"""``fl doc``: an operator's declaration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import torch
import typer

from ..errors import DispatchError
from ..ops import FEW_TERMS, OPERATORS, STANDARD_TOLERANCE, Access, Operator
from .output import console

ACCESS = {
    Access.UPDATE: "may be overwritten",
    Access.OUTPUT: "is overwritten without being read",
    Access.STATE: "is written in part",
}


def _complete(incomplete: str) -> list[str]:
    return [name for name in OPERATORS if name.startswith(incomplete)]


def doc(
    operator: Annotated[str, typer.Argument(help="The operator, such as rms_norm.", autocompletion=_complete)],
) -> None:
    """Print an operator's declaration: parameters, shapes, what a call may write, and how exact a result must be."""
    if operator not in OPERATORS:
        raise DispatchError(f"no operator '{operator}' is declared; fl ops lists all")
    for line in described(OPERATORS[operator]):
        console.print(line, highlight=False, markup=False)


def described(operator: Operator) -> Iterator[str]:
    """Return the declaration as lines of text."""
    yield f"{operator.name}{operator.signature}".replace("'", "")
    yield ""
    yield operator.doc.replace("``", "`")
    yield ""
    for name, write in operator.writes.items():
        yield f"{name}: {ACCESS[write.access]}" + (f", if {write.given} is given" if write.given else "")
    if not operator.writes:
        yield "No argument may be written."
    if operator.selection:
        return
    yield f"Modes: {', '.join(sorted(mode.value for mode in operator.modes))}."
    if operator.layer is not None and operator.layer.attributes:
        taken = ", ".join(f"{name} = obj.{attribute}" for name, attribute in operator.layer.attributes.items())
        yield f"Layer form: the first parameter is obj, and {taken}."
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        allowed = operator.tolerances[dtype]
        yield f"Tolerance in {str(dtype).removeprefix('torch.')}: {allowed.atol:g} + {allowed.rtol:g} * |expected|."
    if operator.terms is not None:
        summed = STANDARD_TOLERANCE[torch.float32].atol
        yield f"Sums of n terms, n above {FEW_TERMS}: {summed:g} * (sqrt(n / {FEW_TERMS}) - 1) more."
