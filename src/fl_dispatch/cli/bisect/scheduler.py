"""The hooks in SGLang's processes: a method of its scheduler, and a logits processor that forces tokens.

The module is loaded like any plugin, through ``VLLM_FL_PLUGIN_MODULES``. ``Engine.collective_rpc`` returns nothing, so
answers come as files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...evidence.bisect import inside, kinds

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from torch import Tensor

    from ...registry import OpRegistry

FORCED = "fl_forced"
"""The key of a request's custom parameters."""
METHOD = "fl_bisect"


def _bisect(scheduler: Scheduler, folder: str, job: dict[str, Any]) -> None:
    """Switch the policy if the job has settings for this rank, and write the answer to this rank's file."""
    from sglang_fl import report

    runner = scheduler.tp_worker.model_runner
    rank, refused = report.own_rank(), ""
    if job.get("settings") is not None and (job["ranks"] is None or rank in job["ranks"]):
        refused = inside.switch(job["settings"], job["seed"])
    answer = inside.answer(runner.model)  # also ends a watch
    if job.get("watch"):
        kinds.watch(job["watch"])
    part = Path(folder, f"{rank}.part")
    part.write_text(json.dumps({**answer, "refused": refused}), encoding="utf-8")
    part.rename(part.with_suffix(".json"))


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
