"""The engines of the demonstration: each generates greedily, and reports what its process dispatched."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..hosts import Host, close_sglang, close_vllm, count_sglang, count_vllm, sglang_engine, vllm_engine


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

    @property
    def vocabulary(self) -> int:
        """Entries of the model's vocabulary."""
        return int(json.loads((self.model / "config.json").read_text(encoding="utf-8"))["vocab_size"])


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


def _vllm(request: Request) -> tuple[Generated, dict[str, Any]]:
    llm = vllm_engine(request.model, request.dtype, request.compiled, max_logprobs=request.vocabulary)
    from vllm import SamplingParams

    llm.generate(request.prompts[:1], SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)  # warm up
    count_vllm(llm)
    scores = {"logprobs": request.vocabulary, "prompt_logprobs": request.vocabulary} if request.scored else {}
    sampling = SamplingParams(temperature=0.0, max_tokens=request.tokens, ignore_eos=True, **scores)
    started = time.perf_counter()
    outputs = llm.generate(request.prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    report = close_vllm(llm)
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
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request.model)
    ids = [tokenizer(prompt).input_ids for prompt in request.prompts]
    engine = sglang_engine(request.model, request.dtype)
    engine.generate(input_ids=ids[:1], sampling_params={"temperature": 0.0, "max_new_tokens": 2})  # warm up
    count_sglang(engine)
    sampling = {"temperature": 0.0, "max_new_tokens": request.tokens, "ignore_eos": True}
    scores = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": request.vocabulary}
    started = time.perf_counter()
    outputs = engine.generate(input_ids=ids, sampling_params=sampling, **(scores if request.scored else {}))
    seconds = time.perf_counter() - started
    worker = close_sglang(engine)
    found = [output["output_ids"] for output in outputs]
    answers = [output["meta_info"] for output in outputs] if request.scored else []
    scored = [row for a in answers for row in (*a["input_top_logprobs"][1:], *a["output_top_logprobs"])]
    rows = [{str(token): logprob for logprob, token, _ in row} for row in scored]
    return Generated(ids, found, [tokenizer.decode(row) for row in found], seconds, rows), worker


ENGINES: Mapping[Host, Callable[[Request], tuple[Generated, dict[str, Any]]]] = {
    Host.VLLM: _vllm,
    Host.SGLANG: _sglang,
}
