"""Registers FlagGems."""

from __future__ import annotations

from fl_dispatch.backends.base import Registry
from fl_dispatch.devices import detect_device
from fl_dispatch.types import BackendImplKind, BackendPriority

from .aten import replacement
from .flaggems import FlagGemsBackend
from .impl import activation, custom_attention, experts, normalization, rotary


def register_builtins(registry: Registry) -> None:
    """Register ``default.flagos`` for each operator, ``default.fl`` for ``attention_backend``, and its ATen kernels."""
    registry.register_replacement(replacement)
    custom_attention.register(registry)
    registry.register_many(
        FlagGemsBackend().implementations(
            BackendImplKind.DEFAULT,
            "default.flagos",
            BackendPriority.DEFAULT,
            supports={
                "silu_and_mul": activation.supports,
                "gelu_and_mul": activation.supports,
                "rms_norm": normalization.supports_rms_norm,
                "rotary_embedding": rotary.supports_rotary_embedding,
                "topk_softmax": experts.supports_topk_softmax,
                "moe_sum": experts.supports_moe_sum,
            },
            opaque=True,  # it launches through layers of Python that Dynamo does not follow
            device_types=(detect_device().torch_type,),
        )
    )
