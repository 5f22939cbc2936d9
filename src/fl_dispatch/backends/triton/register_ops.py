"""Registers the Triton kernels.

One more kernel is a function in ``impl``, and its operator's name at these places:

- always: an attribute of ``TritonBackend`` (``triton.py``), and :data:`IMPLEMENTED`;
- if Dynamo must not look into it: :data:`NOT_TRACED`;
- if its tiles are the same in every batch: :data:`INVARIANT`; if another form's are: an attribute of
  ``InvariantTritonBackend`` (``invariant.py``), and :data:`INVARIANT_FORMS`;
- if it declines some arguments before it is called: ``supports`` in :func:`register_builtins`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fl_dispatch.backends.base import Backend, Registry
from fl_dispatch.devices import detect_device
from fl_dispatch.devices.triton import interpreted, why_unavailable
from fl_dispatch.ops import OPERATORS
from fl_dispatch.types import BackendImplKind, OpImpl

IMPL_ID = "default.triton"
PRIORITY = 140
"""Below FlagGems, which has its kind's priority."""
IMPLEMENTED = (
    "linear",
    "lora_shrink",
    "lora_expand",
    "quantize",
    "rms_norm_quantize",
    "silu_and_mul_quantize",
    "scaled_linear",
    "weight_only_linear",
    "silu_and_mul",
    "gelu_and_mul",
    "rms_norm",
    "gemma_rms_norm",
    "rms_norm_gated",
    "rotary_embedding",
    "topk_softmax",
    "topk_sigmoid",
    "grouped_topk",
    "moe_align_block_size",
    "moe_sum",
    "fused_moe",
    "scaled_moe",
    "weight_only_moe",
    "kv_cache_write",
    "rotary_embedding_kv_cache_write",
    "paged_attention",
    "mla_decode",
    "mla_prefill",
    "causal_conv1d",
    "causal_conv1d_update",
    "gated_delta_rule",
    "gated_delta_rule_update",
    "selective_scan",
    "selective_state_update",
)

NOT_TRACED = (
    "linear",
    "lora_shrink",
    "lora_expand",
    "quantize",
    "rms_norm_quantize",
    "silu_and_mul_quantize",
    "scaled_linear",
    "weight_only_linear",
    "moe_align_block_size",
    "fused_moe",
    "scaled_moe",
    "weight_only_moe",
    "kv_cache_write",
    "rotary_embedding_kv_cache_write",
    "paged_attention",
    "mla_decode",
    "mla_prefill",
    "causal_conv1d",
    "causal_conv1d_update",
    "gated_delta_rule",
    "gated_delta_rule_update",
    "selective_scan",
    "selective_state_update",
)
"""Dynamo traces the other kernels, and Inductor compiles around them."""

INVARIANT = ("silu_and_mul", "gelu_and_mul", "rms_norm", "gemma_rms_norm", "rotary_embedding", "kv_cache_write")
"""The kernels whose tiles are the same in every batch; more have a form for that, ``INVARIANT_ID``."""
INVARIANT_ID = "default.triton.invariant"
INVARIANT_FORMS = ("linear", "topk_softmax", "topk_sigmoid", "grouped_topk", "fused_moe", "paged_attention")
DECLARED = {"batch_invariant": True}
ONLY = {**DECLARED, "only_batch_invariant": True}


class _Absent(Backend):
    """Stands in where Triton cannot run, so that decisions can say why."""

    name = "triton"

    def is_available(self) -> bool:
        return False

    def why_unavailable(self) -> str:
        return why_unavailable()


def register_builtins(registry: Registry) -> None:
    """Register ``default.triton`` for every operator that has a kernel. Triton is imported only where it can run."""
    if why_unavailable():
        absent = _Absent()
        impls = [
            OpImpl(
                name,
                impl_id,
                BackendImplKind.DEFAULT,
                OPERATORS[name].prototype,
                priority=PRIORITY,
                available=absent.is_available,
            )
            for impl_id, names in ((IMPL_ID, IMPLEMENTED), (INVARIANT_ID, INVARIANT_FORMS))
            for name in names
        ]
    else:
        from .impl import joined, quantize, quantized_moe, scaled, weight_only
        from .invariant import InvariantTritonBackend
        from .triton import TritonBackend

        # In host memory the launch declines, so that a call need not look where its tensors are.
        device_types = None if interpreted() else (detect_device().torch_type,)
        made = [
            *TritonBackend().implementations(
                BackendImplKind.DEFAULT,
                IMPL_ID,
                PRIORITY,
                supports={
                    "quantize": quantize.supports,
                    "rms_norm_quantize": joined.supports,
                    "silu_and_mul_quantize": joined.supports,
                    "scaled_linear": scaled.supports,
                    "weight_only_linear": weight_only.supports,
                    "scaled_moe": quantized_moe.supports_scaled,
                    "weight_only_moe": quantized_moe.supports_packed,
                },
                device_types=device_types,
            ),
            *InvariantTritonBackend().implementations(
                BackendImplKind.DEFAULT, INVARIANT_ID, PRIORITY, device_types=device_types
            ),
        ]
        impls = [replace(impl, opaque=impl.op_name in NOT_TRACED, properties=_properties(impl)) for impl in made]
    registry.register_many(impls)


def _properties(impl: OpImpl) -> dict[str, Any]:
    if impl.impl_id == INVARIANT_ID:
        return ONLY
    if impl.op_name == "linear":
        from .impl.linear import MOST_ROWS

        return {"reference_from": MOST_ROWS + 1}
    return DECLARED if impl.op_name in INVARIANT else {}
