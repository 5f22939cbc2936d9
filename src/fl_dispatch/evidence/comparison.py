"""Compare numbers with the float64 reference: the largest error, elements without a value, and the bias of rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import Tolerance
from ..ops.declaration import HALF_TYPES
from ..ops.results import errors

MOST_BIAS = 0.15
"""Bias of half-type results towards zero, in units of the last place: rounding gives 0, truncation 0.5."""
LEAST_ELEMENTS = 2048
"""Smallest number of elements to judge a bias: with fewer, unbiased errors may exceed a tenth of :data:`MOST_BIAS`."""
LEAST_ROWS = 8
"""Smallest number of rows to judge a bias: the elements of a norm's row share a factor, so their errors depend on each
other."""
Named = list[tuple[str, Tensor | None]]


@dataclass(frozen=True)
class Deviation:
    """The largest error.

    Args:
        share: share of the tolerance; above 1 the error is too large.
        error, expected: the element's error and expected value.
        where: the output and the element, such as ``output 0 at [3, 17]``.
        sample: the input's label.
    """

    share: float
    error: float
    expected: float
    where: str
    sample: str


@dataclass
class Rounding:
    """Errors of half-type results in units of the last place, over all elements compared.

    Args:
        elements: the number of elements.
        rows: the number of their rows.
        towards_zero: sum of the errors, positive if the result is too small in magnitude; each at most 1.
        total: sum of their magnitudes; each at most 4.
    """

    elements: int = 0
    rows: int = 0
    towards_zero: float = 0.0
    total: float = 0.0

    @property
    def bias(self) -> float:
        """Return the mean error towards zero."""
        return self.towards_zero / max(1, self.elements)

    @property
    def mean(self) -> float:
        """Return the mean magnitude of the error."""
        return self.total / max(1, self.elements)

    def __add__(self, other: Rounding) -> Rounding:
        return Rounding(
            self.elements + other.elements,
            self.rows + other.rows,
            self.towards_zero + other.towards_zero,
            self.total + other.total,
        )

    def problem(self, most_mean: float) -> str:
        """Return the problem, or empty; ``most_mean`` is the operator's bound of the mean error."""
        if self.elements < LEAST_ELEMENTS or self.rows < LEAST_ROWS:
            return ""
        if abs(self.bias) > MOST_BIAS:
            return (
                f"results lie {abs(self.bias):.2f} units of the last place too near to "
                f"{'zero' if self.bias > 0 else 'infinity'} on average, so they are not rounded to nearest"
            )
        if self.mean > most_mean:
            return (
                f"results are {self.mean:.2f} units of the last place off on average; rounding once gives 0.25, so the "
                "arithmetic is done in the half type"
            )
        return ""


@dataclass(frozen=True)
class Comparison:
    """One call's outputs against the expected ones.

    Args:
        problem: the problem, or empty.
        worst: the largest error.
        missing: outputs with NaN in place of expected numbers, and these elements.
        rounding: errors of half-type results.
    """

    problem: str
    worst: Deviation | None
    missing: dict[str, Tensor]
    rounding: Rounding


def compare(label: str, outputs: Named, expected: list[Tensor | None], tolerance: Tolerance) -> Comparison:
    """Compare the outputs of one call.

    Args:
        label: the input's label.
        outputs: outputs by name.
        expected: the expected outputs in float64.
        tolerance: the tolerance of an element.
    """
    problem, rounding = "", Rounding()
    worst: Deviation | None = None
    missing: dict[str, Tensor] = {}
    for (name, output), wanted in zip(outputs, expected, strict=True):
        if output is None or wanted is None or not output.numel():
            continue
        actual = output.to(device=wanted.device, dtype=torch.float64)
        nan = actual.isnan() & ~wanted.isnan()  # a row that no request covers stays NaN
        if nan.any():
            missing[name] = nan
            continue
        error, share = errors(output, wanted, tolerance)
        place = int(share.argmax())
        where = f"{name} at [{', '.join(map(str, _index(place, output.shape)))}]"
        values = [float(part.flatten()[place]) for part in (share, error, wanted, actual)]
        if worst is None or not values[0] <= worst.share:
            worst = Deviation(values[0], values[1], values[2], where, label)
        if not values[0] <= 1:
            wrong = int((~(share <= 1)).sum())
            problem = problem or (
                f"{name}: {wrong} of {actual.numel()} elements are wrong, the worst at {where.partition(' at ')[2]}: "
                f"{values[3]:.6g} instead of {values[2]:.6g}, {values[0]:.3g} times the tolerance"
            )
        elif output.dtype in HALF_TYPES:
            rows = output.shape[:-1].numel()
            rounding += _rounding(actual, wanted, output.dtype, rows)
    return Comparison(problem, worst, missing, rounding)


def _rounding(actual: Tensor, wanted: Tensor, dtype: torch.dtype, rows: int) -> Rounding:
    """Return errors in units of the last place of the expected value, for normal numbers."""
    kind = torch.finfo(dtype)
    normal = (wanted.abs() >= kind.tiny) & actual.isfinite() & (wanted.abs() <= kind.max)
    wanted, actual = wanted[normal], actual[normal]
    unit = torch.exp2(torch.floor(torch.log2(wanted.abs()))) * kind.eps
    error = (wanted - actual) * wanted.sign() / unit
    return Rounding(error.numel(), rows, float(error.clamp(-1, 1).sum()), float(error.abs().clamp(max=4).sum()))


def absent(outputs: Named, marked: Named, missing: dict[str, Tensor], mark: float) -> str:
    """Return in words whether the call left NaN elements unwritten.

    Args:
        outputs: results of a call with new memory full of NaN.
        marked: results of a call with new memory full of ``mark``; empty if there was none.
        missing: the NaN elements, by output.
        mark: the number.
    """
    for (name, output), (_, other) in zip(outputs, marked or outputs, strict=True):
        if name in missing and output is not None and other is not None:
            nan = missing[name].to(other.device)
            left = nan & (other == mark)
            count, unwritten = int(nan.sum()), int(left.sum())
            first = _index(int((left if unwritten else nan).flatten().int().argmax()), output.shape)
            place = f"the first at [{', '.join(map(str, first))}]"
            if unwritten:
                return f"{name}: {unwritten} of {output.numel()} elements are not written, {place}"
            return f"{name}: {count} of {output.numel()} elements are NaN, {place}"
    raise AssertionError("no element is missing")


def strays(operator_state: dict[str, Tensor], outputs: Named, expected: list[Tensor | None]) -> str:
    """Return the states that a call changed although the reference does not; empty if none.

    Args:
        operator_state: the state before the call, by the name of its output.
        outputs: the state after it, among others.
        expected: the state after the reference, in float64.
    """
    for (name, output), wanted in zip(outputs, expected, strict=True):
        if output is not None and wanted is not None and name in operator_state:
            old = operator_state[name]
            before = old.to(device=wanted.device, dtype=torch.float64)
            untouched = ((wanted == before) | (wanted.isnan() & before.isnan())).to(output.device)
            changed = (output != old) & ~(output.isnan() & old.isnan())
            count = int((untouched & changed).sum())
            if count:
                return f"it changes {count} elements of {name} that the call does not address"
    return ""


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        index.insert(0, flat % size)
        flat //= size
    return tuple(index)
