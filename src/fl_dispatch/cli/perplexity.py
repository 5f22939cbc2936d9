"""``fl perplexity``: measure how exactly a real vLLM or SGLang engine computes a model, as one number."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..devices import detect_device
from ..errors import DispatchError, text_of
from ..evidence.origin import origin
from ..evidence.perplexity import TOLERANCE, Perplexity, perplexity, relative_difference, rows_of
from . import hosts, small_model
from .demo import describe_device, judge, show_what_ran
from .demo.progress import steps
from .engines import Prompt, Start, start
from .output import AsJson, ResultFile, ResultsOption, console


def perplexity_command(
    model: Annotated[
        Path | None, typer.Argument(help="A checkpoint's folder. Default: the small model of this package.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A text file. Default: text that the small model was not trained on.", dir_okay=False),
    ] = None,
    host: hosts.HostOption = None,
    prefer: hosts.PreferOption = None,
    config: hosts.ConfigOption = None,
    dtype: hosts.DtypeOption = hosts.Dtype.FLOAT32,
    compiled: hosts.CompiledOption = False,
    window: Annotated[int, typer.Option(help="Tokens per request.", min=2)] = small_model.WINDOW,
    expect: Annotated[
        float | None,
        typer.Option(help="The correct perplexity. Default for the small model: Hugging Face's in float32."),
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative difference from it. Default: depends on the dtype.", min=0)
    ] = None,
    json: AsJson = False,
    out: ResultsOption = None,
    verbose: hosts.VerboseOption = False,
) -> None:
    """Score a text with a real vLLM or SGLang through the dispatch core, and compare the perplexity with the right one.

    Exit code 1 if it differs by more than the dtype's rounding explains, if an implementation failed, or if no
    dispatched operator ran. Without a right perplexity (another model or text, and no --expect) it is only printed.
    """
    file = ResultFile(out, json)
    hosts.environment(prefer, config)
    host = host or hosts.installed_host()
    if host is hosts.Host.SGLANG and compiled:
        raise DispatchError("SGLang's models are not compiled under the plugin: --compiled is for vLLM")
    checkpoint, text_file = model or small_model.CHECKPOINT, text or small_model.HELD_OUT
    written = _read(text_file)
    if expect is None and model is None and text is None and window == small_model.WINDOW:
        expect = small_model.facts()["perplexity"]
    accepted = TOLERANCE[dtype.value] if tolerance is None else tolerance
    if not json:
        console.print(describe_device(), highlight=False, markup=False)
    with (
        tempfile.TemporaryDirectory(prefix="fl-") as folder,
        steps(Path(folder) / "log", json, verbose) as step,
    ):
        way = f"{host.product}, {dtype}, {'compiled' if compiled else 'eager'}"
        with step(f"starting {way}, and scoring {text_file.name} (its import takes a while)"):
            rows = _rows(checkpoint, written, window)
            engine = start(Start(host, str(checkpoint), host is hosts.Host.VLLM and not compiled, dtype=dtype.value))
            engine.count()
            scores = [answer.scores for answer in engine.generate([Prompt(row, scored=True) for row in rows])]
            (report,) = engine.close()
    found = perplexity(scores, len(written.encode()))
    right, compared = _compared(found, expect, accepted)
    said = f"perplexity {found.value:.4f} over {found.tokens:,} tokens of {text_file.name}"
    if not json:
        show_what_ran(report)
        console.print(f"{said}; {found.bits_per_byte:.4f} bits a byte", highlight=False, markup=False)
        console.print(compared, style="bold green" if right else "bold red", highlight=False, markup=False)
    facts = {
        "model": small_model.NAME if model is None else str(model),
        "text": text_file.name,
        "window": window,
        "dtype": dtype.value,
    }
    asked = {"host": host.value, "prefer": prefer and prefer.value, "compiled": compiled}
    judged = {"expected": expect, "tolerance": accepted, "right": right}
    here = origin(torch.device(detect_device().torch_type))
    file.finish({**here, **facts, **asked, **found.as_data(), **judged, "report": report})
    judge([] if right else [compared], report)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DispatchError(f"{file} cannot be read as a text: {text_of(error)}") from error


def _rows(checkpoint: Path, text: str, window: int) -> list[list[int]]:
    """Return the requests, within the model's positions; an engine also generates one token each."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        positions = AutoConfig.from_pretrained(checkpoint).max_position_embeddings
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError) as error:
        raise DispatchError(f"{checkpoint} is no checkpoint with a tokenizer: {text_of(error)}") from error
    if window + 2 > positions:
        raise DispatchError(f"--window {window} is too long: the model has {positions} positions")
    return rows_of(tokenizer(text, add_special_tokens=False).input_ids, tokenizer.bos_token_id, window)


def _compared(found: Perplexity, expect: float | None, tolerance: float) -> tuple[bool, str]:
    if expect is None:
        return True, "nothing to compare it with: --expect has the right one"
    difference = relative_difference(found.value, expect)
    right = difference <= tolerance
    return right, (
        f"{'right' if right else 'WRONG'}: {expect:.4f} is expected, "
        f"relative difference {difference:.1e}, at most {tolerance:.1e}"
    )
