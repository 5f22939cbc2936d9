"""The choice whether an engine makes several steps per scheduler call, and how many a batch may make."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fl_dispatch.hosting.layers.attribute import Attached
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings

from ..version import TESTED_HOSTS, host_version

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import ServerArgs

logger = get_logger(__name__)

NAME = "FL_STEPS"
"""The algorithm's name in SGLang's registry."""
LARGEST = 16
"""The largest number of steps; a row of SGLang's table holds the slots of the longest context + 4 + half the steps."""
MOST = Attached[int]("fl_most_steps")
"""The steps that requests and lengths allow a batch."""


def apply_defaults(args: ServerArgs, change: Callable[[ServerArgs, str, Any, str], None]) -> None:
    """Choose our algorithm if several steps are asked for and possible; else log why not.

    Args:
        change: sets a field for a reason, which it logs.
    """
    asked = get_settings().steps
    if asked in (None, 1):
        return
    if why := why_single(args):
        logger.warning("VLLM_FL_STEPS=%d: each scheduler call makes one step, because %s", asked, why)
        args.speculative_algorithm = None if is_named(args) else args.speculative_algorithm
        return
    args.speculative_algorithm, args.speculative_eagle_topk = NAME, 1
    args.speculative_num_steps = args.speculative_num_draft_tokens = -(-largest() // 2)  # SGLang reserves twice that
    change(args, "disable_overlap_schedule", True, "several steps wait for the host once")
    logger.info(
        "a scheduler call makes up to %d steps while all requests decode (VLLM_FL_STEPS); SGLang refuses beams and "
        "return_sampling_mask then",
        largest(),
    )


def largest() -> int:
    """Return the setting, at most :data:`LARGEST`; one if it is unset."""
    return min(get_settings().steps or 1, LARGEST)


def is_named(args: ServerArgs) -> bool:
    """Whether the arguments name our algorithm, in any case of letters."""
    return (args.speculative_algorithm or "").upper() == NAME


def why_single(args: ServerArgs) -> str:
    """Return why an engine cannot make several steps; an empty string if it can."""
    if host_version() not in TESTED_HOSTS:
        return f"SGLang {host_version()} is not a tested version"
    if args.speculative_algorithm is not None and not is_named(args):
        return "a draft already makes several tokens"
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.configs.hybrid_arch import mambaish_config

    from ..attention import indexer

    model = model_config_of(args)
    reasons = {
        "the model generates nothing": not model.is_generation,
        "the model has an encoder and a decoder": model.is_encoder_decoder,
        "the model takes images or audio": model.is_multimodal,
        "the model has layers that keep a state": mambaish_config(model) is not None,
        "the model has sparse latent attention": indexer.topk_of(model.hf_text_config) is not None,
        "the model generates several tokens in a step (diffusion)": args.dllm_algorithm is not None,
        "pipeline stages hand over each step": args.pp_size > 1,
        "data-parallel ranks run each step together": args.dp_size > 1,
        "prompts and decoding share steps": args.enable_mixed_chunk,
        "experts move between steps": args.enable_eplb,
        "SGLang has watermarks beside its own algorithms alone": args.enable_watermark,
        "SGLang refuses adapters (check_lora_speculative_compatibility in arg_groups/lora_hook.py)": bool(
            args.enable_lora or args.lora_paths
        ),
        "another engine reads each step": args.disaggregation_mode != "null",
    }
    return next((why for why, holds in reasons.items() if holds), "")


def update_running_batch(original: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch) -> Any:
    """Let SGLang prepare a batch that decodes, and note how many steps it may make."""
    prepared = original(scheduler, batch)
    if scheduler.spec_algorithm.name == NAME and prepared is not None and not prepared.is_empty():
        MOST.give(prepared, most_steps(scheduler, prepared))
    return prepared


def leave_room(original: Callable[..., Any], scheduler: Scheduler, request: Req) -> None:
    """Let SGLang bound a request's length, and leave the slots that it reserves for the steps of one scheduler call."""
    original(scheduler, request)
    if scheduler.spec_algorithm.name == NAME:
        reserved = LARGEST + 2 * scheduler.page_size
        room = scheduler.max_total_num_tokens - len(request.origin_input_ids) - reserved
        sampling = request.sampling_params
        sampling.max_new_tokens = min(sampling.max_new_tokens, max(1, room))


def most_steps(scheduler: Scheduler, batch: ScheduleBatch) -> int:
    """Return the steps that requests and lengths allow a batch: one while a request waits or needs the host."""
    waiting = scheduler.waiting_queue and len(batch.reqs) < scheduler.max_running_requests
    if waiting or batch.sampling_info.penalizer_orchestrator.is_required or any(map(_needs_host, batch.reqs)):
        return 1
    left = max(request.sampling_params.max_new_tokens - len(request.output_ids) for request in batch.reqs)
    room = scheduler.model_config.context_len - int(batch.seq_lens_cpu.max())
    return max(1, min(largest(), left, room))


def _needs_host(request: Req) -> bool:
    """Whether the host has to see a token before the next one: grammars, stop strings, processors, hidden states."""
    sampling = request.sampling_params
    return bool(
        request.grammar is not None
        or sampling.stop_strs
        or sampling.stop_regex_strs
        or request.custom_logit_processor
        or request.return_hidden_states
    )
