"""Models that see answer about a picture under SGLang as under Hugging Face, and again from the radix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serving import start

import variants
import vision
from running import ran

MAX_TOKENS = 8
PATCH = 14
"""The only one that SGLang's Qwen2.5-VL reads: it knows pictures that are cut into patches by their size, 1176."""
KIND, SIZE = "qwen2_5_vl", 8 * PATCH
PLUGINS = {
    "SGLANG_FL_PLUGIN_MODULES": "wrong_plugin,policy_method",
    "SGLANG_FL_PREFER": "reference",
    "SGLANG_VLM_CACHE_SIZE_MB": "0",  # or a picture would be looked at once
}
WRONG = {"prefer": "reference", "per_op_order": {"rms_norm@visual.*": ["impl:vendor.wrong"]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    made = vision.build(KIND, folder / "made", vision.qwen("2.5", PATCH))
    return variants.changed(made, folder / KIND, lambda name, tensor: 8 * tensor if "merger.mlp.2" in name else tensor)


@pytest.fixture(scope="module")
def result(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two pictures in one batch, twice; a prompt without one; and with a wrong norm in the encoder."""
    folder, files = tmp_path_factory.mktemp("pictures"), []
    for number, picture in enumerate(vision.pictures(SIZE)):
        files.append(str(folder / f"{number}.png"))
        picture.save(files[-1])
    look = {
        "prompts": None,
        "max_tokens": MAX_TOKENS,
        "more": {"prompt": [vision.PROMPTS[KIND]] * len(files), "image_data": files, "return_logprob": True},
    }
    text = {"prompts": None, "max_tokens": MAX_TOKENS, "more": {"prompt": [vision.WITHOUT]}}
    return start(model, look, look, text, {**look, "policy": WRONG}, variables=PLUGINS).result()


@pytest.fixture(scope="module")
def expected_tokens(model: Path) -> list[list[int]]:
    return vision.expected(model, KIND, MAX_TOKENS, SIZE)


@pytest.mark.engine
def test_answers_are_hugging_faces(result: dict[str, Any], expected_tokens: list[list[int]]) -> None:
    assert result["steps"][0]["tokens"] == expected_tokens[:2]
    assert result["steps"][2]["tokens"] == expected_tokens[2:]
    first, second = (meta["output_token_logprobs"][0][0] for meta in result["steps"][0]["metas"])
    assert abs(first - second) > 1e-3  # or the pictures would not matter


@pytest.mark.engine
def test_a_prompt_with_the_same_picture_comes_from_the_radix_cache(
    result: dict[str, Any], expected_tokens: list[list[int]]
) -> None:
    first, again = result["steps"][:2]
    assert again["tokens"] == expected_tokens[:2]
    assert min(again["cached"]) > max(first["cached"])


@pytest.mark.engine
def test_a_wrong_norm_of_the_encoder_changes_the_answers(
    result: dict[str, Any], expected_tokens: list[list[int]]
) -> None:
    assert result["steps"][3]["tokens"] != expected_tokens[:2]


@pytest.mark.engine
def test_our_operators_ran(result: dict[str, Any]) -> None:
    report = result["report"]
    assert report["undispatched"] == report["failed"] == {}
    assert ran(result, "paged_attention") == {"reference.torch"}
    assert ran(result, "rms_norm") == {"reference.torch", "vendor.wrong"}
