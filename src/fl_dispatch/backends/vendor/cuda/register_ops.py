"""Register the CUDA kernels, grouped by library.

There is no ``gemma_rms_norm``, because no library has one.
"""

from __future__ import annotations

from functools import partial

from fl_dispatch.backends.base import Registry
from fl_dispatch.backends.rows import Row, implementations
from fl_dispatch.types import BackendImplKind, BackendPriority, Traits

from . import library
from .impl.weight_only import MACHETE, MARLIN
from .library import why_unavailable

FIRST = BackendPriority.VENDOR
_Kernel = partial(
    Row,
    kind=BackendImplKind.VENDOR,
    vendor="cuda",
    priority=FIRST,
    opaque=True,  # the compiled operators have no fake functions
    device_types=("cuda",),
)
General = partial(_Kernel, impl_id="vendor.cuda", needs=(partial(why_unavailable, library.GENERAL),))
"""vLLM's general operators."""
Experts = partial(_Kernel, impl_id="vendor.cuda", needs=(partial(why_unavailable, library.EXPERTS),))
"""vLLM's operators for mixtures of experts."""
Cutlass = partial(_Kernel, "scaled_linear", needs=(partial(why_unavailable, library.PRODUCTS),))
"""vLLM's CUTLASS products of quantized rows."""
StateSpaces = partial(
    _Kernel, impl_id="vendor.cuda.triton", needs=(partial(library.why_not_launched, library.STATE_SPACES),)
)
"""vLLM's Triton kernels for state spaces."""

ROWS = (
    General("silu_and_mul", "activation", supports="supports"),
    General("gelu_and_mul", "activation", supports="supports_gelu_and_mul"),
    General("mul_and_silu", "activation", supports="supports"),
    General("fatrelu_and_mul", "activation", supports="supports"),
    General("swigluoai_and_mul", "activation", supports="supports"),
    General("silu_and_mul_with_clamp", "activation", supports="supports"),
    General("quick_gelu", "activation", supports="supports"),
    General("relu2", "activation", supports="supports"),
    General("rms_norm", "normalization", supports="supports_rms_norm"),
    General("rotary_embedding", "rotary", supports="supports_rotary_embedding"),
    General("kv_cache_write", "attention", supports="supports_kv_cache_write"),
    General("quantize", "quantization", supports="supports_quantize"),
    Experts("topk_softmax", "experts", supports="supports_topk"),
    Experts("topk_sigmoid", "experts", supports="supports_topk"),
    Experts("moe_sum", "experts", supports="supports_moe_sum"),
    Cutlass("quantization", impl_id="vendor.cuda.cutlass", supports="supports_scaled_linear"),
    Cutlass("quantization:scaled_blocks", impl_id="vendor.cuda.cutlass.blocks", supports="supports_scaled_blocks"),
    _Kernel(
        "scaled_linear",
        "deep_gemm",
        impl_id="vendor.cuda.deep_gemm",
        needs=(library.why_no_deep_gemm,),
        supports="supports",
        traits=Traits(only_by_name=True),  # DeepGEMM compiles kernels while requests wait
    ),
    _Kernel(
        "weight_only_linear",
        "weight_only:machete",
        impl_id=MACHETE,
        priority=FIRST + 1,  # if both run, vLLM prefers Machete
        needs=(partial(why_unavailable, library.MACHETE),),
        supports="supports_machete",
    ),
    _Kernel(
        "weight_only_linear",
        "weight_only:marlin",
        impl_id=MARLIN,
        needs=(partial(why_unavailable, library.MARLIN),),
        supports="supports_marlin",
    ),
    _Kernel(
        "selective_scan",
        "state_space:scan_of_columns",
        impl_id="vendor.cuda",
        needs=(partial(why_unavailable, library.SCANS),),
        supports="supports_scan_of_columns",
    ),
    StateSpaces("selective_scan", "state_space:scan_of_heads", supports="supports_scan_of_heads", traits="TRAITS"),
    StateSpaces("selective_state_update", "state_space", supports="supports_selective_state_update", traits="TRAITS"),
    _Kernel(
        "paged_attention",
        "attention",
        impl_id="vendor.cuda.fa3",
        needs=(partial(why_unavailable, library.ATTENTION),),
        supports="supports_paged_attention",
    ),
    _Kernel(
        "paged_attention",
        "attention:sglang_paged_attention",
        impl_id="vendor.cuda.sglang_fa3",
        priority=FIRST - 1,  # if both libraries are installed, vLLM's is the measured one
        needs=(partial(why_unavailable, library.SGLANG_ATTENTION),),
        supports="supports_sglang_paged_attention",
    ),
)


def register_builtins(registry: Registry) -> None:
    """Register every row of the table."""
    registry.register_many(implementations(ROWS, __package__))
