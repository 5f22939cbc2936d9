"""The small model's held-out text as requests for an engine, and its perplexity by what the engine answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from fl_dispatch.cli import small_model
from fl_dispatch.evidence.perplexity import perplexity, relative_difference, rows_of
from host_engines import Answer

SLIGHTLY_WRONG = {"per_op_order": {"rms_norm": ["impl:reference.sample_variance"]}}
"""A policy for the norm of ``plugins/sample_variance.py``, which is 0.4 % too small."""

SGLANG_STEP = {"max_tokens": 1, "scores": True}


@cache
def rows() -> list[list[int]]:
    """Token ids of the requests."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model.CHECKPOINT)
    text = small_model.HELD_OUT.read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return rows_of(ids, tokenizer.bos_token_id, small_model.WINDOW)


def step() -> dict[str, Any]:
    """A step of ``vllm/run_features.py`` that scores them."""
    return {"do": "generate", "prompts": rows(), "sampling": {"max_tokens": 1, "prompt_logprobs": 0}}


def found(answers: Sequence[Mapping[str, Any]]) -> float:
    """The perplexity by a step's answers."""
    scores = [
        [scored[str(token)] for token, scored in zip(row[1:], answer["prompt_logprobs"][1:], strict=True)]
        for row, answer in zip(rows(), answers, strict=True)
    ]
    return perplexity(scores, 1).value


def found_by_sglang(step: Mapping[str, Any]) -> float:
    """The perplexity by an answered step of ``sglang/run_sglang.py``: :data:`SGLANG_STEP` with :func:`rows`."""
    return perplexity([scores[:-1] for scores in step["scores"]], 1).value  # the last token is the engine's own


def perplexity_of(answer: Answer) -> float:
    """The perplexity by a scenario's answer to :func:`rows`, whose one token is the engine's own."""
    return perplexity([scores[:-1] for scores in answer.rows], 1).value


def difference(answers: Sequence[Mapping[str, Any]], right: float | None = None) -> float:
    """How far the perplexity by a step's answers is from ``right``, as a part of it.

    Right is by default Hugging Face's in float32.
    """
    return relative_difference(found(answers), right or small_model.facts()["perplexity"])
