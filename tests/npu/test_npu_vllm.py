"""A real vLLM engine on ``npu:0``: every operator by ``vendor.ascend``, no documented rule of the chip waived.

One engine a family answers all of it: prompts in chunks, the same from the prefix cache, and a wrong kernel of each
operator of the chip. How results are compared in half precision says :mod:`half_on_npu`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chip_engines import LLAMA, counts, start

from half_on_npu import DTYPES, as_near_as_hugging_face, asked, clear_tokens
from processes import Runs
from running import MAX_TOKENS, PROMPTS
from sampling import drawn

BLOCK, LATENT_BLOCK = 128, 16
"""Tokens of a block of the cache. The kernels ask for 128; latent rows are copied, so their blocks stay as they are."""
FEW = 4
"""Tokens that an engine with a wrong kernel generates for each prompt."""


@dataclass(frozen=True)
class Family:
    """Expectations of a family's engine.

    Args:
        operators: that ``vendor.ascend`` runs, all of the model's but ``references``.
        kernels: of the chip, all that run; a wrong one of each is tried in some family.
        wrong: those that are tried here at every commit.
        references: operators that the backend declines in this dtype.
    """

    operators: set[str]
    kernels: set[str]
    wrong: tuple[str, ...] = ()
    references: tuple[str, ...] = ()


ATTENTION = {"npu_rotary_mul", "npu_scatter_pa_kv_cache", "npu_fused_infer_attention_score"}
NORMS = {"npu_rms_norm", "npu_add_rms_norm"}
GEMMA = {"gemma_rms_norm", "gelu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"}
EXPERTS = {"npu_moe_gating_top_k", "npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_moe_token_unpermute"}
LATENT = {"npu_scatter_nd_update_", "npu_fused_infer_attention_score_v2"}
LISTED = {"index_key_write", "index_topk", "mla_sparse"}
LISTS = "npu_lightning_indexer"
"""With a wrong form of this kernel an engine generates all tokens, because log-probabilities show wrong lists."""
SPARSE = {LISTS, "npu_sparse_flash_attention"}
DEEPSEEK = {"rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "mla_decode", "mla_prefill"}
LISTING = Family(
    DEEPSEEK - {"mla_prefill"} | LISTED | {"grouped_topk", "fused_moe"},
    NORMS | EXPERTS | SPARSE | {"npu_scatter_nd_update_", "npu_rotary_mul", "npu_swiglu"},
    tuple(sorted(SPARSE)),
    ("linear", "layer_norm"),
)
ALL = {
    "qwen3": Family(
        LLAMA,
        ATTENTION | NORMS | {"npu_linear", "npu_swiglu"},
        (*sorted(ATTENTION | NORMS), "npu_linear", "npu_swiglu"),
    ),
    "llama": Family(LLAMA, ATTENTION | NORMS | {"npu_linear", "npu_swiglu"}),
    "gemma3": Family(
        GEMMA, ATTENTION | {"npu_gemma_rms_norm", "npu_geglu"}, ("npu_gemma_rms_norm", "npu_geglu"), ("linear",)
    ),
    "qwen3_moe": Family(
        LLAMA - {"silu_and_mul"} | {"topk_softmax", "fused_moe"},
        ATTENTION | NORMS | EXPERTS | {"npu_linear", "npu_swiglu"},
        tuple(sorted(EXPERTS)),
    ),
    "deepseek_v32": LISTING,
    "glm_moe_dsa": LISTING,  # a layer with the lists of the layer before
    "deepseek_v3": Family(
        DEEPSEEK | {"grouped_topk", "fused_moe"},
        LATENT | NORMS | EXPERTS | {"npu_rotary_mul", "npu_swiglu"},
        tuple(sorted(LATENT)),
        ("linear",),
    ),
}
DRAWN = {*drawn([name for name in ALL if ALL[name] is LISTING], 1, "sparse latent attention on the NPU")}
FAMILIES = {name: family for name, family in ALL.items() if family is not LISTING or name in DRAWN}
each_family = pytest.mark.parametrize("family", FAMILIES)
WRONG = [(name, kernel) for name, family in FAMILIES.items() for kernel in family.wrong]
AGAIN = [(name, kernel) for name, family in FAMILIES.items() for kernel in sorted(family.kernels - {*family.wrong})]
"""Kernels that are tried in another family at every commit; those here are a sample."""
WRONG += drawn(AGAIN, 4, "wrong kernels of the NPU")


@pytest.fixture(scope="module")
def results(
    chip_checkpoint: Callable[[str], Path], npu_environment: Callable[..., dict[str, str]]
) -> Mapping[str, Any]:
    """Two passes, then one with each wrong kernel."""

    def run(family: str) -> Any:
        step = asked(family)
        wrong = [
            {**step, **({} if kernel == LISTS else {"max_tokens": FEW}), "wrong": kernel, "reset": True}
            for name, kernel in WRONG
            if name == family
        ]
        together = {"max_num_seqs": len(step["prompts"])}
        return start(chip_checkpoint(family), DTYPES[family], [step, step, *wrong], npu_environment(), **together)

    return Runs({family: run(family) for family in FAMILIES})


@each_family
@pytest.mark.parametrize("number", [0, 1], ids=["first", "from the prefix cache"])
def test_log_probabilities_are_as_near_to_float32_as_hugging_faces(
    family: str, number: int, results: Mapping[str, Any], chip_checkpoint: Callable[[str], Path]
) -> None:
    step = results[family]["steps"][number]
    assert as_near_as_hugging_face(family, chip_checkpoint(family), asked(family)["prompts"], step, DTYPES[family])


@pytest.mark.parametrize("family", sorted(DRAWN))
def test_log_probabilities_with_wrong_lists_are_farther(
    family: str, results: Mapping[str, Any], chip_checkpoint: Callable[[str], Path]
) -> None:
    step = _wrong(family, LISTS, results)
    prompts = asked(family)["prompts"]
    assert not as_near_as_hugging_face(family, chip_checkpoint(family), prompts, step, DTYPES[family])


@pytest.mark.parametrize("family", [name for name in FAMILIES if DTYPES[name] == "float16"])
def test_tokens_equal_hugging_faces_as_far_as_half_precision_decides_them(
    family: str, results: Mapping[str, Any], chip_checkpoint: Callable[[str], Path]
) -> None:
    expected = clear_tokens(chip_checkpoint(family), PROMPTS, MAX_TOKENS, DTYPES[family])
    assert sum(map(len, expected)) >= 24
    for step in results[family]["steps"][:2]:
        assert [tokens[: len(clear)] for tokens, clear in zip(step["tokens"], expected, strict=True)] == expected


@each_family
def test_the_second_pass_reads_the_prefix_cache(family: str, results: Mapping[str, Any]) -> None:
    first, second = results[family]["steps"][:2]
    prompts = asked(family)["prompts"]
    assert first["cached"] == [0] * len(prompts)
    block = LATENT_BLOCK if {"mla_decode", "mla_sparse"} & FAMILIES[family].operators else BLOCK
    assert second["cached"] == [(len(prompt) - 1) // block * block for prompt in prompts]


@each_family
def test_every_operator_is_the_vendors_but_what_the_documentation_of_the_chip_excludes(
    family: str, results: Mapping[str, Any]
) -> None:
    report, about = results[family]["report"], FAMILIES[family]
    references = {operator: {"reference.torch"} for operator in about.references}
    assert counts(report) == {**{operator: {"vendor.ascend"} for operator in about.operators}, **references}
    assert (report["native_layers"], report["failed"]) == ({}, {})


@each_family
def test_the_kernels_of_the_chip_ran(family: str, results: Mapping[str, Any]) -> None:
    assert set(results[family]["steps"][0]["kernels"]) == FAMILIES[family].kernels


@each_family
@pytest.mark.parametrize("number", [0, 1], ids=["first", "from the prefix cache"])
def test_no_layer_makes_the_host_wait_for_the_device(family: str, number: int, results: Mapping[str, Any]) -> None:
    """Lengths are integers that the host has, in decoding, prefill and its chunks of context alike."""
    assert results[family]["steps"][number]["waits"] == {}


def test_each_step_makes_the_calls_that_the_backend_documents(results: Mapping[str, Any]) -> None:
    kernels = results["llama"]["steps"][0]["kernels"]
    layers = kernels["npu_fused_infer_attention_score"]
    assert kernels["npu_scatter_pa_kv_cache"] == kernels["npu_swiglu"] == layers
    assert kernels["npu_rotary_mul"] == kernels["npu_add_rms_norm"] == 2 * layers
    assert kernels["npu_linear"] == 4 * layers


@pytest.mark.parametrize(("family", "kernel"), WRONG)
def test_a_wrong_kernel_changes_the_tokens(family: str, kernel: str, results: Mapping[str, Any]) -> None:
    right, step = results[family]["steps"][0], _wrong(family, kernel, results)
    assert step["cached"] == [0] * len(right["cached"]), "it would read what a right kernel wrote"
    assert step["kernels"][kernel] > 0
    assert [tokens[:FEW] for tokens in step["tokens"]] != [tokens[:FEW] for tokens in right["tokens"]]


def _wrong(family: str, kernel: str, results: Mapping[str, Any]) -> Mapping[str, Any]:
    """The step of a family with a wrong kernel."""
    tried = [one for name, one in WRONG if name == family]
    step: Mapping[str, Any] = results[family]["steps"][2:][tried.index(kernel)]
    return step
