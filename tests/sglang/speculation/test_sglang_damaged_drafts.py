"""With drafts a request with NaN in its logits ends alone, or is read again; NaN in drafts' logits costs no answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import start

import drafters
import variants
from interpreting import run
from poison import SAID, variables
from running import PROMPTS, expected_tokens, reference_network
from sampling import drawn

pytest.importorskip("sglang")

TREE = {"speculative_eagle_topk": 2, "speculative_num_steps": 2, "speculative_num_draft_tokens": 5}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram": ("NGRAM", {"speculative_num_draft_tokens": 5}),
    "draft_model": ("STANDALONE", {"tp_size": 2}),
    "tree": ("STANDALONE", TREE),
    "eagle": ("EAGLE", {"page_size": 16}),
    "eagle3": ("EAGLE3", {}),
    "mtp": ("NEXTN", {"speculative_num_steps": 1}),
}
"""Who drafts → SGLang's name of the way, and arguments."""
PAIRS = {"tree": "draft_model"}
CASES = [(way, times) for way in WAYS for times in (1, 1000)]
HEADS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "rejection": ({"speculative_use_rejection_sampling": True}, {"SGLANG_OPT_USE_GUMBEL_SAMPLE": "0"}),
    "tree": (TREE, {}),
}
"""Arguments and variables of engines; with the variable ``torch.multinomial`` draws drafts, and from NaN it raises."""
SAMPLES = 300
SOUND = {"prompts": drafters.TURNS[:2], "max_tokens": drafters.LONG}
ANSWERS = {"prompts": drafters.TURNS, "max_tokens": drafters.LONG, "apart": True}
SPREAD = {"temperature": drafters.TEMPERATURE, "top_k": drafters.TOP}


Pairs = dict[str, tuple[Path, Path | None]]


@pytest.fixture(scope="module")
def pairs(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return drafters.under_sglang(checkpoint, tmp_path_factory.mktemp("drafters"))


def drafting(way: str, drafter: Path | None, **more: Any) -> dict[str, Any]:
    """The arguments of an engine."""
    algorithm, arguments = WAYS[way]
    models = {} if drafter is None else {"speculative_draft_model_path": str(drafter)}
    return {**arguments, **models, "speculative_algorithm": algorithm, "max_total_tokens": 8192, **more}


def its_own(answers: list[list[int]]) -> int:
    """A token that the last answer has, and no other text."""
    others = {token for text in (*drafters.TURNS, *answers[:-1]) for token in text}
    return next(token for token in answers[-1][2:-8] if token not in others)


@pytest.mark.engine
@pytest.mark.parametrize(("way", "times"), drawn(CASES, 2, "drafts of damaged requests under SGLang"))
def test_a_request_whose_answer_becomes_nan_is_read_again_and_ends_alone_if_it_becomes_so_again(
    way: str, times: int, pairs: Pairs, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    target, drafter = pairs[PAIRS.get(way, way)]
    right = expected_tokens(checkpoint(drafters.TARGETS.get(way, "qwen3")), drafters.TURNS, drafters.LONG)
    given = variables(target, tmp_path, its_own(right), POISON_TIMES=str(times))
    engine = drafting(way, drafter)
    sound, *poisoned = start(target, SOUND, *[ANSWERS] * 2, variables=given, engine=engine).result()["steps"]
    assert all(checked > 0 for checked, _ in sound["drafts"])
    for step in poisoned:
        *others, last = step["answers"]
        assert others == right[:2]
        assert last == right[2] if times == 1 else SAID in last


@pytest.mark.engine
@pytest.mark.parametrize("way", drawn(tuple(HEADS), 1, "drafts from NaN under SGLang"))
def test_a_head_that_drafts_from_nan_costs_no_answer_and_no_distribution(
    way: str, pairs: Pairs, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    target, head = pairs["eagle"]
    assert head is not None
    broken = variants.changed(
        head, tmp_path / "broken", lambda name, tensor: tensor * torch.nan if name == "fc.weight" else tensor
    )
    samples = {"prompts": PROMPTS[:1] * SAMPLES, "max_tokens": 2, "sampling": SPREAD}
    arguments, given = HEADS[way]
    engine = drafting("eagle", broken, max_running_requests=64, page_size=1, **arguments)
    greedy, sampled = start(target, ANSWERS, samples, variables=given, engine=engine).result()["steps"]
    assert greedy["answers"] == expected_tokens(checkpoint("llama"), drafters.TURNS, drafters.LONG)
    drafters.check_pairs(reference_network(target, torch.float32), PROMPTS[0], sampled["tokens"])


CHOICE = """
import torch
from types import SimpleNamespace as Made
from sglang.kernels.ops.speculative.row_argmax import row_argmax
from sglang_fl.worker import damage
logits = torch.full((1, {words}), torch.nan)
print(int(row_argmax(logits.softmax(-1))))
for drafts in (False, True):
    damage.without_damaged_drafts(Made(is_draft_worker=drafts), Made(logits_output=Made(next_token_logits=logits)))
    print(int(row_argmax(logits.softmax(-1))))
"""


def test_sglangs_kernel_chooses_a_draft_beyond_the_vocabulary_from_nan_but_not_from_what_a_drafter_gives() -> None:
    """It splits a row 64 times, and its tiles have 2,048 elements: none is masked in Mistral's vocabulary."""
    words = 131_072
    unguarded, target, drafter = map(int, run(CHOICE.format(words=words)).splitlines()[-3:])
    assert unguarded == target == words
    assert drafter < words
