"""Each PyTorch form of a kernel of SGLang's speculation does what the kernel does.

SGLang's Triton kernels run in Triton's interpreter on the same random inputs (``run_draft_kernels.py``). It has others
for CUDA alone, whose rules are loops here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from serving import HERE, environment

import processes
from sglang_fl.speculation import forms

IN_TRITON = {
    "build_tree (1, 3, 4)",
    "build_tree (2, 3, 7)",
    "build_tree (4, 2, 5)",
    "build_tree (3, 1, 4)",
    "read_chain",
    "verify_greedy chains",
    "verify_greedy trees",
    "sample_by_rejection",
    "slots_of_drafts",
    "slots_of_window",
    "write_slots",
    "last_accepted",
}
SEEDS = 12
REQUESTS, WIDTH, VOCABULARY = 6, 4, 9


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    return processes.finish(HERE / "run_draft_kernels.py", {"seeds": SEEDS}, environment(), True)


def test_every_form_gives_what_its_kernel_gives(compared: dict[str, Any]) -> None:
    assert compared["differing"] == {}


def test_every_form_ran(compared: dict[str, Any]) -> None:
    assert set(compared["ran"]) == IN_TRITON


def _chances(draw: torch.Generator, *shape: int) -> torch.Tensor:
    """Distributions, of which some rule tokens out."""
    weights = torch.rand(*shape, VOCABULARY, generator=draw) ** 4
    weights[torch.rand(weights.shape, generator=draw) < 0.3] = 0
    weights[..., 0] += 1e-3
    return weights / weights.sum(-1, keepdim=True)


def _links(ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Places, successors and siblings of chains that end after some columns."""
    places, columns = torch.arange(len(ends) * WIDTH).view(-1, WIDTH), torch.arange(WIDTH)
    return places, torch.where(columns < ends[:, None], columns + 1, -1), torch.full_like(places, -1)


def _written(requests: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros(requests * WIDTH).int(), torch.full((requests, WIDTH), -1).int(), torch.zeros(requests).int()


def _loop(
    tokens: list[int], end: int, coins: list[float], last_coin: float, chances: torch.Tensor, single: float, acc: float
) -> list[int]:
    """The tokens that a request gains: SGLang's rule for CUDA, for one child a column."""
    gained, row = [], 0
    left = chances[row].clone()
    while row < end:
        token = tokens[row + 1]
        chance = float(chances[row][token])
        if chance > 0 and (coins[row] < chance / acc or chance >= single):
            gained.append(token)
            row += 1
            left = chances[row].clone()
        else:
            left[token] = 0
            break
    total = 0.0
    for token, weight in enumerate(left.tolist()):
        total += weight
        if weight > 0:
            drawn = token
            if total > last_coin * float(left.sum()):
                break
    return [*gained, drawn]


@pytest.mark.parametrize(("single", "acc"), [(1.0, 1.0), (0.4, 1.0), (1.0, 0.5)])
def test_drafts_are_accepted_by_the_targets_probability(single: float, acc: float) -> None:
    draw = torch.Generator().manual_seed(5)
    for _ in range(SEEDS):
        ends = torch.randint(0, WIDTH, (REQUESTS,), generator=draw)
        candidates = torch.randint(0, VOCABULARY, (REQUESTS, WIDTH), generator=draw)
        coins, last = torch.rand(REQUESTS, WIDTH, generator=draw), torch.rand(REQUESTS, generator=draw)
        chances, written = _chances(draw, REQUESTS, WIDTH), _written(REQUESTS)
        nothing = torch.zeros_like(chances)
        forms.sample_target_only(*written, candidates, *_links(ends), coins, last, chances, nothing, single, acc)
        for request in range(REQUESTS):
            tokens = candidates[request].tolist()
            own = coins[request].tolist(), float(last[request]), chances[request]
            expected = _loop(tokens, int(ends[request]), *own, single, acc)
            places = written[1][request][: len(expected)]
            assert int(written[2][request]) == len(expected) - 1
            assert written[0][places].tolist() == expected
            assert written[1][request][len(expected) :].tolist() == [-1] * (WIDTH - len(expected))


@pytest.mark.parametrize("drafted", ["surely", "by chance"])
def test_accepted_and_replaced_tokens_have_the_targets_distribution(drafted: str) -> None:
    """The first two tokens of many requests, whose drafts are always the same, or drawn from another distribution."""
    requests, draw = 40_000, torch.Generator().manual_seed(7)
    target, draft = _chances(draw, WIDTH), _chances(draw, WIDTH - 1)
    if drafted == "surely":
        tokens = target.argmax(1).repeat(requests, 1)
    else:
        tokens = torch.stack([row.multinomial(requests, True, generator=draw) for row in draft], 1)
    candidates = torch.nn.functional.pad(tokens, (1, 0))[:, :WIDTH]
    coins, last = torch.rand(requests, WIDTH, generator=draw), torch.rand(requests, generator=draw)
    written, links = _written(requests), _links(torch.full((requests,), WIDTH - 1))
    check = forms.sample_target_only if drafted == "surely" else forms.sample_by_rejection
    distributions = target.repeat(requests, 1, 1), draft.repeat(requests, 1, 1)
    check(*written, candidates, *links, coins, last, *distributions, 1.0, 1.0, True)
    gained, number = written[0].view(requests, WIDTH), written[2]
    for column in range(2):
        there = gained[number >= column, column].long()
        expected, found = target[column], there.bincount(minlength=VOCABULARY) / len(there)
        assert len(there) > requests / 20
        assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / len(there)).sqrt()).all()


def test_only_the_best_tokens_stay_possible() -> None:
    draw = torch.Generator().manual_seed(3)
    chances = _chances(draw, REQUESTS)
    numbers = torch.tensor([1, 2, 3, VOCABULARY, 1 << 30, 5]).int()
    shares = torch.tensor([0.01, 0.3, 0.5, 0.8, 0.99, 1.0])
    by_number, by_share = forms.keep_top_k(chances, numbers), forms.keep_top_p(chances, shares)
    for request, row in enumerate(chances.tolist()):
        order = sorted(range(VOCABULARY), key=lambda token, row=row: -row[token])
        sums = [sum(row[token] for token in order[:place]) for place in range(VOCABULARY)]
        counted = [token for place, token in enumerate(order) if place < numbers[request]]
        shared = [token for token, before in zip(order, sums, strict=True) if before <= shares[request]]
        for found, kept in ((by_number, counted), (by_share, shared)):
            expected = torch.zeros(VOCABULARY)
            for token in kept:
                expected[token] = row[token]
            assert torch.allclose(found[request], expected / expected.sum())


def test_what_does_not_follow_the_last_draft_is_padding() -> None:
    """Two branches, and padding that SGLang ties to the first column."""
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]).bool()
    places, positions, links = torch.zeros(4), torch.zeros(4), torch.zeros(2, 4)
    forms.read_chain(tree.flatten(), torch.tensor([7]), positions, places, *links, 1, 4)
    assert links.tolist() == [[1, 2, -1, -1], [-1] * 4]
    assert positions.tolist() == [7, 8, 9, 10]
    assert places.tolist() == [0, 1, 2, 3]


def test_a_mask_of_another_kind_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="masks of kind 0"):
        forms.build_tree(*[torch.zeros(1)] * 8, 2, 3, 4, 0)


def test_tokens_of_a_tree_have_the_targets_distribution() -> None:
    """The first two tokens of many requests: three drafts at first, and two more after the second one of these."""
    requests, width, draw = 40_000, 6, torch.Generator().manual_seed(7)
    target = _chances(draw, width)
    first, after = target[0].topk(3).indices, target[2].topk(2).indices
    candidates = torch.cat((torch.zeros(1).long(), first, after)).repeat(requests, 1)
    places = torch.arange(requests * width).view(-1, width)
    continued, siblings = torch.tensor([1, -1, 4, -1, -1, -1]), torch.tensor([-1, 2, 3, -1, 5, -1])
    links = (places, continued.repeat(requests, 1), siblings.repeat(requests, 1))
    coins, last = torch.rand(requests, width, generator=draw), torch.rand(requests, generator=draw)
    written = (torch.zeros(requests * width).int(), torch.full((requests, 3), -1).int(), torch.zeros(requests).int())
    chances = target.repeat(requests, 1, 1)
    forms.sample_target_only(*written, candidates, *links, coins, last, chances, torch.zeros_like(chances))
    gained = written[0].view(requests, width)
    second = gained[:, 0] == first[1]
    assert (written[1][second & (written[2] > 0), 1] % width == 2).all()
    for tokens, expected in ((gained[:, 0], target[0]), (gained[second, 2], target[2])):
        found = tokens.long().bincount(minlength=VOCABULARY) / len(tokens)
        assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / len(tokens)).sqrt()).all()
