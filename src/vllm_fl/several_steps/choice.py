"""Decide whether an engine makes several steps for one scheduling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings

from ..compat import model_runner, models, versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

FIRST_HOST = "0.33"
SCHEDULERS = {
    False: "vllm_fl.several_steps.scheduler.StepsScheduler",
    True: "vllm_fl.several_steps.scheduler.AsyncStepsScheduler",
}
"""Whether scheduling is asynchronous → the scheduler."""


def adapt(vllm_config: VllmConfig) -> None:
    """Make vLLM use our scheduler if several steps are requested and possible; otherwise log why not."""
    asked, scheduling = get_settings().steps, vllm_config.scheduler_config
    if asked == 1 or is_on(vllm_config) or vllm_config.model_config is None:
        return
    if why := why_single(vllm_config):
        logger.warning("VLLM_FL_STEPS=%d: each scheduling makes one step, because %s", asked, why)
        return
    scheduling.scheduler_cls = SCHEDULERS[bool(scheduling.async_scheduling)]
    logger.info("a scheduling makes up to %d steps while all requests decode (VLLM_FL_STEPS)", asked)


def is_on(vllm_config: VllmConfig) -> bool:
    """Whether the engine makes several steps."""
    return vllm_config.scheduler_config.scheduler_cls in SCHEDULERS.values()


def why_single(vllm_config: VllmConfig) -> str:
    """Return why an engine cannot make several steps; empty if it can."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    runner = model_runner.choice(vllm_config)
    reasons = {
        f"vLLM {versions.host_version()} is older than {FIRST_HOST}": not _is_new_enough(),
        f"the V1 model runner is taken ({runner.why})": runner.runner == "V1",
        "a draft already makes several tokens": vllm_config.speculative_config is not None,
        "scheduler_cls names another scheduler": vllm_config.scheduler_config.scheduler_cls is not None,
        "the model generates nothing": model.runner_type != "generate",
        "the model generates several tokens in a step (diffusion)": getattr(model, "is_diffusion", False),
        "the model has an encoder and a decoder": model.is_encoder_decoder,
        "the model has layers that keep a state": models.has_states(model),
        "the model has sparse latent attention": models.has_indexer(model),
        "the model takes embeddings": model.supports_multimodal_inputs or model.enable_prompt_embeds,
        "processors of logits may need the host for each token": bool(model.logits_processors),
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


def _is_new_enough() -> bool:
    return tuple(map(int, versions.host_version().split("."))) >= tuple(map(int, FIRST_HOST.split(".")))
