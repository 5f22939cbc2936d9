"""Promises of the routing and expert operators beyond their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fl_dispatch.backends.reference.impl import moe, quantized_moe, routing
from fl_dispatch.ops import OPERATORS, Sample
from fl_dispatch.ops.moe import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS, aligned_blocks


def samples(name: str, dtype: torch.dtype = torch.float32) -> list[Sample]:
    return list(OPERATORS[name].samples(dtype, torch.device("cpu"), torch.Generator().manual_seed(0)))


def choices(tokens: int, experts: int, topk: int) -> Tensor:
    return torch.rand(tokens, experts).argsort(-1)[:, :topk].int()


def experts(count: int, hidden: int = 24, inner: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 2 * inner, hidden) / hidden**0.5, torch.randn(count, hidden, inner) / inner**0.5


# ---- routing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["topk_softmax", "topk_sigmoid", "grouped_topk"])
def test_rounding_cannot_change_the_choice_of_a_sample(name: str, dtype: torch.dtype) -> None:
    choose = getattr(routing, name)
    for sample in samples(name, dtype):
        logits, *rest = sample.args
        ids = choose(logits, *rest)[1]
        for seed in range(3):
            noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(choose(logits.double() * (1 + 1e-7 * noise), *rest)[1], ids), sample.label


def test_samples_have_biases_that_change_some_choices() -> None:
    for name in ("topk_softmax", "topk_sigmoid", "grouped_topk"):
        biased = [sample for sample in samples(name) if sample.args[-1] is not None]
        assert biased
        for sample in biased:
            choose = getattr(routing, name)
            assert not torch.equal(choose(*sample.args)[1], choose(*sample.args[:-1], None)[1]), sample.label


def test_a_bias_moves_the_choice_and_not_the_weights() -> None:
    logits, bias = torch.randn(9, 16), torch.zeros(16)
    bias[5] = 10.0
    for choose, scores in ((routing.topk_softmax, logits.softmax(-1)), (routing.topk_sigmoid, logits.sigmoid())):
        weights, ids = choose(logits, 3, bias=bias)
        assert (ids[:, 0] == 5).all()
        assert torch.equal(weights, scores.gather(1, ids.long()))


def test_one_group_of_all_experts_is_the_plain_choice() -> None:
    logits, bias = torch.randn(9, 16), torch.randn(16) / 10
    assert all(
        torch.equal(*pair)
        for pair in zip(
            routing.grouped_topk(logits, 4, 1, 1, True, "sigmoid", 1.0, bias),
            routing.topk_sigmoid(logits, 4, True, bias),
            strict=True,
        )
    )


def test_no_expert_outside_the_best_groups_is_chosen_even_with_a_negative_bias() -> None:
    logits, bias = torch.randn(50, 32), torch.full((32,), -5.0)
    _, ids = routing.grouped_topk(logits, 8, 4, 1, True, "sigmoid", 1.0, bias)
    assert ((ids // 8) == (ids[:, :1] // 8)).all()


def test_a_token_whose_scores_have_all_underflowed_has_weights_of_zero() -> None:
    logits = torch.full((2, 8), -200.0)
    logits[1, 3] = 0.0
    for weights, ids in (routing.topk_sigmoid(logits, 2, True), routing.grouped_topk(logits, 2, 4, 2, True, "sigmoid")):
        assert weights[0].tolist() == [0.0, 0.0]
        assert weights[1].max() == 1
        assert (weights[1] * (ids[1] == 3)).sum() == 1


def test_an_unknown_score_is_declined() -> None:
    with pytest.raises(NotImplementedError, match="sqrtsoftplus"):
        routing.grouped_topk(torch.randn(2, 8), 2, 2, 1, scoring_func="sqrtsoftplus")


# ---- alignment


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize(("tokens", "topk", "count"), [(1, 1, 64), (7, 4, 5), (33, 2, 8), (16, 8, 128)])
def test_the_declared_number_of_blocks_is_enough(tokens: int, topk: int, count: int, block_size: int) -> None:
    most = aligned_blocks(tokens * topk, block_size, count)
    for _ in range(20):
        *_, padded = moe.moe_align_block_size(choices(tokens, count, topk), block_size, count)
        assert padded.item() % block_size == 0
        assert padded.item() <= most * block_size


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_the_declared_number_of_blocks_is_reached(block_size: int) -> None:
    """By one pair for each expert; and where there are more pairs, by full blocks but for one pair of each."""
    for count, pairs in ((6, torch.arange(6)), (3, torch.tensor([0, 1, 2, *[0] * block_size]))):
        *_, padded = moe.moe_align_block_size(pairs[:, None], block_size, count)
        assert padded.item() == aligned_blocks(len(pairs), block_size, count) * block_size


@pytest.mark.parametrize("local", [None, 3])
def test_a_product_block_by_block_gives_the_experts_output(local: int | None) -> None:
    """As a grouped matrix product uses the alignment: rows of a block share the weights of one expert."""
    count, topk, block_size, x = 8, 3, 4, torch.randn(21, 24)
    ids, weights = choices(21, count, topk), torch.rand(21, topk)
    expert_map = None
    if local is not None:
        expert_map = torch.full((count,), -1, dtype=torch.int32)
        expert_map[torch.tensor([6, 1, 4])] = torch.arange(3, dtype=torch.int32)
    w13, w2 = experts(local or count)
    places, blocks, padded = moe.moe_align_block_size(ids, block_size, count, expert_map)
    pairs = torch.zeros(ids.numel() + 1, 24)  # the last row takes what the free places compute
    rows = torch.cat((x.repeat_interleave(topk, 0), torch.zeros(1, 24)))
    for block in range(int(padded) // block_size):
        place = places[block * block_size : (block + 1) * block_size].long()
        gate, up = (rows[place] @ w13[blocks[block]].T).chunk(2, -1)
        pairs[place] = (torch.nn.functional.silu(gate) * up) @ w2[blocks[block]].T
    summed = moe.moe_sum((pairs[:-1] * weights.view(-1, 1)).view(21, topk, 24))
    torch.testing.assert_close(summed, moe.fused_moe(x, w13, w2, weights, ids, expert_map=expert_map))


# ---- experts


def test_parts_of_the_experts_sum_up_to_all_of_them() -> None:
    x, ids, weights = torch.randn(13, 24), choices(13, 8, 3), torch.rand(13, 3)
    w13, w2 = experts(8)
    whole = moe.fused_moe(x, w13, w2, weights, ids)
    total = torch.zeros_like(whole)
    for here in ([1, 2, 7], [0, 3, 4, 5, 6]):
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[here] = torch.arange(len(here), dtype=torch.int32)
        total += moe.fused_moe(x, w13[here], w2[here], weights, ids, expert_map=expert_map)
    torch.testing.assert_close(total, whole)


def test_halves_of_each_expert_sum_up_to_the_whole() -> None:
    """As tensor parallelism divides them."""
    x, ids, weights = torch.randn(13, 24), choices(13, 8, 3), torch.rand(13, 3)
    w13, w2 = experts(8)
    gate, up = w13.chunk(2, 1)
    parts = [
        moe.fused_moe(x, torch.cat((gate[:, part], up[:, part]), 1), w2[..., part], weights, ids)
        for part in (slice(8), slice(8, 16))
    ]
    torch.testing.assert_close(sum(parts), moe.fused_moe(x, w13, w2, weights, ids))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_cannot_change_how_a_sample_is_quantized(dtype: torch.dtype, seed: int) -> None:
    """Between the products of an expert; a changed number would move the result by a whole step of int8 or fp8."""
    generator = torch.Generator().manual_seed(seed)
    for sample in OPERATORS["scaled_moe"].samples(dtype, torch.device("cpu"), generator):
        args = sample.args[:-1]
        wide = [
            arg.double() if isinstance(arg, Tensor) and arg.dtype in (dtype, torch.float32) else arg for arg in args
        ]
        exact = quantized_moe.scaled_moe(*wide, None)
        single = quantized_moe.scaled_moe(args[0].float(), *args[1:], None)
        torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=1e-5, msg=sample.label)


def test_only_experts_that_are_chosen_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[Any] = []
    real = moe.functional.linear
    monkeypatch.setattr(moe.functional, "linear", lambda *args: products.append(args[0].shape[0]) or real(*args))
    moe.fused_moe(torch.randn(5, 24), *experts(64), torch.rand(5, 2), torch.tensor([[3, 9]] * 4 + [[9, 40]]))
    assert products == [4, 4, 5, 5, 1, 1]


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_expert_numbers_of_either_width_are_taken(ids: torch.dtype) -> None:
    x, w13_w2, chosen = torch.randn(4, 24), experts(6), choices(4, 6, 2)
    expected = moe.fused_moe(x, *w13_w2, torch.ones(4, 2), chosen.int())
    assert torch.equal(moe.fused_moe(x, *w13_w2, torch.ones(4, 2), chosen.to(ids)), expected)
    aligned = moe.moe_align_block_size(chosen.to(ids), 4, 6)
    assert all(map(torch.equal, aligned, moe.moe_align_block_size(chosen.int(), 4, 6)))


def test_what_is_given_as_out_is_returned() -> None:
    for name, operator in (("moe_sum", moe.moe_sum), ("fused_moe", moe.fused_moe)):
        given = [sample.args for sample in samples(name) if sample.args[-1] is not None]
        assert given
        assert all(operator(*args) is args[-1] for args in given)


def test_every_declared_activation_is_computed_and_another_is_declined() -> None:
    assert set(moe.ACTIVATIONS) == {*GATED_ACTIVATIONS, *PLAIN_ACTIVATIONS}
    with pytest.raises(NotImplementedError, match="'situ'"):
        moe.fused_moe(torch.randn(1, 24), *experts(2), torch.ones(1, 1), torch.zeros(1, 1).int(), "situ")
