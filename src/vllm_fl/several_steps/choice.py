"""Decide whether an engine makes several steps per scheduler call."""

from __future__ import annotations

from functools import wraps
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from fl_dispatch.devices import detect_device
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings

from ..compat import arrivals, model_runner, models, versions
from ..schedulers import SCHEDULERS, makes_several_steps

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig, VllmConfig

logger = get_logger(__name__)

PROCESSORS = "vllm.logits_processors"
"""The entry points by which packages bring processors of logits for every model."""
READ_SINGLY = ("ernie45", "granite", "hunyuan_a13b")
"""vLLM's parsers of reasoning that read a stream differently if its pieces have several tokens."""


def adapt(vllm_config: VllmConfig) -> None:
    """Make vLLM use our scheduler if several steps are possible; otherwise log why not if they were asked for."""
    asked, scheduling = get_settings().steps, vllm_config.scheduler_config
    if asked == 1 or makes_several_steps(vllm_config) or vllm_config.model_config is None:
        return
    if why_single(vllm_config):
        if asked:
            logger.warning("VLLM_FL_STEPS=%d: %s", asked, describe(vllm_config))
        return
    scheduling.scheduler_cls = SCHEDULERS[bool(scheduling.async_scheduling)]
    take_schedulers()
    arrivals.mark_tools()
    logger.info("%s while all requests decode (VLLM_FL_STEPS)", describe(vllm_config))


def most_steps() -> int:
    """Return the largest number of steps of one scheduler call: ``VLLM_FL_STEPS``, or eight if it is unset."""
    return get_settings().steps or 8


def take_schedulers() -> None:
    """Make vLLM take our schedulers without its warning, which is for classes that a user brings. Idempotent."""
    from vllm.config import SchedulerConfig
    from vllm.utils.import_utils import resolve_obj_by_qualname

    take = SchedulerConfig.get_scheduler_cls
    if hasattr(take, "__wrapped__"):
        return

    @wraps(take)
    def taken(self: SchedulerConfig) -> Any:
        ours = self.scheduler_cls in SCHEDULERS.values()
        return resolve_obj_by_qualname(self.scheduler_cls) if ours else take(self)

    SchedulerConfig.get_scheduler_cls = taken


def describe(vllm_config: VllmConfig) -> str:
    """Return how many steps a scheduler call of the engine makes, and why not more than one."""
    if makes_several_steps(vllm_config):
        return f"a scheduler call makes up to {most_steps()} steps"
    return f"a scheduler call makes one step, because {why_made_single(vllm_config)}"


def why_made_single(vllm_config: VllmConfig) -> str:
    """Return why an engine makes single steps; the engines of data-parallel ranks do not know their number."""
    return why_single(vllm_config) or "data-parallel ranks were not tried"


def why_single(vllm_config: VllmConfig) -> str:
    """Return why an engine cannot make several steps; empty if it can."""
    from vllm import envs

    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    runner = model_runner.choice(vllm_config)
    parser = vllm_config.structured_outputs_config.reasoning_parser
    reasons = {
        "VLLM_FL_STEPS is 1": get_settings().steps == 1,
        "VLLM_FL_PREFER_ENABLED is false": not get_settings().policy.enabled,
        "vLLM 0.32 is older than 0.33": versions.host_version() == "0.32",
        f"vLLM {versions.host_version()} is not a tested version": not versions.is_tested(),
        f"the V1 model runner is taken ({runner.why})": runner.runner == "V1",
        "a draft already makes several tokens": vllm_config.speculative_config is not None,
        "scheduler_cls names another scheduler": vllm_config.scheduler_config.scheduler_cls is not None,
        "worker_cls names another worker": not _is_ours(parallel.worker_cls),
        "the model generates nothing": model.runner_type != "generate",
        "the model generates several tokens in a step (diffusion)": getattr(model, "is_diffusion", False),
        "the model has an encoder and a decoder": model.is_encoder_decoder,
        "the model has layers that keep a state": models.has_states(model),
        "the model has sparse latent attention": models.has_indexer(model),
        "positions have several axes": model.uses_mrope,
        "the model takes embeddings": model.supports_multimodal_inputs or model.enable_prompt_embeds,
        "processors of logits may need the host for each token": bool(
            model.logits_processors or entry_points(group=PROCESSORS)
        ),
        f"vLLM's parser '{parser}' of reasoning reads a stream token by token": parser in READ_SINGLY,
        "vLLM's server in Rust does not say which streams call tools": envs.VLLM_USE_RUST_FRONTEND,
        "masks of sampling are returned": getattr(model, "return_sampling_mask", False),
        "tokens are replayed": getattr(model, "enable_trace_replay", False),
        "pipeline stages hand over each step": parallel.pipeline_parallel_size > 1,
        "data-parallel ranks run each step together": parallel.data_parallel_size > 1,
        "contexts are divided among ranks": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "a step is two batches": parallel.use_ubatching,
        "experts move between steps": parallel.enable_eplb,
        "sampling is divided among ranks": getattr(parallel, "enable_batch_sharded_sampling", False),
        "a connector sees each step": vllm_config.kv_transfer_config is not None
        or getattr(vllm_config, "ec_transfer_config", None) is not None,
        "another output is made of each step": getattr(
            getattr(vllm_config, "aux_output_config", None), "enabled", False
        ),
        "tokens get a watermark": getattr(vllm_config, "watermark_config", None) is not None,
        "prompts are read by a part of the layers": cache.kv_sharing_fast_prefill,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _is_ours(worker: str | type) -> bool:
    return str(worker).startswith("vllm_fl.") or worker in detect_device().workers.values()
