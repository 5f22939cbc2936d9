"""vLLM's allocator for sleep mode, on a GPU that is not vLLM's own platform.

vLLM checks the platform's name before it uses the allocator, which does not depend on the platform: it maps and unmaps
memory through CUDA's driver, so tensors and captured graphs keep their addresses.
"""

from __future__ import annotations

import importlib
from functools import cache, wraps
from typing import Any

from fl_dispatch.logger_manager import get_logger

logger = get_logger(__name__)

ALLOCATOR = "vllm.device_allocator.cumem"
GETTER = "get_mem_allocator_instance"
USERS = ("vllm.device_allocator", "vllm.v1.worker.gpu_worker", "vllm.v1.worker.lora_model_runner_mixin")
"""The modules with the function that returns vLLM's allocator."""
ADAPTERS = "vllm.v1.worker.lora_model_runner_mixin"
KEPT = "runtime"
"""The tag of memory that every level of sleep backs up."""


@cache
def loads() -> bool:
    """Whether vLLM's allocator loads here: its compiled library, and CUDA's. Creates no context."""
    try:
        found: Any = importlib.import_module(ALLOCATOR)
    except (ImportError, AssertionError) as error:  # an assertion in vLLM: CUDA's library is not in this process
        logger.info("no sleep mode: vLLM's allocator does not load: %s", error)
        return False
    if not found.cumem_available:
        logger.info("no sleep mode: this vLLM comes without its allocator")
    return bool(found.cumem_available)


def allocator() -> Any:
    """Return the process's allocator."""
    found: Any = importlib.import_module(ALLOCATOR)
    return found.CuMemAllocator.get_instance()


def release() -> None:
    """Release the pools, as vLLM does on its own platforms when a worker ends."""
    allocator().release_pools()


def lend_allocator() -> None:
    """Make vLLM use its allocator whatever the platform's name. Idempotent."""
    for name in USERS:
        module = importlib.import_module(name)
        if hasattr(module, GETTER):  # the mixin's, since vLLM 0.33
            setattr(module, GETTER, allocator)


def keep_adapters() -> None:
    """Keep vLLM's memory for adapters in the part that every level of sleep backs up. Idempotent.

    By default that memory is among the weights, which level 2 discards without reloading a batch's mapping. vLLM 0.33
    does this on its own platforms.
    """
    mixin: Any = importlib.import_module(ADAPTERS).LoRAModelRunnerMixin
    made = mixin.load_lora_model
    if hasattr(made, "__wrapped__"):
        return

    @wraps(made)
    def kept(*args: Any, **kwargs: Any) -> Any:
        with allocator().use_memory_pool(tag=KEPT):
            return made(*args, **kwargs)

    mixin.load_lora_model = kept
