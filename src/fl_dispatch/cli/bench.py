"""``fl bench``: how fast is every implementation?"""

from __future__ import annotations

import os
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..devices import detect_device
from ..errors import DispatchError
from ..evidence.bench import Result, machine
from ..evidence.bench import bench as bench_one
from ..evidence.cases import HIDDEN, TOKENS, Place, cases
from ..evidence.plot import plot as draw
from ..evidence.rates import Yardstick
from ..evidence.timing import Clock
from ..evidence.verify import implementations
from ..manager import get_default_manager
from ..ops import OPERATORS
from ..types import OpImpl
from .output import print_json, print_table
from .verify import dtype_named


def bench(
    op: Annotated[list[str] | None, typer.Option(help="Only this operator (repeatable).")] = None,
    impl: Annotated[list[str] | None, typer.Option(help="Only this implementation (repeatable).")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    tokens: Annotated[list[int] | None, typer.Option(help="Numbers of tokens (repeatable).")] = None,
    hidden: Annotated[list[int] | None, typer.Option(help="Hidden sizes (repeatable).")] = None,
    device: Annotated[str | None, typer.Option(help="PyTorch device; this machine's by default.")] = None,
    seconds: Annotated[float, typer.Option(help="How long to measure each row.")] = 0.05,
    output: Annotated[
        Path | None, typer.Option(help="Also write the JSON to this file; until it is complete, to FILE.partial.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw to this image file (needs matplotlib).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Measure implementations: device time and host time of a call, against this device's copy and matrix rates.

    The share is that of the floor: for an operator that only moves bytes, of the copy rate measured in the same run.
    """
    for file in (output, plot):
        if file is not None and not file.parent.is_dir():
            raise DispatchError(f"there is no directory {file.parent} for {file.name}")
        if file is not None and file.is_dir():
            raise DispatchError(f"{file} is a directory, not a file")
    wanted = dtype_named(dtype)
    place = Place(wanted, torch.device(device or detect_device().torch_type))
    work = _planned(op, impl)
    yardstick = Yardstick(Clock(place.device, seconds), wanted)
    results: list[Result] = []
    partial = None if output is None else _partial(output)
    todo = [
        (case, candidates)
        for name, candidates in work.items()
        for case in cases(OPERATORS[name], place, tokens or TOKENS, hidden or HIDDEN)
    ]
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=sum(len(candidates) for _, candidates in todo))
        for case, candidates in todo:
            for candidate in candidates:
                what = f"{case.op_name} {case.tokens}x{case.width} {candidate.impl_id}"
                progress.update(task, description=what)
                if not progress.console.is_terminal:  # a log has no bar
                    progress.console.print(f"measuring {what}", highlight=False, markup=False, soft_wrap=True)
                results.append(bench_one(get_default_manager(), candidate, case, wanted, yardstick))
                progress.advance(task)
            if partial is not None:  # after every case, so that an interrupted run keeps what it has
                _write(partial, _data(place, dtype, yardstick, results))
    data = _data(place, dtype, yardstick, results)
    if output is not None:
        _write(output, data)
    if partial is not None:
        partial.unlink(missing_ok=True)
    if json:
        print_json(data)
    else:
        _print(data, results)
    if plot is not None:
        draw(data["results"], f"{data['machine']['device']}, {dtype}, {data['machine']['date']}", plot)


def _data(place: Place, dtype: str, yardstick: Yardstick, results: list[Result]) -> dict[str, Any]:
    return {
        "machine": machine(place.device),
        "dtype": dtype,
        "copy_bytes_per_s": yardstick.rates.copy_bytes_per_s,
        "operations_per_s": yardstick.rates.operations_per_s,
        "results": [result.as_data() for result in results],
    }


def _partial(output: Path) -> Path | None:
    """Where results lie until all are there; nowhere beside a device or a pipe, or in a directory that is read only."""
    regular = output.is_file() or not output.exists()
    return output.with_name(f"{output.name}.partial") if regular and os.access(output.parent, os.W_OK) else None


def _write(file: Path, data: dict[str, Any]) -> None:
    file.write_text(dumps(data, indent=1) + "\n", encoding="utf-8")


def _planned(op: list[str] | None, impl: list[str] | None) -> dict[str, list[OpImpl]]:
    """The implementations to measure, by operator.

    Raises:
        DispatchError: nothing matches, or what was named cannot run here.
    """
    work: dict[str, list[OpImpl]] = {}
    for candidate in implementations(get_default_manager(), op, impl):
        available, why = candidate.availability()
        if available and OPERATORS[candidate.op_name].work is not None:
            work.setdefault(candidate.op_name, []).append(candidate)
        elif impl and not available:
            raise DispatchError(f"'{candidate.impl_id}' of '{candidate.op_name}' cannot run here: {why}")
    return work


def _print(data: dict[str, Any], results: list[Result]) -> None:
    rates = f"copy {data['copy_bytes_per_s'] / 1e9:.0f} GB/s, matrix {data['operations_per_s'] / 1e9:.0f} GFLOP/s"
    print_table(
        f"{data['machine']['device']}, {data['dtype']}; {rates}",
        (
            "operator",
            "implementation",
            "case",
            "tokens",
            "width",
            "device us",
            "spread",
            "host us",
            "of floor",
            "of copy",
        ),
        (_row(result) for result in results),
    )


def _row(result: Result) -> tuple[Any, ...]:
    row = (result.op_name, result.impl_id, result.label, result.tokens, result.width)
    if result.device is None:
        return (*row, "-", result.note, "", "", "")
    times = result.device
    spread = f"{times.low * 1e6:.1f} to {times.high * 1e6:.1f}"
    host = "" if result.host is None else f"{result.host.median * 1e6:.1f}"
    return (*row, f"{times.median * 1e6:.1f}", spread, host, f"{result.share:.3f}", f"{result.share_of_copy:.3f}")
