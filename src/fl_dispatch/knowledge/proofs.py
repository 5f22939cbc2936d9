"""Proofs: implementations that have succeeded in this process."""

from __future__ import annotations

from ..types import OpImpl


class Proofs:
    """The implementations that have succeeded in this process, and those that are watched nevertheless.

    A success with arguments that an implementation was free to overwrite is a proof of its own.
    """

    def __init__(self) -> None:
        self._proven: frozenset[tuple[str, str, bool]] = frozenset()
        self._watched: frozenset[tuple[str, str]] = frozenset()

    def add(self, impl: OpImpl, *, wrote: bool) -> bool:
        """Record an implementation's success; return whether it is the first."""
        first = not (self.holds(impl, wrote=True) or self.holds(impl, wrote=False))
        self._proven |= {(impl.op_name, impl.impl_id, wrote)}
        return first

    def operators(self) -> frozenset[str]:
        """Return operators with an implementation that has succeeded."""
        return frozenset(op_name for op_name, _, _ in self._proven)

    def watch(self, impl: OpImpl) -> None:
        """Keep copies of what an implementation overwrites from now on, because it failed after a success."""
        self._watched |= {(impl.op_name, impl.impl_id)}

    def holds(self, impl: OpImpl, *, wrote: bool) -> bool:
        """Whether an implementation has succeeded; with ``wrote``, while free to overwrite arguments."""
        return (impl.op_name, impl.impl_id, wrote) in self._proven

    def watches(self, impl: OpImpl) -> bool:
        """Whether copies are kept although the implementation is proven."""
        return (impl.op_name, impl.impl_id) in self._watched
