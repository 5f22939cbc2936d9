"""Inputs of selective state spaces."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..declaration import Sample
from .recurrent import LENGTHS, Form, Pair, Recurrences


class _StateSpaces(Recurrences):
    """Source of inputs of ``selective_scan`` and ``selective_state_update``."""

    def rows(self, rows: int, heads: Pair, dims: Pair, form: Form) -> tuple[Tensor | None, ...]:
        """Return the operands before the states: ``x``, ``b`` and ``c`` are slices of one product."""
        (count, groups), (head_dim, state_size) = heads, dims
        values, keys = count * head_dim, groups * state_size
        x, b, c = torch.tensor_split(self.normal(rows, values + 2 * keys), (values, values + keys), dim=1)
        dt = self.normal(rows, count + 8)[:, 8:]
        # Some heads forget in a few tokens, some hardly at all.
        a = -torch.linspace(-4.0, 1.5, count).exp().to(self.device, self.wide)
        if form.by_column:
            a = a[:, None] * torch.linspace(0.25, 2.0, state_size).to(a)
        by_group = (rows, groups, state_size)
        d, dt_bias = (None, None) if form.bare else (self.normal(count), self.normal(count))
        x, b, c = x.view(rows, count, head_dim), b.view(by_group), c.mul_(state_size**-0.5).view(by_group)
        return x, dt, a, b, c, d, dt_bias

    def made_states(self, requests: int, heads: Pair, dims: Pair, form: Form) -> Tensor:
        dtype = self.dtype if form.half_states else self.wide
        return self.states(requests, heads[0], *dims, apart=form.apart, dtype=dtype)


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
