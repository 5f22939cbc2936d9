"""Drafts beside sparse latent attention and layers with a state in SGLang on a GPU, by a predictor or a look-up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sglang_on_gpu import NEUTRAL, STEP, all_is_ours, start
from test_sglang_states_gpu import FUSED, SIZES

import drafters
import states
from fl_dispatch.cli.checkpoints import build_checkpoint
from running import expected_tokens, ran

CHAIN = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}
LOOK_UP = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
BESIDE: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "sparse latent attention, predictor": ("deepseek_v32", CHAIN, "mla_sparse"),
    "shared lists, predictor": ("glm_moe_dsa", CHAIN, "mla_sparse"),
    "sparse latent attention, look-up": ("deepseek_v32", LOOK_UP, "mla_sparse"),
    "a state, predictor": ("qwen3_5", CHAIN, "gated_delta_rule_update"),
    "a state, look-up": ("granitemoehybrid", LOOK_UP, "selective_state_update"),
}
"""Name → the family, how it drafts, and an operator of its layers."""
STATES = ("qwen3_5", "granitemoehybrid")
LONG: Mapping[str, Any] = {"prompts": drafters.TURNS, "max_tokens": 40}
Beside = tuple[Path, str, dict[str, Any]]
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=BESIDE)
def beside(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Beside:
    """A target, an operator of its layers, and what its engine said: the prompts twice, and long answers."""
    family, arguments, operator = BESIDE[request.param]
    model = _target(family, arguments is CHAIN, tmp_path_factory.mktemp("beside"))
    drafter = {"speculative_draft_model_path": str(model)} if arguments is CHAIN else {}
    engine = {**arguments, **drafter, "max_total_tokens": 8192}
    if family in STATES:
        engine["max_mamba_cache_size"] = 32
    return model, operator, start(model, STEP, STEP, LONG, variables=NEUTRAL, engine=engine).result()


def _target(family: str, predicts: bool, folder: Path) -> Path:
    if family not in STATES:
        plain = build_checkpoint(family, folder / "plain")
        return (drafters.with_reader if predicts else drafters.repeating)(plain, folder / "target")
    plain = drafters.repeating(states.build(family, folder / "plain", **SIZES.get(family, {})), folder / "repeating")
    return drafters.with_mtp_beside_states(plain, folder / "target") if predicts else plain


def test_greedy_tokens_equal_hugging_face(beside: Beside) -> None:
    model, _, found = beside
    first, second, long = (step["tokens"] for step in found["steps"])
    assert first == second == expected_tokens(model)
    assert long == expected_tokens(model, drafters.TURNS, 40)


def test_drafts_are_accepted(beside: Beside) -> None:
    checked, right = (sum(pair[part] for step in beside[2]["steps"] for pair in step["drafts"]) for part in (0, 1))
    assert 0 < right < 3 * checked


def test_our_kernels_ran_in_the_model_and_in_the_drafter(beside: Beside) -> None:
    _, operator, found = beside
    fused = FUSED["qwen3_5"] if operator == "gated_delta_rule_update" else ()
    assert ran(found, operator) == {"default.triton"}
    assert ran(found, "rms_norm") <= {"default.triton"}
    report, drafter = found["report"], found["report"]["drafter"]
    assert all_is_ours(report, fused)
    assert drafter is None or (drafter["native_layers"] == {} and drafter["undispatched"].keys() <= {*fused})
