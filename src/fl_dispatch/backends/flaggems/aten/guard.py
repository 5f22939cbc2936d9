"""The guard in a slot of PyTorch's dispatcher: it decides, call by call, which kernel runs.

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

from fl_dispatch.aten_replacement.slot import Slot
from fl_dispatch.devices import DeviceSpec
from fl_dispatch.errors import DispatchError
from fl_dispatch.knowledge.error_kinds import add_note, is_dead_device, is_out_of_memory
from fl_dispatch.logger_manager import get_logger

from . import check

logger = get_logger(__name__)

LARGEST_FIRST = 1 << 30
"""Bytes of arguments, and of results, that exist twice for a check, as long as the operator is unproven. A larger call
runs FlagGems only where a smaller one of the same dtypes was right.
"""
LARGEST_LATER = 64 << 20
"""``LARGEST_FIRST`` of an operator that is proven."""
MOST_DECLINED = 16
"""Kinds of arguments for which FlagGems may raise before the operator is left to PyTorch altogether."""
SEED = 20_260_101


@dataclass
class State:
    """The state that all operators of a process share.

    Args:
        device: the device with the replaced operators; it says whether a graph is being captured.
        strict: whether a wrong or failing kernel is an error.
    """

    device: DeviceSpec
    strict: bool
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
        slot: where it is put, with PyTorch's own kernel.
        run: FlagGems' function.
        state: shared with the others.

    Attributes:
        calls: how often FlagGems ran; of a captured graph only the capture counts.
        native: how often PyTorch's kernel ran instead: the kind of arguments was new, or FlagGems raised.
        waits: whether it waited for the device, for some kind of arguments; no graph can capture that.
        declined: kind of arguments, whatever numbers stand for tensors → what FlagGems raised before it had written
            anything; PyTorch's kernel runs.
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
                pass  # FlagGems never looks whether what it writes is what it reads, and the check does not see it
            elif capturable is not None:
                if capturable or not self.state.device.captures():
                    return self._flaggems(kind, args, kwargs)
            elif not self.state.sealed and not self._declines(args, kwargs) and not self.state.device.captures():
                return self._first(kind, args, kwargs)
            self.native += 1
            return self.run_native(*args, **kwargs)

    def _first(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A kind of arguments that is new: check it, and run FlagGems if it is right."""
        capturable = self._learns(args, kwargs)
        if capturable is None:
            self.native += 1
            return self.run_native(*args, **kwargs)
        result = self._flaggems(kind, args, kwargs)
        if not self.why_disabled and not self._declines(args, kwargs):
            self._known[kind] = capturable
        return result

    def _flaggems(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run FlagGems; where it raises and overwrites nothing, PyTorch's kernel now, and from now on as well.

        For this kind of arguments if it was never right, for every kind if it was: then the arguments are not why.

        Raises:
            Exception: of FlagGems, where its writes are unknown, inside a capture, with ``strict``, or where
                memory ran out or the device is dead. Or of PyTorch, which does not take the arguments either.
        """
        try:
            result = self.run(*args, **kwargs)
        except Exception as error:  # FlagGems' own, for these values
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
        """Whether a graph may capture the call; ``None`` where PyTorch's kernel is to run."""
        tensors = [leaf for leaf in check.leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        dtypes = tuple(getattr(leaf, "dtype", leaf) for leaf in check.leaves((args, kwargs)) if _has_dtype(leaf))
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return None
        proven = dtypes in self._proven
        largest = LARGEST_LATER if proven else LARGEST_FIRST
        # Autotuning reruns a kernel: safe for outputs that it overwrites, not for accumulators.
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
        except Exception as error:  # FlagGems' own: it cannot take what PyTorch takes
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
        """Whether FlagGems does on copies what PyTorch does; ``None`` where the result is too large to have twice."""
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
        """Learning ends: what FlagGems raised for some kinds of arguments, and was right for none, is PyTorch's."""
        if self.declined and not self._known and not self.why_disabled:
            self._disable(next(reversed(self.declined.values())))

    def _declines(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return bool(self.declined) and self._form(args, kwargs) in self.declined

    def _form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        numbers = int | float | complex
        pairs = zip(self._tensors, args, strict=False)
        return _kind(type(v) if tensor and isinstance(v, numbers) else v for tensor, v in pairs), _kind(kwargs.items())

    def _decline(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
        """FlagGems raised, and wrote nothing of the caller's: it does not take such arguments."""
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
    """Whether two arguments are in one storage."""
    tensors = (leaf for leaf in check.leaves((args, kwargs)) if isinstance(leaf, Tensor))
    places = [place for tensor in tensors if (place := tensor.untyped_storage().data_ptr())]
    return len(set(places)) < len(places)


def _kind(values: Any) -> Any:
    """The key that FlagGems compiles a kernel for, and chooses its configuration by."""
    return tuple(map(_kind_of, values))


def _alike(args: tuple[Any, ...]) -> Any:
    """Which tensors begin at one address; FlagGems has a kernel for a product with its own transpose."""
    places = [value.data_ptr() for value in args if isinstance(value, Tensor)]
    return tuple(map(places.index, places)) if len(set(places)) < len(places) else None


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
