"""SGLang's own choice among the backends of a layer, and the ways in which it could bypass ours.

SGLang's layers have several forwards: one in PyTorch, some for kernels, some for devices. The order of precedence is:
an argument of the call, a backend forced for all layers, the function that we hook, its own priorities. The first two
would run another forward than the one in our reports, so they are refused; :mod:`sglang_fl.environment` refuses the
variable that forces a backend.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from sglang.kernels.fused_op import BaseFusedOp

INSTEAD = "choose with SGLANG_FL_PREFER or SGLANG_FL_PER_OP, which fl explain shows, or leave sglang_fl out"


def force(original: Callable[[Any], None], backend: Any) -> None:
    """Wrap SGLang's ``set_fused_op_backend`` to accept only ``None``, which forces no backend.

    Raises:
        ValueError: a backend is named.
    """
    if backend is not None:
        raise ValueError(f"set_fused_op_backend({str(backend)!r}) would go around sglang_fl; {INSTEAD}")
    original(backend)


def name_of(forward: Callable[..., Any]) -> str:
    """Return SGLang's name of a forward, such as ``forward_native``."""
    return str(getattr(forward, "__name__", type(forward).__name__))


def keep(layer: Any, forward: Callable[..., Any]) -> None:
    """Make a layer run this forward, however SGLang's code calls it.

    OLMo 2 calls ``forward_native`` of its norms itself.
    """
    own = vars(layer)
    own["forward_native"] = forward
    if type(layer).forward is BaseFusedOp.forward:  # otherwise the argument is not accepted
        own["forward"] = MethodType(_forward, layer)


def _forward(layer: BaseFusedOp, /, *args: Any, backend: Any = None, **kwargs: Any) -> Any:
    if backend is not None:
        name = type(layer).__name__
        raise ValueError(f"{name}(..., backend={str(backend)!r}) would go around sglang_fl; {INSTEAD}")
    return BaseFusedOp.forward(layer, *args, **kwargs)
