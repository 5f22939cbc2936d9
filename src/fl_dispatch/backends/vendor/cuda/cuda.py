"""The CUDA backend, in parts by the library, or by the kernels of one, that they come from.

It has no ``gemma_rms_norm``, because the library has none.
"""

from __future__ import annotations

from fl_dispatch.backends.base import Backend

from . import library
from .impl import (
    activation,
    attention,
    deep_gemm,
    experts,
    normalization,
    quantization,
    rotary,
    state_space,
    weight_only,
)


class _Compiled(Backend):
    """Name, vendor and availability, which the parts share."""

    library: library.Library

    @property
    def name(self) -> str:
        """``cuda``."""
        return "cuda"

    @property
    def vendor(self) -> str:
        """``cuda``."""
        return "cuda"

    def is_available(self) -> bool:
        """Whether the kernels are loaded; the first call in a process loads them."""
        return not self.why_unavailable()

    def why_unavailable(self) -> str:
        """Why they are not."""
        return library.why_unavailable(self.library)


class CudaBackend(_Compiled):
    """vLLM's general operators."""

    library = library.GENERAL

    silu_and_mul = staticmethod(activation.silu_and_mul)
    gelu_and_mul = staticmethod(activation.gelu_and_mul)
    mul_and_silu = staticmethod(activation.mul_and_silu)
    fatrelu_and_mul = staticmethod(activation.fatrelu_and_mul)
    swigluoai_and_mul = staticmethod(activation.swigluoai_and_mul)
    silu_and_mul_with_clamp = staticmethod(activation.silu_and_mul_with_clamp)
    quick_gelu = staticmethod(activation.quick_gelu)
    relu2 = staticmethod(activation.relu2)
    rms_norm = staticmethod(normalization.rms_norm)
    rotary_embedding = staticmethod(rotary.rotary_embedding)
    kv_cache_write = staticmethod(attention.kv_cache_write)
    quantize = staticmethod(quantization.quantize)


class CutlassBackend(_Compiled):
    """Products of quantized rows by CUTLASS."""

    library = library.PRODUCTS

    scaled_linear = staticmethod(quantization.scaled_linear)


class CutlassBlocksBackend(_Compiled):
    """The same with a scale for each block of a weight."""

    library = library.PRODUCTS

    scaled_linear = staticmethod(quantization.scaled_blocks)


class DeepGemmBackend(_Compiled):
    """The same by DeepGEMM, which compiles kernels while a process runs."""

    scaled_linear = staticmethod(deep_gemm.scaled_linear)

    def why_unavailable(self) -> str:
        return library.why_no_deep_gemm()


class MarlinBackend(_Compiled):
    """Products with weights of few bits, repacked for Marlin."""

    library = library.MARLIN

    weight_only_linear = staticmethod(weight_only.marlin)


class MacheteBackend(_Compiled):
    """The same for compute capability 9, by CUTLASS's products of mixed types."""

    library = library.MACHETE

    weight_only_linear = staticmethod(weight_only.machete)


class ScanBackend(_Compiled):
    """vLLM's scan of channels with a decay for each column of their state."""

    library = library.SCANS

    selective_scan = staticmethod(state_space.scan_of_columns)


class StateSpaceBackend(_Compiled):
    """vLLM's Triton kernels of state spaces."""

    selective_scan = staticmethod(state_space.scan_of_heads)
    selective_state_update = staticmethod(state_space.selective_state_update)

    def why_unavailable(self) -> str:
        return library.why_not_launched(library.STATE_SPACES)


class CudaExpertsBackend(_Compiled):
    """vLLM's operators for mixtures of experts."""

    library = library.EXPERTS

    topk_softmax = staticmethod(experts.topk_softmax)
    topk_sigmoid = staticmethod(experts.topk_sigmoid)
    moe_sum = staticmethod(experts.moe_sum)


class FlashAttentionBackend(_Compiled):
    """FlashAttention 3, for GPUs of compute capability 9."""

    library = library.ATTENTION

    paged_attention = staticmethod(attention.paged_attention)


class SglangAttentionBackend(_Compiled):
    """The same from SGLang's kernels, for a machine without vLLM's."""

    library = library.SGLANG_ATTENTION

    paged_attention = staticmethod(attention.sglang_paged_attention)
