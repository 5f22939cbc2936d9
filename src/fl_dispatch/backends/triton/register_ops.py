"""Registers the Triton kernels: one more is a function in ``impl``, named like its operator, and a row of the table."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

from fl_dispatch.backends.base import Backend, Registry
from fl_dispatch.devices import detect_device
from fl_dispatch.devices.triton import interpreted, why_unavailable
from fl_dispatch.ops import OPERATORS
from fl_dispatch.types import BATCH_INVARIANT, ONLY_BATCH_INVARIANT, REFERENCE_FROM, BackendImplKind, OpImpl

IMPL_ID = "default.triton"
INVARIANT_ID = "default.triton.invariant"
PRIORITY = 140
"""Below FlagGems, which has its kind's priority."""


@dataclass(frozen=True)
class Kernel:
    """A function of ``impl``, whose modules are imported only where Triton can run.

    Args:
        op_name: the operator, and the function.
        module: it is in.
        traced: Dynamo traces it, and Inductor compiles around it.
        invariant: its tiles are the same in every batch.
        supports: the module's predicate for arguments that it declines before it is called.
        most_rows: the module's constant; for more tokens it calls the reference itself.
    """

    op_name: str
    module: str
    traced: bool = False
    invariant: bool = False
    supports: str = ""
    most_rows: str = ""

    @property
    def impl_id(self) -> str:
        """The id; the forms in ``invariant``, of kernels whose tiles depend on the batch, have one of their own."""
        return INVARIANT_ID if self.module == "invariant" else IMPL_ID


KERNELS = (
    Kernel("linear", "linear", most_rows="MOST_ROWS"),
    Kernel("linear", "invariant", invariant=True),
    Kernel("lora_shrink", "lora"),
    Kernel("lora_expand", "lora"),
    Kernel("quantize", "quantize", supports="supports"),
    Kernel("rms_norm_quantize", "joined", supports="supports"),
    Kernel("silu_and_mul_quantize", "joined", supports="supports"),
    Kernel("scaled_linear", "scaled", supports="supports"),
    Kernel("weight_only_linear", "weight_only", supports="supports"),
    Kernel("fused_linear", "fused", supports="supports"),
    Kernel("silu_and_mul", "activation", traced=True, invariant=True),
    Kernel("gelu_and_mul", "activation", traced=True, invariant=True),
    Kernel("rms_norm", "normalization", traced=True, invariant=True),
    Kernel("gemma_rms_norm", "normalization", traced=True, invariant=True),
    Kernel("rms_norm_gated", "gated_norm", traced=True),
    Kernel("rotary_embedding", "rotary", traced=True, invariant=True),
    Kernel("topk_softmax", "routing", traced=True),
    Kernel("topk_softmax", "invariant", traced=True, invariant=True),
    Kernel("topk_sigmoid", "routing", traced=True),
    Kernel("topk_sigmoid", "invariant", traced=True, invariant=True),
    Kernel("grouped_topk", "routing", traced=True),
    Kernel("grouped_topk", "invariant", traced=True, invariant=True),
    Kernel("moe_align_block_size", "alignment"),
    Kernel("moe_sum", "moe", traced=True),
    Kernel("fused_moe", "moe"),
    Kernel("fused_moe", "invariant", invariant=True),
    Kernel("scaled_moe", "quantized_moe", supports="supports_scaled"),
    Kernel("weight_only_moe", "quantized_moe", supports="supports_packed"),
    Kernel("kv_cache_write", "cache", invariant=True),
    Kernel("rotary_embedding_kv_cache_write", "rotary_cache", invariant=True),
    Kernel("paged_attention", "attention"),
    Kernel("paged_attention", "invariant", invariant=True),
    Kernel("mla_decode", "mla"),
    Kernel("mla_prefill", "mla_prefill"),
    Kernel("causal_conv1d", "convolution"),
    Kernel("causal_conv1d_update", "convolution"),
    Kernel("gated_delta_rule", "delta_rule"),
    Kernel("gated_delta_rule_update", "delta_rule"),
    Kernel("selective_scan", "state_space"),
    Kernel("selective_state_update", "state_space"),
)


class TritonBackend(Backend):
    """Plain Triton, for every chip that it serves."""

    name = "triton"

    def is_available(self) -> bool:
        """Whether Triton can run here."""
        return not why_unavailable()

    def why_unavailable(self) -> str:
        """Why not."""
        return why_unavailable()


def register_builtins(registry: Registry) -> None:
    """Register every row of the table."""
    backend = TritonBackend()
    registry.register_many([_implementation(kernel, backend) for kernel in KERNELS])


def _implementation(kernel: Kernel, backend: Backend) -> OpImpl:
    """A kernel as the registry has it: the operator's prototype where Triton cannot run, so that decisions say why."""
    absent = OpImpl(
        kernel.op_name,
        kernel.impl_id,
        BackendImplKind.DEFAULT,
        OPERATORS[kernel.op_name].prototype,
        priority=PRIORITY,
        available=backend.is_available,
    )
    if why_unavailable():
        return absent
    module = importlib.import_module(f".impl.{kernel.module}", __package__)
    properties: dict[str, Any] = {BATCH_INVARIANT: True} if kernel.invariant else {}
    if kernel.impl_id == INVARIANT_ID:
        properties[ONLY_BATCH_INVARIANT] = True
    if kernel.most_rows:
        properties[REFERENCE_FROM] = getattr(module, kernel.most_rows) + 1
    return replace(
        absent,
        fn=getattr(module, kernel.op_name),
        supports=getattr(module, kernel.supports) if kernel.supports else None,
        properties=properties,
        # In host memory the launch declines, so that a call need not look where its tensors are.
        device_types=None if interpreted() else (detect_device().torch_type,),
        opaque=not kernel.traced,
    )
