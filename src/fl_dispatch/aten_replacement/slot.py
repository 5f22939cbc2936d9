"""Slots in PyTorch's dispatcher: one for each operator and device, for the life of the process.

A registration cannot be removed while the process runs: a thread that calls the operator meanwhile would read freed
memory and crash. So a slot stays. Without a guard it passes calls on to PyTorch's kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Slot:
    """One operator on one kind of device.

    Args:
        key: the operator with its overload, ``mm.out``; ``mm`` is ``mm.default``.
        dispatch_key: the device's dispatch key, such as ``CUDA``.

    Attributes:
        schema: the operator's schema.
        tensors: for each of its arguments, whether it is a tensor.
        guard: the function that runs; ``None`` for PyTorch's own kernel.

    Raises:
        RuntimeError: this PyTorch has no such operator, or no kernel for it.
    """

    def __init__(self, key: str, dispatch_key: str) -> None:
        name, _, overload = key.partition(".")
        self.key = key
        self.schema = getattr(getattr(torch.ops.aten, name), overload or "default")._schema
        self.guard: Callable[..., Any] | None = None
        self._kernel = torch.library.get_kernel(f"aten::{key}", dispatch_key)
        self._keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, dispatch_key))
        self.tensors = tuple(str(a.type) in ("Tensor", "Optional[Tensor]") for a in self.schema.arguments)
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns once, for one operator, that a kernel is overridden
            self._library.impl(key, self, dispatch_key)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.guard or self.run_native
        return run(*args, **kwargs)

    def run_native(self, *args: Any, **kwargs: Any) -> Any:
        """Run PyTorch's own kernel."""
        args, kwargs = self._wrapped(args, kwargs)
        return self._kernel.call_boxed(self._keys, *args, **kwargs)

    def _wrapped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert arguments for a kernel: PyTorch passes a Python function numbers in place of wrapped tensors."""
        pairs = enumerate(zip(self.tensors, args, strict=False))
        numbers = [i for i, (tensor, value) in pairs if tensor and isinstance(value, int | float | complex)]
        if numbers:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            args = tuple(_tensor(v, tensors) if place in numbers else v for place, v in enumerate(args))
        return args, kwargs


_slots: dict[tuple[str, str], Slot] = {}


def slot_of(key: str, dispatch_key: str) -> Slot:
    """Return the slot of an operator on a kind of device, registering it on first use.

    Raises:
        RuntimeError: this PyTorch has no such operator, or no kernel for it.
    """
    if (key, dispatch_key) not in _slots:
        _slots[key, dispatch_key] = Slot(key, dispatch_key)
    return _slots[key, dispatch_key]


def draws(key: str) -> bool:
    """Whether an operator draws random numbers; false if this PyTorch has no such operator."""
    name, _, overload = key.partition(".")
    operator = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
    return operator is not None and torch.Tag.nondeterministic_seeded in operator.tags


def _tensor(number: bool | int | float | complex, tensors: list[Tensor]) -> Tensor:
    """Return a number as a tensor that affects a result's dtype no more than the number does."""
    if isinstance(number, bool | complex):
        return torch.tensor(number)
    alike = [t for t in tensors if t.is_floating_point() == isinstance(number, float) and t.dtype is not torch.bool]
    if alike and all(t.dim() == 0 for t in tensors):
        return torch.tensor(number, dtype=alike[0].dtype)
    if isinstance(number, int):
        return torch.tensor(number, dtype=torch.int64)
    return torch.tensor(number, dtype=torch.float64 if alike else torch.get_default_dtype())
