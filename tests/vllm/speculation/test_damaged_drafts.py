"""With drafts a request with NaN in its logits ends alone, or begins again; NaN in a draft's logits costs no answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import PROMPTS, RUNNERS, start_features

import drafters
from drafting import LOOK_UP, NGRAM, SPREAD
from fl_dispatch.hosting.damage.rows import damaged_rows, damaged_tokens
from fl_dispatch.settings import reset_settings
from poison import SAID, variables
from running import expected_tokens, reference_network
from tensors import Largest
from vllm_fl.damage import detection

SAMPLES = 300
GREEDY = {"do": "generate", "prompts": drafters.TURNS, "sampling": {"max_tokens": drafters.LONG}}
COUNTS = [{"do": "metrics", "contains": part} for part in ("preemptions", "spec_decode")]


@pytest.fixture(scope="module")
def pairs(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    return drafters.pairs(checkpoint, tmp_path_factory.mktemp("drafters"))


def its_own(answers: list[list[int]]) -> int:
    """A token that the last answer has, and no other text."""
    others = {token for text in (*drafters.TURNS, *answers[:-1]) for token in text}
    return next(token for token in answers[-1][2:-8] if token not in others)


def drafting(method: str, drafter: Path | None, **more: Any) -> dict[str, Any]:
    who = LOOK_UP if drafter is None else {"model": str(drafter)}
    speculation = {"method": method, "num_speculative_tokens": 1 if method == "mtp" else 3, **who, **more}
    return {"speculative_config": speculation, "max_num_seqs": 64, "max_num_batched_tokens": 256}


def generated(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"][0] for output in step]


@pytest.mark.engine
@pytest.mark.parametrize(
    ("runner", "method", "sampled"),
    [("V1", NGRAM, {}), ("V2", "draft_model", {"draft_sample_method": "probabilistic"}), ("V2", "mtp", {})],
    ids=["V1, look-up", "V2, a model", "V2, a predictor"],
)
def test_a_request_whose_answer_becomes_nan_ends_alone_with_its_origin(
    runner: str,
    method: str,
    sampled: Mapping[str, str],
    pairs: dict[str, tuple[Path, Path]],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    family = drafters.TARGETS.get(method, "qwen3")
    target, drafter = pairs.get(method, (checkpoint(family), None))
    right = expected_tokens(checkpoint(family), drafters.TURNS, drafters.LONG)
    given = {**RUNNERS[runner], **variables(target, tmp_path, its_own(right))}
    run = (target, [GREEDY, GREEDY, *COUNTS], drafting(method, drafter, **sampled))
    *greedy, preempted, counted = start_features(run, **given).result()["runs"][0]["steps"]
    for answers in map(generated, greedy):
        assert answers[:2] == right[:2]
        assert answers[2] == right[2][: len(answers[2])]
    assert [[output["why"][0] for output in step] for step in greedy] == [[None, None, SAID]] * 2
    assert preempted["vllm:num_preemptions"] == 2
    assert counted["vllm:spec_decode_num_accepted_tokens"] > 0


@pytest.mark.engine
def test_a_request_whose_damage_does_not_come_again_is_repaired(
    pairs: dict[str, tuple[Path, Path]], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    target, drafter = pairs["draft_model"]
    right = expected_tokens(checkpoint("qwen3"), drafters.TURNS, drafters.LONG)
    given = {**RUNNERS["V2"], **variables(target, tmp_path, its_own(right), POISON_TIMES="1")}
    run = (target, [GREEDY, *COUNTS], drafting("draft_model", drafter))
    greedy, preempted, _ = start_features(run, **given).result()["runs"][0]["steps"]
    assert generated(greedy) == right
    assert preempted["vllm:num_preemptions"] == 1


@pytest.mark.engine
def test_damage_in_drafts_costs_acceptance_and_no_answer(
    pairs: dict[str, tuple[Path, Path]], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    target, drafter = pairs["draft_model"]
    right = expected_tokens(checkpoint("qwen3"), drafters.TURNS, drafters.LONG)
    spread = {**SPREAD, "max_tokens": 2}
    many = {"do": "generate", "prompts": PROMPTS[:1] * SAMPLES, "sampling": spread}
    engine = drafting("draft_model", drafter, draft_sample_method="probabilistic")
    common = PROMPTS[0][5]
    assert common in drafters.TURNS[0]
    found = {}
    for name, times in (("sound", "0"), ("damaged", "1000000")):
        given = {**RUNNERS["V2"], **variables(drafter, tmp_path, common, POISON_TIMES=times)}
        run = (target, [GREEDY, *COUNTS, many], engine)
        greedy, preempted, counted, sampled = start_features(run, **given).result()["runs"][0]["steps"]
        assert generated(greedy) == right
        assert preempted["vllm:num_preemptions"] == 0
        drafters.check_pairs(reference_network(target, torch.float32), PROMPTS[0], generated(sampled))
        found[name] = counted["vllm:spec_decode_num_accepted_tokens"]
    assert 0 < found["damaged"] < found["sound"]


def test_rows_of_rejected_drafts_damage_nobody() -> None:
    logits = torch.zeros(9, 5)
    for row, value in ((1, torch.nan), (4, torch.inf), (8, -torch.inf)):
        logits[row, 2 if row < 8 else slice(None)] = value
    ends, tokens = torch.tensor([3, 4, 6, 9], dtype=torch.int32), torch.tensor([1, 1, 0, 3])
    assert damaged_tokens(damaged_rows(logits), ends, tokens).tolist() == [0, 0, 1, 1]


def test_logits_of_drafts_are_copied_in_parts_and_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, steps, words, drafts = 6, 3, 50, 2
    logits = torch.zeros(requests, steps, words)
    logits[4, 1, 7], logits[5, 2, 0] = torch.nan, torch.inf  # the latter is of a draft that nobody has
    before = logits.clone()
    batch = SimpleNamespace(
        expanded_local_pos=torch.arange(1 + drafts).repeat(requests),
        expanded_idx_mapping=torch.arange(requests).repeat_interleave(1 + drafts),
    )
    given: list[torch.Tensor] = []
    verify = detection._without_damaged_drafts(lambda self, target, batch, logits, invalid: given.append(invalid))
    monkeypatch.setattr(detection, "COPIED_AT_ONCE", 4 * words)
    target = torch.zeros(len(batch.expanded_local_pos), words)
    with Largest() as largest:
        verify(None, target, batch, logits)
    assert given[0].nonzero().flatten().tolist() == [4 * (1 + drafts) + 2]
    assert torch.allclose(logits, before, equal_nan=True)
    assert largest.elements == 4 * words


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("given", [{"VLLM_FL_DAMAGED_REQUESTS": "ignore"}, {"VLLM_COMPUTE_NANS_IN_LOGITS": "0"}])
def test_logits_stay_as_they_are_where_damage_is_not_looked_for(
    v2: bool, given: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"VLLM_COMPUTE_NANS_IN_LOGITS": "1", **given}.items():
        monkeypatch.setenv(name, value)
    reset_settings()
    runner = SimpleNamespace(sample=print, _sample=print)
    try:
        detection.install(runner, v2, drafts=True)
    finally:
        monkeypatch.undo()
        reset_settings()
    assert runner == SimpleNamespace(sample=print, _sample=print)
