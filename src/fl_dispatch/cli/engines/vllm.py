"""vLLM's ``LLM`` as an engine of commands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from . import Answer, Prompt, Row, Start


class HostEngine:
    """See :class:`~fl_dispatch.cli.engines.Engine`.

    Args:
        settings: settings of the engine.
        fixed: arguments of ``LLM`` that override all others.
    """

    seconds = 0.0

    def __init__(self, settings: Start, **fixed: Any) -> None:
        from vllm import LLM

        length = {"max_model_len": settings.length} if settings.length else {}
        self.llm = LLM(
            **{
                "model": settings.model,
                "dtype": settings.dtype,
                "tensor_parallel_size": settings.ranks,
                "enforce_eager": settings.eager,
                "seed": 0,
                "disable_log_stats": True,
                "max_logprobs": -1,  # the whole vocabulary
                **length,
                **settings.arguments,
                **fixed,
            }
        )

    def count(self) -> None:
        self.llm.collective_rpc("fl_set_counting", args=(True,))

    def generate(self, prompts: Sequence[Prompt]) -> list[Answer]:
        given = [{"prompt_token_ids": list(prompt.tokens)} for prompt in prompts]
        sampling = [_sampling(prompt) for prompt in prompts]
        started = time.perf_counter()
        outputs = self.llm.generate(given, sampling, use_tqdm=False)
        self.seconds = time.perf_counter() - started
        return [_answer(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]

    def close(self) -> list[dict[str, Any]]:
        reports = [dict(report) for report in self.llm.collective_rpc("fl_report")]
        self.end()
        return reports

    def end(self) -> None:
        """End the engine without a report."""
        self.llm.llm_engine.engine_core.shutdown()


def _sampling(prompt: Prompt) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=prompt.new,
        ignore_eos=True,
        logprobs=prompt.top,
        prompt_logprobs=(prompt.top or 0) if prompt.scored else None,
        extra_args={"fl_forced": list(prompt.forced)} if prompt.forced else None,
        detokenize=False,
    )


def _answer(prompt: Prompt, output: Any) -> Answer:
    (result,), read = output.outputs, output.prompt_logprobs[1:] if prompt.scored else []
    scores = [row[token].logprob for token, row in zip(prompt.tokens[1:], read, strict=prompt.scored)]
    rows = [] if prompt.top is None else [_row(row) for row in (*read, *result.logprobs)]
    return Answer(list(result.token_ids), scores, rows)


def _row(row: Any) -> Row:
    return {str(token): entry.logprob for token, entry in row.items()}
