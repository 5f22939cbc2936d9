"""``fl verify``: check that every implementation is right."""

from __future__ import annotations

import time
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .. import evidence
from ..devices import device_of
from ..errors import DispatchError
from ..evidence.compiled import backends
from ..evidence.inputs import Inputs
from ..evidence.origin import origin
from ..evidence.verify import DTYPES, RACE_CALLS, RACE_SECONDS, SCHEMA, Verification, implementations
from ..evidence.verify import verify as verify_one
from ..manager import get_default_manager
from ..types import OpImpl
from .output import INTERRUPTED, AsJson, ResultFile, Rows, about, advancing
from .places import device_named, dtype_named

COLUMNS = {
    "operator": 20,
    "implementation": 19,
    "dtype": 8,
    "how": 8,
    "inputs": 6,
    "prepared": 8,
    "declined": 8,
    "error/tolerance": 15,
    "status": 14,
    "input": 0,
}
ROW_PER_PREPARATION = 5
"""How much longer a row takes than generating its inputs and computing what the reference gives, about."""
COMPILATION_SECONDS = {"eager": 0.3, "inductor": 3.0}
"""To compile for one input, about."""


def _schema(asked: bool) -> None:
    if asked:
        print(files(evidence).joinpath("verify.schema.json").read_text(encoding="utf-8"), end="")
        raise typer.Exit


def verify(
    op: Annotated[list[str] | None, typer.Option(help="Only this operator (repeatable). Default: all.")] = None,
    impl: Annotated[
        list[str] | None, typer.Option(help="Only this implementation, such as reference.torch (repeatable).")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="bfloat16, float16, float32, float64 (repeatable). Default: the first three."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="PyTorch device. Default: this machine's.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the generated inputs.")] = 0,
    label: Annotated[str, typer.Option("--input", help="Run only inputs with this text in their label.")] = "",
    repeat: Annotated[int, typer.Option(min=1, help="Calls for each input; all must give the same bits.")] = 3,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run only the declared samples: no large sizes, no hostile memory, no load.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=0, help="Time limit of the calls under load, for each row.")
    ] = RACE_SECONDS,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Also inside torch.compile, as compiled models call it.")
    ] = False,
    json: AsJson = False,
    schema: Annotated[
        bool, typer.Option("--schema", callback=_schema, is_eager=True, help="Print the JSON's schema and exit.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the results to this file, as JSON; to FILE.partial until it is complete.")
    ] = None,
) -> None:
    """Verify implementations against the float64 reference on every declared input.

    Exit status 0: everything that ran is correct. 1: something is wrong. 2: nothing matches, nothing ran, or a named
    implementation cannot run here. 130: interrupted.
    """
    manager, file = get_default_manager(), ResultFile(out, json)
    dtypes = [dtype_named(name) for name in dtype] if dtype else DTYPES
    candidates = implementations(manager, op, impl)
    place = device_named(device)
    if not device_of(place.type).accelerator:
        torch.set_num_threads(1)  # inputs are small, so threads would mostly wait for each other
    absent = {(one.op_name, one.impl_id): why for one in candidates for ok, why in [one.availability()] if not ok}
    ready = [one for one in candidates if (one.op_name, one.impl_id) not in absent]
    if impl and not ready:
        raise DispatchError("; ".join(f"'{name}' of '{op_name}' cannot run here: {why}"
                                      for (op_name, name), why in absent.items()))  # fmt: skip
    ways = ["", *backends()] if compiled else [""]
    run = _Run(Rows(COLUMNS, quiet=json), file, place, absent)
    try:
        run.say(f"Verifying on {place} against the reference in float64")
        _verify_all(run, ready, list(dtypes), ways, seed, label, repeat, quick, seconds)
    except KeyboardInterrupt:
        kept = file.stop(run.data(complete=False))
        run.say(f"interrupted after {len(run.results)} rows" + (f", which are in {kept}" if kept else ""))
        raise typer.Exit(INTERRUPTED) from None
    file.finish(run.data(complete=True))
    run.close()


class _Run:
    """The findings of one run of the command so far."""

    def __init__(self, rows: Rows, file: ResultFile, place: torch.device, absent: dict[tuple[str, str], str]) -> None:
        self.rows, self.file, self.place, self.absent = rows, file, place, absent
        self.results: list[Verification] = []

    def say(self, text: str, style: str = "") -> None:
        """Print a line between the rows."""
        self.rows.say(text, style)

    def add(self, result: Verification) -> None:
        """Print a row and keep it."""
        self.results.append(result)
        worst, failed = result.worst, next(iter(result.failed), "")
        self.rows.add(
            (
                result.op_name,
                result.impl_id,
                result.dtype,
                result.how,
                result.samples,
                result.prepared if result.prepares else "",
                len(result.declined) or "",
                "" if worst is None else f"{worst.share:.3f}",
                result.verdict,
                failed if result.problems else "" if worst is None else worst.sample,
            )
        )
        for problem in result.problems:
            self.say(f"    {problem}", "red")
        if failed:
            self.say(f"    input: {result.failed[failed]}; again: {_again(result, failed, self.place)}", "dim")
        self.file.keep(self.data(complete=False))

    def data(self, complete: bool) -> dict[str, Any]:
        """Return all results as plain data."""
        return {
            "schema": SCHEMA,
            "device": str(self.place),
            **origin(self.place),
            "complete": complete,
            "results": [result.as_data() for result in self.results],
            "absent": [(*who, why) for who, why in self.absent.items()],
        }

    def close(self) -> None:
        """Print what did not run, and exit with the status of all results."""
        for result in self.results:
            if text := _said_of_weights(result):
                self.say(f"{result.op_name} {result.impl_id} {result.dtype} {text}", "dim")
            reasons: dict[str, list[str]] = {}
            for label, why in result.declined.items():
                reasons.setdefault(why, []).append(label)
            for why, labels in reasons.items():
                self.say(f"{result.op_name} {result.impl_id} {result.dtype} declines {', '.join(labels)}: {why}", "dim")
        for (op_name, impl_id), why in self.absent.items():
            self.say(f"{op_name} {impl_id} cannot run here: {why}", "dim")
        if any(result.problems for result in self.results):
            raise typer.Exit(1)
        if not any(result.samples for result in self.results):
            raise DispatchError("nothing was verified: no implementation that is available takes any of the inputs")


def _said_of_weights(result: Verification) -> str:
    """Return the kinds of weights that a weight-preparing implementation was verified with; empty for others."""
    if not result.prepares:
        return ""
    said = f"was proven with prepared weights on {result.prepared} inputs, with plain ones on {result.plain}"
    for why, number in result.refused.items():
        said += f"; {number} weights were not prepared: {why}"
    return said


def _again(result: Verification, label: str, place: torch.device) -> str:
    """Return the command that runs one input again."""
    compiled = "" if result.how == "direct" else " --compiled"
    return (
        f'fl verify --op {result.op_name} --impl {result.impl_id} --dtype {result.dtype} --input "{label}" '
        f"--seed {result.seed} --device {place}{compiled}"
    )


def _verify_all(
    run: _Run,
    candidates: list[OpImpl],
    dtypes: list[torch.dtype],
    ways: list[str],
    seed: int,
    label: str,
    repeat: int,
    quick: bool,
    seconds: float,
) -> None:
    manager = get_default_manager()
    by_operator: dict[str, list[OpImpl]] = {}
    for candidate in candidates:
        by_operator.setdefault(candidate.op_name, []).append(candidate)

    def made(op_name: str, dtype: torch.dtype) -> Inputs:
        return Inputs(manager, op_name, dtype, run.place, seed=seed, probes=not quick, label=label)

    with advancing(len(candidates) * len(dtypes) * len(ways)) as progress:
        progress.begin(f"making the inputs of {len(by_operator)} operators")
        first: dict[str, Inputs] = {}
        total = 0.0
        for op_name, own in by_operator.items():
            begun = time.perf_counter()
            first[op_name] = made(op_name, dtypes[0])
            first[op_name].compute()
            preparation = time.perf_counter() - begun
            compilation = sum(COMPILATION_SECONDS.get(way, 0.0) for way in ways) * len(first[op_name])
            load = 0.0 if quick else seconds
            total += len(dtypes) * len(own) * (min(load, 0.25) + ROW_PER_PREPARATION * preparation + compilation)
        rows = len(candidates) * len(dtypes) * len(ways)
        run.say(f"{rows} rows, {about(total)}" + ("" if quick else "; --quick takes less"))
        for op_name, own in by_operator.items():
            for dtype in dtypes:
                inputs = first[op_name] if dtype is dtypes[0] else made(op_name, dtype)
                for candidate in own:
                    for way in ways:
                        name = str(dtype).removeprefix("torch.")
                        progress.begin(f"verifying {op_name} {candidate.impl_id} {name} {way}".strip())
                        run.add(
                            verify_one(
                                manager,
                                candidate,
                                dtype,
                                run.place,
                                inputs=inputs,
                                repeats=repeat,
                                compiled=way,
                                race_calls=0 if quick else RACE_CALLS,
                                race_seconds=seconds,
                            )
                        )
                        progress.end()
            del first[op_name]  # they may be large
