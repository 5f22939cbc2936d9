"""Implementations that no graph can hold decide which of vLLM's graphs are captured, and the reason names them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

from fl_dispatch import (
    BackendImplKind,
    OpImpl,
    SelectionPolicy,
    get_default_manager,
    reset_default_manager,
    reset_global_policy,
    set_global_policy,
)
from fl_dispatch.devices.cuda import CUDA
from fl_dispatch.ops import OPERATORS
from vllm_fl.compilation import compile
from vllm_fl.layers import delta_net, mamba2
from vllm_fl.platform import config

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
WAITING = tuple(name for name, operator in OPERATORS.items() if operator.waits)
OUTSIDE_GRAPHS = ("kv_cache_write", "paged_attention", "mla_decode", "mla_prefill")
"""Operators whose Ascend kernels take a batch's lengths as integers, or wait for the device."""


@pytest.fixture(autouse=True)
def a_vendor_of_everything() -> Iterator[None]:
    """``vendor.nimbus`` comes first for every operator, and a graph can hold all of it."""
    reset_default_manager()
    get_default_manager().ensure_initialized()
    for op in OPERATORS:
        register(op)
    set_global_policy(SelectionPolicy(prefer="vendor"))
    yield
    reset_default_manager()
    reset_global_policy()


def register(op: str, name: str = "vendor.nimbus", priority: int = 500, **options: Any) -> None:
    kind = BackendImplKind.VENDOR
    impl = OpImpl(op, name, kind, lambda *args: None, "nimbus", priority, signature="unchecked", **options)
    get_default_manager().registry.register_impl(impl)


def mode(
    experts: bool = False,
    latent: bool = False,
    compiled: bool = True,
    cache: str = "auto",
    states: bool = False,
    v2: bool = True,
    divided: bool = False,
    **given: Any,
) -> CUDAGraphMode:
    """The mode of a model whose user asked for full and piecewise graphs."""
    how = CompilationMode.VLLM_COMPILE if compiled else CompilationMode.NONE
    compilation = SimpleNamespace(**{"mode": how, "cudagraph_mode": FULL, "splitting_ops": None, **given})
    native = given.pop("native", False)
    model = SimpleNamespace(is_moe=experts, use_mla=latent, is_hybrid=states, is_attention_free=False)
    model.hf_text_config = SimpleNamespace()
    asked: Any = SimpleNamespace(
        compilation_config=compilation,
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=cache),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1 + divided),
        use_v2_model_runner=v2,
        _get_v2_model_runner_unsupported_features=lambda: ["something"],
    )
    config._adapt_graphs(asked, native)
    found: CUDAGraphMode = compilation.cudagraph_mode
    return found


def test_graphs_that_can_hold_everything_are_full() -> None:
    assert mode() == mode(experts=True, latent=True, compiled=False) == FULL


def test_who_asks_for_full_graphs_has_pieces_for_prompts(caplog: pytest.LogCaptureFixture) -> None:
    asked = CUDAGraphMode.FULL
    with caplog.at_level("INFO", logger="vllm_fl"):
        assert mode(cudagraph_mode=asked) == FULL
    assert "graphs hold attention only for batches with one number of new tokens for every request" in caplog.text
    assert mode(cudagraph_mode=asked, compiled=False) == mode(cudagraph_mode=asked, native=True) == asked


def test_attention_that_no_graph_can_hold_leaves_piecewise_graphs(caplog: pytest.LogCaptureFixture) -> None:
    register("paged_attention", "vendor.nimbus.fast", 600, properties={"graphs": False})
    with caplog.at_level("INFO", logger="vllm_fl"):
        assert mode() == PIECEWISE
    assert "because no graph can hold 'vendor.nimbus.fast' of 'paged_attention'" in caplog.text
    assert mode(latent=True) == FULL  # such a model has another kind of attention


def test_a_cache_that_ranks_divide_leaves_piecewise_graphs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="vllm_fl"):
        assert (mode(divided=True), mode(divided=True, compiled=False)) == (PIECEWISE, NONE)
    assert "attention over a cache that ranks divide reads lengths on the host" in caplog.text


def test_a_cache_in_fp8_is_left_to_those_that_take_its_scales(caplog: pytest.LogCaptureFixture) -> None:
    """``vendor.nimbus`` has no scales, so another implementation runs, and the graphs are those that can hold it."""
    with caplog.at_level("INFO", logger="vllm_fl"):
        assert (mode(), mode(cache="fp8")) == (FULL, PIECEWISE)
    assert "'reference.torch' of 'paged_attention'" in caplog.text
    for op in config.ATTENTION_OPERATORS:
        vendor = BackendImplKind.VENDOR
        impl = OpImpl(
            op, "vendor.nimbus.scaled", vendor, OPERATORS[op].reference, "nimbus", 100, available=lambda: True
        )
        get_default_manager().registry.register_impl(impl)
    assert mode(cache="fp8_e4m3") == FULL


@pytest.mark.parametrize("given", [{"compiled": False}, {"splitting_ops": []}])
def test_without_pieces_there_are_no_graphs_around_it(given: dict[str, Any]) -> None:
    register("kv_cache_write", "vendor.nimbus.fast", 600, properties={"graphs": False})
    assert mode(**given) == NONE


def test_another_operator_that_no_graph_can_hold_leaves_none(caplog: pytest.LogCaptureFixture) -> None:
    register("rms_norm", "vendor.nimbus.slow", 600, properties={"graphs": False})
    with caplog.at_level("INFO", logger="vllm_fl"):
        assert mode() == NONE
    assert "no graph can hold 'vendor.nimbus.slow' of 'rms_norm'" in caplog.text


def test_experts_count_only_in_models_that_have_them() -> None:
    register("fused_moe", "vendor.nimbus.slow", 600, properties={"graphs": False})
    assert (mode(), mode(experts=True)) == (FULL, NONE)


def test_an_implementation_that_is_not_chosen_does_not_count() -> None:
    register("rms_norm", "vendor.nimbus.slow", 400, properties={"graphs": False})
    assert mode() == FULL


@pytest.mark.parametrize(
    ("impl_id", "operators"),
    [("reference.torch", WAITING), ("vendor.ascend", (*OUTSIDE_GRAPHS, *config.SPARSE_OPERATORS))],
)
def test_ours_that_no_graph_can_hold_say_so(impl_id: str, operators: tuple[str, ...]) -> None:
    """Those that read numbers from the device, or take them as integers."""
    impls = {op: get_default_manager().registry.get_implementation(op, impl_id) for op in OPERATORS}
    assert {op for op, impl in impls.items() if impl and impl.properties.get("graphs") is False} == {*operators}


@pytest.mark.parametrize(
    ("mode", "backend", "properties", "given", "endpoints"),
    [
        (CompilationMode.VLLM_COMPILE, "inductor", {"reference_from": 33}, None, [32]),
        (CompilationMode.VLLM_COMPILE, "inductor", {"reference_from": 33}, [8192], [32, 8192]),
        (CompilationMode.VLLM_COMPILE, "inductor", {"reference_from": 2}, [8192], [8192]),
        (CompilationMode.VLLM_COMPILE, "inductor", {}, [8192], [8192]),
        (CompilationMode.VLLM_COMPILE, "eager", {"reference_from": 33}, None, None),
        (CompilationMode.DYNAMO_TRACE_ONCE, "inductor", {"reference_from": 33}, None, None),
    ],
)
def test_batches_whose_products_are_pytorchs_are_compiled_apart(
    mode: CompilationMode, backend: str, properties: dict[str, Any], given: Any, endpoints: Any
) -> None:
    register("linear", "vendor.nimbus.products", 600, properties=properties)
    compilation = CompilationConfig(mode=mode, backend=backend, compile_ranges_endpoints=given)
    compile.adapt(compilation, CUDA)
    assert compilation.compile_ranges_endpoints == endpoints


def test_states_are_in_whole_graphs_of_the_v2_runner_alone(caplog: pytest.LogCaptureFixture) -> None:
    for op in {*delta_net.OPERATORS, *mamba2.OPERATORS}:
        register(op, "vendor.nimbus.states", 600)
    assert mode(states=True) == FULL
    with caplog.at_level("INFO", logger="vllm_fl"):
        assert mode(states=True, v2=False) == PIECEWISE
    assert "the V1 runner replays a graph of decoding for new prompts of one token" in caplog.text
    assert mode(states=True, v2=False, compiled=False) == NONE
    assert mode(v2=False) == FULL
