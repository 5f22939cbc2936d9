"""Inputs of selective state spaces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..declaration import Sample
from .recurrent import LENGTHS, STALE, States
from .source import starts


class _StateSpaces(States):
    """Source of inputs of ``selective_scan`` and ``selective_state_update``."""

    def rows(
        self, rows: int, heads: tuple[int, int], dims: tuple[int, int], bare: bool, by_column: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the operands before the states: ``x``, ``b`` and ``c`` are slices of one product."""
        (count, groups), (head_dim, state_size) = heads, dims
        values, keys = count * head_dim, groups * state_size
        x, b, c = torch.tensor_split(self.normal(rows, values + 2 * keys), (values, values + keys), dim=1)
        dt = self.normal(rows, count + 8)[:, 8:]
        # Some heads forget in a few tokens, some hardly at all.
        a = -torch.linspace(-4.0, 1.5, count).exp().to(self.device, torch.promote_types(self.dtype, torch.float32))
        if by_column:
            a = a[:, None] * torch.linspace(0.25, 2.0, state_size).to(a)
        by_group = (rows, groups, state_size)
        d, dt_bias = (None, None) if bare else (self.normal(count), self.normal(count))
        x, b, c = x.view(rows, count, head_dim), b.view(by_group), c.mul_(state_size**-0.5).view(by_group)
        return x, dt, a, b, c, d, dt_bias

    def slots_of(
        self, requests: int, heads: tuple[int, int], dims: tuple[int, int], apart: int, half_states: bool
    ) -> tuple[Tensor, Tensor]:
        """Return states, in float32 or in the model's dtype, and the requests' slots."""
        dtype = self.dtype if half_states else torch.promote_types(self.dtype, torch.float32)
        return self.states(requests, heads[0], *dims, apart=apart, dtype=dtype), self.slots(requests)

    def sequences(
        self,
        label: str,
        lengths: Sequence[int],
        heads: tuple[int, int],
        dims: tuple[int, int],
        *,
        new: Sequence[int] | None = (),
        apart: int = 0,
        padding: int = 0,
        half_states: bool = False,
        bare: bool = False,
        by_column: bool = False,
        stale: float = STALE,
        serving: bool = True,
    ) -> Sample:
        """Make a sample of ragged sequences without states for those in ``new``; ``None`` omits ``has_state``.

        Args:
            label: see :class:`Sample`.
            lengths: rows of each sequence.
            heads: heads and groups.
            dims: elements of a head, and of a state.
            new: the sequences without a state.
            apart: elements between the states of two slots.
            padding: rows that no sequence covers.
            half_states: whether states have the dtype of ``x``.
            bare: whether ``d`` and ``dt_bias`` are omitted.
            by_column: whether each column of a head's state has a decay.
            stale: the numbers in the slots of new requests.
            serving: see :class:`Sample`.
        """
        states, slots = self.slots_of(len(lengths), heads, dims, apart, half_states)
        has_state = None if new is None else self.new_requests(states, slots, new, stale)
        rows = self.rows(sum(lengths) + padding, heads, dims, bare, by_column)
        return Sample(label, (*rows, states, slots, starts(lengths).to(self.device), has_state), serving)

    def tokens(
        self,
        label: str,
        requests: int,
        heads: tuple[int, int],
        dims: tuple[int, int],
        *,
        apart: int = 0,
        half_states: bool = False,
        bare: bool = False,
        by_column: bool = False,
        serving: bool = True,
    ) -> Sample:
        """Make a sample with one token per request."""
        rows = self.rows(requests, heads, dims, bare, by_column)
        return Sample(label, (*rows, *self.slots_of(requests, heads, dims, apart, half_states)), serving)


def scan_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``selective_scan``."""
    sample = _StateSpaces(dtype, device, generator).sequences
    yield sample("5 prompts of 1 to 130 tokens", LENGTHS, (4, 1), (64, 128), new=range(5))
    yield sample("prompts that go on, and new ones", LENGTHS, (4, 2), (32, 64), new=(1, 3))
    yield sample("padded pages and batch", (20, 0, 65), (4, 4), (32, 64), new=(0,), apart=48, padding=3)
    yield sample("every request has a state", (9, 30), (6, 2), (64, 64), new=None)
    yield sample("states of the model's type", (70, 5), (4, 1), (64, 64), new=(1,), half_states=True)
    yield sample("Mamba: a decay for each column", LENGTHS, (96, 1), (1, 16), new=(1, 3), by_column=True)
    yield sample("neither d nor a bias", (12, 3), (4, 1), (32, 32), new=(1,), bare=True, serving=False)
    yield sample("head size 24, state size 40, 3 groups", (70, 2), (9, 3), (24, 40), new=(0,), serving=False)
    yield sample("decays of columns, head size 3, 2 groups", (70, 2), (4, 2), (3, 8), new=(0,), bare=True,
                 by_column=True, serving=False)  # fmt: skip
    yield sample("one token of one element", (1,), (1, 1), (1, 1), new=(0,), serving=False)
    yield sample("empty batch", (), (4, 2), (32, 32), serving=False)


def scan_probes(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``selective_scan``: long and many sequences."""
    sample = _StateSpaces(dtype, device, generator).sequences
    yield sample("1,100 tokens", (1100,), (2, 1), (32, 32), new=(0,), serving=False)
    yield sample("lengths around 64 and 128", (63, 64, 65, 127, 128, 129), (2, 1), (16, 16), new=(0, 3), serving=False)
    yield sample(
        "NaN in slots of new requests", (9, 1, 70), (2, 1), (64, 64), new=(0, 1), stale=math.nan, serving=False
    )
    yield sample("300 sequences of 1 to 5 tokens", [1 + number % 5 for number in range(300)], (1, 1), (16, 16),
                 new=range(0, 300, 7), serving=False)  # fmt: skip


def update_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``selective_state_update``."""
    sample = _StateSpaces(dtype, device, generator).tokens
    yield sample("1 request, 48 heads", 1, (48, 1), (64, 128))
    yield sample("8 requests", 8, (4, 2), (64, 128))
    yield sample("padded pages", 5, (4, 4), (64, 32), apart=48)
    yield sample("states of the model's type", 3, (4, 1), (64, 64), half_states=True)
    yield sample("Mamba: a decay for each column", 6, (96, 1), (1, 16), by_column=True)
    yield sample("neither d nor a bias", 3, (4, 1), (32, 32), bare=True, serving=False)
    yield sample("head size 24, state size 40, 3 groups", 3, (9, 3), (24, 40), serving=False)
    yield sample("decays of columns, head size 3, 2 groups", 3, (4, 2), (3, 8), bare=True, by_column=True,
                 serving=False)  # fmt: skip
    yield sample("one element", 1, (1, 1), (1, 1), serving=False)
    yield sample("empty batch", 0, (4, 2), (32, 32), serving=False)


def update_probes(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``selective_state_update``: many requests."""
    sample = _StateSpaces(dtype, device, generator).tokens
    yield sample("520 requests", 520, (2, 1), (16, 16), serving=False)
