"""Numbers of Triton kernels and their constants in a compiled model: equal ones share one, for equal layers' sake.

A graph that PyTorch traces names a launch's kernel and its constants by their numbers in a table. PyTorch gives each
launch a number of its own for the constants, and for the kernel too where the launch says how many warps it wants: such
a kernel is wrapped anew. Two layers that do the same then differ by those numbers alone, in the key by which compiled
graphs are found again (``autograd_cache_key``), and each of them would be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

Add = Callable[[Any], int]


def share_equal() -> None:
    """Give the launches that Dynamo traces from now on common numbers where they are equal."""
    from torch._higher_order_ops import triton_kernel_wrap

    table: Any = triton_kernel_wrap.kernel_side_table
    if not hasattr(table.add_kernel, "numbers"):
        table.add_kernel = _shared(table.add_kernel, _kernel)
        table.add_constant_args = _shared(table.add_constant_args, _constants)


def _shared(add: Add, key_of: Callable[[Any], Hashable]) -> Add:
    """The table's method, called once for all that have a key in common; ``None`` is no key."""
    numbers: dict[Hashable, int] = {}

    def add_once(new: Any) -> int:
        key = key_of(new)
        if key is None:
            return add(new)
        if key not in numbers:
            numbers[key] = add(new)
        return numbers[key]

    add_once.numbers = numbers  # type: ignore[attr-defined]
    return add_once


def _constants(constants: dict[str, Any]) -> Hashable:
    """All names and values, each with its type; ``None`` if one has no hash, as a list."""
    key = tuple(
        (name, type(value), repr(value) if isinstance(value, float) else value) for name, value in constants.items()
    )
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _kernel(kernel: Any) -> Hashable:
    """A kernel with the one configuration that its launch asks for; ``None`` for all other kernels."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    if not isinstance(kernel, Autotuner) or not isinstance(kernel.fn, JITFunction) or len(kernel.configs) != 1:
        return None
    (config,) = kernel.configs
    hooks = (config.pre_hook, kernel.reset_to_zero, kernel.restore_value)
    if kernel.keys or any(hooks) or kernel.user_defined_pre_hook or kernel.user_defined_post_hook:
        return None
    # The table keeps the kernel, so no other one gets its address.
    return id(kernel.fn), _constants(config.all_kwargs())
