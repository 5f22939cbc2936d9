"""``fl bisect``: find the operator, the layers and the implementation that make a model's logits wrong."""

from __future__ import annotations

import json as json_library
import os
import tempfile
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any

import typer

from ...errors import DispatchError
from ...evidence.bisect.base import measure
from ...evidence.bisect.documents import Document, of_settings, text
from ...evidence.bisect.findings import Result
from ...evidence.bisect.investigation import Investigation
from ...evidence.bisect.journal import Journal
from ...evidence.bisect.probes import Probes
from ...evidence.bisect.prompts import FORCED, rounds
from ...settings import load_settings
from ..engines import Start
from ..hosts import Host, installed_host
from ..output import INTERRUPTED, AsJson, check_file, fail, print_json
from . import prompts as prompts_of
from .driver import SLEEPING, Starter
from .report import Report

REFERENCE: Document = {"prefer": "reference", "aten_replacement": False}
"""The default trusted policy."""
HUGGINGFACE = "huggingface"


def bisect(
    model: Annotated[str | None, typer.Option(help="Checkpoint: a folder, or a name that the host knows.")] = None,
    policy: Annotated[
        Path | None,
        typer.Option(help="YAML of the policy under suspicion. Default: the environment's policy."),
    ] = None,
    against: Annotated[
        str,
        typer.Option(
            help="The trusted policy: a YAML file, 'reference', or 'huggingface' (references, checked by it)."
        ),
    ] = "reference",
    host: Annotated[
        Host | None, typer.Option(help="Serving engine; by default the installed one.", case_sensitive=False)
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option("--tensor-parallel-size", "-tp", min=1)] = 1,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled/--enforce-eager", help="Compile and capture as the host does; each run then starts an engine."
        ),
    ] = False,
    dtype: Annotated[str, typer.Option(help="Dtype of the model, by the host's name.")] = "auto",
    prompts: Annotated[
        Path | None, typer.Option(help="A file with one prompt per line. Default: generated prompts.")
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE for vLLM's LLM or SGLang's Engine, the value as JSON or text (repeatable)."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the policy that avoids the fault.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Keep the answers in this folder, and reuse those already in it.")
    ] = None,
    slower_than: Annotated[
        float | None,
        typer.Option(min=1.01, help="Find what makes the policy slower than this many times the trusted policy."),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Start a new engine for each run.")] = False,
    patience: Annotated[float, typer.Option(min=1, help="Seconds allowed for one step of an engine.")] = 900,
    self_test: Annotated[
        list[str] | None,
        typer.Option("--self-test", help="Find a planted fault, by name or 'all' (repeatable); takes no --model."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the engines' own logs.")] = False,
    json: AsJson = False,
) -> None:
    """Find the operator, layers and implementation that move a model's logits by more than rounding.

    Exit status 0: the policies agree. 1: they differ, and the cause is named. 2: the cause was not found.
    130: interrupted; --resume continues.
    """
    for file in (out, None if resume is None else resume.parent / "x"):
        check_file(file)
    chosen = host or installed_host()
    report = Report(json)
    if self_test is not None:
        from .selftest import self_test as run_self_test

        raise typer.Exit(run_self_test(self_test, chosen, report, resume, patience, verbose, _arguments(engine_arg)))
    if model is None:
        raise DispatchError("name the checkpoint with --model, or plant a fault with --self-test")
    if slower_than and against == HUGGINGFACE:
        raise DispatchError("--slower-than compares two policies; name a YAML policy with --against, or 'reference'")
    folder = resume or Path(tempfile.mkdtemp(prefix="fl-bisect-"))
    start = Start(chosen, model, not compiled, tensor_parallel_size, dtype, 0, _arguments(engine_arg))
    good = REFERENCE if against in ("reference", HUGGINGFACE) else _document(Path(against))
    case = Case(start, good, _document(policy), prompts, against == HUGGINGFACE, slower_than=slower_than or 0)
    try:
        result = investigate(case, folder, report, restart=restart, patience=patience, verbose=verbose)
    except KeyboardInterrupt:
        fail(f"interrupted; the same command with --resume {folder} continues")
        raise typer.Exit(INTERRUPTED) from None
    if out is not None and result.policy is not None:
        out.write_text(text(result.policy, report.head(result)), encoding="utf-8")
    if json:
        print_json(report.as_data(result))
    else:
        report.show(result, out)
    if result.differs and not result.agrees:
        raise typer.Exit(2)
    raise typer.Exit(int(result.differs))


class Case:
    """One investigation's subject.

    Args:
        start: settings of the engines; a length of 0 becomes that of the longest request.
        good, bad: documents of the policies.
        prompts: a file, or ``None`` for generated ones.
        huggingface: whether the good policy must agree with Hugging Face.
        variables: environment variables of the engines.
        slower_than: see :class:`~fl_dispatch.evidence.bisect.probes.Probes`.
    """

    def __init__(
        self,
        start: Start,
        good: Document,
        bad: Document,
        prompts: Path | None = None,
        huggingface: bool = False,
        variables: dict[str, str] | None = None,
        slower_than: float = 0.0,
    ) -> None:
        self.slower_than = slower_than
        self.start, self.good, self.bad, self.huggingface = start, good, bad, huggingface
        self.variables = variables or {}
        tokens = prompts_of.read(prompts, start.model) if prompts else prompts_of.made(start.model)
        self.rounds = rounds(tokens)
        self.length = max(map(len, tokens)) + FORCED
        self.tokens = tokens

    def header(self) -> dict[str, Any]:
        """Return everything that this case's answers depend on."""
        start = self.start
        product = {Host.VLLM: "vllm", Host.SGLANG: "sglang"}[start.host]
        return {
            "model": start.model,
            "host": f"{product} {_version(product)}",
            "eager": start.eager,
            "ranks": start.ranks,
            "dtype": start.dtype,
            "arguments": dict(start.arguments),
            "good": self.good,
            "policy": self.bad,
            "prompts": self.tokens,
            "huggingface": self.huggingface,
            "slower_than": self.slower_than,
        }


def investigate(
    case: Case,
    folder: Path,
    report: Report,
    *,
    restart: bool = False,
    patience: float = 900,
    verbose: bool = False,
    journal: Journal | None = None,
) -> Result:
    """Run an investigation; the engines' files and the record go into ``folder``.

    Raises:
        DispatchError: the good policy's engine does not run, or differs from Hugging Face.
    """
    journal = journal or Journal(folder, case.header())
    start = case.start
    if start.length == 0:
        start = Start(**{**vars(start), "length": case.length})
    variables = {**(SLEEPING if case.slower_than else {}), **case.variables}
    starter = Starter(start, case.rounds, folder, patience, variables, verbose)
    report.begin(case.start, folder, case.tokens)
    probes = Probes(starter, journal, report.asked, not restart and start.eager, report.begins, case.slower_than)
    work = Investigation(probes, case.good, case.bad, not start.eager, report.say)
    try:
        if case.huggingface:
            from .huggingface import compare

            base = measure(probes, case.good, not start.eager, lambda line: None)
            report.agrees(compare(case.start, case.rounds, base.scores, base.yardstick))
            probes.runs = probes.starts = 0
        result = work.run()
    finally:
        report.ended()
        probes.stop()
    report.runs, report.starts = probes.runs, probes.starts
    return result


def _document(file: Path | None) -> Document:
    given = {} if file is None else {"VLLM_FL_CONFIG": str(file)}
    return of_settings(load_settings({**os.environ, **given}))


def _arguments(given: list[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in given or ():
        key, equals, value = one.partition("=")
        if not equals or not key.isidentifier():
            raise DispatchError(f"--engine-arg {one!r} is not KEY=VALUE, such as max_num_batched_tokens=512")
        try:
            found[key] = json_library.loads(value)
        except ValueError:
            found[key] = value
    return found


def _version(product: str) -> str:
    for name in (product, f"{product}-cpu"):
        try:
            return version_of(name)
        except ModuleNotFoundError:
            continue
    return "unknown"
