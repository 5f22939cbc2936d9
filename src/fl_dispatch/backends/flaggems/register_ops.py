"""Register FlagGems: its operators, the attention class, and its kernels for PyTorch's own operators.

Two operators are left out: the cache write of FlagGems 5.0.2 ignores the strides of a cache with heads before slots,
and it has no latent attention with the arguments of this project.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fl_dispatch.backends.base import Registry
from fl_dispatch.backends.rows import Row, implementations
from fl_dispatch.devices import detect_device
from fl_dispatch.types import BackendImplKind, BackendPriority, Traits

from . import library
from .aten import replacement

Operator = partial(
    Row,
    impl_id="default.flagos",
    kind=BackendImplKind.DEFAULT,
    priority=BackendPriority.DEFAULT,
    needs=(library.why_unavailable,),
    opaque=True,  # FlagGems launches through layers of Python that Dynamo cannot trace
)

ROWS = (
    Operator("silu_and_mul", "activation", supports="supports"),
    Operator("gelu_and_mul", "activation", supports="supports"),
    Operator("rms_norm", "normalization", supports="supports_rms_norm"),
    Operator("rotary_embedding", "rotary", supports="supports_rotary_embedding"),
    Operator("topk_softmax", "experts", supports="supports_topk_softmax"),
    Operator("moe_sum", "experts", supports="supports_moe_sum"),
)
ATTENTION = Row(
    "attention_backend",
    "custom_attention",
    impl_id="default.fl",
    kind=BackendImplKind.DEFAULT,
    traits=Traits(batch_invariant=True),
)
"""The attention class does not need FlagGems: it dispatches operators, and each has its own requirements."""


def register_builtins(registry: Registry) -> None:
    """Register ``default.flagos`` for each operator, ``default.fl`` for ``attention_backend``, and its ATen kernels."""
    devices = (detect_device().torch_type,)
    registry.register_replacement(replacement)
    rows = (ATTENTION, *(replace(row, device_types=devices) for row in ROWS))
    registry.register_many(implementations(rows, __package__))
