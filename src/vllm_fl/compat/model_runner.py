"""Which of vLLM's two model runners a device without a Triton driver gets: V1, or V2 in PyTorch forms of its kernels.

vLLM asks whether Triton is installed and finds a driver; on a machine with a GPU it does, whatever device we serve.
Every process that holds a configuration asks, so every one is told. A variable in the environment would reach them as
well, but vLLM takes ``VLLM_USE_V2_MODEL_RUNNER`` for the user's word, in later configurations too: only the user sets
it, and gets V2 by it.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import wraps
from typing import TYPE_CHECKING, Any

from fl_dispatch.devices import DeviceSpec
from vllm import envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONFIG = "vllm.config.vllm"
DOOR = "vllm.triton_utils.dispatcher"
HOST_AS_DEVICE = "vllm.v1.worker.cpu.shm"


def do_without_triton(v2: bool) -> None:
    """Have vLLM's configuration choose a runner for a device that no Triton driver serves. Idempotent.

    Args:
        v2: whether the V2 runner's kernels have forms for the device; it then serves what they are enough for, where
            the user asks for it.
    """
    module: Any = importlib.import_module(CONFIG)
    module.HAS_TRITON = v2 = v2 and _is_wanted()
    config = module.VllmConfig
    if v2 and not hasattr(config._get_v2_model_runner_unsupported_features, "__wrapped__"):
        config._get_v2_model_runner_unsupported_features = _with_ours(config._get_v2_model_runner_unsupported_features)


def _with_ours(vllms: Any) -> Any:
    @wraps(vllms)
    def unsupported(self: VllmConfig) -> list[str]:
        return [*vllms(self), *without_forms(self)]

    return unsupported


def replace_kernels(device: DeviceSpec) -> None:
    """Have this worker launch PyTorch forms of the V2 runner's kernels, where the device runs it. Idempotent."""
    if "v2" not in device.model_runners or not _is_wanted():
        return
    if not device.accelerator:
        importlib.import_module(HOST_AS_DEVICE)  # vLLM's streams, events and pinned memory for main memory as device
    from ..runner_kernels import table

    table.register()


def _is_wanted() -> bool:
    """Whether the user asks for V2, and this vLLM takes other kernels for it."""
    return bool(envs.VLLM_USE_V2_MODEL_RUNNER) and importlib.util.find_spec(DOOR) is not None


def without_forms(config: VllmConfig) -> list[str]:
    """The features of a configuration whose kernels have no PyTorch form."""
    model, parallel = config.model_config, config.parallel_config
    asked = {
        "speculative decoding": config.speculative_config is not None,
        "prompt embeddings": model is not None and model.enable_prompt_embeds,
        "a budget of thinking tokens": getattr(config, "reasoning_config", None) is not None,
        "watermarks": getattr(config, "watermark_config", None) is not None,
        "sampling divided among ranks": getattr(parallel, "enable_batch_sharded_sampling", False),
    }
    return [f"{feature} without Triton" for feature, present in asked.items() if present]
