"""Drafts beside layers that keep a state: the state goes back to the last accepted draft, and a wrong one is seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from serving import STEP, start
from torch import Tensor

import drafters
import states
from fl_dispatch.cli.checkpoints import build_checkpoint
from host_engines import WRONG
from quantized_states import SIZES
from running import PROMPTS, expected_tokens
from sampling import drawn

pytest.importorskip("sglang")

from sglang_fl.bridge.drafted_states import Drafts
from sglang_fl.compat import state_forms

TIED = "lfm2"
"""A model with its embedding as the head; its drafts by a look-up are hardly ever right."""


class Run(NamedTuple):
    """The model, SGLang's name of the way to draft, and its further arguments."""

    model: str
    algorithm: str
    arguments: dict[str, Any]

    def build(self, folder: Path) -> tuple[Path, Path | None]:
        """Write the checkpoint, and what drafts for it, into a new folder."""
        folder.mkdir()
        model = states.build(self.model, folder / "plain", **SIZES[self.model])
        if self.model != TIED:
            model = drafters.repeating(model, folder / "repeating")
        if self.algorithm == "NGRAM":
            return model, None
        if self.algorithm == "NEXTN":
            return (drafters.with_mtp_beside_states(model, folder / "mtp"),) * 2
        llama = build_checkpoint("llama", folder / "llama", hidden_size=SIZES[self.model]["hidden_size"])
        return model, drafters.eagle3_beside_states(model, llama, folder / "eagle3")


CHAIN = {"speculative_num_steps": 3}
TREE = {"speculative_eagle_topk": 2, "speculative_num_steps": 2, "speculative_num_draft_tokens": 5}
LOOK_UP = {"speculative_num_draft_tokens": 4}
RUNS = {
    "predictor": Run("qwen3_5", "NEXTN", CHAIN),
    "tree": Run("qwen3_5", "NEXTN", TREE),
    "predictor of two ranks": Run("qwen3_5", "NEXTN", {**CHAIN, "tp_size": 2}),
    "predictor beside experts": Run("qwen3_next", "NEXTN", CHAIN),
    "head": Run("qwen3_next", "EAGLE3", CHAIN),
    "look-up beside delta nets": Run("qwen3_5", "NGRAM", LOOK_UP),
    "look-up beside state spaces": Run("granitemoehybrid", "NGRAM", LOOK_UP),
    "look-up beside convolutions": Run("lfm2", "NGRAM", LOOK_UP),
}
DRAWN = drawn(tuple(RUNS), 2, "drafts beside states under SGLang")
FEWER = 40
"""Tokens of a long answer: a later one of LFM2 is a close choice."""
LONG = {"prompts": drafters.TURNS, "max_tokens": FEWER}
each = pytest.mark.parametrize("method", DRAWN)


def _ordered(operator: str) -> dict[str, Any]:
    return {**LONG, "policy": {"prefer": "reference", "per_op_order": {operator: [f"impl:{WRONG}"]}}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, Path | None]]:
    """Method → the target and what drafts for it."""
    folder = tmp_path_factory.mktemp("state drafts")
    return {method: RUNS[method].build(folder / method) for method in DRAWN}


@pytest.fixture(scope="module")
def result(models: Mapping[str, tuple[Path, Path | None]]) -> Callable[[str], dict[str, Any]]:
    """A method → two passes over the prompts, long answers, and long answers with a wrong operator of single tokens."""
    variables = {"SGLANG_FL_PLUGIN_MODULES": "wrong_plugin,policy_method,used_slots", "SGLANG_FL_PREFER": "reference"}
    runs = {}
    for method in DRAWN:
        run, (model, drafter) = RUNS[method], models[method]
        engine = {
            **run.arguments,
            **({} if drafter is None else {"speculative_draft_model_path": str(drafter)}),
            "speculative_algorithm": run.algorithm,
            "max_mamba_cache_size": 32,
            "max_total_tokens": 8192,
        }
        wrong = [_ordered(operator) for operator in states.OPERATORS[run.model] if operator.endswith("_update")]
        runs[method] = start(model, STEP, STEP, LONG, *wrong, variables=variables, engine=engine)
    return lambda method: runs[method].result()


@each
def test_greedy_tokens_equal_hugging_face_in_chunks_and_from_the_radix_cache(
    method: str, result: Callable[[str], dict[str, Any]], models: Mapping[str, tuple[Path, Path | None]]
) -> None:
    model, (first, second, long) = models[method][0], result(method)["steps"][:3]
    assert first["tokens"] == second["tokens"] == expected_tokens(model)
    assert first["cached"] == [0] * len(PROMPTS)
    assert second["cached"][2] > 0
    assert long["tokens"] == expected_tokens(model, drafters.TURNS, FEWER)


@each
def test_drafts_are_accepted_and_rejected(method: str, result: Callable[[str], dict[str, Any]]) -> None:
    steps = result(method)["steps"][:3]
    checked, right = (sum(pair[part] for step in steps for pair in step["drafts"]) for part in (0, 1))
    run = RUNS[method]
    width = run.arguments.get("speculative_num_draft_tokens", 4) - 1
    assert 0 < right < width * checked or (run.model == TIED and right < width * checked > 0)


@each
def test_a_wrong_operator_of_single_tokens_changes_the_tokens(
    method: str, result: Callable[[str], dict[str, Any]]
) -> None:
    _, _, right, *wrong = (step["tokens"] for step in result(method)["steps"])
    assert [tokens != right for tokens in wrong] == [True] * len(wrong)
    assert wrong


@each
def test_the_drafter_runs_our_operators_too(method: str, result: Callable[[str], dict[str, Any]]) -> None:
    report = result(method)["report"]
    assert report["native_layers"] == report["undispatched"] == report["failed"] == {}
    drafter = report["drafter"]
    assert drafter is None or drafter["native_layers"] == drafter["undispatched"] == {}


def test_each_draft_of_a_tree_continues_the_state_of_the_draft_before_it() -> None:
    """Request 0 drafts a chain, request 1 two branches; the states are sums of numbers that name the columns."""
    parents = torch.tensor([[-1, 0, 1, 2], [-1, 0, 0, 2]])
    before = torch.tensor([[5000.0], [6000.0], [7000.0]])
    states, after = before.clone(), torch.zeros(3, 4, 1)
    tokens = torch.tensor([1.0, 10.0, 100.0, 1000.0]).repeat(2)[:, None]

    def add(table: Tensor, slots: Tensor, rows: slice) -> Tensor:
        table[slots.long()] += tokens[rows]
        return table[slots.long()]

    found = Drafts(parents).run(states, torch.tensor([2, 0], dtype=torch.int32), after, add)
    sums = torch.tensor([[7001.0, 7011.0, 7111.0, 8111.0], [5001.0, 5011.0, 5101.0, 6101.0]])
    assert torch.equal(found.view(2, 4), sums)
    assert torch.equal(after[:2, :, 0], sums)
    assert torch.equal(states, before)


def test_the_state_after_the_last_accepted_draft_becomes_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_fl.compat.native_kernels.start_triton", lambda: False)
    conv, after = torch.zeros(2, 4, 3, 2), torch.arange(2.0 * 3 * 5 * 6).view(2, 3, 5, 3, 2)
    nothing = torch.zeros(2, 4, 0)
    caches: Any = SimpleNamespace(
        conv=[conv], intermediate_conv_window=[after], temporal=nothing, intermediate_ssm=nothing
    )
    slots, columns = torch.tensor([3, 1]), torch.tensor([0, 4])
    state_forms.commit_states(None, caches, slots, columns, None, None)
    assert torch.equal(conv[:, 3], after[:, 0, 0])
    assert torch.equal(conv[:, 1], after[:, 1, 4])
    assert conv[:, [0, 2]].count_nonzero() == 0
    with pytest.raises(NotImplementedError, match="keeps no states of drafts for the prefix cache"):
        state_forms.commit_states(None, caches, slots, columns, slots, columns)
