"""The attention class for vLLM unless a vendor's is preferred, given as a path so that no host is imported."""

from __future__ import annotations

BACKEND = "vllm_fl.attention.dense.AttentionFLBackend"
MLA_BACKEND = "vllm_fl.attention.mla.MLAFLBackend"


def attention_backend(use_mla: bool = False) -> str:
    """See :data:`fl_dispatch.ops.attention.attention_backend`."""
    return MLA_BACKEND if use_mla else BACKEND
