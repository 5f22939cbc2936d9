"""vLLM 0.26 chooses the product of a linear layer in every call, not when its method is made."""

from __future__ import annotations

from typing import Any


def _chosen(method: Any) -> Any:
    from vllm.model_executor.layers import utils

    return utils.dispatch_unquantized_gemm()


def fix_product_when_made() -> None:
    """Let a method answer what it would choose."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    UnquantizedLinearMethod._gemm_impl = property(_chosen)
