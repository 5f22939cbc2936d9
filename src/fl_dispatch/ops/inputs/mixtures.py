"""Mixtures of experts for samples: the routing of tokens, and weights of quantized experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..quantization import LARGEST, rounded, unpacked
from .quantized import SUM_TIE_MARGIN, TIE_MARGIN, Products, TieFree

PLAIN = "_no_mul"
"""The suffix of activations for experts without a gate."""


def choose(tokens: int, experts: int, topk: int, generator: torch.Generator) -> Tensor:
    """Return distinct experts for each token, ``[tokens, topk]``, int32."""
    return torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :topk].int()


@dataclass(frozen=True)
class Mixture:
    """The sizes and options of a sample's mixture of experts.

    Args:
        tokens: number of rows.
        experts: number of experts on all ranks.
        topk: experts of a token.
        hidden: elements of a row.
        inner: elements between the two products of an expert.
        activation: see ``fused_moe``.
        on_input: whether routing weights multiply inputs.
        local: the experts on this rank, by default all.
        padding: number of last tokens, which choose no expert.
        biases: whether experts have biases.
        out: whether ``out`` is given.
    """

    tokens: int
    experts: int
    topk: int
    hidden: int
    inner: int
    activation: str = "silu"
    on_input: bool = False
    local: Sequence[int] | None = None
    padding: int = 0
    biases: bool = False
    out: bool = False

    @property
    def here(self) -> int:
        """Return the number of experts on this rank."""
        return self.experts if self.local is None else len(self.local)

    @property
    def inputs(self) -> int:
        """Return the rows of an expert's first weight."""
        return self.inner if self.activation.endswith(PLAIN) else 2 * self.inner

    def routing(
        self, device: torch.device, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, str, bool, Tensor | None]:
        """Return the arguments from ``topk_weights`` to ``expert_map``."""
        ids = choose(self.tokens, self.experts, self.topk, generator)
        ids[self.tokens - self.padding :] = -1
        weights = torch.randn(self.tokens, self.topk, generator=generator).softmax(-1)
        expert_map = None
        if self.local is not None:
            expert_map = torch.full((self.experts,), -1, dtype=torch.int32)
            expert_map[list(self.local)] = torch.arange(self.here, dtype=torch.int32)
            expert_map = expert_map.to(device)
        return weights.to(device), ids.to(device), self.activation, self.on_input, expert_map


# -- rows quantized too -----------------------------------------------------------------------------------------------


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": _gated, "relu2_no_mul": lambda x: x.relu().square()}
)
"""Activations in the samples of quantized mixtures; each maps zeros to zeros."""


@dataclass(frozen=True)
class Scaled:
    """Mixtures with rows that every right implementation quantizes alike before both products.

    An intermediate near a rounding tie may be quantized up or down, depending on float32 rounding, and the result then
    differs by a whole step. So the weights of each expert's elements with such intermediates are set to zero.

    Args:
        dtype: dtype of rows and results.
        generator: draws the numbers, on the CPU.
        quantized: type of weights and quantized rows.
        block: side of a weight's block with one scale, and elements of a row with one scale; 0 for no blocks.
        static: whether the scales of rows are given.
    """

    dtype: torch.dtype
    generator: torch.Generator
    quantized: torch.dtype
    block: int = 0
    static: bool = False

    def arguments(self, mixture: Mixture) -> tuple[Any, ...]:
        """Return the arguments of ``scaled_moe``, on the CPU."""
        products = Products(self.dtype, torch.device("cpu"), self.generator, self.quantized)
        here, inputs, hidden, inner = mixture.here, mixture.inputs, mixture.hidden, mixture.inner
        w13, w2 = products.experts(here, inputs, hidden, self.block), products.experts(here, hidden, inner, self.block)
        routing = mixture.routing(torch.device("cpu"), self.generator)
        biases = [products.normal(here, size, scale=0.25) if mixture.biases else None for size in (inputs, hidden)]
        size = 3.0 / self._tie_free.largest
        given = [products.scales(here, size=size) if self.static else None for _ in range(2)]
        x = self._tie_free.rows(mixture.tokens, hidden, group=self.block)
        for scale in () if given[0] is None else given[0]:
            x = self._tie_free.drop_ties(x, scale.double())
        out = products.normal(mixture.tokens, hidden) if mixture.out else None
        (weight, scale), (first, second) = w13, given

        def numbers(expert: int) -> Tensor:
            return weight[expert].double() * _spread(scale[expert].double(), self.block, weight.shape[1:])

        def rows(x: Tensor, expert: int) -> Tensor:
            return self._tie_free.quantized_rows(x, None if first is None else first[expert].double(), self.block)

        def near_ties(x: Tensor, expert: int) -> Tensor:
            return self._tie_free.near_ties(x, None if second is None else second[expert].double(), self.block)

        _drop_ties(x, weight, biases[0], routing, numbers, rows, near_ties)
        return x, *w13, *w2, *routing, *biases, *given, self.block, out

    @property
    def _tie_free(self) -> TieFree:
        largest = LARGEST[str(self.quantized).removeprefix("torch.")]
        return TieFree(self.dtype, torch.device("cpu"), self.generator, self.quantized, largest)


def _drop_ties(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    routing: Any,
    numbers: Callable[[int], Tensor],
    rows: Callable[[Tensor, int], Tensor],
    near_ties: Callable[[Tensor, int], Tensor],
    zero: int = 0,
) -> None:
    """Write zeros into ``weight`` and ``bias`` until no intermediate is near a tie.

    Args:
        x: rows of tokens.
        weight: the first product's weight.
        bias: the first product's bias.
        routing: see :meth:`Mixture.routing`.
        numbers: an expert → its weight.
        rows: the first product's rows and their expert → quantized rows.
        near_ties: the second product's rows and their expert → whether each number is near a tie.
        zero: the byte that stands for zeros in a weight.
    """
    topk_weights, topk_ids, activation, on_input, expert_map = routing
    local = topk_ids.long() if expert_map is None else torch.where(topk_ids < 0, -1, expert_map.long()[topk_ids])
    for expert in range(weight.shape[0]):
        tokens, choices = (local == expert).nonzero(as_tuple=True)
        here = rows(x[tokens].double() * (topk_weights[tokens, choices, None].double() if on_input else 1), expert)
        added = None if bias is None else bias[expert]
        while len(tokens):
            between = functional.linear(here, numbers(expert), None if added is None else added.double())
            between = ACTIVATIONS[activation](between)
            found = near_ties(between, expert).any(0)
            if not found.any():
                break
            columns = found.repeat(weight.shape[1] // len(found))
            weight[expert].view(torch.uint8)[columns] = zero  # PyTorch has no masked write of float8
            if added is not None:
                added[columns] = 0


def _spread(scale: Tensor, block: int, shape: Sequence[int]) -> Tensor:
    """Expand scales of blocks to one for each element of a weight."""
    for dim, size in enumerate(shape if block else ()):
        scale = scale.repeat_interleave(block, dim).narrow(dim, 0, size)
    return scale


def scaled(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator, quantized: torch.dtype, **rest: Any
) -> Callable[..., tuple[Any, ...]]:
    """Return a function from a mixture to the arguments of ``scaled_moe``; ``rest`` as in :class:`Scaled`."""
    source = Scaled(dtype, generator, quantized, **rest)
    return lambda mixture: _on(device, source.arguments(mixture))


# -- weights alone quantized ------------------------------------------------------------------------------------------


def weight_only(
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    bits: int,
    group: int,
    zeros: bool = False,
    kind: torch.dtype = torch.int8,
    rounding: str = "",
) -> Callable[..., tuple[Any, ...]]:
    """Return a function from a mixture to arguments of ``weight_only_moe``; ``kind``: integers, or a type of floats."""
    products = Products(dtype, torch.device("cpu"), generator, kind)

    def arguments(mixture: Mixture) -> tuple[Any, ...]:
        here, inputs, hidden, inner = mixture.here, mixture.inputs, mixture.hidden, mixture.inner
        few_bits = partial(products.few_bit_experts, here, bits=bits, group=group, zeros=zeros)
        (*w13, zero13), (*w2, zero2) = few_bits(inputs, hidden), few_bits(hidden, inner)
        routing = mixture.routing(torch.device("cpu"), generator)
        biases = [products.normal(here, size, scale=0.25) if mixture.biases else None for size in (inputs, hidden)]
        x = products.normal(mixture.tokens, hidden)
        factors = [products.scales(here).float() if rounding == "nvfp4" else None for _ in range(2)]
        if rounding:
            _settle_rounded(x, w13, biases[0], factors, routing, rounding)
        out = products.normal(mixture.tokens, hidden) if mixture.out else None
        return _on(device, (x, *w13, *w2, *routing, *biases, zero13, zero2, out, *factors, rounding))

    return arguments


STEP = 1e-3
"""Least relative difference of two rounded numbers, above the difference of a row's scales."""


def _settle_rounded(
    x: Tensor,
    first: Sequence[Tensor],
    bias: Tensor | None,
    factors: Sequence[Tensor | None],
    routing: Any,
    rounding: str,
) -> None:
    """Drop ties as :func:`_drop_ties` does; ``first`` is the weight of the first product with its scales."""
    weight, scale = first

    def numbers(expert: int) -> Tensor:
        stored = unpacked(weight[expert]).double() - (8 if weight.dtype is torch.uint8 else 0)
        return (stored.view(*scale[expert].shape, -1) * scale[expert].double()[..., None]).flatten(1)

    def rows(x: Tensor, expert: int, factor: Tensor | None = factors[0]) -> Tensor:
        return rounded(x, rounding, None if factor is None else factor[expert : expert + 1])

    def near_ties(x: Tensor, expert: int) -> Tensor:
        gap = x.abs() * TIE_MARGIN + x.abs().amax(-1, keepdim=True) * SUM_TIE_MARGIN
        below, above = (rows(one, expert, factors[1]).abs() for one in (x - gap, x + gap))
        return (below - above).abs() > STEP * torch.maximum(below, above)

    _drop_ties(x, weight, bias, routing, numbers, rows, near_ties, 0x88 if weight.dtype is torch.uint8 else 0)


def _on(device: torch.device, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one.to(device) if isinstance(one, Tensor) else one for one in arguments)
