"""The attention class that vLLM gets unless a vendor's is preferred, named by its path: no host is imported."""

from __future__ import annotations

from fl_dispatch.backends.base import Registry
from fl_dispatch.types import BackendImplKind, OpImpl, Traits

BACKEND = "vllm_fl.attention.dense.AttentionFLBackend"
MLA_BACKEND = "vllm_fl.attention.mla.MLAFLBackend"


def attention_backend(use_mla: bool = False) -> str:
    """See :data:`fl_dispatch.ops.attention.attention_backend`."""
    return MLA_BACKEND if use_mla else BACKEND


def register(registry: Registry) -> None:
    """Register ``default.fl``, which needs no FlagGems: the class dispatches its operators like any layer.

    It is batch-invariant if they are, and they have to declare that themselves.
    """
    default, properties = BackendImplKind.DEFAULT, Traits(batch_invariant=True)
    registry.register_many(
        [OpImpl("attention_backend", "default.fl", default, attention_backend, properties=properties)]
    )
