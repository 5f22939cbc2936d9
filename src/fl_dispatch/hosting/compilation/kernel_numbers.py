"""Share the numbers of equal Triton kernels and constants in a compiled model, so that equal layers compile once.

A graph that PyTorch traces names a launch's kernel and its constants by their numbers in a table. PyTorch gives each
launch a new number for the constants, and also for the kernel if the launch sets the number of warps, because such a
kernel is wrapped anew. Two equal layers then differ by these numbers alone in the key of compiled graphs
(``autograd_cache_key``), and each of them would be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from ...logger_manager import get_logger

logger = get_logger(__name__)

Add = Callable[[Any], int]
PLAIN = (bool, int, float, str, type(None), torch.dtype)
"""Types compared by value; constants of other types, including tuples, keep separate numbers."""


def share_equal() -> None:
    """Give equal launches that Dynamo traces from now on the same numbers.

    This only saves time: with an unknown version of PyTorch or Triton, all launches keep separate numbers.
    """
    try:
        from torch._higher_order_ops import triton_kernel_wrap

        table: Any = triton_kernel_wrap.kernel_side_table
        if not hasattr(table.add_kernel, "numbers"):
            table.add_kernel = _shared(table.add_kernel, table.get_kernel, _kernel)
            table.add_constant_args = _shared(table.add_constant_args, table.get_constant_args, _constants)
    except (ImportError, AttributeError) as error:
        logger.info("equal layers with Triton kernels are compiled one by one: %s: %s", type(error).__name__, error)


def _shared(add: Add, get: Callable[[int], Any], key_of: Callable[[Any], Hashable]) -> Add:
    """Return the table's method, called once for all values with the same key; ``None`` is not a key.

    A number is reused only while the table still has the added value there, because PyTorch empties the table on a
    reset.
    """
    numbers: dict[Hashable, tuple[int, Any]] = {}

    def holds(number: int, added: Any) -> bool:
        try:
            return get(number) is added
        except AssertionError:  # the table has nothing there
            return False

    def add_once(new: Any) -> int:
        if (key := key_of(new)) is None:
            return add(new)
        if key not in numbers or not holds(*numbers[key]):
            numbers[key] = add(new), new
        return numbers[key][0]

    add_once.numbers = numbers  # type: ignore[attr-defined]
    return add_once


def _constants(constants: Mapping[str, Any]) -> Hashable:
    """Return all names and values, each with its type; ``None`` if one is not of a plain type."""
    if any(type(value) not in PLAIN for value in constants.values()):
        return None
    return tuple((name, type(value), repr(value)) for name, value in constants.items())


def _kernel(kernel: Any) -> Hashable:
    """Return a kernel with the one configuration that its launch asks for; ``None`` for other kernels."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    if not isinstance(kernel, Autotuner) or not isinstance(kernel.fn, JITFunction) or len(kernel.configs) != 1:
        return None
    try:
        hooks = kernel.reset_to_zero, kernel.restore_value, kernel.user_defined_pre_hook, kernel.user_defined_post_hook
        if kernel.keys or any(hooks):
            return None
    except AttributeError:  # another version of Triton
        return None
    (config,) = kernel.configs
    options = dict(vars(config))  # also those that a launch sets and Triton's configurations lack
    named = _constants(options.pop("kwargs", {}))
    others = _constants(options)  # a hook is not of a plain type
    # The kernel is stored with its number, so no other kernel gets its address.
    return None if named is None or others is None else (id(kernel.fn), named, others)
