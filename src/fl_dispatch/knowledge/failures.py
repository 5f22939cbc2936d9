"""Failures: kinds of errors, and the bans that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..devices import CUDA, detect_device
from ..errors import NotSupported, text_of
from ..locking import writers
from ..logger_manager import get_logger
from ..ops.declaration import leading_tensor
from ..types import OpImpl

logger = get_logger(__name__)

_DEAD_DEVICE = (  # errors after which every call on the device fails
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "launch timed out",
    "misaligned address",
    "invalid address space",
    "invalid program counter",
    "illegal instruction",
    "hardware stack error",
    "uncorrectable ecc error",
    "context is destroyed",
)
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed")
_TORCH_DISPATCHER = ("Could not run '", "The operator '", "There were no tensor arguments")


@dataclass(frozen=True)
class ArgumentKind:
    """The kind of arguments that a ban is for: what the leading tensor is, and the layer."""

    dtype: torch.dtype | None
    rank: int
    layout: str
    device: str
    scope: str | None

    @classmethod
    def of(cls, args: tuple[Any, ...], scope: str | None) -> ArgumentKind:
        """The kind of a call's arguments."""
        tensor = leading_tensor(args)
        if tensor is None:
            return cls(None, 0, "none", "none", scope)
        try:
            layout = "contiguous" if tensor.is_contiguous() else "strided"
        except RuntimeError:  # compressed sparse tensors have no strides
            layout = str(tensor.layout).removeprefix("torch.")
        return cls(tensor.dtype, tensor.dim(), layout, tensor.device.type, scope)

    def __str__(self) -> str:
        where = f" in {self.scope}" if self.scope else ""
        return f"{str(self.dtype).removeprefix('torch.')}, rank {self.rank}, {self.layout}, {self.device}{where}"


@dataclass
class Failure:
    """How often, and why, an implementation failed for a kind of arguments."""

    count: int
    cause: str


class FailureLog:
    """The bans: implementations that failed where another one succeeded. Owned by one manager."""

    WIDEN_AFTER = 3  # distinct kinds of arguments, then the implementation is banned as a whole

    def __init__(self) -> None:
        self._failures: dict[tuple[str, str], dict[ArgumentKind, Failure]] = {}
        self._told: set[tuple[str, str, str]] = set()

    def record(self, impl: OpImpl, kind: ArgumentKind, error: BaseException) -> None:
        """Ban an implementation for a kind of arguments."""
        with writers:
            kinds = dict(self._failures.get((impl.op_name, impl.impl_id), {}))
            before = kinds.get(kind)
            kinds[kind] = Failure(before.count + 1 if before else 1, text_of(error))
            self._failures = {**self._failures, (impl.op_name, impl.impl_id): kinds}

    def tell_once(self, impl: OpImpl, problem: str) -> bool:
        """Whether this problem of an implementation is news; ``problem`` is a kind, because each call has its text."""
        key = (impl.op_name, impl.impl_id, problem)
        news = key not in self._told
        self._told.add(key)
        return news

    def as_a_whole(self, impl: OpImpl) -> str:
        """Why an implementation is banned for all calls; empty when it is not."""
        kinds = self._failures.get((impl.op_name, impl.impl_id), {})
        if len(kinds) < self.WIDEN_AFTER:
            return ""
        return f"banned: it failed for {len(kinds)} kinds of arguments, last {next(reversed(kinds.values())).cause}"

    def for_kind(self, impl: OpImpl, kind: ArgumentKind) -> str:
        """Why an implementation is banned for a kind of arguments; empty when it is not."""
        failure = self._failures.get((impl.op_name, impl.impl_id), {}).get(kind)
        return f"banned for {kind}: {failure.cause} ({failure.count} times)" if failure else ""

    def kinds(self, impl: OpImpl, scope: str | None) -> frozenset[ArgumentKind]:
        """The kinds of arguments in this scope for which an implementation must not run."""
        kinds = self._failures.get((impl.op_name, impl.impl_id), {})
        return frozenset(kind for kind in kinds if kind.scope == scope)

    def has_bans(self, op_name: str) -> bool:
        """Whether some implementation of an operator is banned for some calls."""
        return any(op == op_name for op, _ in self._failures)

    def failures(self) -> Mapping[tuple[str, str], Mapping[ArgumentKind, Failure]]:
        """All bans: (operator, implementation id) → kind of arguments → failure."""
        return self._failures

    def clear(self, op_name: str | None = None) -> Mapping[tuple[str, str], Mapping[ArgumentKind, Failure]]:
        """Lift the bans of one operator, or all; returns what :meth:`restore` takes."""
        with writers:
            before = self._failures
            self._failures = {} if op_name is None else {key: bans for key, bans in before.items() if key[0] != op_name}
            return before

    def restore(self, before: Mapping[tuple[str, str], Mapping[ArgumentKind, Failure]]) -> None:
        """Take a change back."""
        with writers:
            self._failures = {key: dict(bans) for key, bans in before.items()}


class Proofs:
    """Which implementations have succeeded in this process, and which of them need watching all the same.

    Success with arguments that it was free to overwrite is proven apart from success without any.
    """

    def __init__(self) -> None:
        self._proven: frozenset[tuple[str, str, bool]] = frozenset()
        self._watched: frozenset[tuple[str, str]] = frozenset()

    def add(self, impl: OpImpl, *, wrote: bool) -> bool:
        """An implementation succeeded. Returns whether it is the first time at all."""
        first = not (self.holds(impl, wrote=True) or self.holds(impl, wrote=False))
        self._proven |= {(impl.op_name, impl.impl_id, wrote)}
        return first

    def watch(self, impl: OpImpl) -> None:
        """From now on keep copies of what it overwrites: it failed after it had been proven."""
        self._watched |= {(impl.op_name, impl.impl_id)}

    def holds(self, impl: OpImpl, *, wrote: bool) -> bool:
        """Whether it has succeeded; with ``wrote``, free to overwrite arguments."""
        return (impl.op_name, impl.impl_id, wrote) in self._proven

    def watches(self, impl: OpImpl) -> bool:
        """Whether copies are kept although it is proven."""
        return (impl.op_name, impl.impl_id) in self._watched


def add_note(error: BaseException, note: str) -> None:
    """Tell more in an exception, once; one that cannot be changed stays as it is."""
    try:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    except Exception as refused:  # a frozen exception class
        logger.debug("%s; not added: %s", note, text_of(refused))


def declines(error: BaseException) -> bool:
    """Whether an exception says "not for these arguments": a ``NotImplementedError`` that is not torch's own."""
    if not isinstance(error, NotImplementedError):
        return False
    return isinstance(error, NotSupported) or not text_of(error).partition(": ")[2].startswith(_TORCH_DISPATCHER)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, which is the caller's matter (Triton's ``OutOfResources`` is not that)."""
    return any(
        isinstance(part, torch.OutOfMemoryError | MemoryError)
        or (isinstance(part, RuntimeError) and any(sign in text_of(part).lower() for sign in _OUT_OF_MEMORY))
        for part in _parts(error)
    )


def is_dead_device(error: BaseException) -> bool:
    """Whether the error kills the device context, so that any retry fails or lies."""
    return any(
        isinstance(part, RuntimeError) and any(sign in text_of(part).lower() for sign in _DEAD_DEVICE)
        for part in _parts(error)
    )


def is_capturing() -> bool:
    """Whether a graph is being captured in this thread's stream, of this machine's device or of a CUDA device.

    A device that fails to answer counts as capturing: then nothing falls back, and the error at hand is the caller's.
    """
    try:
        return detect_device().captures() or CUDA.captures()
    except Exception:  # a vendor's code, asked in the middle of another failure
        logger.warning("the device cannot say whether a graph is being captured", exc_info=True)
        return True


def _parts(error: BaseException) -> list[BaseException]:
    """The exception, those of its group, and their causes."""
    parts: list[BaseException] = [error]
    for part in parts:
        inner = list(part.exceptions) if isinstance(part, BaseExceptionGroup) else []
        if part.__cause__ is not None:
            inner.append(part.__cause__)
        parts += [other for other in inner if not any(other is known for known in parts)]
    return parts
