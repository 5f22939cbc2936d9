"""Layers of vLLM: whether a linear layer uses a plain product, and replacements of classes not ``CustomOp``."""

from __future__ import annotations

import importlib
from typing import Any


def multiplies_plainly(method: Any) -> bool:
    """Whether a layer's method is a product with unquantized weights, by PyTorch's own ``linear``.

    If vLLM lacks the names, the answer is no, and the layers stay vLLM's.
    """
    from vllm.model_executor.layers import linear, utils
    from vllm.model_executor.layers import vocab_parallel_embedding as embedding
    from vllm.platforms import current_platform

    from vllm import envs

    if envs.VLLM_BATCH_INVARIANT and (current_platform.is_cuda_alike() or current_platform.is_xpu()):
        return False  # vLLM's own product takes precedence there
    if type(method) is linear.UnquantizedLinearMethod:
        chosen = getattr(method, "_gemm_impl", None)
    elif type(method) is embedding.UnquantizedEmbeddingMethod:  # it chooses in every call
        chosen = getattr(utils, "dispatch_unquantized_gemm", lambda: None)()
    else:
        return False
    return chosen is not None and chosen is getattr(utils, "default_unquantized_gemm", None)


def replace_class(base: type, replacement: type) -> None:
    """Replace ``base`` by another class in the package above its module; ``base`` itself undoes that."""
    package = importlib.import_module(base.__module__.rpartition(".")[0])
    setattr(package, base.__name__, replacement)
