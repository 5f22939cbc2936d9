"""``fl prove``: untrusted files → the right and fastest one, as a package with its evidence."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template
from typing import Annotated, Any

import torch
import typer

from ..devices import device_of
from ..errors import DispatchError
from ..evidence.origin import origin
from ..evidence.prove import sandbox
from ..evidence.prove.candidate import read
from ..evidence.prove.process import Limits
from ..evidence.prove.signature import GROUP, sign
from ..evidence.prove.trial import Proof, Trial
from ..evidence.threads import free_threads
from ..evidence.verify import DTYPES
from .new_backend import TEMPLATES, values, write_package
from .output import AsJson, ResultFile, Rows
from .places import device_named, dtype_named

COLUMNS = {"candidate": 24, "verdict": 14, "inputs": 6, "times as fast": 22, "why": 0}
ROW = re.compile(r"    \w+ = staticmethod\(kernels\.\w+\)\n")
"""A row of the template's backend."""


def prove(
    folder: Annotated[Path, typer.Argument(help="Python files; each has a function named like the operator.")],
    op: Annotated[str | None, typer.Option(help="The operator. Default: the only one that the files define.")] = None,
    package: Annotated[str | None, typer.Option(help="Write the best one as the package NAME-fl.")] = None,
    path: Annotated[Path | None, typer.Option(help="The package's folder.")] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="The implementation to beat (repeatable). Default: all of them.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Dtypes to verify (repeatable); the first is timed. Default: three.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="PyTorch device. Default: this machine's.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time limit of one call.")] = 20.0,
    memory: Annotated[int, typer.Option(min=256, help="Memory limit of one process, in MiB.")] = 4096,
    allow: Annotated[list[str] | None, typer.Option(help="A package that files may import (repeatable).")] = None,
    json: AsJson = False,
    out: Annotated[Path | None, typer.Option(help="Write the results to this file, as JSON.")] = None,
) -> None:
    """Prove untrusted candidates for an operator, time the correct ones, and package the fastest.

    Each candidate runs in its own process, without network and with limits of time and memory; on a CPU it can neither
    start a process nor write a file. This process makes the inputs and compares the results. A file may contain only
    functions on tensors.

    Exit status 0: a candidate is correct, and with --package the package was written. 1: none is correct, or none is
    faster. 2: nothing to prove, or this machine cannot isolate the process.
    """
    if why := sandbox.why_unavailable():
        raise DispatchError(why)
    file, rows = ResultFile(out, json), Rows(COLUMNS, quiet=json)
    place = device_named(device)
    compilers = device_of(place.type).accelerator
    threads, _ = free_threads()
    torch.set_num_threads(threads)
    candidates = read(folder, op, allow or ())
    dtypes = [dtype_named(name) for name in dtype] if dtype else list(DTYPES)
    trial = Trial(candidates[0].operator, place, dtypes, Limits(seconds, memory, threads, compilers), against or ())
    proofs = [Proof(candidate) for candidate in candidates]
    for proof in proofs:
        trial.verify(proof)
        if not proof.right:
            rows.add(_row(proof))
    rivals = trial.race(proofs)
    ranked = sorted(proofs, key=lambda proof: (not proof.right, -(proof.faster or (0.0,))[0]))
    for proof in ranked:
        if proof.right:
            rows.add(_row(proof))
    best = ranked[0]
    about = {"schema": "fl-prove-1", **origin(place), "operator": trial.operator.name, "seed": trial.seed}
    found = [_data(proof) for proof in ranked]
    file.finish({**about, "there_us": _microseconds(rivals), "candidates": found})
    if not best.right:
        rows.say("none is right")
        raise typer.Exit(1)
    if package is None:
        return
    if best.faster is None or best.faster[1] <= 1:
        rows.say(f"no package, because {best.candidate.name} is not surely faster than what is there")
        raise typer.Exit(1)
    said = f"{best.faster[0]:.2f} times as fast as what was there"
    evidence = {**about, "said": said, "there_us": _microseconds(rivals), **found[0]}
    for written in _pack(package, path, best, place.type, evidence):
        rows.say(str(written))


def _row(proof: Proof) -> tuple[object, ...]:
    inputs = sum(one.samples for one in proof.verified)
    faster = "" if proof.faster is None else "{:.2f} [{:.2f}, {:.2f}]".format(*proof.faster)
    declined = next((why for one in proof.verified for why in one.declined.values()), "")
    why = proof.problems[0] if proof.problems else f"declines some: {declined}" if declined else ""
    return proof.candidate.name, proof.verdict, inputs or "", faster, why


def _data(proof: Proof) -> dict[str, Any]:
    """Return the results as plain data, with times in microseconds."""
    times = {case: [round(one * 1e6, 3) for one in all_] for case, all_ in proof.seconds.items()}
    return {
        "candidate": proof.candidate.name,
        "sha256_of_text": proof.candidate.sha256,
        "verdict": proof.verdict,
        "problems": proof.problems,
        "verified": [one.as_data() for one in proof.verified],
        "rounds_us": times,
        "calls_of_a_round": proof.calls,
        "times_as_fast": proof.faster,
    }


def _microseconds(rivals: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {case: round(one * 1e6, 3) for case, one in found.items()} for name, found in rivals.items()}


def _pack(name: str, path: Path | None, best: Proof, device: str, evidence: dict[str, Any]) -> list[Path]:
    """Write a package with one kernel, in the layout of ``fl new-backend``."""
    written = write_package(name, path)
    folder = written[0]
    module = folder / f"{name}_fl"
    (module / "kernels.py").write_text(best.candidate.text, encoding="utf-8")
    backend = module / "backend.py"
    op_name = best.candidate.operator.name
    row = f"    {op_name} = staticmethod(kernels.{op_name})\n"
    rows = iter([row])
    text = ROW.sub(lambda _: next(rows, ""), backend.read_text(encoding="utf-8"))
    text = text.replace("device_types=None", f'device_types=("{device}",)')
    backend.write_text(text, encoding="utf-8")
    with (folder / "pyproject.toml").open("a", encoding="utf-8") as project:
        project.write(f'\n[project.entry-points."{GROUP}"]\n{name} = "{name}_fl"\n')
    readme = Template((TEMPLATES / "proven/README.md.in").read_text(encoding="utf-8"))
    (folder / "README.md").write_text(readme.substitute(values(name, None)), encoding="utf-8")
    sign(module, evidence)
    return [*written[1:], module / "evidence.json"]
