"""Stop a host's code from pinning memory on machines that cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Unpinned(TorchFunctionMode):
    """A mode in which PyTorch's functions ignore requests for pinned memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a host's function so that it pins no memory."""

    @wraps(function)
    def without(*args: Any, **kwargs: Any) -> Any:
        with Unpinned():
            return function(*args, **kwargs)

    return without
