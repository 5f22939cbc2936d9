"""A trial whether Dynamo can trace an implementation, run once on the declaration's samples.

The trial runs when compiled code first meets an implementation that does not declare it, possibly inside that very
trace, and before dispatch is frozen. Processes with the same code get the same answer.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..devices import detect_device
from ..errors import NotSupported, text_of
from ..ops import OPERATORS, Operator
from ..state import State, is_elsewhere
from ..types import OpImpl
from . import generated
from .keys import CALL

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
_DECLINED = "declined"


def obstacle(state: State, impl: OpImpl) -> str:
    """Return why Dynamo cannot trace an implementation; empty if it can, or if its tensors cannot be made here."""
    known = state.traces.obstacle(impl)
    if known is None:  # no lock is held: a trace in another thread may wait for one that this thread needs
        known = state.traces.add(impl, "" if is_elsewhere(impl) else _tried(state, impl, OPERATORS[impl.op_name]))
    return known


def _tried(state: State, impl: OpImpl, operator: Operator) -> str:
    """Trace an implementation with samples; return why Dynamo cannot trace it, empty if it can."""

    def otherwise(*args: Any, **kwargs: Any) -> Any:
        raise NotSupported("it does not take all of these parameters")

    convention = state.registry.convention(impl)
    function = generated.direct(operator, impl, convention, CALL, impl.fn, otherwise, ask=False)
    traced = False
    for dtype in DTYPES:
        for alike in _groups(operator, dtype):
            for args in alike:
                found = _traced(function, args)
                if found is not None:
                    break
            else:
                continue
            if found:
                return found
            traced = True
            if dtype is not DTYPES[0]:
                break  # a kernel may choose by dtype, but hardly by dtype and form together
    return "" if traced else "it declines every sample of the declaration, so it was not tried"


def _groups(operator: Operator, dtype: torch.dtype) -> Iterable[Iterator[tuple[Any, ...]]]:
    """Yield groups of samples with the same optional arguments, the smallest first."""
    assert operator.samples is not None
    place, generator = torch.device(detect_device().torch_type), torch.Generator().manual_seed(0)
    groups: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for sample in operator.samples(dtype, place, generator):
        args = operator.bind(sample.args, {})
        if _size(args):
            form = tuple(arg if isinstance(arg, bool) else arg is None for arg in args)
            groups.setdefault(form, []).append(args)
    return [iter(sorted(group, key=_size)) for group in groups.values()]


def _traced(function: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    """Return why a call cannot be traced; empty if it can, ``None`` if the implementation declines it."""
    reached = []

    def stop(graph: Any, inputs: Any) -> Any:
        reached.append(graph)
        raise NotSupported("the trial ends here: nothing is run")

    def call(*args: Any) -> Any:
        try:
            function(*args)
        except NotImplementedError:
            return _DECLINED
        return None

    own = types.FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)  # its own cache
    try:
        with torch.no_grad():
            result = torch.compile(own, fullgraph=True, backend=stop, dynamic=False)(*args)
    except Exception as error:
        return "" if reached else _in_one_line(error)
    return None if result == _DECLINED else ""


def _in_one_line(error: Exception) -> str:
    """Return Dynamo's explanation, or the first line of another error."""
    lines = [line.strip() for line in text_of(error).splitlines()]
    explained = next((line for line in lines if line.startswith("Explanation: ")), "")
    return explained.removeprefix("Explanation: ") or lines[0]


def _size(args: tuple[Any, ...]) -> int:
    return sum(arg.numel() for arg in args if isinstance(arg, torch.Tensor))
