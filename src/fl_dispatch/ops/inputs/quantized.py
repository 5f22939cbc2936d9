"""Quantized matrices, and inputs that are quantized alike however intermediates are rounded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .source import Source

TIE_MARGIN = 1e-4
"""Relative distance of a quotient from the nearest tie: more than the error of float32 arithmetic."""
SUM_TIE_MARGIN = 2e-6
"""Distance of a sum from the nearest tie, relative to its largest term, because terms may cancel."""


@dataclass(frozen=True)
class TieFree(Source):
    """Source of rows that every right implementation quantizes alike, because no quotient is near a rounding tie.

    Args:
        quantized: the quantized type.
        largest: the quantized magnitude of a group's largest element.
    """

    quantized: torch.dtype
    largest: float

    def rows(self, rows: int, inner: int, *, group: int = 0, scale: float = 1.0) -> Tensor:
        """Return normal numbers ``[rows, inner]``; ``group`` as in the operator."""
        x = self.normal(rows, inner, scale=scale)
        for part in _groups(x, group):
            if part.numel():
                part.copy_(self.drop_ties(part, part.double().abs().amax(-1, keepdim=True) / self.largest))
        return x

    def with_scale(self, rows: int, inner: int, scale: float) -> Tensor:
        """Return normal numbers for a given scale; some are outside the range of the type."""
        x = self.normal(rows, inner, scale=self.largest * scale / 2)
        return self.drop_ties(x, torch.tensor(scale, dtype=torch.float32, device=self.device).double())

    def exact(self, rows: int, inner: int, scale: float) -> Tensor:
        """Return multiples of a scale, a power of two, that need no rounding; some exceed the range of the type."""
        numbers = self.normal(rows, inner, scale=self.largest / 2)
        return self._rounded(numbers.double()).mul(2 * scale).to(self.dtype)

    def apart(self, rows: int, inner: int, gap: int) -> Tensor:
        """Return rows with ``gap`` elements between them."""
        whole = self.normal(rows, inner + gap)
        whole[:, :inner] = self.rows(rows, inner)
        return whole[:, :inner]

    def gated(self, rows: int, width: int, *, group: int = 0, scale: Tensor | None = None) -> Tensor:
        """Return gates and factors ``[rows, 2 * width]``; their product is quantized alike, rounded or not."""
        gate, up = self.normal(rows, width), self.normal(rows, width)
        y = torch.nn.functional.silu(gate.double()) * up.double()
        gap = max(TIE_MARGIN, torch.finfo(self.dtype).eps)  # one rounding of the product, and one of the largest
        for part in _groups(y, group):
            if part.numel():
                largest = part.abs().amax(-1, keepdim=True)
                settled = self.drop_ties(part, largest / self.largest if scale is None else scale.double(), gap)
                part.copy_(torch.where(part.abs() == largest, part, settled) if scale is None else settled)
        return torch.cat((gate, up.masked_fill(y == 0, 0.0)), -1)

    def drop_ties(self, x: Tensor, scale: Tensor, gap: float = TIE_MARGIN) -> Tensor:
        """Replace numbers of ``x`` by zeros if their quotient is near a tie."""
        quotient = x.double() / scale
        below, above = (self._rounded(quotient * (1 + sign * gap)) for sign in (-1, 1))
        return torch.where(below == above, x, torch.zeros_like(x))

    def quantized_rows(self, rows: Tensor, scale: Tensor | None, group: int) -> Tensor:
        """Return quantized rows in float64, by a given scale or by their own."""
        result = rows.clone()
        for part in _groups(result, group):
            units = self._units(part, scale)
            part.copy_(self._rounded(part / units) * units)
        return result

    def near_ties(self, rows: Tensor, scale: Tensor | None, group: int) -> Tensor:
        """Return which numbers of such rows are near a tie, within the error of a float32 sum."""
        result = torch.empty_like(rows, dtype=torch.bool)
        for part, found in zip(_groups(rows, group), _groups(result, group), strict=True):
            quotient = part / self._units(part, scale)
            gap = quotient.abs() * TIE_MARGIN + self.largest * SUM_TIE_MARGIN
            found.copy_(self._rounded(quotient - gap) != self._rounded(quotient + gap))
        return result

    def _units(self, part: Tensor, scale: Tensor | None) -> Tensor:
        if scale is not None:
            return scale
        return (part.abs().amax(-1, keepdim=True) / self.largest).clamp(min=torch.finfo(torch.float32).tiny)

    def _rounded(self, quotient: Tensor) -> Tensor:
        kept = quotient.clamp(-self.largest, self.largest)
        return kept.round() if self.quantized is torch.int8 else kept.float().to(self.quantized).double()


CYCLE = (8, 7, 2, 2, 2, 1, 1, 1)
"""Magnitudes with mean square 16, a power of four. No quotient of two is a tie, except one half, and the largest of
many is 8 or 7."""
ODD = (8, 7, 7, 2, 2, 2, 1, 1, 0, 0, 0)
"""An odd number of magnitudes with the properties of ``CYCLE``."""


@dataclass(frozen=True)
class Normed(Source):
    """Source of rows with a norm that rounds to a power of two's multiple, so that results are quantized alike."""

    def rows(self, rows: int, hidden: int) -> Tensor:
        """Return ``[rows, hidden]``, each row in another order."""
        odd = 3 * hidden % len(CYCLE)  # 3 * 11 is 1 modulo 8
        cycles = torch.tensor(CYCLE * ((hidden - odd * len(ODD)) // len(CYCLE)) + ODD * odd)
        order = torch.rand((rows, hidden), generator=self.generator).argsort(-1)
        return (cycles[order] * self._signs(rows, hidden)).to(self.device, self.dtype)

    def pair(self, rows: int, hidden: int) -> tuple[Tensor, Tensor]:
        """Return two tensors of integers with the sum that :meth:`rows` returns."""
        drawn = torch.randint(-8, 9, (rows, hidden), generator=self.generator).to(self.device, self.dtype)
        return self.rows(rows, hidden) - drawn, drawn

    def weight(self, hidden: int) -> Tensor:
        """Return fours with random signs."""
        return (4 * self._signs(hidden)).to(self.device, self.dtype)

    def _signs(self, *shape: int) -> Tensor:
        return torch.randint(0, 2, shape, generator=self.generator) * 2 - 1


def none_and_infinite(x: Tensor, group: int) -> Tensor:
    """Return rows ``[5 or more, inner]``, some with a NaN or infinities in their first or last group."""
    x = x.clone()
    inf = float("inf")
    x[0, 1], x[1, group - 1], x[2, 0], x[3, -1], x[3, -2] = float("nan"), inf, -inf, inf, float("nan")
    return x


def _groups(x: Tensor, group: int) -> Iterator[Tensor]:
    if group < 0:
        yield x.view(1, -1)
    else:
        yield from torch.split(x, group or x.shape[1], dim=1)


@dataclass(frozen=True)
class Products(Source):
    """Source of quantized rows and weights; ``quantized`` is the type of both."""

    quantized: torch.dtype

    def matrix(self, rows: int, columns: int) -> Tensor:
        """Return numbers of the quantized type; for int8 over its whole range."""
        if self.quantized is torch.int8:
            drawn = torch.randint(-127, 128, (rows, columns), generator=self.generator)
        else:
            drawn = torch.randn((rows, columns), generator=self.generator) * 32
        return drawn.to(self.device, self.quantized)

    def scales(self, *shape: int, size: float = 1.0) -> Tensor:
        """Return positive scales between ``size / 2`` and ``size``, at least as wide as float32."""
        drawn = (torch.rand(shape, generator=self.generator) + 1) * size / 2
        return drawn.to(self.device, torch.promote_types(self.dtype, torch.float32))

    def both(self, rows: int, columns: int, inner: int, one_scale: bool = False) -> tuple[Tensor, ...]:
        """Return ``x``, its scales, ``weight`` and its scales, so that results are near one."""
        unit = self._unit(inner)
        weights = self.scales(1, 1, size=unit) if one_scale else self.scales(columns, 1, size=unit)
        return self.matrix(rows, inner), self.scales(rows, 1, size=unit), self.matrix(columns, inner), weights

    def blocks(self, rows: int, columns: int, inner: int, block: int) -> tuple[Tensor, ...]:
        """Return the tensors of :meth:`both`, with a scale for each block."""
        unit, across, down = self._unit(inner), -(-inner // block), -(-columns // block)
        x, weight = self.matrix(rows, inner), self.matrix(columns, inner)
        return x, self.scales(rows, across, size=unit), weight, self.scales(down, across, size=unit)

    def experts(self, experts: int, columns: int, inner: int, block: int = 0) -> tuple[Tensor, Tensor]:
        """Weights ``[experts, columns, inner]`` and their scales, so that products of numbers near one are near one."""
        down, across = (-(-columns // block), -(-inner // block)) if block else (columns, 1)
        scales = self.scales(experts, down, across, size=self._unit(inner) * inner**-0.25)
        return self.matrix(experts * columns, inner).view(experts, columns, inner), scales

    def few_bit_experts(
        self, experts: int, columns: int, inner: int, *, bits: int, group: int, zeros: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return ``weight``, ``scale`` and ``zero`` of ``weight_only_linear`` for each expert."""
        weight, scale, zero = self.weight(experts * columns, inner, bits, group, zeros)
        parts = (one if one is None else one.view(experts, columns, one.shape[1]) for one in (weight, scale, zero))
        return tuple(parts)  # type: ignore[return-value]

    def float4(self, columns: int, inner: int, group: int) -> tuple[Tensor, Tensor]:
        """Return e2m1 numbers, two per byte, and scales that are powers of two."""
        codes = torch.randint(0, 256, (columns, inner // 2), generator=self.generator).to(torch.uint8)
        powers = torch.randint(-1, 2, (columns, inner // group), generator=self.generator)
        scale = torch.exp2(powers - round(math.log2(inner) / 2) - 2.0)
        return codes.view(torch.float4_e2m1fn_x2).to(self.device), scale.to(self.device, self.dtype)

    def weight(
        self, columns: int, inner: int, bits: int, group: int, zeros: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return ``weight``, ``scale`` and ``zero`` of ``weight_only_linear``."""
        if self.quantized is torch.float4_e2m1fn_x2:
            return *self.float4(columns, inner, group), None
        if self.quantized is not torch.int8:
            scale = self.scales(columns, inner // group, size=self._unit(inner) * inner**-0.25)
            return self.matrix(columns, inner), scale.to(self.dtype), None
        if bits == 4:
            drawn = torch.randint(0, 256, (columns, inner // 2), generator=self.generator).to(torch.uint8)
        else:
            drawn = torch.randint(-127, 128, (columns, inner), generator=self.generator).to(torch.int8)
        low, high = (0, 16) if bits == 4 else (-20, 20)
        zero = torch.randint(low, high, (columns, inner // group), generator=self.generator, dtype=torch.int8)
        scale = self.scales(columns, inner // group, size=(0.3 if bits == 4 else 0.02) * inner**-0.5).to(self.dtype)
        return drawn.to(self.device), scale, zero.to(self.device) if zeros else None

    def _unit(self, inner: int) -> float:
        spread = 73.0 if self.quantized is torch.int8 else 32.0
        return float(inner**-0.25 / spread)
