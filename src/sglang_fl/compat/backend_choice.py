"""SGLang's own choice among the backends of a layer, and the ways by which it would go around ours.

SGLang's layers have several forwards: one in PyTorch, some for kernels, some for devices. It asks in this order: an
argument of the call, a backend forced for all layers, the function that we hook, its own priorities. The first two
would run another forward than the one that our reports name, so they are refused; the variable that forces one is
refused in :mod:`sglang_fl.platform.startup`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from sglang.kernels.fused_op import BaseFusedOp

INSTEAD = "choose with SGLANG_FL_PREFER or SGLANG_FL_PER_OP, which fl explain shows, or leave sglang_fl out"


def force(original: Callable[[Any], None], backend: Any) -> None:
    """Around SGLang's ``set_fused_op_backend``: ``None``, which forces nothing, alone is taken.

    Raises:
        ValueError: a backend.
    """
    if backend is not None:
        raise ValueError(f"set_fused_op_backend({str(backend)!r}) would go around sglang_fl; {INSTEAD}")
    original(backend)


def name_of(forward: Callable[..., Any]) -> str:
    """A forward by SGLang's name for it, such as ``forward_native``."""
    return str(getattr(forward, "__name__", type(forward).__name__))


def keep(layer: Any, forward: Callable[..., Any]) -> None:
    """Let a layer run this forward, however SGLang's code calls it.

    OLMo 2 calls ``forward_native`` of its norms itself.
    """
    own = vars(layer)
    own["forward_native"] = forward
    if type(layer).forward is BaseFusedOp.forward:  # else the argument is not taken
        own["forward"] = MethodType(_forward, layer)


def _forward(layer: BaseFusedOp, /, *args: Any, backend: Any = None, **kwargs: Any) -> Any:
    if backend is not None:
        name = type(layer).__name__
        raise ValueError(f"{name}(..., backend={str(backend)!r}) would go around sglang_fl; {INSTEAD}")
    return BaseFusedOp.forward(layer, *args, **kwargs)
