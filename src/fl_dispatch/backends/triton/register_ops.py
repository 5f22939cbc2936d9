"""Registers the Triton kernels: one more is a function in ``impl``, named like its operator, and a row of the table."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace

from fl_dispatch.backends.base import Backend, Registry
from fl_dispatch.devices import detect_device
from fl_dispatch.devices.triton import interpreted, why_unavailable
from fl_dispatch.ops import OPERATORS
from fl_dispatch.types import BackendImplKind, OpImpl, Traits

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
    Kernel("linear", "products.linear", most_rows="MOST_ROWS"),
    Kernel("linear", "invariant", invariant=True),
    Kernel("lora_shrink", "products.lora"),
    Kernel("lora_expand", "products.lora"),
    Kernel("quantize", "rows.quantization", supports="supports"),
    Kernel("rms_norm_quantize", "fusion.quantized_rows", supports="supports"),
    Kernel("silu_and_mul_quantize", "fusion.quantized_rows", supports="supports"),
    Kernel("scaled_linear", "products.scaled_linear", supports="supports"),
    Kernel("weight_only_linear", "products.weight_only_linear", supports="supports"),
    Kernel("fused_linear", "fusion.fused_linear", supports="supports"),
    Kernel("silu_and_mul", "rows.activation", traced=True, invariant=True),
    Kernel("gelu_and_mul", "rows.activation", traced=True, invariant=True),
    Kernel("rms_norm", "rows.normalization", traced=True, invariant=True),
    Kernel("gemma_rms_norm", "rows.normalization", traced=True, invariant=True),
    Kernel("rms_norm_gated", "rows.gated_norm", traced=True),
    Kernel("rotary_embedding", "rows.rotary", traced=True, invariant=True),
    Kernel("topk_softmax", "experts.routing", traced=True),
    Kernel("topk_softmax", "invariant", traced=True, invariant=True),
    Kernel("topk_sigmoid", "experts.routing", traced=True),
    Kernel("topk_sigmoid", "invariant", traced=True, invariant=True),
    Kernel("grouped_topk", "experts.routing", traced=True),
    Kernel("grouped_topk", "invariant", traced=True, invariant=True),
    Kernel("moe_align_block_size", "experts.alignment"),
    Kernel("moe_sum", "experts.fused_moe", traced=True),
    Kernel("fused_moe", "experts.fused_moe"),
    Kernel("fused_moe", "invariant", invariant=True),
    Kernel("scaled_moe", "experts.quantized_moe", supports="supports_scaled"),
    Kernel("weight_only_moe", "experts.quantized_moe", supports="supports_packed"),
    Kernel("kv_cache_write", "attention.cache", invariant=True),
    Kernel("rotary_embedding_kv_cache_write", "fusion.rotary_cache", invariant=True),
    Kernel("paged_attention", "attention.paged"),
    Kernel("paged_attention", "invariant", invariant=True),
    Kernel("mla_decode", "attention.latent_decode"),
    Kernel("mla_prefill", "attention.latent_prefill"),
    Kernel("causal_conv1d", "states.convolution"),
    Kernel("causal_conv1d_update", "states.convolution"),
    Kernel("gated_delta_rule", "states.delta_rule"),
    Kernel("gated_delta_rule_update", "states.delta_rule"),
    Kernel("selective_scan", "states.state_space"),
    Kernel("selective_state_update", "states.state_space"),
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
    """A kernel as the registry has it: the operator's reference where Triton cannot run, so that decisions say why."""
    absent = OpImpl(
        kernel.op_name,
        kernel.impl_id,
        BackendImplKind.DEFAULT,
        OPERATORS[kernel.op_name].reference,
        priority=PRIORITY,
        available=backend.is_available,
    )
    if why_unavailable():
        return absent
    module = importlib.import_module(f".impl.{kernel.module}", __package__)
    traits = Traits(
        batch_invariant=kernel.invariant,
        only_batch_invariant=kernel.impl_id == INVARIANT_ID,
        reference_from=getattr(module, kernel.most_rows) + 1 if kernel.most_rows else None,
    )
    return replace(
        absent,
        fn=getattr(module, kernel.op_name),
        supports=getattr(module, kernel.supports) if kernel.supports else None,
        properties=traits,
        # In host memory the launch declines, so that a call need not look where its tensors are.
        device_types=None if interpreted() else (detect_device().torch_type,),
        opaque=not kernel.traced,
    )
