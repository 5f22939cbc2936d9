"""A dispatch mode that sees each ATen operator of a thread, and of threads to which it hands work meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Kind:
    """An operator: positions and names of the arguments that it overwrites, and whether it makes views or casts."""

    positions: tuple[int, ...]
    names: tuple[str, ...]
    views: bool
    casts: bool


Ran = Callable[[Kind, Any, Any, Any], None]
"""Called after an operator: its kind, positional and keyword arguments, and result."""
_CASTS = {"aten::_to_copy", "aten::clone", "aten::copy_", "aten::lift_fresh", "aten::_copy_from"}
"""Operators that return the values of their only argument."""


@cache
def _kind(func: Any) -> Kind:
    """Return the kind of an operator, by its schema."""
    schema = func._schema
    written = [
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    views = not written and any(result.alias_info is not None for result in schema.returns)
    positions, names = tuple(index for index, _ in written), tuple(name for _, name in written)
    return Kind(positions, names, views, schema.name in _CASTS)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode of one thread."""

    def __init__(self, ran: Ran) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran = ran

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell PyTorch not to wrap the method below, which would import its compiler and cost 7 µs per call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        result = func(*args, **kwargs)
        if not kind.views:
            self.ran(kind, args, kwargs, result)
        return result


@contextmanager
def watching(ran: Ran) -> Iterator[None]:
    """Call ``ran`` with the operators of this thread, and of threads in pools that it uses meanwhile."""
    with _pools_are_watched(), Watch(ran):
        yield


def unwatched(weights: Named) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an iterator that reads files, without its own operators, which are not part of the load."""
    source, mode = iter(weights), _get_current_dispatch_mode()
    while True:
        with _pop_mode_temporarily() if isinstance(mode, Watch) else nullcontext():
            found = next(source, None)
        if found is None:
            return
        yield found
        mode = _get_current_dispatch_mode()


_submit = ThreadPoolExecutor.submit
_watching = 0
_pools = threading.Lock()


@contextmanager
def _pools_are_watched() -> Iterator[None]:
    """Let thread pools watch the work of a watched thread, because a dispatch mode belongs to one thread.

    In SGLang's DeepSeek such a pool's threads write the weights. Loads may overlap.
    """
    global _watching
    with _pools:
        _watching += 1
        ThreadPoolExecutor.submit = _watched  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with _pools:
            _watching -= 1
            if not _watching:
                ThreadPoolExecutor.submit = _submit  # type: ignore[method-assign]


def _watched(pool: ThreadPoolExecutor, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Submit a call that is watched in its thread, too, as the submitting one is."""
    mode = _get_current_dispatch_mode()
    if not isinstance(mode, Watch):
        return _submit(pool, call, *args, **kwargs)  # the iterator reads files

    @wraps(call)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with Watch(mode.ran):
            return call(*args, **kwargs)

    return _submit(pool, inside, *args, **kwargs)
