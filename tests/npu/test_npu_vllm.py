"""A real vLLM engine on ``npu:0``: every operator by ``vendor.ascend``, no documented rule of the chip waived.

One engine a family answers all of it: prompts in chunks, the same from the prefix cache, and a wrong kernel of each
operator of the chip. How results are compared in half precision says :mod:`half_on_npu`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fl_dispatch.cli.checkpoints import VOCABULARY, build_checkpoint
from half_on_npu import DTYPES, SIZES, as_near_as_hugging_face, clear_tokens
from processes import Runs, finish, pool
from running import MAX_TOKENS, PROMPTS

SCRIPT = Path(__file__).with_name("run_npu_vllm.py")
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
        wrong: those that are tried here.
        references: operators that the backend declines in this dtype.
    """

    operators: set[str]
    kernels: set[str]
    wrong: tuple[str, ...] = ()
    references: tuple[str, ...] = ()


ATTENTION = {"npu_rotary_mul", "npu_scatter_pa_kv_cache", "npu_fused_infer_attention_score"}
NORMS = {"npu_rms_norm", "npu_add_rms_norm"}
LLAMA = {"rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention", "linear"}
GEMMA = {"gemma_rms_norm", "gelu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention"}
EXPERTS = {"npu_moe_gating_top_k", "npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_moe_token_unpermute"}
LATENT = {"npu_scatter_nd_update_", "npu_fused_infer_attention_score_v2"}
DEEPSEEK = {"rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "mla_decode", "mla_prefill"}
FAMILIES = {
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
    "deepseek_v3": Family(
        DEEPSEEK | {"grouped_topk", "fused_moe"},
        LATENT | NORMS | EXPERTS | {"npu_rotary_mul", "npu_swiglu"},
        tuple(sorted(LATENT)),
        ("linear",),
    ),
}
each_family = pytest.mark.parametrize("family", FAMILIES)
WRONG = [(name, kernel) for name, family in FAMILIES.items() for kernel in family.wrong]
STEP = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family → its checkpoint in the chip's sizes."""
    folder = tmp_path_factory.mktemp("npu")
    return cache(lambda family: build_checkpoint(family, folder / family, **SIZES[family]))


@pytest.fixture(scope="module")
def results(model: Callable[[str], Path], npu_environment: Callable[..., dict[str, str]]) -> Mapping[str, Any]:
    """Two passes, then one with each wrong kernel; and engines whose way of running differs."""

    def run(family: str, *wrong: str, engine: Mapping[str, Any] | None = None, **variables: str) -> Any:
        arguments = {
            "model": str(model(family)),
            "dtype": DTYPES[family],
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "kv_cache_memory_bytes": 64 << 20,
            "max_logprobs": VOCABULARY,
            **(engine or {}),
        }
        steps = [STEP, STEP, *({**STEP, "max_tokens": FEW, "wrong": kernel, "reset": True} for kernel in wrong)]
        return pool.submit(finish, SCRIPT, {"engine": arguments, "steps": steps}, npu_environment(**variables))

    spawned = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "EMU_NPUS": "2"}
    return Runs(
        {
            **{name: run(name, *family.wrong) for name, family in FAMILIES.items()},
            "two ranks": run("qwen3", engine={"tensor_parallel_size": 2}, **spawned),
            "as it starts": run("qwen3", engine={"enforce_eager": False}),
            "compiled": run("qwen3", engine={"enforce_eager": False, "compilation_config": COMPILED}),
        }
    )


COMPILED = {"mode": 3, "backend": "eager", "cudagraph_mode": "NONE"}
WAYS = ("two ranks", "as it starts", "compiled")


def _counts(report: Mapping[str, Any]) -> dict[str, set[str]]:
    """Operator → the implementations that ran."""
    found: dict[str, set[str]] = {}
    for operator, impl_id in (key.split(" ") for key in report["counts"]):
        found.setdefault(operator, set()).add(impl_id)
    return found


@each_family
@pytest.mark.parametrize("number", [0, 1], ids=["first", "from the prefix cache"])
def test_log_probabilities_are_as_near_to_float32_as_hugging_faces(
    family: str, number: int, results: Mapping[str, Any], model: Callable[[str], Path]
) -> None:
    step = results[family]["steps"][number]
    assert as_near_as_hugging_face(family, model(family), PROMPTS, step, DTYPES[family])


@pytest.mark.parametrize("family", [name for name, dtype in DTYPES.items() if dtype == "float16"])
def test_tokens_equal_hugging_faces_as_far_as_half_precision_decides_them(
    family: str, results: Mapping[str, Any], model: Callable[[str], Path]
) -> None:
    expected = clear_tokens(model(family), PROMPTS, MAX_TOKENS, DTYPES[family])
    assert sum(map(len, expected)) >= 24
    for step in results[family]["steps"][:2]:
        assert [tokens[: len(clear)] for tokens, clear in zip(step["tokens"], expected, strict=True)] == expected


@each_family
def test_the_second_pass_reads_the_prefix_cache(family: str, results: Mapping[str, Any]) -> None:
    first, second = results[family]["steps"][:2]
    assert first["cached"] == [0] * len(PROMPTS)
    block = LATENT_BLOCK if "mla_decode" in FAMILIES[family].operators else BLOCK
    assert second["cached"] == [(len(prompt) - 1) // block * block for prompt in PROMPTS]


@each_family
def test_every_operator_is_the_vendors_but_what_the_documentation_of_the_chip_excludes(
    family: str, results: Mapping[str, Any]
) -> None:
    report, about = results[family]["report"], FAMILIES[family]
    references = {operator: {"reference.torch"} for operator in about.references}
    assert _counts(report) == {**{operator: {"vendor.ascend"} for operator in about.operators}, **references}
    assert (report["native_layers"], report["failed"]) == ({}, {})


@each_family
def test_the_kernels_of_the_chip_ran(family: str, results: Mapping[str, Any]) -> None:
    assert set(results[family]["steps"][0]["kernels"]) == FAMILIES[family].kernels


def test_each_step_makes_the_calls_that_the_backend_documents(results: Mapping[str, Any]) -> None:
    kernels = results["llama"]["steps"][0]["kernels"]
    layers = kernels["npu_fused_infer_attention_score"]
    assert kernels["npu_scatter_pa_kv_cache"] == kernels["npu_swiglu"] == layers
    assert kernels["npu_rotary_mul"] == kernels["npu_add_rms_norm"] == 2 * layers
    assert kernels["npu_linear"] == 4 * layers


@pytest.mark.parametrize(("family", "kernel"), WRONG)
def test_a_wrong_kernel_changes_the_tokens(family: str, kernel: str, results: Mapping[str, Any]) -> None:
    right, *wrong = results[family]["steps"][0], *results[family]["steps"][2:]
    step = wrong[FAMILIES[family].wrong.index(kernel)]
    assert step["cached"] == [0] * len(PROMPTS), "it would read what a right kernel wrote"
    assert step["kernels"][kernel] > 0
    assert step["tokens"] != [tokens[:FEW] for tokens in right["tokens"]]


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_of_running_give_the_same(
    way: str, results: Mapping[str, Any], model: Callable[[str], Path]
) -> None:
    for step in results[way]["steps"]:
        assert as_near_as_hugging_face("qwen3", model("qwen3"), PROMPTS, step, DTYPES["qwen3"])
    for report in results[way]["reports"]:
        assert _counts(report) == {operator: {"vendor.ascend"} for operator in LLAMA}
        assert (report["native_layers"], report["failed"]) == ({}, {})


def test_two_ranks_are_spawned_and_meet_over_the_stand_in_for_hccl(results: Mapping[str, Any]) -> None:
    first, second = results["two ranks"]["reports"]
    assert len({first["pid"], second["pid"], results["two ranks"]["pid"]}) == 3
    assert first["counts"] == second["counts"]
    assert first["communication"]["tp:0"]["all_reduce"] > 0
