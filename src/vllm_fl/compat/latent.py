"""Latent attention of vLLM 0.26: its plan of the context without pinned memory, and its prefill.

Later versions ask the platform for the prefill.
"""

from __future__ import annotations

import importlib
from functools import wraps
from typing import Any

from torch.overrides import TorchFunctionMode

from . import versions
from .replacements import MLA


class _Unpinned(TorchFunctionMode):
    """PyTorch's functions as if nobody had asked for pinned memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def plan_context_unpinned() -> None:
    """Let vLLM 0.26 plan the context of latent attention where no memory can be pinned. Idempotent."""
    module: Any = importlib.import_module(MLA)
    plan = module.build_mla_chunked_context_metadata
    if hasattr(plan, "__wrapped__"):
        return

    @wraps(plan)
    def unpinned(**arguments: Any) -> Any:
        with _Unpinned():
            return plan(**arguments)

    module.build_mla_chunked_context_metadata = unpinned


def offer_latent_prefill() -> None:
    """Put our prefill backend in the place of vLLM's FlashAttention, which 0.26 takes on every platform. Idempotent."""
    if versions.host_version() == "0.26":
        from vllm.v1.attention.backends.mla.prefill.registry import (
            MLAPrefillBackendEnum,
            register_mla_prefill_backend,
        )

        register_mla_prefill_backend(MLAPrefillBackendEnum.FLASH_ATTN, "vllm_fl.mla_prefill.NumberedChunks")
