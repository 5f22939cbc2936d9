"""``fl bench``: measure the speed of every implementation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..errors import DispatchError
from ..evidence.bench import Result, expected_seconds
from ..evidence.bench import bench as bench_one
from ..evidence.cases import HIDDEN, MOST_CALL_SECONDS, TOKENS, Case, cases, short_cases
from ..evidence.origin import machine, origin
from ..evidence.plot import plot as draw
from ..evidence.rates import Yardstick
from ..evidence.threads import free_threads
from ..evidence.timing import Clock
from ..evidence.verify import implementations
from ..manager import get_default_manager
from ..ops import OPERATORS, Place
from ..types import OpImpl
from .output import INTERRUPTED, AsJson, ResultFile, ResultsOption, Rows, about, advancing, check_file
from .places import device_named, dtype_named

COLUMNS = {
    "operator": 18,
    "implementation": 19,
    "weights": 8,
    "case": 22,
    "tokens": 6,
    "width": 6,
    "device us": 9,
    "spread": 18,
    "host us": 7,
    "of floor": 8,
    "of copy": 7,
}


def _sizes(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def bench(
    op: Annotated[list[str] | None, typer.Option(help="Only this operator (repeatable). Default: all.")] = None,
    impl: Annotated[list[str] | None, typer.Option(help="Only this implementation (repeatable).")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    tokens: Annotated[
        list[int] | None,
        typer.Option(help=f"Numbers of tokens (repeatable). Default: those of {_sizes(TOKENS)} that fit."),
    ] = None,
    hidden: Annotated[
        list[int] | None, typer.Option(help=f"Hidden sizes (repeatable). Default: those of {_sizes(HIDDEN)} that fit.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="PyTorch device. Default: this machine's.")] = None,
    seconds: Annotated[float, typer.Option(help="Minimum seconds to measure each row.")] = 0.05,
    quick: Annotated[bool, typer.Option("--quick", help="Measure only the smallest default hidden size.")] = False,
    json: AsJson = False,
    out: ResultsOption = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw to this image file (needs matplotlib).")] = None,
) -> None:
    """Measure implementations: device time and host time of a call, against this device's copy and matrix rates.

    A share is the floor divided by the measured time; the floor follows from the rates measured in the same run.
    An implementation that prepares weights has two rows: with prepared weights, as in an engine, and with plain ones.
    A default shape fits if a call takes at most 1 ms at the device's rates; a size that you name is always measured.

    Exit status 0: measured. 2: nothing matches, or a named implementation cannot run here. 130: interrupted.
    """
    file = ResultFile(out, json)
    check_file(plot)
    wanted = dtype_named(dtype)
    work = _planned(op, impl)
    place = Place(wanted, device_named(device))
    threads, why = free_threads()
    torch.set_num_threads(threads)
    yardstick = Yardstick(Clock(place.device, seconds), wanted)
    rows = Rows(COLUMNS, quiet=json)
    results: list[Result] = []

    def data(complete: bool) -> dict[str, Any]:
        return {**_data(place, dtype, yardstick, results), "complete": complete, "threads": threads}

    try:
        todo, left_out = _todo(work, place, yardstick, tokens, hidden, quick)
        total = sum(expected_seconds(case, yardstick) * len(candidates) for case, candidates in todo)
        rates = yardstick.rates
        rows.say(
            f"{machine(place.device)['device']}, {dtype}; copy {rates.copy_bytes_per_s / 1e9:.0f} GB/s, matrix "
            f"{rates.operations_per_s / 1e9:.0f} GFLOP/s; threads: {threads}" + (f" ({why})" if why else "")
        )
        rows.say(f"{sum(len(candidates) for _, candidates in todo)} rows, {about(total)}")
        if left_out:
            rows.say(
                f"left out: {left_out} shapes with a call of over {MOST_CALL_SECONDS * 1e3:g} ms at these rates; "
                "--tokens and --hidden ask for them"
            )
        with advancing(total) as progress:
            for case, candidates in todo:
                for candidate in candidates:
                    progress.begin(f"measuring {case.op_name} {case.tokens}x{case.width} {candidate.impl_id}")
                    for result in bench_one(get_default_manager(), candidate, case, wanted, yardstick):
                        results.append(result)
                        rows.add(_row(result))
                    progress.end(expected_seconds(case, yardstick))
                file.keep(data(complete=False))
    except KeyboardInterrupt:
        kept = file.stop(data(complete=False))
        rows.say(f"interrupted after {len(results)} rows" + (f", which are in {kept}" if kept else ""))
        raise typer.Exit(INTERRUPTED) from None
    file.finish(data(complete=True))
    if plot is not None:
        whole = data(complete=True)
        draw(whole["results"], f"{whole['machine']['device']}, {dtype}, {whole['machine']['date']}", plot)


def _todo(
    work: dict[str, list[OpImpl]],
    place: Place,
    yardstick: Yardstick,
    tokens: list[int] | None,
    hidden: list[int] | None,
    quick: bool,
) -> tuple[list[tuple[Case, list[OpImpl]]], int]:
    """Return the cases to measure, and the number of shapes left out because they take long on this device."""
    todo: list[tuple[Case, list[OpImpl]]] = []
    left_out = 0
    for name, candidates in work.items():
        if tokens or hidden:
            chosen = list(cases(OPERATORS[name], place, tokens or TOKENS, hidden or HIDDEN))
        else:
            chosen, others = short_cases(OPERATORS[name], place, yardstick.rates, HIDDEN[:1] if quick else HIDDEN)
            left_out += others
        todo += [(case, candidates) for case in chosen]
    return todo, left_out


def _data(place: Place, dtype: str, yardstick: Yardstick, results: list[Result]) -> dict[str, Any]:
    return {
        **origin(place.device),
        "dtype": dtype,
        "copy_bytes_per_s": yardstick.rates.copy_bytes_per_s,
        "operations_per_s": yardstick.rates.operations_per_s,
        "results": [result.as_data() for result in results],
    }


def _planned(op: list[str] | None, impl: list[str] | None) -> dict[str, list[OpImpl]]:
    """Return the implementations to measure, by operator.

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
    if not work:
        raise DispatchError("nothing to measure: no implementation is available")
    return work


def _row(result: Result) -> tuple[Any, ...]:
    row = (result.op_name, result.impl_id, result.weights, result.label, result.tokens, result.width)
    if result.device is None:
        return (*row, "-", "", "", "", result.note)
    times = result.device
    spread = f"{times.low * 1e6:.1f} to {times.high * 1e6:.1f}"
    host = "" if result.host is None else f"{result.host.median * 1e6:.1f}"
    return (*row, f"{times.median * 1e6:.1f}", spread, host, f"{result.share:.3f}", f"{result.share_of_copy:.3f}")
