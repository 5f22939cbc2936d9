"""Kernels of the emulated NPU for ``torch_npu``'s operators, written from its documentation alone.

A kernel is a function of CPU tensors over the NPU's memory, with the parameters of the operator's schema. It refuses
what the documentation refuses (``Refused``), and says what the documentation leaves open and it assumes. No code is
shared with what the tests compare them with.

Documentation is, in this order: docstrings and Meta kernels of the pinned wheel (``torch_npu/_op_plugin_docs.py``,
``torch_npu/op_plugin/meta``), the pages ``docs/zh/custom_APIs/torch_npu/torch_npu-<operator>.md`` of the public
repository Ascend/op-plugin (commit 517f2e7d), and the operators' pages of CANN (aclnn). Products differ; the emulated
one is an Atlas A2 (Ascend 910B).
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..aten import Call, below_autograd, has_kernel
from ..launches import launch

HALF = (torch.float16, torch.bfloat16)
FLOAT = (*HALF, torch.float32)

WAIVABLE = ("float32", "head_size")
"""Rules that ``EMU_NPU_WAIVE`` may name, for small models whose tokens shall be compared exactly.

- float32: operators that are documented for float16 and bfloat16 take float32 too;
- head_size: attention takes any head size that is a multiple of 16, MLA's operators any latent and rotary size.
"""

_kernels: dict[str, Callable[..., Any]] = {}
_calls: Counter[str] = Counter()
_libraries: list[torch.library.Library] = []


class Refused(RuntimeError):
    """A call that the documentation does not allow, or that nobody emulates."""


def require(allowed: bool, rule: str) -> None:
    """Refuse a call that breaks a documented rule."""
    if not allowed:
        raise Refused(rule)


def require_dtype(name: str, tensor: torch.Tensor, dtypes: Iterable[torch.dtype]) -> None:
    allowed = tuple(dtypes)
    if torch.bfloat16 in allowed and waived("float32"):
        allowed += (torch.float32,)
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
    require(tensor.dtype in allowed, f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}, not one of {names}")


def require_same_dtype(**tensors: torch.Tensor) -> None:
    found = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    require(len(set(found.values())) == 1, f"dtypes must be equal, and are {found}")


def require_contiguous(**tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        require(tensor is None or tensor.is_contiguous(), f"{name} must be contiguous")


def require_default(**values: Any) -> None:
    """Refuse arguments that are documented and not emulated."""
    for name, value in values.items():
        plain = not isinstance(value, torch.Tensor)
        require(
            value is None or (plain and value in (0, [])), f"{name}={value if plain else '(tensor)'} is not emulated"
        )


def waived(rule: str) -> bool:
    return rule in os.environ.get("EMU_NPU_WAIVE", "").split(",")


def kernel(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a kernel for operators of the namespace ``npu``."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            _kernels[name] = function
        return function

    return register


def calls() -> dict[str, int]:
    """Operator → calls that its kernel completed in this process."""
    return dict(_calls)


def reset_calls() -> None:
    _calls.clear()


def install() -> list[str]:
    """Register all kernels with the dispatcher; returns the operators."""
    from . import activation, attention, cache, lists, matmul, moe, normalization, quantization, rotary, sampling  # noqa: F401

    unknown = set(filter(None, os.environ.get("EMU_NPU_WAIVE", "").split(","))) - set(WAIVABLE)
    if unknown:
        raise ValueError(f"EMU_NPU_WAIVE names {sorted(unknown)}; there are {', '.join(WAIVABLE)}")
    library = torch.library.Library("npu", "IMPL")
    _libraries.append(library)
    for name, function in _kernels.items():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.npu, packet), overload or "default")
        library.impl(name, _served(operator, packet, function), "PrivateUse1", allow_override=True)
        if has_kernel(f"npu::{name}", "AutogradPrivateUse1"):
            library.impl(name, below_autograd(operator), "AutogradPrivateUse1", allow_override=True)
    return list(_kernels)


def _served(operator: torch._ops.OpOverload, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    run = functools.partial(_run, operator, name, function)
    return lambda *args, **kwargs: launch(operator, run, args, kwargs)


def _run(operator: torch._ops.OpOverload, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    call = Call(f"npu::{name}")
    cpu_args, cpu_kwargs = call.into(args), {key: call.into(value) for key, value in kwargs.items()}
    call.check_devices()
    if name in os.environ.get("EMU_NPU_WRONG", "").split(","):
        cpu_args = _wrong(operator, cpu_args)
    try:
        result = function(*cpu_args, **cpu_kwargs)
    except Refused as refused:
        raise Refused(f"the emulated NPU refuses npu::{name}: {refused}") from None
    _calls[name] += 1
    return call.back(result)


def _wrong(operator: torch._ops.OpOverload, args: list[Any]) -> list[Any]:
    """The arguments of a wrong kernel: every second element of the first floating tensor is doubled.

    Not all of them, and not their sign, because a factor that query and key share leaves the order of scores. Integers
    are halved where there is nothing else.
    """
    tensors = [value[0] if isinstance(value, list) and value else value for value in args]
    places = [position for position, tensor in enumerate(tensors) if isinstance(tensor, torch.Tensor)]
    position = next((one for one in places if tensors[one].is_floating_point()), places[0])
    tensor, value = tensors[position], args[position]
    factor = 1 + torch.arange(tensor.shape[-1]) % 2
    if operator._schema.name.removeprefix("npu::") in OVERWRITING:
        tensor.mul_(factor.to(tensor.dtype))
        return args
    wrong = tensor * factor.to(tensor.dtype) if tensor.is_floating_point() else (tensor // factor).to(tensor.dtype)
    return [*args[:position], [wrong, *value[1:]] if isinstance(value, list) else wrong, *args[position + 1 :]]


OVERWRITING = ("npu_apply_rotary_pos_emb",)
"""Operators that write their first argument, though the schema does not say so."""
