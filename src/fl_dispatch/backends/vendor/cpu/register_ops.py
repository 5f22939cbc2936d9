"""Register the CPU kernels: vLLM's compiled ones, PyTorch's oneDNN products, and C++ of this project.

There is no ``gemma_rms_norm``, because vLLM's kernels round the scale to the input dtype.
"""

from __future__ import annotations

from functools import partial

from fl_dispatch.backends.base import Registry
from fl_dispatch.backends.rows import Row, implementations
from fl_dispatch.devices import detect_device
from fl_dispatch.types import BackendImplKind, BackendPriority, Traits

from . import library
from .impl.linear import why_no_onednn


def why_elsewhere() -> str:
    """Return why no model runs on the CPU here, or an empty string; a product cannot infer this from its tensors."""
    device = detect_device()
    return "" if device.torch_type == "cpu" else f"models run on {device.name} here"


FIRST = BackendPriority.VENDOR
_Kernel = partial(Row, kind=BackendImplKind.VENDOR, vendor="cpu", opaque=True)  # no kernel has a fake function
Wheel = partial(_Kernel, impl_id="vendor.cpu", priority=FIRST, needs=(library.why_unavailable,))
"""Kernels of vLLM's CPU build."""
Build = partial(Wheel, needs=("why_unavailable",))
"""Kernels that some builds for other processors lack."""
OneDnn = partial(
    _Kernel,
    impl_id="vendor.cpu.onednn",
    priority=FIRST - 5,  # the same kernels with 10 us more overhead in each call
    needs=(why_elsewhere, why_no_onednn),
)
"""PyTorch's products; Inductor does not accept their repacked weights."""
Own = partial(_Kernel, impl_id="vendor.cpu.cpp", priority=FIRST - 5, needs=(why_elsewhere, "why_unavailable"))
"""C++ of this project, which needs a compiler but no build of vLLM."""
OwnProduct = partial(Own, priority=FIRST - 6)  # after PyTorch's product, if that supports the processor's instructions

ROWS = (
    Wheel("silu_and_mul", "activation", supports="supports_silu_and_mul", traits=Traits(inductor=False)),
    Wheel("gelu_and_mul", "activation", supports="supports_gelu_and_mul", traits=Traits(inductor=False)),
    Wheel("rms_norm", "normalization", supports="supports_rms_norm", traits=Traits(inductor=False)),
    Wheel("rotary_embedding", "rotary", supports="supports_rotary_embedding", traits=Traits(inductor=False)),
    Wheel("quantize", "quantization", supports="supports_quantize"),
    # Before the wheel's product, because memory then has each weight once; PyTorch's dispatcher calls both.
    Own("linear", "plain", priority=FIRST - 1, needs=(why_elsewhere, why_no_onednn, "why_unavailable"), opaque=False),
    Wheel("linear", "linear", priority=FIRST - 2, needs=(why_elsewhere, library.why_unavailable), opaque=False),
    Build("scaled_linear", "integers", supports="supports_scaled_linear"),
    Build("fused_moe", "experts", supports="supports_fused_moe"),
    OneDnn("linear", "linear:linear_reordered", opaque=False),
    OneDnn("scaled_linear", "quantization", supports="supports_scaled_linear"),
    OneDnn("weight_only_linear", "quantization", supports="supports_weight_only_linear"),
    Build("causal_conv1d", "recurrent", supports="supports_causal_conv1d_update"),
    Build("causal_conv1d_update", "recurrent", supports="supports_causal_conv1d_update"),
    Build("gated_delta_rule", "recurrent", supports="supports_gated_delta_rule"),
    Build("gated_delta_rule_update", "recurrent", supports="supports_gated_delta_rule_update"),
    Build("selective_scan", "state_space", supports="supports_selective_scan"),
    Build("selective_state_update", "state_space", supports="supports_selective_state_update"),
    Build("kv_cache_write", "attention", supports="supports_kv_cache_write", traits="TRAITS", requires="REQUIRES"),
    Build("paged_attention", "attention", supports="supports_paged_attention", traits="TRAITS", requires="REQUIRES"),
    Own("kv_cache_write", "own_attention", supports="supports_kv_cache_write", traits="TRAITS"),
    Own("paged_attention", "own_attention", supports="supports_paged_attention", traits="TRAITS"),
    Own("fused_moe", "own_experts", supports="supports_fused_moe"),
    OwnProduct("scaled_linear", "own_integers", supports="supports_scaled_linear"),
    # The same trait as the reference, which takes the calls that this one declines.
    OwnProduct("scaled_moe", "own_integers", supports="supports_scaled_moe", traits=Traits(graphs=False)),
    OwnProduct("weight_only_linear", "own_quantization", supports="supports_weight_only_linear"),
)


def register_builtins(registry: Registry) -> None:
    """Register every row of the table."""
    registry.register_many(implementations(ROWS, __package__))
