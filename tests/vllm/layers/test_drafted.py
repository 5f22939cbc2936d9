"""Steps with drafts leave the states that one token after the other leaves, whatever was accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_dispatch.ops import OPERATORS
from vllm_fl.layers.drafted import Drafted

REQUESTS, WIDTH, CHANNELS, TAPS, STEPS = 3, 4, 6, 4, 6
HEADS, SIZE = 2, 3
EVEN = [[WIDTH] * REQUESTS] * STEPS
RAGGED = [[1 + (step + 2 * request) % WIDTH for request in range(REQUESTS)] for step in range(STEPS)]
"""Tokens of each request in each step."""
convolve = OPERATORS["causal_conv1d_update"].reference
advance = OPERATORS["selective_state_update"].reference
each = pytest.mark.parametrize("lengths", [EVEN, RAGGED], ids=["each request with all drafts", "some with fewer"])


def accepted(lengths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Accepted tokens of each request in each step: at least one, at most all."""
    return [[1 + (3 * step + request) % of for request, of in enumerate(row)] for step, row in enumerate(lengths)]


def described(slots: Tensor, before: Sequence[int], lengths: Sequence[int]) -> Drafted:
    """A step as vLLM describes it; ``before``: what was accepted in the step before."""
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    step = SimpleNamespace(
        num_accepted_tokens=torch.tensor(before, dtype=torch.int32),
        state_indices_tensor_d=slots,
        query_start_loc_d=starts,
        num_decode_tokens=int(starts[-1]),
    )
    found = Drafted.of(step)
    assert found is not None
    return found


def test_a_step_without_drafts_has_none() -> None:
    assert Drafted.of(SimpleNamespace(num_accepted_tokens=None)) is None


@each
def test_results_and_states_are_those_of_the_accepted_tokens(lengths: list[list[int]]) -> None:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight, bias, a, d, dt_bias = (
        drawn(CHANNELS, TAPS),
        drawn(CHANNELS),
        -drawn(HEADS).exp(),
        drawn(HEADS),
        drawn(HEADS),
    )
    slots = torch.arange(REQUESTS * WIDTH, dtype=torch.int32).view(REQUESTS, WIDTH).flip(0) + 1
    window, states = drawn(14, CHANNELS, TAPS - 2 + WIDTH), drawn(14, HEADS, CHANNELS // HEADS, SIZE)
    first, own = slots[:, 0].long(), torch.arange(REQUESTS, dtype=torch.int32)
    right_inputs, right_states = window[first, :, : TAPS - 1].clone(), states[first].clone()

    def update(x: Tensor, kept: Tensor, at: Tensor) -> Tensor:
        b, c = x[:, :SIZE].unsqueeze(1), x[:, -SIZE:].unsqueeze(1)
        return advance(x.unflatten(1, (HEADS, -1)), x[:, :HEADS], a, b, c, d, dt_bias, kept, at).flatten(1)

    before = [1] * REQUESTS
    for row, taken in zip(lengths, accepted(lengths), strict=True):
        x = drawn(sum(row), CHANNELS)
        found = _one_step(described(slots, before, row), x, weight, bias, window, states, update)
        expected = []
        for request, (tokens, count) in enumerate(zip(torch.split(x, row), taken, strict=True)):
            at = own[request : request + 1]
            inputs, kept = right_inputs.clone(), right_states.clone()
            for place, token in enumerate(tokens):
                convolved = convolve(token[None], weight, bias, inputs, at, "silu")
                expected.append(update(convolved, kept, at))
                if place == count - 1:
                    right_inputs[request], right_states[request] = inputs[request], kept[request]
        torch.testing.assert_close(found, torch.cat(expected))
        before = taken


def _one_step(
    drafted: Drafted,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    window: Tensor,
    states: Tensor,
    update: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    rows = drafted.convolved(drafted.apart(x), convolve, weight, bias, window, "silu")
    return drafted.together(torch.stack([update(rows[:, at], states, own) for at, own in drafted.each(states)], dim=1))


def test_a_request_whose_first_token_has_placeholders_begins_with_zeros() -> None:
    """Its block has what its last request left; that of a request which goes on stays."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    from vllm_fl.compat import state_drafts

    class Layer(MambaBase):
        get_state_shape = get_state_dtype = mamba_type = None  # type: ignore[assignment]

    layer = Layer()
    layer.kv_cache = (torch.ones(5, 2), torch.ones(5, 3, 2))
    compilation = SimpleNamespace(static_forward_context={"state": layer, "attention": object()})
    batch = SimpleNamespace(
        num_draft_tokens_per_req=np.array([2, 2, 2]),
        is_prefilling_np=np.array([True, False, True]),
        num_computed_tokens_np=np.array([0, 7, 3]),
        prefill_runs_as_decode_np=None,
    )
    tables = torch.tensor([[1, 2], [3, 0], [4, 0]], dtype=torch.int32), torch.zeros(3, 1, dtype=torch.int32)
    groups = [SimpleNamespace(layer_names=[name]) for name in ("state", "attention")]
    prepare = state_drafts._filled_up_decode(lambda self, batch, *rest: rest)
    owner = SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=compilation))
    prepare(owner, batch, None, tables, None, None, SimpleNamespace(kv_cache_groups=groups))
    assert batch.prefill_runs_as_decode_np.tolist() == [True, False, True]
    for state in layer.kv_cache:
        assert [bool(slot.any()) for slot in state] == [True, False, True, True, True]
