"""Drafts found by n-gram look-up are verified in PyTorch: greedy tokens stay, sampled ones keep their distribution.

The engine has either of vLLM's model runners; the four kernels below are V1's, ``test_runner_kernels`` has V2's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import MAX_TOKENS, PROMPTS, RUNNERS, start_features

from sampling import drawn
from vllm_fl.runner_kernels import rejection

TURNS = [prompt[:6] * 4 for prompt in PROMPTS[:3]]  # a text that repeats itself, so that look-up finds drafts
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
LONG = 64
"""Tokens of an answer; a small random model soon repeats itself, and then drafts are right."""


@pytest.fixture(scope="module", params=drawn(tuple(RUNNERS), 1, "model runner that speculates"))
def speculative(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> dict[str, Any]:
    seeded = {"temperature": 1.0, "seed": 5, "max_tokens": MAX_TOKENS}
    mixed = [{"max_tokens": MAX_TOKENS}, seeded, {"max_tokens": MAX_TOKENS}]
    steps = [
        {"do": "generate", "prompts": PROMPTS, "sampling": {"max_tokens": MAX_TOKENS}},
        {"do": "generate", "prompts": TURNS, "sampling": {"max_tokens": LONG}},
        {"do": "metrics", "contains": "spec_decode"},
        {"do": "generate", "prompts": PROMPTS[:3], "sampling": mixed},
        {"do": "generate", "prompts": PROMPTS[:3], "sampling": mixed},
    ]
    plain = [{"do": "generate", "prompts": TURNS, "sampling": {"max_tokens": LONG}}]
    model = checkpoint("qwen3")
    runs = (model, steps, {"speculative_config": DRAFTS}), (model, plain, {})
    with_drafts, without = start_features(*runs, **RUNNERS[request.param]).result()["runs"]
    assert with_drafts["report"]["model_runner"] == request.param
    return {"steps": with_drafts["steps"], "plain": without["steps"]}


def _tokens(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"][0] for output in step]


def test_greedy_tokens_equal_hugging_face(
    speculative: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert _tokens(speculative["steps"][0]) == expected("qwen3")


def test_drafts_are_accepted_and_rejected_and_change_no_token(speculative: dict[str, Any]) -> None:
    assert _tokens(speculative["steps"][1]) == _tokens(speculative["plain"][0])
    counted = speculative["steps"][2]
    accepted, drafted = (counted[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft"))
    assert 0 < accepted < drafted


def test_a_seeded_request_beside_greedy_ones_is_reproducible(
    speculative: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    first, second = (_tokens(step) for step in speculative["steps"][3:])
    assert first == second
    assert [first[0], first[2]] == [expected("qwen3")[0], expected("qwen3")[2]]


# -- the four kernels -------------------------------------------------------------------------------------------------

ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)
"""Requests with two drafts, none, and three."""


def _output() -> torch.Tensor:
    return torch.full((3, 4), -1, dtype=torch.int32)


def test_greedy_keeps_the_targets_tokens_up_to_the_first_wrong_draft() -> None:
    output = _output()
    drafts, best = torch.tensor([4, 5, 6, 7, 8], dtype=torch.int32), torch.tensor([4, 5, 6, 9, 8])
    bonus = torch.tensor([[20], [21], [22]])
    rejection.rejection_greedy_sample_kernel(output, ENDS, drafts, best, bonus, None, 3, None, None, False)
    assert output.tolist() == [[4, 5, 20, -1], [21, -1, -1, -1], [6, 9, -1, -1]]


def test_each_kernel_leaves_the_others_requests_alone() -> None:
    drafts = torch.tensor([4, 5, 6, 7, 8], dtype=torch.int32)
    bonus, greedy = torch.tensor([[20], [21], [22]]), torch.tensor([True, False, False])
    output = _output()
    rejection.rejection_greedy_sample_kernel(output, ENDS, drafts, drafts.long(), bonus, greedy, 3, None, None, False)
    assert output.tolist() == [[4, 5, 20, -1], [-1] * 4, [-1] * 4]
    certain = torch.nn.functional.one_hot(drafts.long(), 10).float()
    rejection.rejection_random_sample_kernel(
        output, ENDS, drafts, None, certain, bonus, drafts, torch.full((5,), 0.5), greedy, 3, 10, None, True, False
    )
    assert output.tolist() == [[4, 5, 20, -1], [21, -1, -1, -1], [6, 7, 8, 22]]


def test_a_padded_draft_is_never_accepted() -> None:
    ends, drafts = torch.tensor([2], dtype=torch.int32), torch.tensor([-1, 3], dtype=torch.int32)
    output, uniform = torch.full((1, 3), -1, dtype=torch.int32), torch.zeros(2, dtype=torch.float64)
    arguments = (torch.tensor([[9]]), torch.tensor([5, 6], dtype=torch.int32), uniform, torch.tensor([False]), 2, 8)
    rejection.rejection_random_sample_kernel(
        output, ends, drafts, None, torch.full((2, 8), 0.125), *arguments, None, True, False
    )
    assert output.tolist() == [[5, -1, -1]]


def test_synthetic_acceptance_follows_the_rate_of_each_position() -> None:
    drafts, best = torch.tensor([4, 5, 6, 7, 8], dtype=torch.int32), torch.full((5,), 3)
    uniform = torch.tensor([0.1, 0.1, 0.1, 0.6, 0.1], dtype=torch.float64)
    output, bonus = _output(), torch.tensor([[20], [21], [22]])
    rates = torch.tensor([0.5, 0.5, 0.5])
    rejection.rejection_greedy_sample_kernel(output, ENDS, drafts, best, bonus, None, 3, uniform, rates, True)
    assert output.tolist() == [[4, 5, 20, -1], [21, -1, -1, -1], [6, 3, -1, -1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_a_requests_value_is_repeated_for_its_tokens_and_one_value_replaced(dtype: torch.dtype) -> None:
    output = torch.empty(5, dtype=dtype)
    rejection.expand_kernel(output, torch.tensor([0, 7, 3], dtype=dtype), ENDS, 0, 1, 128)
    assert output.tolist() == [1, 1, 3, 3, 3]


@pytest.mark.parametrize("certain_drafter", [True, False])
def test_accepted_or_recovered_a_token_has_the_targets_distribution(certain_drafter: bool) -> None:
    trials, generator = 40_000, torch.Generator().manual_seed(3)
    target = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    draft = torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2])
    ends = torch.arange(1, trials + 1, dtype=torch.int32)
    if certain_drafter:
        drafts, draft_probs = torch.ones(trials, dtype=torch.int32), None
    else:
        drafts = torch.multinomial(draft, trials, replacement=True, generator=generator).int()
        draft_probs = draft.expand(trials, -1)
    probabilities = target.expand(trials, -1)
    noise = torch.empty(trials, 5).exponential_(generator=generator)
    recovered = torch.empty(trials, dtype=torch.int32)
    rejection.sample_recovered_tokens_kernel(
        recovered, ends, drafts, draft_probs, probabilities, noise.reciprocal(), 5, 8, certain_drafter, False
    )
    output = torch.full((trials, 2), -1, dtype=torch.int32)
    uniform = torch.rand(trials, dtype=torch.float64, generator=generator)
    sampled = torch.zeros(trials, dtype=torch.bool)
    rejection.rejection_random_sample_kernel(
        output, ends, drafts, draft_probs, probabilities, torch.zeros(trials, 1).long(), recovered, uniform, sampled,
        1, 5, None, certain_drafter, False,
    )  # fmt: skip
    found = output[:, 0].bincount(minlength=5) / trials
    deviation = 5 * (target * (1 - target) / trials).sqrt()
    assert ((found - target).abs() <= deviation).all(), found.tolist()
