"""Damaged requests under SGLang: they alone end, with an error that says why, and nothing of them is remembered.

The rows of logits are reduced before SGLang samples, because it overwrites NaN there. On a CPU the batch runs a second
time while each call is looked at: it writes the same slots again. Elsewhere its inputs may be gone by then.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from fl_dispatch import get_default_manager
from fl_dispatch.devices import detect_device
from fl_dispatch.hosting.damage.rows import damaged_rows
from fl_dispatch.hosting.damage.verdicts import of_numbers
from fl_dispatch.hosting.layers.attribute import Attached
from fl_dispatch.hosting.ranks.agreement import together
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings
from fl_dispatch.shadow.origin import Origin, watching

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = get_logger(__name__)


class Damaged(NamedTuple):
    """The damage of a batch.

    Args:
        rows: 1 for each damaged request, in main memory once :attr:`copied` is reached.
        copied: the device's event behind the copy; ``None`` on a CPU.
        origins: the calls where it began; ``None`` if it was not looked for.
    """

    rows: Tensor
    copied: Any = None
    origins: tuple[Origin, ...] | None = None


DAMAGED = Attached[Damaged]("fl_damaged")
"""The damage that a batch's logits show."""


def sample(
    original: Callable[..., Any], runner: ModelRunner, logits_output: LogitsProcessorOutput, batch: ForwardBatch
) -> Any:
    """Look at the rows of logits, and let SGLang sample."""
    logits = logits_output.next_token_logits
    if logits is not None and not _is_off():
        rows = damaged_rows(logits)
        if detect_device().accelerator:
            DAMAGED.give(logits_output, Damaged(rows.to("cpu", non_blocking=True), _event(logits.device)))
        else:  # an output may be one of an earlier batch, and is marked anew
            DAMAGED.give(logits_output, Damaged(rows, origins=_origins(runner, batch) if bool(rows.any()) else None))
    return original(runner, logits_output, batch)


def _is_off() -> bool:
    """Whether damage is not looked for; stages of a pipeline pass no such mark on."""
    settings = get_settings()
    return settings.damaged_requests == "ignore" or not settings.policy.enabled or get_parallel().pp_size > 1


def process_batch_result(original: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch, result: Any) -> Any:
    """End the damaged requests of a batch, and let SGLang give the others their tokens."""
    found = DAMAGED.find(output) if (output := getattr(result, "logits_output", None)) is not None else None
    if found is not None:
        if found.copied is not None:
            found.copied.synchronize()
        rows = found.rows.tolist()
        for request, damaged in zip(batch.reqs, rows, strict=False):
            if damaged and not request.finished() and not request.is_retracted:
                _end(request, of_numbers(True, found.origins), batch.forward_mode.is_extend())
    return original(scheduler, batch, result)


def _event(device: torch.device) -> Any:
    """An event behind what a device was given last."""
    event = torch.get_device_module(device).Event()
    event.record()
    return event


def _end(request: Any, why: str, reads_prompts: bool) -> None:
    logger.error("request %s is ended: %s", request.rid, why)
    reason = FINISH_ABORT(why, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
    request.skip_radix_cache_insert = True
    if reads_prompts:
        request.discard_output_reason = reason
    else:
        request.to_finish = reason


def _origins(runner: ModelRunner, batch: ForwardBatch) -> tuple[Origin, ...] | None:
    """The origins on all ranks, by a second run of the batch; ``None`` where it would not be the same one."""
    here = get_parallel()
    if mambaish_config(runner.model_config) is not None or batch.contains_mm_inputs():
        return None
    if here.attn_dp_size > 1:  # the other ranks run batches of their own
        return None
    manager = get_default_manager()
    with watching(manager.state) as found:
        runner.forward(batch)
    manager.shadow.findings.begun(found)
    return tuple(together(here.tp_group.cpu_group, found) if here.tp_size > 1 else found)
