"""What stands in PyTorch's dispatcher in the place of one operator: it decides, call by call, whose kernel runs.

FlagGems compiles and tunes a kernel in the call that first needs it, which takes seconds, waits for the device and
cannot be part of a graph. So there is a time to learn and a time to serve. While a host warms up, a new kind of
arguments is checked (:mod:`.check`), and FlagGems compiles and tunes. Inside a graph capture, and once the operators
are *sealed*, a kind that was not met before runs PyTorch's own kernel, which is always there.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fl_dispatch.errors import DispatchError
from fl_dispatch.failures import add_note, is_capturing, is_dead_device, is_out_of_memory
from fl_dispatch.logger_manager import get_logger

from . import check

logger = get_logger(__name__)

LARGEST_FIRST, LARGEST_LATER = 1 << 30, 64 << 20
"""Bytes of arguments that are copied for a check, as long as the operator is unproven, and afterwards. A larger call
runs FlagGems only where a smaller one of the same dtypes was right."""
SEED = 20_260_101


@dataclass
class State:
    """What all operators of a process share.

    Args:
        dispatch_key: of the device, such as ``CUDA``.
        cuda: whether the device is one that captures CUDA graphs.
        strict: whether a wrong or failing kernel is an error.
        disabled: told of an operator that is found wrong.
    """

    dispatch_key: str
    cuda: bool
    strict: bool
    disabled: Callable[[Guard], None]
    sealed: bool = False
    inside: threading.local = field(default_factory=threading.local)


class _Inside:
    """Calls of this thread that come from within a replaced operator, or from a check of it, run PyTorch's kernels."""

    def __init__(self, flag: threading.local) -> None:
        self._flag = flag

    def __enter__(self) -> None:
        self._flag.on = True

    def __exit__(self, *_: object) -> None:
        self._flag.on = False


class Guard:
    """One operator.

    Args:
        key: the operator with its overload, as FlagGems names it.
        run: FlagGems' function.
        state: shared with the others.

    Attributes:
        calls: how often FlagGems ran; of a captured graph only the capture counts.
        native: how often PyTorch's kernel ran instead, because the kind of arguments was new.
        waits: whether it waited for the device, for some kind of arguments; no graph can capture that.
        why_disabled: what was found wrong, or an empty string.

    Raises:
        RuntimeError: this PyTorch has no such operator, or no kernel for it.
    """

    def __init__(self, key: str, run: Callable[..., Any], state: State) -> None:
        name, _, overload = key.partition(".")
        schema = getattr(getattr(torch.ops.aten, name), overload or "default")._schema
        self.key, self.run, self.state = key, run, state
        self.calls = self.native = 0
        self.why_disabled = ""
        self.waits = False
        self._kernel = torch.library.get_kernel(f"aten::{key}", state.dispatch_key)
        self._keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, state.dispatch_key))
        self._places = tuple(str(a.type) in ("Tensor", "Optional[Tensor]") for a in schema.arguments)
        written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self._mutates, self._in_place = bool(written), not all(a.is_out for a in written)
        self._known: dict[Any, bool] = {}  # kind of arguments → whether a graph may capture the call
        self._proven: set[Any] = set()
        self._inside = _Inside(state.inside)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.why_disabled or getattr(self.state.inside, "on", False):
            return self.run_native(*args, **kwargs)
        with self._inside:
            kind = _kind(args), _kind(kwargs.items())
            capturable = self._known.get(kind)
            if self._mutates and _share_memory(args, kwargs):
                pass  # FlagGems never looks whether what it writes is what it reads, and the check does not see it
            elif capturable is not None:
                if capturable or not is_capturing():
                    self.calls += 1
                    return self.run(*args, **kwargs)
            elif not self.state.sealed and not is_capturing():
                return self._first(kind, args, kwargs)
            self.native += 1
            return self.run_native(*args, **kwargs)

    def run_native(self, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's own kernel."""
        args, kwargs = self._wrapped(args, kwargs)
        return self._kernel.call_boxed(self._keys, *args, **kwargs)

    def _first(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A kind of arguments that is new: check it, and run FlagGems if it is right."""
        capturable = self._learns(args, kwargs)
        if capturable is not None:
            try:
                result = self.run(*args, **kwargs)
            except Exception as error:  # FlagGems' own: with these values, or where memory ran out
                if self.state.strict or self._mutates or is_out_of_memory(error) or is_dead_device(error):
                    raise
                self._disable(f"{type(error).__name__}: {error}")
            else:
                self._known[kind] = capturable
                self.calls += 1
                return result
        self.native += 1
        return self.run_native(*args, **kwargs)

    def _learns(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        """Whether a graph may capture the call; ``None`` where PyTorch's kernel is to run."""
        tensors = [leaf for leaf in check.leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        dtypes = tuple(tensor.dtype for tensor in tensors)
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return None
        proven = dtypes in self._proven
        if check.size_of(args, kwargs) > (LARGEST_LATER if proven else LARGEST_FIRST):
            # A kernel that is tuned runs many times, which what it only writes bears, and what it adds to does not.
            return not self.waits if proven and not self._in_place else None
        try:
            with torch.inference_mode():
                if not self._is_right(args, kwargs):
                    return None
                waits = self.state.cuda and check.waits_for_device(self.run, args, kwargs, SEED)
        except DispatchError:  # ours
            raise
        except Exception as error:  # FlagGems' own: it cannot take what PyTorch takes
            if is_dead_device(error):
                add_note(error, f"in FlagGems' ATen operator '{self.key}'; a blacklist can name it")
                raise
            if not is_out_of_memory(error):
                self._disable(f"{type(error).__name__}: {error}")
            return None
        self._proven.add(dtypes)
        self.waits = self.waits or waits
        return not waits

    def _is_right(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        ours = check.randomized(args, kwargs, SEED)
        theirs = check.copied(ours)
        try:
            expected = self.run_native(*theirs[0], **theirs[1])
        except Exception as error:  # the caller's mistake, as the call itself will say, or the random values
            logger.debug("ATen operator '%s' was not checked: %s", self.key, error)
            return False
        shapes = [t.shape for t in check.leaves(ours) if isinstance(t, Tensor)]
        if shapes != [t.shape for t in check.leaves(theirs) if isinstance(t, Tensor)]:
            return False  # PyTorch gave ``out`` its size; FlagGems would write past its end
        found = self.run(*ours[0], **ours[1])
        if wrong := check.differs(found, expected) or check.differs(ours, theirs):
            self._disable(f"wrong: {wrong}")
            return False
        if not self._mutates and check.aliases(found, ours) != check.aliases(expected, theirs):
            self._disable("wrong: its result is in the memory of other arguments, or of none")
            return False
        return True

    def _disable(self, why: str) -> None:
        self.why_disabled = " ".join(why.split())[:300]
        logger.warning("ATen operator '%s' is left to PyTorch, for FlagGems' is %s", self.key, self.why_disabled)
        if self.state.strict:
            raise DispatchError(f"strict: FlagGems' ATen operator '{self.key}' is {self.why_disabled}")
        self.state.disabled(self)

    def _wrapped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as a kernel takes them: PyTorch hands a function in Python numbers where a tensor was one."""
        pairs = enumerate(zip(self._places, args, strict=False))
        numbers = [i for i, (tensor, value) in pairs if tensor and isinstance(value, int | float | complex)]
        if numbers:
            tensors = [leaf for leaf in check.leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            args = tuple(_tensor(v, tensors) if place in numbers else v for place, v in enumerate(args))
        return args, kwargs


def _tensor(number: bool | int | float | complex, tensors: list[Tensor]) -> Tensor:
    """A number as a tensor that has no more say over a result's dtype than the number."""
    if isinstance(number, bool | complex):
        return torch.tensor(number)
    alike = [t for t in tensors if t.is_floating_point() == isinstance(number, float) and t.dtype is not torch.bool]
    if alike and all(t.dim() == 0 for t in tensors):
        return torch.tensor(number, dtype=alike[0].dtype)
    if isinstance(number, int):
        return torch.tensor(number, dtype=torch.int64)
    return torch.tensor(number, dtype=torch.float64 if alike else torch.get_default_dtype())


def _share_memory(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two arguments are in one storage."""
    tensors = (leaf for leaf in check.leaves((args, kwargs)) if isinstance(leaf, Tensor))
    places = [place for tensor in tensors if (place := tensor.untyped_storage().data_ptr())]
    return len(set(places)) < len(places)


def _kind(values: Any) -> Any:
    """What decides which kernel is compiled and which of its configurations is taken."""
    return tuple(map(_kind_of, values))


def _kind_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16 == 0
    if isinstance(value, list | tuple):
        return tuple(map(_kind_of, value))
    if isinstance(value, Mapping):
        return tuple((name, _kind_of(part)) for name, part in value.items())
    if isinstance(value, float) and math.isnan(value):  # which would be a new kind in every call
        return type(value), "nan"
    return type(value), value if value.__hash__ is not None else id(value)
