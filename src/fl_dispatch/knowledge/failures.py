"""Bans of implementations that failed where another one succeeded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import text_of
from ..locking import writers
from ..ops.declaration import leading_tensor
from ..types import OpImpl


@dataclass(frozen=True)
class ArgumentKind:
    """The kind of arguments of a ban: the leading tensor's dtype, rank, layout and device, and the layer."""

    dtype: torch.dtype | None
    rank: int
    layout: str
    device: str
    scope: str | None

    @classmethod
    def of(cls, args: tuple[Any, ...], scope: str | None) -> ArgumentKind:
        """Return the kind of a call's arguments."""
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
    """The number and the reason of an implementation's failures for a kind of arguments."""

    count: int
    cause: str


class FailureLog:
    """The bans: implementations that failed where another one succeeded. Owned by one manager."""

    WIDEN_AFTER = 3  # distinct kinds of arguments, then the implementation is banned as a whole

    def __init__(self) -> None:
        self._failures: dict[tuple[str, str], dict[ArgumentKind, Failure]] = {}
        self._reported: set[tuple[str, str, str]] = set()

    def record(self, impl: OpImpl, kind: ArgumentKind, error: BaseException) -> None:
        """Ban an implementation for a kind of arguments."""
        with writers:
            kinds = dict(self._failures.get((impl.op_name, impl.impl_id), {}))
            before = kinds.get(kind)
            kinds[kind] = Failure(before.count + 1 if before else 1, text_of(error))
            self._failures = {**self._failures, (impl.op_name, impl.impl_id): kinds}

    def is_new_problem(self, impl: OpImpl, problem: str) -> bool:
        """Whether a kind of problem is new for an implementation, and note it; each call's text may differ."""
        key = (impl.op_name, impl.impl_id, problem)
        news = key not in self._reported
        self._reported.add(key)
        return news

    def as_a_whole(self, impl: OpImpl) -> str:
        """Return why an implementation is banned for all calls; empty if it is not."""
        kinds = self._failures.get((impl.op_name, impl.impl_id), {})
        if len(kinds) < self.WIDEN_AFTER:
            return ""
        return f"banned: it failed for {len(kinds)} kinds of arguments, last {next(reversed(kinds.values())).cause}"

    def for_kind(self, impl: OpImpl, kind: ArgumentKind) -> str:
        """Return why an implementation is banned for a kind of arguments; empty if it is not."""
        failure = self._failures.get((impl.op_name, impl.impl_id), {}).get(kind)
        return f"banned for {kind}: {failure.cause} ({failure.count} times)" if failure else ""

    def for_some_kinds(self, impl: OpImpl, scope: str | None) -> str:
        """Return the kinds of arguments in this scope that an implementation is banned for, and why; empty for none."""
        return "; ".join(self.for_kind(impl, kind) for kind in sorted(self.kinds(impl, scope), key=str))

    def kinds(self, impl: OpImpl, scope: str | None) -> frozenset[ArgumentKind]:
        """Return the kinds of arguments in this scope for which an implementation must not run."""
        kinds = self._failures.get((impl.op_name, impl.impl_id), {})
        return frozenset(kind for kind in kinds if kind.scope == scope)

    def has_bans(self, op_name: str) -> bool:
        """Whether an implementation of the operator is banned for some calls."""
        return any(op == op_name for op, _ in self._failures)

    def failures(self) -> Mapping[tuple[str, str], Mapping[ArgumentKind, Failure]]:
        """Return all bans: (operator, implementation id) → kind of arguments → failure."""
        return self._failures

    def clear(self, op_name: str | None = None) -> Mapping[tuple[str, str], Mapping[ArgumentKind, Failure]]:
        """Lift the bans of one operator, or all; return the argument for :meth:`restore`."""
        with writers:
            before = self._failures
            self._failures = {} if op_name is None else {key: bans for key, bans in before.items() if key[0] != op_name}
            return before

    def restore(self, before: Mapping[tuple[str, str], Mapping[ArgumentKind, Failure]]) -> None:
        """Undo a :meth:`clear`."""
        with writers:
            self._failures = {key: dict(bans) for key, bans in before.items()}
