"""``fl demo``: generate text with a real engine through the dispatch core, and compare it with Hugging Face's.

The model is the small one of this package, which writes English, or a checkpoint of another architecture. The latter is
built locally with random weights and writes noise. The tokens of both are exact.
"""

from __future__ import annotations

import enum
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from ...devices import detect_device
from ...errors import DispatchError
from .. import hosts, small_model
from ..output import AsJson, console, fail, print_json, print_table
from .comparison import compare
from .engines import Generated, Request, generate
from .progress import steps

EMULATED_ENV = "FL_EMULATED_CHIP"
"""The variable with which an environment declares that its chip is emulated, and how."""

PROMPTS = (
    "the river runs to the sea",
    "one two three four five six seven eight nine ten one two three four five six seven eight nine ten",
    "chip",
)


class Family(enum.StrEnum):
    """The package's small model, and the families that the demo can build with random weights."""

    SMALL = small_model.NAME
    QWEN3 = "qwen3"
    LLAMA = "llama"
    GEMMA3 = "gemma3"
    QWEN3_MOE = "qwen3_moe"
    MIXTRAL = "mixtral"


def demo(
    host: hosts.HostOption = None,
    family: Annotated[
        Family | None,
        typer.Option(help="small is a trained model; the others have random weights.", case_sensitive=False),
    ] = None,
    prefer: hosts.PreferOption = None,
    config: hosts.ConfigOption = None,
    dtype: hosts.DtypeOption = hosts.Dtype.FLOAT32,
    head_size: Annotated[
        int | None, typer.Option(help="Head size of a model with random weights (qwen3).", min=16)
    ] = None,
    compiled: hosts.CompiledOption = False,
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.", min=1, max=512)] = 32,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt (repeatable).")] = None,
    verbose: hosts.VerboseOption = False,
    json: AsJson = False,
) -> None:
    """Generate with a real vLLM or SGLang through the dispatch core, and compare with Hugging Face.

    In float32 the tokens must be equal, in half precision the log-probabilities as near to float32 as Hugging Face's.
    Exit code 1 if they are not, if an implementation failed, or if no dispatched operator ran.
    """
    hosts.environment(prefer, config)
    host = host or hosts.installed_host()
    family = family or (Family.SMALL if head_size is None else Family.QWEN3)
    if (host, family) == (hosts.Host.SGLANG, Family.GEMMA3):
        raise DispatchError("SGLang ties the embeddings of Gemma 3, the checkpoint here does not: take another family")
    if family is Family.SMALL and head_size is not None:
        raise DispatchError("--head-size is for a model with random weights; the small model's heads have 128 elements")
    if host is hosts.Host.SGLANG and compiled:
        raise DispatchError("SGLang's models are not compiled under the plugin: --compiled is for vLLM")
    device = describe_device()
    if not json:
        console.print(device, highlight=False, markup=False)
    with tempfile.TemporaryDirectory(prefix="fl-demo-") as folder, steps(Path(folder) / "log", json, verbose) as step:
        path = small_model.CHECKPOINT
        if family is not Family.SMALL:
            with step(f"building a small {family} checkpoint"):
                from ..checkpoints import build_checkpoint

                sizes = {} if head_size is None else {"head_dim": head_size}
                path = build_checkpoint(family.value, Path(folder) / family.value, **sizes)
        prompts = list(prompt or (small_model.PROMPTS if family is Family.SMALL else PROMPTS))
        request = Request(path, prompts, tokens, dtype.value, compiled, dtype is not hosts.Dtype.FLOAT32)
        way = f"{host.product}, {dtype}, {'compiled' if compiled else 'eager'}"
        with step(f"starting {way}, and generating (its import takes a while)"):
            generated, report = generate(host, request)
        with step("computing the same with Hugging Face transformers"):
            right, compared = compare(family.value, request, generated)
    if json:
        result = {"right": right, "compared": compared, "tokens_per_second": generated.rate}
        print_json({"device": device, **result, "texts": generated.texts, "report": report})
    else:
        trained = "by a model of 1.2 million parameters that learned English from Python's documentation"
        title = trained if family is Family.SMALL else "random weights: noise, but exact"
        _show(f"Text ({title})", request.prompts, generated, report)
        console.print(compared, style="bold green" if right else "bold red", highlight=False)
    judge([] if right else [f"the result differs from Hugging Face's: {compared}"], report)


def describe_device() -> str:
    """Return the device that an engine would run on here, and whether it is emulated."""
    spec = detect_device()
    emulated = os.environ.get(EMULATED_ENV)
    return f"device: {spec.name} ({spec.device_name(0)})" + (f", EMULATED: {emulated}" if emulated else "")


def judge(problems: list[str], report: dict[str, Any]) -> None:
    """Print the problems and exit with code 1, if there are any.

    Args:
        problems: known problems, one sentence each.
        report: a worker's report; a failed implementation in it is a problem, and so is a run without operators.
    """
    problems = [*problems]
    problems += [
        f"'{impl_id}' failed in '{op_name}' and is banned; another one took over (--verbose shows why)"
        for op_name, impl_ids in report["failed"].items()
        for impl_id in impl_ids
    ]
    if not report["counts"]:
        problems.append("no operator ran through the dispatch core")
    for problem in problems:
        fail(problem)
    if problems:
        raise typer.Exit(1)


def _show(title: str, prompts: list[str], generated: Generated, report: dict[str, Any]) -> None:
    print_table(title, ("prompt", "continuation"), zip(prompts, generated.texts, strict=True))
    show_what_ran(report)
    total = sum(map(len, generated.tokens))
    console.print(f"{total} tokens in {generated.seconds:.2f} s: {generated.rate:.1f} tokens/s", highlight=False)


def show_what_ran(report: dict[str, Any]) -> None:
    """Print tables of the implementations that a worker called, and of the reasons, from its report."""
    rows: list[tuple[str, str, str, int]] = []
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for key, calls in sorted(report["counts"].items()):
        op_name, impl_id = key.split(" ")
        decision = report["decisions"][op_name]
        ran = next((entry for entry in decision["considered"] if entry["impl_id"] == impl_id), None)
        rows.append((op_name, impl_id, ran["kind"] if ran else "", calls))
        for entry in [] if ran is None else [ran, *_passed_over(decision, ran)]:
            status = "passed over" if entry is not ran else "ran"
            reasons.setdefault((entry["impl_id"], status, _reason(entry)), []).append(op_name)
    title = f"What ran, counted in the engine's process {report['pid']}"
    print_table(title, ("operator", "implementation", "kind", "calls"), rows)
    why = [(impl_id, status, ", ".join(ops), reason) for (impl_id, status, reason), ops in reasons.items()]
    print_table("Why", ("implementation", "status", "operators", "why"), why)


def _passed_over(decision: dict[str, Any], ran: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the implementations for this device that precede the one that ran in the order."""
    order, spec = decision["order"], detect_device()

    def place(entry: dict[str, Any]) -> tuple[int, int]:
        kind = order.index(entry["kind"]) if entry["kind"] in order else -1
        return kind, -int(entry["priority"])

    return [
        entry
        for entry in decision["considered"]
        if entry["status"] == "skipped"
        and entry["vendor"] in (None, spec.vendor, spec.name)
        and place(entry) < place(ran)
    ]


def _reason(entry: dict[str, Any]) -> str:
    if entry["status"] == "fallback":
        return f"for the layers or calls that a rule, or another one's limits, send here ({entry['reason']})"
    return str(entry["reason"])
