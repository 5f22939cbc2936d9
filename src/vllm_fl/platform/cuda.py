"""vLLM's own CUDA platform with our operators: ``is_cuda()`` stays true. Importing it needs vLLM's compiled operators.

Everything except our operators stays vLLM's: custom all-reduce, quantized layers, sleep mode, its passes over compiled
graphs. Layers call our ``forward_cuda``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.platforms.cuda import CudaPlatform

from .out_of_tree import Dispatching

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CudaPlatformFL(Dispatching, CudaPlatform):
    """vLLM's CUDA platform."""

    native: ClassVar[bool] = True

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        super().check_and_update_config(vllm_config)
        CudaPlatform.check_and_update_config(vllm_config)

    @classmethod
    def get_mla_prefill_backend_cls(cls, mla_selector_config: Any) -> Any:
        return CudaPlatform.get_mla_prefill_backend_cls(mla_selector_config)
