"""The hooks in SGLang's processes: a method of its scheduler, and a logits processor that forces tokens.

The module is loaded like any plugin, through ``VLLM_FL_PLUGIN_MODULES``. ``Engine.collective_rpc`` returns nothing, so
answers come as files.
"""

from __future__ import annotations

import json
import time
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...evidence.bisect import inside, kinds

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner
    from torch import Tensor

    from ...registry import OpRegistry

FORCED = "fl_forced"
"""The key of a request's custom parameters."""
METHOD = "fl_bisect"
CLOCK = "fl_bisect_seconds"
"""A model runner's attribute: processor time of its forward passes."""


def _bisect(scheduler: Scheduler, folder: str, job: dict[str, Any]) -> None:
    """Write the answer to a job to this rank's file.

    A job for the clock asks for the processor time. Any other one switches the policy if it has settings.
    """
    from sglang_fl import report

    runner = scheduler.tp_worker.model_runner
    rank, answer = report.own_rank(), dict[str, Any]()
    if job.get("clock"):
        answer = {"seconds": _seconds_of_passes(runner)}
    else:
        refused = ""
        if job.get("settings") is not None and (job["ranks"] is None or rank in job["ranks"]):
            refused = inside.switch(job["settings"], job["seed"])
        answer = {**inside.answer(runner.model), "refused": refused}  # also ends a watch
    if job.get("watch"):
        kinds.watch(job["watch"])
    part = Path(folder, f"{rank}.part")
    part.write_text(json.dumps(answer), encoding="utf-8")
    part.rename(part.with_suffix(".json"))


def _seconds_of_passes(runner: ModelRunner) -> float | None:
    """Return the processor time of forward passes since the first question; ``None`` if an accelerator computes.

    The scheduler polls without pause between them, so its own processor time is the wall clock's.
    """
    if inside.processor_seconds() is None:
        return None
    if not hasattr(runner, CLOCK):
        setattr(runner, CLOCK, 0.0)
        forward = runner.forward

        @wraps(forward)
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.process_time()
            result = forward(*args, **kwargs)
            setattr(runner, CLOCK, getattr(runner, CLOCK) + time.process_time() - before)
            return result

        runner.forward = timed
    return float(getattr(runner, CLOCK))


def register_builtins(registry: OpRegistry) -> None:
    """Add the method to SGLang's scheduler; register no implementation."""
    from sglang.srt.managers.scheduler import Scheduler

    setattr(Scheduler, METHOD, _bisect)


def forcing_processor() -> str:
    """Return a serialized custom logit processor that raises one given token per step above all others.

    SGLang takes log-probabilities after the processor, so a row says nothing about the forced token.
    """
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    class ForcedTokens(CustomLogitProcessor):  # type: ignore[misc]  # the host is not type-checked
        def __call__(self, logits: Tensor, custom_param_list: Any = None) -> Tensor:
            for row, given in enumerate(custom_param_list or ()):
                forced = (given or {}).get("fl_forced")
                if forced:
                    step = len(given["__req__"].output_ids)
                    logits[row, forced[min(step, len(forced) - 1)]] = logits[row].max() + 1.0
            return logits

    return str(ForcedTokens.to_str())
