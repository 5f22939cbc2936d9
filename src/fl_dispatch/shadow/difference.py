"""The difference between the results of two runs of one call, in tolerances of its operator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops import Operator
from ..ops.results import errors, flat
from ..run.arguments import Call


@dataclass(frozen=True)
class Difference:
    """The largest difference between two results.

    Args:
        tolerances: the size; NaN if one of the two is not a number, infinite if the results cannot be compared.
        where: the place, in words.
    """

    tolerances: float
    where: str


def difference(operator: Operator, call: Call, result: Any, second: Call, other: Any) -> Difference:
    """Return the largest difference between the results, and between the states that were written."""
    results, others = flat(result), flat(other)
    if len(results) != len(others):
        return Difference(math.inf, f"{len(results)} results instead of {len(others)}")
    pairs = [(f"output {index}", *pair) for index, pair in enumerate(zip(results, others, strict=True))]
    if operator.small_state is not None and call.holds_state():
        states = (operator.small_state.written(*operator.operands(one.args)) for one in (call, second))
        pairs += [(f"state {index}", *pair) for index, pair in enumerate(zip(*states, strict=True))]
    numbers = [pair for pair in pairs if isinstance(pair[2], Tensor) and pair[2].is_floating_point()]
    worst = Difference(0.0, "")
    args = call.args
    for where, one, wanted in numbers or pairs:  # equal weights may stand for equal scores in another order
        found = _of_tensors(operator, args, where, one, wanted)
        if not found.tolerances <= worst.tolerances:
            worst = found
    return worst


def _of_tensors(operator: Operator, args: tuple[Any, ...], where: str, one: Any, wanted: Any) -> Difference:
    """Compare two results: the largest error in tolerances, and where it is."""
    if not (isinstance(one, Tensor) and isinstance(wanted, Tensor)):
        return Difference(0.0 if one is wanted else math.inf, f"{where} is {type(one).__name__}")
    if one.shape != wanted.shape or one.dtype != wanted.dtype:
        text = f"{one.dtype} {list(one.shape)} instead of {wanted.dtype} {list(wanted.shape)}"
        return Difference(math.inf, f"{where} is {text}".replace("torch.", ""))
    if not one.numel():
        return Difference(0.0, "")
    if not one.is_floating_point():
        wrong = int((one != wanted).sum())
        return Difference(math.inf if wrong else 0.0, f"{where}: {wrong} of {one.numel()} integers differ")
    wide = wanted.to(torch.float64 if wanted.dtype is torch.float64 else torch.float32)
    size = torch.where(wide.isfinite(), wide, 0.0).square().mean(-1, keepdim=True).sqrt().clamp(min=1.0)
    share = errors(one, wide, operator.tolerance(_tolerated(one.dtype), args), size)[1].flatten()
    place = share.argmax()  # NaN, if there is one
    largest, got, expected = torch.stack(
        (share[place], one.flatten()[place].to(wide.dtype), wide.flatten()[place])
    ).tolist()
    index = [int(part) for part in torch.unravel_index(place, one.shape)]
    text = f"{where} at {index}: {got:.6g} instead of {expected:.6g}, {largest:.3g} times the tolerance"
    return Difference(largest, text)


def _tolerated(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the tolerance; 8-bit formats are only ever copied, for example as keys in a cache."""
    return dtype if dtype.itemsize > 1 else torch.bfloat16
