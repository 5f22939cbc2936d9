"""Inputs of layers with a state for each request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..declaration import Sample
from .source import Source, starts

SPARE_SLOTS = 3
"""Slots that belong to no request of a call."""
LENGTHS = (64, 5, 1, 130, 17)
Pair = tuple[int, int]
STALE = 100.0
"""The numbers in the slot of a request without a state."""


@dataclass(frozen=True)
class States(Source):
    """Source of states and of the slots of a call's requests."""

    def slots(self, requests: int) -> Tensor:
        """Return a slot for each request; slot 0 belongs to no request, as in hosts."""
        return (1 + self.order(requests + SPARE_SLOTS - 1)[:requests]).to(self.device)

    def states(
        self, requests: int, *shape: int, apart: int = 0, scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return states ``[slots, *shape]`` with ``apart`` unused elements between slots, as in a padded page."""
        size = math.prod(shape)
        page = self.normal(requests + SPARE_SLOTS, size + apart, scale=scale).to(dtype or self.dtype)
        return page.as_strided((len(page), *shape), (size + apart, *_contiguous(shape)))

    def new_requests(self, states: Tensor, slots: Tensor, new: Sequence[int], stale: float) -> Tensor:
        """Return ``has_state``: requests in ``new`` have none, and their slots are filled with ``stale``."""
        has_state = torch.ones(len(slots), dtype=torch.bool)
        has_state[list(new)] = False
        has_state = has_state.to(self.device)
        states[slots[~has_state].long()] = stale
        return has_state


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


class Convolutions(States):
    """Source of inputs of ``causal_conv1d`` and ``causal_conv1d_update``."""

    def parts(
        self, rows: int, requests: int, channels: int, width: int, bias: bool, channels_first: bool, apart: int
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """Return ``x`` as a slice of a projection, weights, states and slots."""
        x = self.normal(rows, channels + 24)[:, :channels]
        weight = self.normal(channels, width, scale=width**-0.5)
        if channels_first:
            states = self.states(requests, channels, width - 1, apart=apart)
        else:
            states = self.states(requests, width - 1, channels, apart=apart).transpose(1, 2)
        return x, weight, self.normal(channels) if bias else None, states, self.slots(requests)

    def sequences(
        self,
        label: str,
        lengths: Sequence[int],
        channels: int,
        *,
        width: int = 4,
        bias: bool = False,
        new: Sequence[int] | None = (),
        channels_first: bool = False,
        apart: int = 0,
        activation: str = "silu",
        padding: int = 0,
        stale: float = STALE,
        serving: bool = True,
    ) -> Sample:
        """Make a sample of ragged sequences without states for those in ``new``; ``None`` omits ``has_state``."""
        rows = sum(lengths) + padding
        x, weight, bias_, states, slots = self.parts(rows, len(lengths), channels, width, bias, channels_first, apart)
        has_state = None if new is None else self.new_requests(states, slots, new, stale)
        args = (x, weight, bias_, states, slots, starts(lengths).to(self.device), has_state, activation)
        return Sample(label, args, serving)

    def tokens(
        self,
        label: str,
        requests: int,
        channels: int,
        *,
        width: int = 4,
        bias: bool = False,
        channels_first: bool = False,
        apart: int = 0,
        activation: str = "silu",
        serving: bool = True,
    ) -> Sample:
        """Make a sample with one token per request."""
        parts = self.parts(requests, requests, channels, width, bias, channels_first, apart)
        return Sample(label, (*parts, activation), serving)


def conv_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``causal_conv1d``."""
    sample = Convolutions(dtype, device, generator).sequences
    yield sample("5 prompts of 1 to 130 tokens", LENGTHS, 256, new=range(5))
    yield sample("prompts that go on, and new ones", LENGTHS, 384, new=(1, 3))
    yield sample("with bias, padded pages", LENGTHS, 128, new=(0,), bias=True, apart=40)
    yield sample("channels first", LENGTHS, 128, new=(2,), channels_first=True)
    yield sample("every request has a state", (9, 30), 64, new=None)
    yield sample("a request without tokens, padded batch", (9, 0, 3), 64, new=(2,), padding=5)
    yield sample("no activation, width 3", (9, 2), 64, width=3, activation="none", serving=False)
    yield sample("width 2, one channel", (4,), 1, width=2, serving=False)
    yield sample("odd number of channels", (6, 1), 67, new=(0,), serving=False)
    yield sample("empty batch", (), 64, serving=False)


def conv_probes(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``causal_conv1d``: long and many sequences."""
    sample = Convolutions(dtype, device, generator).sequences
    yield sample("1,100 and 4,100 tokens", (1100, 4100), 32, new=(0,), serving=False)
    yield sample("300 sequences of 1 to 5 tokens", [1 + number % 5 for number in range(300)], 32, new=range(0, 300, 7),
                 serving=False)  # fmt: skip
    yield sample("8,192 channels", (3, 7), 8192, new=(1,), serving=False)
    yield sample("NaN in slots of new requests", (9, 1, 3), 64, new=(0, 1), stale=math.nan, serving=False)


def conv_update_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``causal_conv1d_update``."""
    sample = Convolutions(dtype, device, generator).tokens
    yield sample("1 request", 1, 8192)
    yield sample("32 requests", 32, 2048)
    yield sample("with bias, padded pages", 7, 256, bias=True, apart=40)
    yield sample("channels first", 5, 128, channels_first=True)
    yield sample("no activation, width 3", 5, 64, width=3, activation="none", serving=False)
    yield sample("width 2, one channel", 2, 1, width=2, serving=False)
    yield sample("odd number of channels", 3, 67, serving=False)
    yield sample("empty batch", 0, 64, serving=False)


def conv_update_probes(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``causal_conv1d_update``: many requests."""
    sample = Convolutions(dtype, device, generator).tokens
    yield sample("520 requests", 520, 96, bias=True, serving=False)


@dataclass(frozen=True)
class Form:
    """The form of a sample's operands.

    Args:
        apart: elements between the states of two slots.
        half_states: whether states have the dtype of the rows.
        by_key: whether the keys of a value are contiguous in a state, as in some hosts.
        bare: whether ``d`` and ``dt_bias`` are omitted.
        by_column: whether each column of a head's state has a decay.
    """

    apart: int = 0
    half_states: bool = False
    by_key: bool = False
    bare: bool = False
    by_column: bool = False


class Recurrences(States):
    """Source of inputs of an operator for prompts, and of its form for one token per request."""

    def rows(self, rows: int, heads: Pair, dims: Pair, form: Form) -> tuple[Tensor | None, ...]:
        """Return the operands before the states."""
        raise NotImplementedError

    def made_states(self, requests: int, heads: Pair, dims: Pair, form: Form) -> Tensor:
        """Return the states, in float32 or in the dtype of the rows."""
        raise NotImplementedError

    def last(self, dims: Pair) -> tuple[float, ...]:
        """Return the operands after all others."""
        return ()

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of decays in models, and of most states."""
        return torch.promote_types(self.dtype, torch.float32)

    def sequences(
        self,
        label: str,
        lengths: Sequence[int],
        heads: Pair,
        dims: Pair,
        *,
        new: Sequence[int] | None = (),
        padding: int = 0,
        stale: float = STALE,
        serving: bool = True,
        **form: Any,
    ) -> Sample:
        """Make a sample of ragged sequences without states for those in ``new``; ``None`` omits ``has_state``.

        Args:
            label: see :class:`Sample`.
            lengths: rows of each sequence.
            heads: heads of keys and of values; or heads and groups.
            dims: elements of a head's key and value; or of a head and of a state.
            new: the sequences without a state.
            padding: rows that no sequence covers.
            stale: the numbers in the slots of new requests.
            serving: see :class:`Sample`.
            form: see :class:`Form`.
        """
        states, slots = self.made_states(len(lengths), heads, dims, Form(**form)), self.slots(len(lengths))
        has_state = None if new is None else self.new_requests(states, slots, new, stale)
        rows = self.rows(sum(lengths) + padding, heads, dims, Form(**form))
        args = (*rows, states, slots, starts(lengths).to(self.device), has_state, *self.last(dims))
        return Sample(label, args, serving)

    def tokens(self, label: str, requests: int, heads: Pair, dims: Pair, serving: bool = True, **form: Any) -> Sample:
        """Make a sample with one token per request."""
        states = self.made_states(requests, heads, dims, Form(**form))
        rows = self.rows(requests, heads, dims, Form(**form))
        return Sample(label, (*rows, states, self.slots(requests), *self.last(dims)), serving)


class DeltaRules(Recurrences):
    """Source of inputs of ``gated_delta_rule`` and ``gated_delta_rule_update``."""

    def rows(self, rows: int, heads: Pair, dims: Pair, form: Form) -> tuple[Tensor | None, ...]:
        """Return query, key and value as slices of one product, both gates, and ``a_log`` and ``dt_bias``."""
        (key_heads, value_heads), (key_dim, value_dim) = heads, dims
        keys, values = key_heads * key_dim, value_heads * value_dim
        product = torch.tensor_split(self.normal(rows, 2 * keys + values, scale=2.0), (keys, 2 * keys), dim=1)
        query, key = (part.view(rows, key_heads, key_dim) for part in product[:2])
        a, b = self.normal(rows, 2 * value_heads).chunk(2, dim=1)
        # Some heads forget in a few tokens, some hardly at all.
        a_log = torch.linspace(-4.0, 1.5, value_heads).to(self.device, self.wide)
        return query, key, product[2].view(rows, value_heads, value_dim), a, b, a_log, self.normal(value_heads)

    def made_states(self, requests: int, heads: Pair, dims: Pair, form: Form) -> Tensor:
        shape, dtype = (dims[::-1] if form.by_key else dims), self.dtype if form.half_states else self.wide
        states = self.states(requests, heads[1], *shape, apart=form.apart, scale=0.7, dtype=dtype)
        return states.transpose(2, 3) if form.by_key else states

    def last(self, dims: Pair) -> tuple[float, ...]:
        return (dims[0] ** -0.5,)


def delta_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``gated_delta_rule``."""
    sample = DeltaRules(dtype, device, generator).sequences
    yield sample("5 prompts of 1 to 130 tokens", LENGTHS, (2, 4), (128, 128), new=range(5))
    yield sample("prompts that go on, and new ones", LENGTHS, (2, 4), (64, 64), new=(1, 3))
    yield sample("padded pages and batch", (20, 0, 65), (4, 4), (32, 64), new=(0,), apart=48, padding=3)
    yield sample("every request has a state", (9, 30), (2, 6), (64, 64), new=None)
    yield sample("states of the model's type", (70, 5), (2, 4), (64, 64), new=(1,), half_states=True)
    yield sample("keys side by side, padded pages", (70, 5), (2, 4), (64, 64), new=(1,), apart=48, by_key=True)
    yield sample("key size 24, value size 40, odd heads", (70, 2), (3, 3), (24, 40), new=(0,), serving=False)
    yield sample("one token", (1,), (1, 1), (32, 32), new=(0,), serving=False)
    yield sample("empty batch", (), (2, 4), (32, 32), serving=False)


def delta_probes(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``gated_delta_rule``: long and many sequences."""
    sample = DeltaRules(dtype, device, generator).sequences
    yield sample("1,100 tokens", (1100,), (1, 2), (32, 32), new=(0,), serving=False)
    yield sample("lengths around 64 and 128", (63, 64, 65, 127, 128, 129), (1, 2), (16, 16), new=(0, 3), serving=False)
    yield sample(
        "NaN in slots of new requests", (9, 1, 70), (1, 2), (64, 64), new=(0, 1), stale=math.nan, serving=False
    )
    yield sample("300 sequences of 1 to 5 tokens", [1 + number % 5 for number in range(300)], (1, 1), (16, 16),
                 new=range(0, 300, 7), serving=False)  # fmt: skip


def delta_update_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``gated_delta_rule_update``."""
    sample = DeltaRules(dtype, device, generator).tokens
    yield sample("1 request, 16 and 32 heads", 1, (16, 32), (128, 128))
    yield sample("8 requests", 8, (2, 4), (128, 128))
    yield sample("padded pages", 5, (4, 4), (64, 32), apart=48)
    yield sample("padded pages, head size 64", 5, (2, 4), (64, 64), apart=48)
    yield sample("states of the model's type", 3, (2, 4), (64, 64), half_states=True)
    yield sample("keys side by side, padded pages", 5, (2, 4), (64, 64), apart=48, by_key=True)
    yield sample("key size 24, value size 40, odd heads", 3, (3, 9), (24, 40), serving=False)
    yield sample("one head", 1, (1, 1), (32, 32), serving=False)
    yield sample("empty batch", 0, (2, 4), (32, 32), serving=False)


def delta_update_probes(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``gated_delta_rule_update``: many requests."""
    sample = DeltaRules(dtype, device, generator).tokens
    yield sample("520 requests", 520, (1, 1), (16, 16), serving=False)
