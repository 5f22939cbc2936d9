"""Compiled models: our implementations are in the graph, and no graph outlives the choices that it was made from."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import Runs, ran, start, start_compiled

from fl_dispatch import Manifest, RankDivergenceError
from fl_dispatch.cli.checkpoints import FAMILIES
from fl_dispatch.devices import CPU
from sampling import drawn

RIGHT = {"prefer": "reference"}
MOST_ROWS = 8
FEW = {"per_op_order": {"linear": ["impl:vendor.few"]}, **RIGHT}
"""A product that raises an error for more rows, and says so (``few_rows_plugin``)."""
MOODY = {"per_op_order": {"silu_and_mul": ["impl:vendor.moody", "reference"]}}
WRONG = drawn(("silu_and_mul", "rms_norm", "rotary_embedding"), 1, "wrong operators in a graph")
DENSE, SLIDING, MOE = "qwen3", "gemma3", "qwen3_moe"
MODELS = [family for family in (DENSE, SLIDING, MOE) if family in FAMILIES]
BY_INDUCTOR = [DENSE, *drawn(MODELS[1:], 1, "models that Inductor compiles")]
PIECES = {DENSE: 4, SLIDING: 7, MOE: 4}
"""One before each attention layer, and one after the last."""
DISTINCT = 3
"""The first, the last, and those between two layers, which are equal, whatever keys their attention sees."""

VLLM_COMPILE, DYNAMO_ONCE, STOCK = "VLLM_COMPILE", "DYNAMO_TRACE_ONCE", "STOCK_TORCH_COMPILE"
OTHER_MODES = drawn((DYNAMO_ONCE, STOCK), 1, "other modes of compilation")


def engine(
    model: Path, policy: dict[str, Any] = RIGHT, mode: str = VLLM_COMPILE, backend: str = "eager", **compilation: Any
) -> dict[str, Any]:
    config = {"mode": mode, "backend": backend, **compilation}
    return {"model": model, "engine": {"enforce_eager": False, "compilation_config": config}, "policy": policy}


@pytest.fixture(scope="session")
def results(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Every compiled engine by name, in five processes; two of them share a compile cache, one after the other."""
    fresh, shared = (str(tmp_path_factory.mktemp("cache")) for _ in range(2))
    dense = checkpoint(DENSE)

    def wrong(operator: str) -> dict[str, Any]:
        return {"per_op_order": {operator: ["impl:vendor.wrong"]}, **RIGHT}

    def inductor(family: str, policy: dict[str, Any] = RIGHT) -> dict[str, Any]:
        return engine(checkpoint(family), policy, backend="inductor")

    def whole(policy: dict[str, Any] = RIGHT) -> dict[str, Any]:
        return engine(dense, policy, mode=DYNAMO_ONCE, backend="inductor")

    first = start_compiled(
        {"inductor qwen3": inductor(DENSE), "whole": whole(), "moody": inductor(DENSE, MOODY)},
        VLLM_CACHE_ROOT=shared,
        VLLM_FL_PLUGIN_MODULES="moody_plugin",
    )
    eager = start_compiled(
        {
            **{f"eager {family}": engine(checkpoint(family)) for family in MODELS},
            **{f"wrong {operator}": engine(dense, wrong(operator)) for operator in WRONG},
            "linear": engine(checkpoint("llama"), {**RIGHT, "per_op_order": {"linear": ["vendor"]}}),
            "sizes": engine(dense, compile_sizes=[4, 2]),
            **{mode: engine(dense, mode=mode) for mode in OTHER_MODES},
        },
        VLLM_CACHE_ROOT=fresh,
        VLLM_FL_PLUGIN_MODULES="wrong_plugin,linear_plugin",
    )
    few = engine(checkpoint("llama"), FEW, backend="inductor", compile_ranges_endpoints=[MOST_ROWS])
    models = start_compiled(
        {**{f"inductor {family}": inductor(family) for family in BY_INDUCTOR if family != DENSE}, "few rows": few},
        VLLM_CACHE_ROOT=fresh,
        VLLM_FL_PLUGIN_MODULES="few_rows_plugin",
    )
    two_ranks = start(
        checkpoint("llama"),
        engine={"tensor_parallel_size": 2, **engine(dense)["engine"]},
        variables={"VLLM_CACHE_ROOT": fresh},
    )
    second = start_compiled(
        {
            "whole again": whole(),
            "whole, another policy": whole(MOODY),
            "again": {**inductor(DENSE), "afterwards": MOODY},
            "moody fails": inductor(DENSE, MOODY),
        },
        after=first["moody"],
        VLLM_CACHE_ROOT=shared,
        VLLM_FL_PLUGIN_MODULES="moody_plugin",
        MOODY_FAILS="1",
    )
    return Runs({**first, **eager, **models, **second, "two ranks": two_ranks})


@pytest.mark.parametrize(
    ("backend", "family"),
    [*(("eager", family) for family in MODELS), *(("inductor", family) for family in BY_INDUCTOR)],
)
def test_compiled_tokens_equal_hugging_face(
    backend: str, family: str, results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    result = results[f"{backend} {family}"]
    assert result["tokens"] == expected(family)
    compiled = result["report"]["compiled"]
    assert (compiled["mode"], compiled["backend"]) == (VLLM_COMPILE, backend)
    assert compiled["pieces"] == compiled["compilations"] == PIECES[family]
    assert compiled["distinct"] == (DISTINCT if backend == "inductor" else 0)
    assert result["report"]["native_layers"] == {}
    assert result["report"]["failed"] == {}


@pytest.mark.parametrize("family", [family for family in MODELS if family == MOE])
def test_a_mixtures_router_and_experts_are_in_the_graph_on_a_cpu(family: str, results: Mapping[str, Any]) -> None:
    """Only opaque calls of a graph are counted, so a router in it is not."""
    assert ran(results[f"eager {family}"], "fused_moe") == {"reference.torch"}
    assert ran(results[f"eager {family}"], "topk_softmax") == set()


@pytest.mark.parametrize("operator", WRONG)
def test_a_wrong_implementation_is_in_the_graph(
    operator: str, results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    result = results[f"wrong {operator}"]
    assert result["report"]["compiled"]["pieces"] == PIECES[DENSE]
    assert result["tokens"] != expected(DENSE)


@pytest.mark.parametrize("mode", OTHER_MODES)
def test_the_other_modes_compile_too(
    mode: str, results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert results[mode]["tokens"] == expected(DENSE)
    assert results[mode]["report"]["compiled"]["mode"] == mode
    assert results[mode]["report"]["compiled"]["graphs"] >= 1


def test_sizes_that_the_user_names_are_compiled_besides(
    results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert results["sizes"]["tokens"] == expected(DENSE)
    assert results["sizes"]["report"]["compiled"]["compilations"] == 3 * PIECES[DENSE]


def test_products_of_many_rows_are_pytorchs_where_an_implementation_says_so(
    results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    result = results["few rows"]
    assert result["tokens"] == expected("llama")
    assert result["report"]["compiled"]["compilations"] == 2 * result["report"]["compiled"]["pieces"]
    assert ran(result, "linear") == {"vendor.few"}
    assert result["report"]["failed"] == {}


def test_another_policy_does_not_load_the_graph_of_the_first(
    results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert results["moody"]["tokens"] != expected(DENSE)
    assert results["moody"]["report"]["compiled"]["loaded"] == 0


def test_the_first_policy_again_loads_its_graph_from_the_cache(
    results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    first, again = results["inductor qwen3"]["report"], results["again"]["report"]
    assert first["pid"] != again["pid"]
    assert first["manifest"]["hash"] == again["manifest"]["hash"]
    assert (first["compiled"]["loaded"], first["compiled"]["saved"]) == (0, 1)
    assert (again["compiled"]["loaded"], again["compiled"]["compilations"]) == (1, 0)
    assert results["again"]["tokens"] == expected(DENSE)


def test_a_model_of_one_graph_is_loaded_too(
    results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    """vLLM without our replacement writes such a graph, and compiles again in each start."""
    first, again, other = (results[name]["report"] for name in ("whole", "whole again", "whole, another policy"))
    assert first["pid"] != again["pid"]
    assert (first["compiled"]["loaded"], first["compiled"]["saved"]) == (0, 1)
    assert (again["compiled"]["loaded"], again["compiled"]["graphs"]) == (1, 0)
    assert other["compiled"]["loaded"] == 0
    assert results["whole again"]["tokens"] == results["whole"]["tokens"] == expected(DENSE)


def test_a_ban_under_the_same_policy_does_not_load_the_graph_of_what_is_banned(
    results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    before, after = results["moody"]["report"], results["moody fails"]["report"]
    assert before["settings"] == after["settings"]
    assert after["failed"] == {"silu_and_mul": ["vendor.moody"]}
    assert before["manifest"]["hash"] != after["manifest"]["hash"]
    assert after["compiled"]["loaded"] == 0
    assert results["moody fails"]["tokens"] == expected(DENSE)


def test_a_policy_that_would_change_the_compiled_choice_is_refused(results: Mapping[str, Any]) -> None:
    refusal = results["again"]["refusal"]
    assert "dispatch is frozen" in refusal
    assert "silu_and_mul: reference.torch would become vendor.moody" in refusal


def test_the_manifest_names_what_was_compiled(results: Mapping[str, Any]) -> None:
    manifest = results["moody"]["report"]["manifest"]
    assert manifest["choices"]["silu_and_mul"] == [{"runs": ["vendor.moody"]}]
    assert manifest["versions"]["torch"] == torch.__version__


def test_attention_stays_outside_the_graph_and_is_counted(results: Mapping[str, Any]) -> None:
    counts = results["inductor qwen3"]["report"]["counts"]
    assert {key.split(" ")[0] for key in counts} == {"kv_cache_write", "paged_attention"}


def test_products_of_a_vendors_are_in_the_graph(
    results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert results["linear"]["tokens"] == expected("llama")
    assert ran(results["linear"], "linear") == {"vendor.products"}


def test_two_ranks_compile_the_same_choices(
    results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    result = results["two ranks"]
    assert result["steps"][0]["tokens"] == expected("llama")
    assert len({report["manifest"]["hash"] for report in result["reports"]}) == 1
    assert {report["compiled"]["pieces"] for report in result["reports"]} == {4}


def _compare_manifests(rank: int, store: str, version: str, answers: Any) -> None:
    import torch.distributed as dist

    from vllm_fl.worker import ranks

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = SimpleNamespace(world_size=2, ranks=[0, 1], cpu_group=dist.group.WORLD)
    try:
        ranks.refuse_other_manifest(Manifest({}, {}, {"vendor_package": version}), group)
        answers.put("")
    except RankDivergenceError as error:
        answers.put(str(error))
    dist.destroy_process_group()


@pytest.mark.parametrize("second", ["1.0", "2.0"])
def test_ranks_with_other_packages_refuse_to_serve(second: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    arguments = [(rank, str(tmp_path / "store"), version, answers) for rank, version in enumerate(("1.0", second))]
    processes = [context.Process(target=_compare_manifests, args=each) for each in arguments]
    for process in processes:
        process.start()
    found = [answers.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert ["vendor_package" in text for text in found] == [second != "1.0"] * 2


# -- configuration, without an engine ---------------------------------------------------------------------------------


@pytest.fixture
def vllm_config() -> Any:
    from vllm.config import CompilationConfig

    compilation = CompilationConfig(mode=VLLM_COMPILE, backend="inductor")
    return SimpleNamespace(compilation_config=compilation, additional_config={}, model_config=None)


def test_inductor_without_a_compiler_is_refused(vllm_config: Any) -> None:
    import torch._inductor.config as inductor

    from vllm_fl.compilation import compile

    compile.refuse_missing_compiler(vllm_config, CPU)
    with (
        inductor.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(ValueError, match=r"needs a C\+\+ compiler"),
    ):
        compile.refuse_missing_compiler(vllm_config, CPU)
    vllm_config.compilation_config.backend = "eager"
    compile.refuse_missing_compiler(vllm_config, CPU)


def test_python_without_headers_is_refused(vllm_config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm_fl.compilation import compile

    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="C headers"):
        compile.refuse_missing_compiler(vllm_config, CPU)


def test_what_a_compiled_model_cannot_have_is_switched_off_and_logged(
    vllm_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm_fl.compilation import compile

    compilation = vllm_config.compilation_config
    compilation.pass_config.fuse_norm_quant = compilation.pass_config.fuse_attn_quant = True
    compilation.compile_sizes = [8, "cudagraph_capture_sizes", 2]
    with caplog.at_level("INFO", logger="vllm_fl"):
        compile.adapt(compilation, CPU)
    assert not compilation.pass_config.fuse_attn_quant
    assert compilation.pass_config.fuse_norm_quant, "a pass of ours does that"
    assert compilation.compile_sizes == [2, 8]
    assert not compilation.inductor_compile_config["combo_kernels"]
    for changed in ("fuse_attn_quant", "compile_sizes: [2, 8]", "combo_kernels"):
        assert changed in caplog.text


def test_where_no_pass_of_ours_runs_norms_and_activations_stay_apart(vllm_config: Any) -> None:
    from vllm_fl.compilation import compile

    compilation = vllm_config.compilation_config
    compilation.backend = "eager"
    compilation.pass_config.fuse_norm_quant = compilation.pass_config.fuse_act_quant = True
    compile.adapt(compilation, CPU)
    assert not compilation.pass_config.fuse_norm_quant
    assert not compilation.pass_config.fuse_act_quant


def test_a_cache_directory_of_the_user_is_divided_by_choices(vllm_config: Any) -> None:
    from vllm_fl.compilation import compile

    vllm_config.compilation_config.cache_dir = "/cache"
    compile.enter_cache_key(vllm_config, "abc")
    assert vllm_config.compilation_config.cache_dir == "/cache/abc"
    assert vllm_config.additional_config == {compile.MANIFEST_KEY: "abc"}


def test_a_graph_request_is_answered_with_none_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.config import CompilationConfig, CUDAGraphMode

    from vllm_fl.platform import config

    compilation = CompilationConfig(cudagraph_mode="PIECEWISE")
    with caplog.at_level("INFO", logger="vllm_fl"):
        nothing = {"lora_config": None, "model_config": None, "speculative_config": None}
        config.apply_defaults(SimpleNamespace(compilation_config=compilation, **nothing), CPU)
    assert compilation.cudagraph_mode == CUDAGraphMode.NONE
    assert "cudagraph_mode" in caplog.text
