"""Proofs: which implementations have succeeded in this process."""

from __future__ import annotations

from ..types import OpImpl


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

    def operators(self) -> frozenset[str]:
        """Operators of which some implementation has succeeded."""
        return frozenset(op_name for op_name, _, _ in self._proven)

    def watch(self, impl: OpImpl) -> None:
        """From now on keep copies of what it overwrites: it failed after it had been proven."""
        self._watched |= {(impl.op_name, impl.impl_id)}

    def holds(self, impl: OpImpl, *, wrote: bool) -> bool:
        """Whether it has succeeded; with ``wrote``, free to overwrite arguments."""
        return (impl.op_name, impl.impl_id, wrote) in self._proven

    def watches(self, impl: OpImpl) -> bool:
        """Whether copies are kept although it is proven."""
        return (impl.op_name, impl.impl_id) in self._watched
