"""Constants of Triton kernels in a compiled model: equal ones have one number, so that equal layers are compiled once.

A graph that PyTorch traces names the constants of a kernel's launch by their number in a table, and gives each launch a
number of its own. Two layers that do the same then differ by those numbers alone, in the key by which compiled graphs
are found again (``autograd_cache_key``), and each of them would be compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def share_equal() -> None:
    """Give the launches that Dynamo traces from now on a common number where their constants are equal."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    if not hasattr(kernel_side_table.add_constant_args, "numbers"):
        kernel_side_table.add_constant_args = shared(kernel_side_table.add_constant_args)  # type: ignore[method-assign]


def shared(add: Callable[[dict[str, Any]], int]) -> Callable[[dict[str, Any]], int]:
    """The table's method, called once for all constants that are equal and of the same types."""
    numbers: dict[Any, int] = {}

    def add_constant_args(args: dict[str, Any]) -> int:
        try:
            key = tuple(
                (name, type(value), repr(value) if isinstance(value, float) else value) for name, value in args.items()
            )
            known = numbers.get(key)
        except TypeError:  # a list, say, has no hash
            return add(args)
        return known if known is not None else numbers.setdefault(key, add(args))

    add_constant_args.numbers = numbers  # type: ignore[attr-defined]
    return add_constant_args
