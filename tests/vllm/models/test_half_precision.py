"""In bfloat16 and float16 the engine is as close to float32 as Hugging Face is in the same type: every model family.

Teacher forced: the log-probabilities of every vocabulary entry after every prompt token. How far half precision may be
from float32 depends on the model, so the bound is what Hugging Face's model shows in the same type, with the factors
of :mod:`fl_dispatch.cli.half_precision`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import PROMPTS, start_features

import variants
from fl_dispatch.cli.checkpoints import FAMILIES, VOCABULARY
from fl_dispatch.cli.half_precision import EXPERTS, exact, table, within
from half_types import INDEX_KEYS, SPARSE, part_of
from running import reference_network
from sampling import drawn

NO_FLOAT16 = ("gemma2", "gemma3")
"""vLLM itself refuses float16 for these: numerical instability."""
TIED = ("gemma2", "bloom")
"""The embeddings are also the last layer's weights."""

ALL_CASES = [
    *((family, "bfloat16", "plain") for family in FAMILIES),
    *((family, "bfloat16" if family in NO_FLOAT16 else "float16", "large") for family in FAMILIES),
    ("qwen3", "float16", "plain"),
    ("deepseek_v2", "float16", "plain"),
    ("glm4_moe", "float16", "plain"),
]
NARROW = ("qwen3", "float16", "large")
"""The case that is run once more, with a norm that squares in float16."""

GROUPED = [("gemma3", "bfloat16", "plain"), ("qwen3", "bfloat16", "plain")]
"""Their KV-cache groups are looked at."""
ALWAYS = [NARROW, *GROUPED]
CASES = [*ALWAYS, *drawn([case for case in ALL_CASES if case not in ALWAYS], 5, "half precision")]


def _enlarge(tied: bool, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Weights that bring the hidden states above 1000, so that their squares are beyond float16."""
    if "embed" in name and "norm" not in name:
        return tensor if tied else tensor * 1000.0
    if name.endswith("word_embeddings_layernorm.weight"):  # Bloom's
        return tensor * 1000.0
    if tied and name.endswith("post_feedforward_layernorm.weight"):  # Gemma 2's; its norms add one
        return tensor + 1000.0
    last = ("o_proj.weight", "down_proj.weight", "w2.weight", "attention.dense.weight", "dense_4h_to_h.weight")
    return tensor * 300.0 if name.endswith(last) else tensor


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Family and size of the activations → checkpoint."""
    folder = tmp_path_factory.mktemp("half")

    @cache
    def of(family: str, size: str) -> Path:
        if size == "plain":
            return checkpoint(family)
        return variants.changed(checkpoint(family), folder / family, partial(_enlarge, family in TIED))

    return of


@pytest.fixture(scope="module")
def runs(model: Callable[[str, str], Path]) -> Callable[..., dict[str, Any]]:
    """Family, type and size → what that case's engine says."""
    ask = {"do": "generate", "prompts": PROMPTS, "sampling": {"max_tokens": 1, "prompt_logprobs": VOCABULARY}}
    narrow = {"do": "policy", "per_op_order": {"rms_norm": ["impl:reference.narrow"]}}

    def begin(case: tuple[str, str, str]) -> Future[dict[str, Any]]:
        family, dtype, size = case
        steps = [ask, narrow, ask] if case == NARROW else [ask]
        engine: dict[str, Any] = {"dtype": dtype, "max_logprobs": VOCABULARY, "enable_prefix_caching": False}
        if family in SPARSE:
            engine["attention_config"] = INDEX_KEYS
        job = (model(family, size), [*steps, {"do": "kv_groups"}], engine)
        return start_features(job, VLLM_FL_PLUGIN_MODULES="narrow_norm")

    started = {case: begin(case) for case in CASES}

    def find(*case: str) -> dict[str, Any]:
        (run,) = started[case].result()["runs"]  # type: ignore[index]
        found: dict[str, Any] = run
        return found

    return find


@pytest.fixture(scope="module")
def hugging_face(model: Callable[[str, str], Path]) -> Callable[[str, str, str], tuple[torch.Tensor, float]]:
    """Family, type and size → log-probabilities ``[tokens, vocabulary]``, and the largest hidden activation."""

    @cache
    def of(family: str, dtype: str, size: str) -> tuple[torch.Tensor, float]:
        return exact(reference_network(model(family, size), getattr(torch, dtype)), PROMPTS)

    return of


def _logprobs(step: list[dict[str, Any]]) -> torch.Tensor:
    """``[tokens, vocabulary]`` from what the engine returned for each token after the first."""
    return table(row for output in step for row in output["prompt_logprobs"][1:])


@pytest.mark.parametrize(("family", "dtype", "size"), CASES)
def test_log_probabilities_are_as_near_to_float32_as_hugging_faces(
    family: str,
    dtype: str,
    size: str,
    runs: Callable[..., dict[str, Any]],
    hugging_face: Callable[[str, str, str], tuple[torch.Tensor, float]],
) -> None:
    found = _logprobs(runs(family, dtype, size)["steps"][0])
    assert found.isfinite().all()
    single, largest = hugging_face(family, "float32", size)
    assert (1e3 < largest < 65504) == (size == "large")
    assert within(found, single, hugging_face(family, dtype, size)[0], part_of(family))
    operators = {key.split(" ")[0] for key in runs(family, dtype, size)["report"]["counts"]}
    latent = "mla_sparse" if family in SPARSE else "mla_prefill" if family.startswith("deepseek") else ""
    assert {"kv_cache_write", latent or "paged_attention"} <= operators
    assert ("rotary_embedding" in operators) == (family != "bloom")
    assert ("fused_moe" in operators) == (family in EXPERTS)
    assert runs(family, dtype, size)["report"]["native_layers"] == {}


def test_a_norm_that_squares_in_float16_is_noticed(
    runs: Callable[..., dict[str, Any]],
    hugging_face: Callable[[str, str, str], tuple[torch.Tensor, float]],
) -> None:
    family, dtype, size = NARROW
    found = _logprobs(runs(*NARROW)["steps"][2])
    assert runs(*NARROW)["report"]["counts"]["rms_norm reference.narrow"] > 0
    assert not within(found, hugging_face(family, "float32", size)[0], hugging_face(family, dtype, size)[0])


def test_window_and_full_layers_have_groups_of_their_own(runs: Callable[..., dict[str, Any]]) -> None:
    groups = runs(*GROUPED[0])["steps"][-1]
    assert sorted(kind for kind, _, _ in groups) == ["FullAttentionSpec", *["SlidingWindowSpec"] * (len(groups) - 1)]
    assert sum(layers for kind, layers, _ in groups if kind == "SlidingWindowSpec") == 5
    ((kind, layers, _),) = runs(*GROUPED[1])["steps"][-1]
    assert (kind, layers) == ("FullAttentionSpec", 3)


@pytest.mark.parametrize("family", NO_FLOAT16)
def test_vllm_itself_refuses_float16_where_it_is_unstable(family: str, checkpoint: Callable[[str], Path]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    with pytest.raises(ValueError, match="does not support float16"):
        EngineArgs(str(checkpoint(family)), dtype="float16").create_model_config()
