"""The small model's held-out text as requests for an engine, and the perplexity from the engine's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from fl_dispatch.cli import small_model
from fl_dispatch.evidence.perplexity import perplexity, relative_difference, rows_of
from host_engines import Answer

SLIGHTLY_WRONG = {"per_op_order": {"rms_norm": ["impl:reference.sample_variance"]}}
"""A policy with the norm of ``plugins/sample_variance.py``, which is 0.4 % too small."""

SGLANG_STEP = {"max_tokens": 1, "scores": True}


@cache
def rows() -> list[list[int]]:
    """Return token ids of the requests."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model.CHECKPOINT)
    text = small_model.HELD_OUT.read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return rows_of(ids, tokenizer.bos_token_id, small_model.WINDOW)


def step() -> dict[str, Any]:
    """Return a step of ``vllm/run_features.py`` that scores the requests."""
    return {"do": "generate", "prompts": rows(), "sampling": {"max_tokens": 1, "prompt_logprobs": 0}}


def found(answers: Sequence[Mapping[str, Any]]) -> float:
    """Return the perplexity from a step's answers."""
    scores = [
        [scored[str(token)] for token, scored in zip(row[1:], answer["prompt_logprobs"][1:], strict=True)]
        for row, answer in zip(rows(), answers, strict=True)
    ]
    return perplexity(scores, 1).value


def found_by_sglang(step: Mapping[str, Any]) -> float:
    """Return the perplexity from the answers to :data:`SGLANG_STEP` of ``sglang/run_sglang.py`` with :func:`rows`."""
    return perplexity([scores[:-1] for scores in step["scores"]], 1).value  # without the generated token


def perplexity_of(answer: Answer) -> float:
    """Return the perplexity from a scenario's answer to :func:`rows` with one generated token."""
    return perplexity([scores[:-1] for scores in answer.rows], 1).value


def difference(answers: Sequence[Mapping[str, Any]], right: float | None = None) -> float:
    """Return the relative difference of the perplexity from a step's answers and ``right``.

    ``right`` is by default Hugging Face's in float32.
    """
    return relative_difference(found(answers), right or small_model.facts()["perplexity"])
