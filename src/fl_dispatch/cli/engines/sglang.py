"""SGLang's ``Engine`` as an engine of commands."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Sequence
from multiprocessing import resource_tracker
from typing import Any

from . import Answer, Prompt, Row, Start


class HostEngine:
    """See :class:`~fl_dispatch.cli.engines.Engine`.

    Args:
        settings: settings of the engine.
        fixed: arguments of ``Engine`` that override all others.
    """

    seconds = 0.0

    def __init__(self, settings: Start, **fixed: Any) -> None:
        import sglang

        length = {"context_length": settings.length} if settings.length else {}
        self.engine = sglang.Engine(
            **{
                "model_path": settings.model,
                "dtype": settings.dtype,
                "tp_size": settings.ranks,
                "disable_cuda_graph": settings.eager,
                "max_total_tokens": 8192,
                "grammar_backend": "none",
                "random_seed": 0,
                "log_level": "info",
                **length,
                **settings.arguments,
                **fixed,
            }
        )

    def count(self) -> None:
        from sglang_fl import report

        report.set_counting(self.engine)

    def generate(self, prompts: Sequence[Prompt]) -> list[Answer]:
        started = time.perf_counter()
        outputs = self.engine.generate(
            input_ids=[list(prompt.tokens) for prompt in prompts],
            sampling_params=[_sampling(prompt) for prompt in prompts],
            return_logprob=[prompt.scored or prompt.top is not None for prompt in prompts],
            logprob_start_len=[0 if prompt.scored else -1 for prompt in prompts],
            top_logprobs_num=[prompt.top or 0 for prompt in prompts],
            **self.asked(len(prompts)),
        )
        self.seconds = time.perf_counter() - started
        return [_answer(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]

    def asked(self, requests: int) -> dict[str, Any]:
        """Return further arguments of ``generate``."""
        return {}

    def close(self) -> list[dict[str, Any]]:
        from sglang_fl import report

        reports = [dict(worker) for worker in report.collect(self.engine)]
        end(self.engine)
        logging.getLogger("sglang").setLevel(logging.ERROR)  # it logs errors when this process ends
        return reports


def end(engine: Any) -> None:
    """End an engine's processes; messages of Python's resource tracker go to the current output of this process.

    SGLang kills every child process, including the tracker, and would do so again when this process ends. Python then
    starts a new tracker, which does not know the resources to unregister and prints a traceback for each.
    """
    engine.shutdown()
    atexit.unregister(engine.shutdown)
    resource_tracker.ensure_running()


def _sampling(prompt: Prompt) -> dict[str, Any]:
    forced = {"custom_params": {"fl_forced": list(prompt.forced)}} if prompt.forced else {}
    return {"temperature": 0.0, "max_new_tokens": prompt.new, "ignore_eos": True, **forced}


def _answer(prompt: Prompt, output: dict[str, Any]) -> Answer:
    meta = output["meta_info"]
    scores = [logprob for logprob, *_ in meta["input_token_logprobs"][1:]] if prompt.scored else []
    read = [_row(row) for row in meta["input_top_logprobs"][1:]] if prompt.scored and prompt.top else []
    steps = [_row(row) for row in meta["output_top_logprobs"]] if prompt.top else []
    for row, token in zip(steps, prompt.forced, strict=False):  # a forced token's value says nothing
        row.pop(str(token), None)
    return Answer(list(output["output_ids"]), scores, [*read, *steps])


def _row(row: Any) -> Row:
    return {str(token): logprob for logprob, token, *_ in row}
