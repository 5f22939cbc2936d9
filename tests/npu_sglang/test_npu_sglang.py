"""A real SGLang engine on ``npu:0``: its operators by ``vendor.ascend``, no documented rule of the chip waived.

One engine a family: two passes, the second from the radix cache, then one with each wrong kernel of the chip, and a
right one. How results are compared in half precision says :mod:`half_on_npu`. Qwen3 always runs; the commit draws two
of the other families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engines import run

from fl_dispatch.cli.checkpoints import build_checkpoint
from half_on_npu import DTYPES, SIZES, as_near_as_hugging_face, asked, clear_tokens
from processes import Runs, pool
from running import MAX_TOKENS, PROMPTS
from sampling import drawn

PAGE = 128
FEW = 4
"""Tokens that an engine with a wrong kernel generates for each prompt."""


@dataclass(frozen=True)
class Family:
    """Expectations of a family's engine.

    Args:
        operators: that run, all by ``vendor.ascend``.
        wrong: kernels of the chip of which a wrong one is tried.
        references: operators that the backend declines in this dtype.
        native: layers that stay SGLang's own.
        changes: of the checkpoint.
    """

    operators: set[str]
    wrong: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    native: Mapping[str, int] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)


DENSE = {"rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention", "linear"}
LISTED = DENSE - {"paged_attention"} | {"index_key_write", "index_topk", "mla_sparse", "grouped_topk", "fused_moe"}
LISTS = "npu_lightning_indexer"
"""With a wrong form of this kernel an engine generates all tokens, because log-probabilities show wrong lists."""
LISTING = Family(LISTED, (LISTS, "npu_sparse_flash_attention"), ("layer_norm",))
FAMILIES = {
    "qwen3": Family(
        DENSE,
        (
            "npu_rms_norm",
            "npu_add_rms_norm",
            "npu_swiglu",
            "npu_rotary_mul",
            "npu_scatter_pa_kv_cache",
            "npu_fused_infer_attention_score",
        ),
    ),
    "llama": Family(DENSE),
    "qwen3_moe": Family(
        DENSE - {"silu_and_mul"} | {"topk_softmax", "fused_moe"}, ("npu_moe_gating_top_k", "npu_grouped_matmul")
    ),
    "gemma3": Family(
        {"gemma_rms_norm", "gelu_and_mul", "kv_cache_write", "paged_attention", "linear"},
        ("npu_gemma_rms_norm", "npu_geglu"),
        native={"RotaryEmbedding": 2},  # its attention rotates by a function of its own, and these two layers never run
        changes={"tie_word_embeddings": True},  # SGLang ties them whatever the checkpoint says
    ),
    "deepseek_v3": Family(
        DENSE - {"paged_attention"} | {"mla_decode", "grouped_topk", "fused_moe"},
        ("npu_fused_infer_attention_score_v2", "npu_scatter_nd_update_"),
    ),
    "deepseek_v32": LISTING,
    "glm_moe_dsa": LISTING,
}
OTHERS = [name for name in FAMILIES if name != "qwen3"]
DRAWN = ["qwen3", *drawn(OTHERS, 2, "families of SGLang on the NPU")]
WRONG = [(name, kernel) for name in DRAWN for kernel in FAMILIES[name].wrong]
each_family = pytest.mark.parametrize("family", DRAWN)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family → its checkpoint in the chip's sizes."""
    folder = tmp_path_factory.mktemp("npu")
    return cache(lambda name: build_checkpoint(name, folder / name, **SIZES[name], **FAMILIES[name].changes))


@pytest.fixture(scope="module")
def results(model: Callable[[str], Path]) -> Mapping[str, Any]:
    variables = {"SGLANG_FL_PLUGIN_MODULES": "wrong_kernels", "SGLANG_FL_PREFER": "vendor"}

    def start(family: str) -> Any:
        step = asked(family)
        wrong = [
            {**step, **({} if kernel == LISTS else {"max_tokens": FEW}), "wrong": kernel}
            for kernel in (*FAMILIES[family].wrong, "")
        ]
        engine = {"dtype": DTYPES[family], "max_running_requests": len(step["prompts"])}
        return pool.submit(run, model(family), [step, step, *wrong], engine, **variables)

    return Runs({family: start(family) for family in DRAWN})


@each_family
@pytest.mark.parametrize("number", [0, 1], ids=["first", "from the radix cache"])
def test_log_probabilities_are_as_near_to_float32_as_hugging_faces(
    family: str, number: int, results: Mapping[str, Any], model: Callable[[str], Path]
) -> None:
    step = results[family]["steps"][number]
    assert as_near_as_hugging_face(family, model(family), asked(family)["prompts"], step, DTYPES[family])


@pytest.mark.parametrize("family", [name for name in DRAWN if LISTS in FAMILIES[name].wrong])
def test_log_probabilities_with_wrong_lists_are_farther(
    family: str, results: Mapping[str, Any], model: Callable[[str], Path]
) -> None:
    step = results[family]["steps"][2 + FAMILIES[family].wrong.index(LISTS)]
    assert not as_near_as_hugging_face(family, model(family), asked(family)["prompts"], step, DTYPES[family])


@pytest.mark.parametrize("family", [name for name in DRAWN if DTYPES[name] == "float16"])
def test_tokens_equal_hugging_faces_as_far_as_half_precision_decides_them(
    family: str, results: Mapping[str, Any], model: Callable[[str], Path]
) -> None:
    clear = clear_tokens(model(family), PROMPTS, MAX_TOKENS, "float16")
    assert sum(map(len, clear)) >= 24
    for step in results[family]["steps"][:2]:
        assert [found[: len(decided)] for found, decided in zip(step["tokens"], clear, strict=True)] == clear


@each_family
def test_the_second_pass_reads_the_radix_cache(family: str, results: Mapping[str, Any]) -> None:
    first, second = results[family]["steps"][:2]
    prompts = asked(family)["prompts"]
    assert first["cached"] == [0] * len(prompts)
    assert second["cached"] == [(len(prompt) - 1) // PAGE * PAGE for prompt in prompts]


@each_family
def test_every_operator_is_the_vendors(family: str, results: Mapping[str, Any]) -> None:
    report = results[family]["report"]
    ran = {tuple(key.split(" ")) for key in report["counts"]}
    documented = DTYPES[family] == "float16"  # npu_linear's documentation does not name bfloat16
    product = ("linear", "vendor.ascend" if documented else "reference.torch")
    references = {(operator, "reference.torch") for operator in FAMILIES[family].references}
    assert ran == {(op, "vendor.ascend") for op in FAMILIES[family].operators - {"linear"}} | {product} | references
    assert (report["native_layers"], report["failed"]) == (FAMILIES[family].native, {})


def test_graphs_are_off_though_nobody_said_so(results: Mapping[str, Any]) -> None:
    log = results["qwen3"]["log"]
    assert log.count("graphs of decode: 'disabled' instead of ") == 1
    assert log.count("graphs of prefill: 'disabled' instead of ") <= 1  # the host may have chosen none by itself
    assert "Capture target" not in log


@pytest.mark.parametrize(("family", "kernel"), WRONG)
def test_a_wrong_kernel_changes_the_tokens(family: str, kernel: str, results: Mapping[str, Any]) -> None:
    right, _, *others = results[family]["steps"]
    step = others[FAMILIES[family].wrong.index(kernel)]
    assert step["cached"] == [0] * len(right["cached"]), "it would read what a right kernel wrote"
    assert [tokens[:FEW] for tokens in step["tokens"]] != [tokens[:FEW] for tokens in right["tokens"]]


@each_family
def test_with_right_kernels_the_same_engine_is_right_again(family: str, results: Mapping[str, Any]) -> None:
    right, *_, last = results[family]["steps"]
    assert last["tokens"] == [tokens[:FEW] for tokens in right["tokens"]]
