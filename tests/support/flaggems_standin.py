"""A stand-in for FlagGems on the CPU: its table, ``enable``, ``only_enable`` and several kernels.

Some kernels are right; one returns a wrong result, one overwrites a wrong one, and one raises. All are really
registered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

log: list[str] = []


def mm(a: Tensor, b: Tensor) -> Tensor:
    log.append("mm")
    return torch.mm(a.double(), b.double()).to(a.dtype)


def mm_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    log.append("mm_out")
    return out.copy_((a.double()[:, :, None] * b.double()).sum(1))


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    log.append("addmm")
    return torch.mm(a, b)  # forgets the bias


def add(a: Tensor, b: Tensor | float, *, alpha: float = 1) -> Tensor:
    log.append("add")
    return a - (-b)


def mul_(a: Tensor, b: Tensor | float) -> Tensor:
    log.append("mul_")
    a.zero_()
    return a


def softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    log.append("softmax")
    raise ValueError("no kernel for this\nshape")


def true_divide(a: Tensor, b: Tensor | float) -> Tensor:
    log.append("true_divide")
    return a * (1 / b)


def exponential_(x: Tensor, lambd: float = 1.0, *, generator: Any = None) -> Tensor:
    log.append("exponential_")
    return x


def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    log.append("cumsum")
    return x.flip(dim).flip(dim).cumsum(dim)


def unheard_of(x: Tensor) -> Tensor:
    log.append("unheard_of")
    return x


CONFIG = (
    ("mm", mm),
    ("mm.out", mm_out),
    ("addmm", addmm),
    ("add.Tensor", add),
    ("mul_.Tensor", mul_),
    ("_softmax", softmax),
    ("div.Tensor", true_divide),
    ("true_divide.Tensor", true_divide),
    ("exponential_", exponential_),
    ("cumsum", cumsum),
    ("unheard_of", unheard_of),
)


class Register:
    """The counterpart of FlagGems' class: calls ``register_impl`` for each entry that was not excluded."""

    def __init__(self, config: Any, user_include_ops: Any = (), user_exclude_ops: Any = (), **_: Any) -> None:
        self.all_ops: list[str] = []
        self.all_keys: list[str] = []
        for key, fn in config:
            if fn.__name__ in user_include_ops or (not user_include_ops and fn.__name__ not in user_exclude_ops):
                self.register_impl(key, fn)  # type: ignore[attr-defined]


def modules() -> dict[str, ModuleType]:
    """Return the modules that are in ``sys.modules`` after FlagGems is imported."""
    gems, runtime, register = (ModuleType(f"flag_gems{part}") for part in ("", ".runtime", ".runtime.register"))
    by_function: dict[str, list[tuple[str, Callable[..., Any]]]] = {}
    for key, fn in CONFIG:
        by_function.setdefault(fn.__name__, []).append((key, fn))

    def enable(unused: list[str], registrar: Any) -> None:
        registrar(CONFIG, user_exclude_ops=unused)

    def only_enable(include: list[str], registrar: Any) -> None:
        registrar(CONFIG, user_include_ops=include)

    vars(gems).update(device="chip", FULL_CONFIG_BY_FUNC=by_function, enable=enable, only_enable=only_enable, mm=mm)
    vars(register).update(Register=Register)
    return {module.__name__: module for module in (gems, runtime, register)}


def is_imported() -> bool:
    """Whether this process has imported FlagGems or this stand-in."""
    return "flag_gems" in sys.modules
