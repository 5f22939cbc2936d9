"""``fl verify``: is every implementation right?"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer

from ..devices import detect_device
from ..errors import DispatchError
from ..evidence.verify import DTYPES, Verification, implementations
from ..evidence.verify import verify as verify_one
from ..manager import get_default_manager
from .output import console, print_json, print_table

NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in (*DTYPES, torch.float64)}


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a command line.

    Raises:
        DispatchError: there is no such dtype among those that operators are tried in.
    """
    if name not in NAMES:
        raise DispatchError(f"unknown dtype '{name}'; there are {', '.join(NAMES)}")
    return NAMES[name]


def verify(
    op: Annotated[list[str] | None, typer.Option(help="Only this operator (repeatable).")] = None,
    impl: Annotated[list[str] | None, typer.Option(help="Only this implementation, such as reference.torch.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bfloat16, float16, float32, float64.")] = None,
    device: Annotated[str | None, typer.Option(help="PyTorch device; this machine's by default.")] = None,
    seed: Annotated[int, typer.Option(help="Of the generated inputs.")] = 0,
    repeat: Annotated[int, typer.Option(min=1, help="Calls for each input; all must give the same bits.")] = 3,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Verify implementations against the float64 reference on every declared input.

    Exit code 0: all that ran is right. 1: something is wrong. 2: nothing matches, or what was named cannot run here.
    """
    manager = get_default_manager()
    place = torch.device(device or detect_device().torch_type)
    dtypes = [dtype_named(name) for name in dtype] if dtype else DTYPES
    results: list[Verification] = []
    absent: list[tuple[str, str, str]] = []
    for candidate in implementations(manager, op, impl):
        available, why = candidate.availability()
        if available:
            results += [verify_one(manager, candidate, wanted, place, seed=seed, repeats=repeat) for wanted in dtypes]
        elif impl:
            raise DispatchError(f"'{candidate.impl_id}' of '{candidate.op_name}' cannot run here: {why}")
        else:
            absent.append((candidate.op_name, candidate.impl_id, why))
    if json:
        print_json({"device": str(place), "results": [result.as_data() for result in results], "absent": absent})
    else:
        _print(str(place), results, absent)
    if any(result.problems for result in results):
        raise typer.Exit(1)


def _print(place: str, results: list[Verification], absent: list[tuple[str, str, str]]) -> None:
    print_table(
        f"Verified on {place} against the reference in float64",
        ("operator", "implementation", "dtype", "inputs", "declined", "error/tolerance", "worst input", "status"),
        (_row(result) for result in results),
    )
    for result in results:
        for problem in result.problems:
            line = f"{result.op_name} {result.impl_id} {result.dtype}: {problem}"
            console.print(line, style="red", highlight=False, markup=False)
    for op_name, impl_id, why in absent:
        console.print(f"{op_name} {impl_id} cannot run here: {why}", style="dim", highlight=False, markup=False)


def _row(result: Verification) -> tuple[Any, ...]:
    worst = result.worst
    return (
        result.op_name,
        result.impl_id,
        result.dtype,
        result.samples,
        len(result.declined) or "",
        "" if worst is None else f"{worst.share:.3f}",
        "" if worst is None else worst.sample,
        result.verdict,
    )
