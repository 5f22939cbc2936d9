"""Drafts on a GPU, with graphs and eagerly: Hugging Face's tokens, with drafts that are right and some that are not."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import MAX_TOKENS, PROMPTS, Runs, expected_tokens, ran, start_features

import drafters
from fl_dispatch.cli.checkpoints import build_checkpoint

pytestmark = pytest.mark.gpu
NGRAM = "ngram"
LOOK_UP = {"method": NGRAM, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
TARGETS = {**drafters.TARGETS, NGRAM: "llama"}


class Run(NamedTuple):
    """Who drafts, how many tokens, with graphs or without, and the graphs of drafters that have to be replayed."""

    method: str
    tokens: int
    graphs: bool = True
    drafting: frozenset[str] = frozenset()


RUNS = {
    "eagle": Run("eagle", 3, drafting=frozenset({"draft prefill", "draft decode"})),
    "eagle3": Run("eagle3", 3, drafting=frozenset({"draft prefill", "draft decode"})),
    "eagle3, eagerly": Run("eagle3", 3, graphs=False),
    "draft model": Run("draft_model", 3),
    "draft model, eagerly": Run("draft_model", 3, graphs=False),
    "predictor": Run("mtp", 1, drafting=frozenset({"draft prefill"})),
    "look-up": Run(NGRAM, 3),
}
each = pytest.mark.parametrize("name", RUNS)
COMMON = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 256 << 20, "max_num_batched_tokens": 256}


def expected(method: str) -> tuple[list[list[int]], list[list[int]]]:
    """Hugging Face's tokens for the standard prompts, and for those that repeat themselves."""
    return _expected(TARGETS[method])


@cache
def _expected(family: str) -> tuple[list[list[int]], list[list[int]]]:
    model = _checkpoint(family)
    return expected_tokens(model), expected_tokens(model, drafters.TURNS, drafters.LONG)


_folder: list[Path] = []


@cache
def _checkpoint(family: str) -> Path:
    return build_checkpoint(family, _folder[0] / family)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    _folder[:] = [tmp_path_factory.mktemp("checkpoints")]
    models = drafters.pairs(_checkpoint, tmp_path_factory.mktemp("drafters"))

    def start(run: Run) -> Any:
        target, drafter = models.get(run.method, (_checkpoint(TARGETS[run.method]), None))
        who = LOOK_UP if drafter is None else {"method": run.method, "model": str(drafter)}
        engine = {"speculative_config": {**who, "num_speculative_tokens": run.tokens}, "enforce_eager": not run.graphs}
        steps = [
            {"do": "replays"},
            {"do": "generate", "prompts": PROMPTS, "sampling": {"max_tokens": MAX_TOKENS}},
            {"do": "generate", "prompts": drafters.TURNS, "sampling": {"max_tokens": drafters.LONG}},
            {"do": "metrics", "contains": "spec_decode"},
            {"do": "replays"},
        ]
        return start_features((target, steps, {**COMMON, **engine}), VLLM_FL_DENY_VENDORS="cuda", USE_FLAGGEMS="0")

    return Runs({name: start(run) for name, run in RUNS.items()})


def _tokens(step: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"][0] for output in step]


@each
def test_tokens_equal_hugging_face(name: str, results: Runs) -> None:
    _, short, long, *_ = results[name]["runs"][0]["steps"]
    assert (_tokens(short), _tokens(long)) == expected(RUNS[name].method)


@each
def test_drafts_are_accepted_and_rejected(name: str, results: Runs) -> None:
    counted = results[name]["runs"][0]["steps"][3]
    accepted, made = (counted[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft"))
    assert 0 < accepted < made


@each
def test_target_and_drafter_replay_their_graphs(name: str, results: Runs) -> None:
    """A step that verifies has one token more than drafts for each request."""
    run = RUNS[name]
    replayed = {(owner, mode, tokens) for owner, mode, tokens in results[name]["runs"][0]["steps"][4]}
    if not run.graphs:
        assert replayed == set()
        return
    verified = {tokens for owner, mode, tokens in replayed if (owner, mode) == ("model", "FULL")}
    assert verified or run.method == NGRAM  # which may find less than asked for
    assert all(tokens % (run.tokens + 1) == 0 for tokens in verified)
    assert {owner for owner, mode, _ in replayed if mode == "FULL"} >= run.drafting


@each
def test_our_operators_run_in_both_models(name: str, results: Runs) -> None:
    (run,) = results[name]["runs"]
    attention = "mla_decode" if RUNS[name].method == "mtp" else "paged_attention"
    assert ran(run, attention) == {"default.triton"}
    assert run["report"]["model_runner"] == "V2"
    assert run["report"]["native_layers"] == {}
    assert run["report"]["failed"] == {}
