"""Remedies for quantized checkpoints that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_EIGHT_BITS = "quantize with llm-compressor's scheme 'FP8_DYNAMIC' or 'W8A8'"
_FEW_BITS = "quantize with llm-compressor's scheme 'W4A16'"
METHODS: Mapping[str, str] = MappingProxyType(
    {
        "fbgemm_fp8": "quantize with llm-compressor's scheme 'FP8_DYNAMIC'",
        "modelopt": _EIGHT_BITS,
        "quark": _EIGHT_BITS,
        "torchao": f"{_EIGHT_BITS}, or 'W4A16', because torchao's files have parts of its own classes of tensors",
        "bitsandbytes": _FEW_BITS,
        "mxfp4": _FEW_BITS,
        "gguf": _FEW_BITS,
        "hqq": _FEW_BITS,
    }
)
"""Unserved method, by its name in checkpoints → a method that works."""
AUTO_ROUND = (
    "export with AutoRound's format 'auto_gptq' if weights are symmetric, or with 'auto_awq' if they have 4 bits "
    "and zero points"
)
AUTO_ROUND_FLOATS = "export with AutoRound's format 'llm_compressor'"
BITS = "export with 2, 3, 4 or 8 bits"
AWQ_BITS = "export with 4 bits, or as 'gptq', which has 8"
PACK = "export with format 'pack-quantized'"
DENSE = "export without sparsity"
ZERO_POINTS = "export with 'sym': true, or as 'awq', which has zero points"
OUT_OF_ORDER = (
    "puts columns out of order, which is not served though 'desc_act' is false: quantize without an order of "
    "activations, or by GPTQModel with 'act_group_aware', which keeps columns in place"
)
"""The problem with a ``g_idx``, and the remedy."""
COLUMNS = "export with 'desc_act': false, or by GPTQModel with 'act_group_aware', which keeps columns in place"
ORDER = "export with actorder 'static', which keeps columns in place"
VERSION = "export with version 'gemm'"
UNUSUAL_VERSIONS = ("gemv", "gemv_fast", "marlin")
"""Orders of ``awq`` weights in files other than those of ``gemm``."""
INDEX_KEYS = "leave 'indexer.wk' as it is, or quantize to fp8 in blocks"
HEADS = "export with strategy 'tensor', or give --kv-cache-dtype bfloat16"
SCALE_A_HEAD = "a KV cache in fp8 with a scale for each head ('kv_cache_scheme' with strategy 'attn_head')"


def of_method(name: str) -> str:
    """Return a remedy for each method that is not served."""
    return METHODS.get(name, f"{_EIGHT_BITS}, or 'W4A16'")
