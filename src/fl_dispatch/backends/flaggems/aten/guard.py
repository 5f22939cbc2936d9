"""The guard in a slot of PyTorch's dispatcher, which chooses the kernel of each call.

FlagGems compiles and tunes a kernel in the first call that needs it, which takes seconds, waits for the device and
cannot be captured in a graph. So the guard first learns, then serves. While a host warms up, FlagGems compiles and
tunes for each new kind of arguments, and the guard checks the result (:mod:`.check`). Inside a graph capture, and once
the operators are *sealed*, new kinds of arguments run PyTorch's own kernel.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fl_dispatch.aten_replacement.slot import Slot
from fl_dispatch.devices import DeviceSpec
from fl_dispatch.errors import DispatchError
from fl_dispatch.knowledge.error_kinds import add_note, is_dead_device, is_out_of_memory
from fl_dispatch.logger_manager import get_logger

from . import check

logger = get_logger(__name__)

LARGEST_FIRST = 1 << 30
"""Most bytes of arguments, and of results, that a check copies while the operator is unproven. A larger call runs
FlagGems only if a smaller one with the same dtypes was right.
"""
LARGEST_LATER = 64 << 20
"""``LARGEST_FIRST`` for a proven operator."""
MOST_DECLINED = 16
"""Kinds of arguments for which FlagGems may raise before PyTorch gets every call of the operator."""
SEED = 20_260_101


@dataclass
class State:
    """State that all guards of a process share.

    Args:
        device: the device of the replaced operators, which knows whether a graph is being captured.
        strict: whether a wrong or failing kernel is an error.
    """

    device: DeviceSpec
    strict: bool
    sealed: bool = False
    inside: threading.local = field(default_factory=threading.local)


class _Inside:
    """Marks this thread as inside a replaced operator or its check; nested calls run PyTorch's kernels."""

    def __init__(self, flag: threading.local) -> None:
        self._flag = flag

    def __enter__(self) -> None:
        self._flag.on = True

    def __exit__(self, *_: object) -> None:
        self._flag.on = False


class Guard:
    """One operator.

    Args:
        slot: the dispatcher's slot, with PyTorch's own kernel.
        run: FlagGems' function.
        state: shared with the other guards.

    Attributes:
        calls: how often FlagGems ran; a captured graph counts only its capture.
        native: how often PyTorch's kernel ran instead, because the kind of arguments was new or FlagGems raised.
        waits: whether FlagGems waited for the device for some kind of arguments, which rules out graph capture.
        declined: kind of arguments, with a number that stands for a tensor reduced to its type → the error of FlagGems
            before it wrote anything; PyTorch's kernel runs.
        why_disabled: why every call is PyTorch's, or an empty string.
    """

    def __init__(self, slot: Slot, run: Callable[..., Any], state: State) -> None:
        self.key, self.run, self.run_native, self.state = slot.key, run, slot.run_native, state
        self.calls = self.native = 0
        self.why_disabled = ""
        self.waits = False
        self.declined: dict[Any, str] = {}
        written = [a for a in slot.schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self._mutates, self._in_place = bool(written), not all(a.is_out for a in written)
        self._tensors = slot.tensors
        self._known: dict[Any, bool] = {}  # kind of arguments → whether a graph may capture the call
        self._proven: set[Any] = set()
        self._inside = _Inside(state.inside)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.why_disabled or getattr(self.state.inside, "on", False):
            return self.run_native(*args, **kwargs)
        with self._inside:
            kind = _kind(args), _kind(kwargs.items()), _alike(args)
            capturable = self._known.get(kind)
            if self._mutates and _share_memory(args, kwargs):
                pass  # FlagGems does not test whether input and output overlap, and the check misses it
            elif capturable is not None:
                if capturable or not self.state.device.captures():
                    return self._flaggems(kind, args, kwargs)
            elif not self.state.sealed and not self._declines(args, kwargs) and not self.state.device.captures():
                return self._first(kind, args, kwargs)
            self.native += 1
            return self.run_native(*args, **kwargs)

    def _first(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check a new kind of arguments, and run FlagGems if its result is right."""
        capturable = self._learns(args, kwargs)
        if capturable is None:
            self.native += 1
            return self.run_native(*args, **kwargs)
        result = self._flaggems(kind, args, kwargs)
        if not self.why_disabled and not self._declines(args, kwargs):
            self._known[kind] = capturable
        return result

    def _flaggems(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run FlagGems; if it raises before it overwrites anything, run PyTorch's kernel now and in later calls.

        Later calls fall back for this kind of arguments if FlagGems was never right for it. If it was, they fall back
        for every kind, because the arguments are not the cause.

        Raises:
            Exception: FlagGems' error if its writes are unknown, inside a capture, with ``strict``, if memory ran out
                or if the device is dead; PyTorch's error if it does not take the arguments either.
        """
        try:
            result = self.run(*args, **kwargs)
        except Exception as error:  # FlagGems raised for these values
            fatal = is_out_of_memory(error) or is_dead_device(error)
            if fatal or self.state.strict or self._mutates or self.state.device.captures():
                self._note(error)
                raise
            failed = error
        else:
            self.calls += 1
            return result
        result = self.run_native(*args, **kwargs)
        self.native += 1
        if kind in self._known:
            self._disable(_text(failed))
        else:
            self._decline(args, kwargs, failed)
        return result

    def _learns(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        """Whether a graph may capture the call; ``None`` if PyTorch's kernel must run."""
        tensors = [leaf for leaf in check.leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        dtypes = tuple(getattr(leaf, "dtype", leaf) for leaf in check.leaves((args, kwargs)) if _has_dtype(leaf))
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return None
        proven = dtypes in self._proven
        largest = LARGEST_LATER if proven else LARGEST_FIRST
        # Autotuning reruns a kernel, which is safe for overwritten outputs but not for accumulators.
        unchecked = not self.waits if proven and not self._in_place else None
        if check.size_of((args, kwargs)) > largest:
            return unchecked
        try:
            with torch.inference_mode():
                right = self._is_right(args, kwargs, largest)
                if right is None:
                    return unchecked
                if not right:
                    return None
                refuse = self.state.device.refuse_waits
                waits = refuse is not None and check.waits_for_device(refuse, self.run, args, kwargs, SEED)
        except DispatchError:  # ours
            raise
        except Exception as error:  # FlagGems does not take arguments that PyTorch takes
            if is_dead_device(error):
                self._note(error)
                raise
            if not is_out_of_memory(error):
                self._decline(args, kwargs, error)
            return None
        self._proven.add(dtypes)
        self.waits = self.waits or waits
        return not waits

    def _is_right(self, args: tuple[Any, ...], kwargs: dict[str, Any], largest: int) -> bool | None:
        """Whether FlagGems and PyTorch agree on copies; ``None`` if the result is too large for a second copy."""
        ours = check.randomized(args, kwargs, SEED)
        theirs = check.copied(ours)
        try:
            expected = self.run_native(*theirs[0], **theirs[1])
        except Exception as error:  # a mistake of the caller, which the call itself will report, or the random values
            logger.debug("ATen operator '%s' was not checked: %s", self.key, error)
            return False
        shapes = [t.shape for t in check.leaves(ours) if isinstance(t, Tensor)]
        if shapes != [t.shape for t in check.leaves(theirs) if isinstance(t, Tensor)]:
            return False  # PyTorch resized ``out``; FlagGems would write past its end
        if check.size_of(expected) > largest:
            return None
        found = self.run(*ours[0], **ours[1])
        if wrong := check.differs(found, expected) or check.differs(ours, theirs):
            self._disable(f"wrong: {wrong}")
            return False
        if not self._mutates and check.aliases(found, ours) != check.aliases(expected, theirs):
            self._disable("wrong: its result is in the memory of other arguments, or of none")
            return False
        return True

    def _note(self, error: BaseException) -> None:
        add_note(error, f"in FlagGems' ATen operator '{self.key}'; a blacklist can name it")

    def settle(self) -> None:
        """End the learning: give the operator back to PyTorch if FlagGems raised and was never right."""
        if self.declined and not self._known and not self.why_disabled:
            self._disable(next(reversed(self.declined.values())))

    def _declines(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return bool(self.declined) and self._form(args, kwargs) in self.declined

    def _form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        numbers = int | float | complex
        pairs = zip(self._tensors, args, strict=False)
        return _kind(type(v) if tensor and isinstance(v, numbers) else v for tensor, v in pairs), _kind(kwargs.items())

    def _decline(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
        """Record that FlagGems raised for such arguments and wrote to none of the caller's tensors."""
        self.declined[self._form(args, kwargs)] = why = _text(error)
        if self.state.strict:
            self._disable(why)
        elif len(self.declined) > MOST_DECLINED:
            self._disable(f"{why} (the last of {len(self.declined)} kinds of arguments)")
        elif len(self.declined) == 1:
            logger.info("ATen operator '%s': arguments for which FlagGems' raises are PyTorch's: %s", self.key, why)

    def _disable(self, why: str) -> None:
        self.why_disabled = " ".join(why.split())[:300]
        verb = "is" if why.startswith("wrong") else "raised"
        logger.warning("ATen operator '%s' is left to PyTorch, for FlagGems' %s %s", self.key, verb, self.why_disabled)
        if self.state.strict:
            raise DispatchError(f"strict: FlagGems' ATen operator '{self.key}' {verb} {self.why_disabled}")


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _has_dtype(value: Any) -> bool:
    return isinstance(value, Tensor | torch.dtype)


def _share_memory(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two arguments share a storage."""
    tensors = (leaf for leaf in check.leaves((args, kwargs)) if isinstance(leaf, Tensor))
    places = [place for tensor in tensors if (place := tensor.untyped_storage().data_ptr())]
    return len(set(places)) < len(places)


def _kind(values: Any) -> Any:
    """Return the key by which FlagGems compiles a kernel and chooses its configuration."""
    return tuple(map(_kind_of, values))


def _alike(args: tuple[Any, ...]) -> Any:
    """Groups of tensors that begin at one address; FlagGems has a kernel for a matrix times its own transpose."""
    places = [value.data_ptr() for value in args if isinstance(value, Tensor)]
    return tuple(map(places.index, places)) if len(set(places)) < len(places) else None


def _kind_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16 == 0
    if isinstance(value, list | tuple):
        return tuple(map(_kind_of, value))
    if isinstance(value, Mapping):
        return tuple((name, _kind_of(part)) for name, part in value.items())
    if isinstance(value, float) and math.isnan(value):  # NaN differs from itself, so each call would be a new kind
        return type(value), "nan"
    return type(value), value if value.__hash__ is not None else id(value)
