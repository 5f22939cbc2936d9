"""A latent cache in fp8 under SGLang: it computes what Hugging Face's network does whose latents are rounded so.

All tokens read all latents from the cache, because the absorbed form is the only one here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serving import STEP, answered, start

from latent_cache import ALL_ONE, others, read_from_cache, rounded
from quantized_mixture import latent
from quantized_network import computed, distance
from running import MAX_TOKENS, PROMPTS, ran

pytestmark = pytest.mark.engine
WRONG = ("mla_decode", "kv_cache_write")
"""A write that writes nothing finds what a wrong attention has led to, and not the right pass's rows."""
PLUGINS = {"SGLANG_FL_PLUGIN_MODULES": "wrong_plugin,policy_method", "SGLANG_FL_DENY_VENDORS": "wrong"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return latent(tmp_path_factory.mktemp("latent") / "whole")


@pytest.fixture(scope="module")
def found(model: Path) -> dict[str, Any]:
    """A right pass, one that finds its prompts in the cache; and one for each operator with a wrong implementation."""
    orders = [{operator: ["impl:vendor.wrong"]} for operator in WRONG]
    wrong = [{**STEP, "policy": {"prefer": "reference", "per_op_order": order}} for order in orders]
    engine = {"kv_cache_dtype": "fp8_e4m3"}
    result: dict[str, Any] = start(
        model, {**STEP, "scores": True}, STEP, *wrong, variables=PLUGINS, engine=engine
    ).result()
    return result


def test_it_computes_what_the_network_with_rounded_latents_does(model: Path, found: dict[str, Any]) -> None:
    texts, got = answered(PROMPTS, found["steps"][0])
    there = computed(rounded(model, ALL_ONE, read_from_cache), texts)
    assert distance(got, there.scores) <= there.rounding
    assert there.decides(PROMPTS, MAX_TOKENS)
    for other, wrong in others(model, ALL_ONE, texts, read_from_cache).items():
        assert distance(got, wrong) > there.rounding, other


def test_a_prompt_found_in_the_cache_has_the_same_answer(found: dict[str, Any]) -> None:
    first, again = found["steps"][:2]
    assert first["cached"] == [0] * len(PROMPTS)
    assert max(again["cached"]) >= 320
    assert again["tokens"] == first["tokens"]


def test_the_operators_ran_on_it(found: dict[str, Any]) -> None:
    assert all(ran(found, operator) - {"vendor.wrong"} for operator in WRONG)
    assert found["report"]["failed"] == found["report"]["native_layers"] == {}


@pytest.mark.parametrize("operator", WRONG)
def test_a_wrong_implementation_changes_the_tokens(operator: str, found: dict[str, Any]) -> None:
    first, _, *wrong = found["steps"]
    assert wrong[WRONG.index(operator)]["tokens"] != first["tokens"]
