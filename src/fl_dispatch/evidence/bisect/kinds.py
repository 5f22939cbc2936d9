"""Find the kinds of arguments for which a backend's replacement of a PyTorch operator is wrong.

Each call runs twice in an engine's process: by the backend, and on copies by PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ...aten_replacement import apply_blacklist, kept_operators
from ...aten_replacement.slot import Slot, draws
from ...devices import detect_device

ROUNDING = 16.0
"""Units in the last place, of an element or of the root mean square, by which two right results may differ."""


@dataclass(frozen=True)
class Span:
    """The smallest and the largest of some numbers; empty by default."""

    low: float = float("inf")
    high: float = float("-inf")

    def over(self, other: Span) -> Span:
        """Return the span of both."""
        return Span(min(self.low, other.low), max(self.high, other.high))

    def apart(self, other: Span, what: str) -> list[str]:
        """Return the bound of these numbers if they have no number in common with the others."""
        if self.high < other.low < float("inf"):
            return [f"{what} up to {self.high:.3g}"]
        return [f"{what} from {self.low:.3g}"] if self.low > other.high > float("-inf") else []


class Watch:
    """The comparison of one operator's calls, from now on until :meth:`end`.

    Args:
        operator: with its overload, ``aten::mm.out``.
    """

    def __init__(self, operator: str) -> None:
        self.operator, self.slot = operator, _over_backends(operator)
        self.calls = {False: 0, True: 0}
        self.sizes, self.values = {False: Span(), True: Span()}, {False: Span(), True: Span()}
        self.dtypes = set[str]()
        self.is_random = draws(operator.removeprefix("aten::"))
        self.slot.guard = self._compare

    def end(self) -> None:
        """Stop comparing calls."""
        self.slot.guard = None

    def _compare(self, *args: Any, **kwargs: Any) -> Any:
        self.slot.guard = None  # for calls from within
        copies = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        given = tree_map_only(Tensor, Tensor.clone, copies)
        kept = kept_operators()
        try:
            found = self.slot.run_native(*args, **kwargs)
            apply_blacklist({*kept, self.operator})
            expected = self.slot.run_native(*copies[0], **copies[1])
            self._note(given, found, expected)
        finally:
            apply_blacklist(kept)
            self.slot.guard = self._compare
        return found

    def _note(self, given: Any, found: Any, expected: Any) -> None:
        first = next((leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)), None)
        pairs = [
            (one, other, _wrong(one, other))
            for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True)
            if isinstance(one, Tensor)
        ]
        wrong = any(bool(mask.any()) for _, _, mask in pairs)
        self.calls[wrong] += 1
        if first is None:
            return
        self.sizes[wrong] = self.sizes[wrong].over(Span(first.numel(), first.numel()))
        if wrong:
            self.dtypes.add(str(first.dtype).removeprefix("torch."))
        if self.is_random:
            return
        for one, _, mask in pairs:
            for side in (False, True):
                if one.shape == first.shape and len(some := first[mask == side].double()):
                    span = Span(some.min().item(), some.max().item())
                    self.values[side] = self.values[side].over(span)

    def findings(self) -> list[str]:
        """Return the properties that only wrong calls have in common."""
        if not self.calls[True]:
            return []
        arguments = self.slot.schema.arguments
        written = ["out=" for one in arguments if one.is_out] or [
            "in place" for one in arguments if one.alias_info is not None and one.alias_info.is_write
        ]
        return [
            *sorted(self.dtypes),
            *written[:1],
            *self.sizes[True].apart(self.sizes[False], "elements"),
            *self.values[True].apart(self.values[False], "values"),
            f"{self.calls[True]} of {sum(self.calls.values())} calls",
        ]


def _wrong(found: Tensor, expected: Tensor) -> Tensor:
    """Return where two results differ by more than rounding."""
    if not found.is_floating_point():
        return found != expected
    scale = expected.double().abs().maximum(expected.double().square().mean().sqrt())
    near = (found.double() - expected.double()).abs() <= ROUNDING * torch.finfo(found.dtype).eps * scale
    return ~(near | (found == expected) | (found.isnan() & expected.isnan()))


@cache
def _over_backends(operator: str) -> Slot:
    """Return a slot in PyTorch's dispatcher above the backend's current kernel; it stays there and forwards calls."""
    return Slot(operator.removeprefix("aten::"), detect_device().dispatch_key)


_under_way: list[Watch] = []


def watch(operator: str) -> None:
    """Begin to compare an operator's calls in this process; :func:`end_watch` ends it."""
    _under_way.append(Watch(operator))


def end_watch() -> list[str]:
    """Return the kinds of arguments that the last :func:`watch` found to be wrong, or nothing."""
    if not _under_way:
        return []
    watched = _under_way.pop()
    watched.end()
    return watched.findings()
