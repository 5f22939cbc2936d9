"""Steps of one token: compiled graphs call one operator for a product, the norm before it and the gate behind it.

No CPU has an implementation of that operator but the reference, so a plugin brings one.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import MAX_TOKENS, PLUGINS, PROMPTS, Runs, ran, start_compiled
from torch import Tensor
from torch.fx import GraphModule

import quantized_checkpoints as checkpoints
from fl_dispatch import SelectionPolicy, get_default_manager, set_global_policy
from fl_dispatch.backends.reference.impl import fused_linear
from fl_dispatch.manager import reset_default_manager
from fl_dispatch.settings.selection_policy import TunedRule
from quantized_checkpoints import SCHEMES

JOINED = "fused_linear"
RIGHT = {"deny_vendors": ["wrong", "cpu"]}
"""One vendor has the joined operator and all of its parts."""
DENSE, SCHEME = "llama", "compressed-tensors W8A8 fp8"
LAYERS, QUANTIZED_LAYERS = 3, 4
ONE_AT_A_TIME = {"max_num_seqs": 1, "max_num_batched_tokens": 512}
STEPS = len(PROMPTS) * (MAX_TOKENS - 1) + sum(len(prompt) == 1 for prompt in PROMPTS)
"""Steps of one token, where requests come one after the other."""
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "a rule for a part": {**RIGHT, "per_op_order": {"silu_and_mul": ["vendor", "reference"]}},
    "nothing but references": {"deny_vendors": ["wrong", "cpu", "one_token"]},
}


@pytest.fixture(scope="module")
def results(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = checkpoints.write_checkpoint(tmp_path_factory.mktemp("one") / "fp8", SCHEMES[SCHEME])
    dense = checkpoint(DENSE)

    def engine(model: Path = dense, policy: Mapping[str, Any] = RIGHT, **more: Any) -> dict[str, Any]:
        arguments = {"enforce_eager": False, "compilation_config": {"mode": "VLLM_COMPILE", "backend": "inductor"}}
        return {"model": model, "engine": {**arguments, **more}, "policy": policy}

    others = {name: ["reference"] for name in ("rotary_embedding", "kv_cache_write", "paged_attention")}
    wrong = {"per_op_order": {JOINED: ["impl:vendor.wrong"], **others}, "deny_vendors": ["cpu"]}
    engines = {
        "one": engine(**ONE_AT_A_TIME),
        "several": engine(),
        "fp8": engine(folder, **ONE_AT_A_TIME),
        "wrong": engine(policy=wrong, **ONE_AT_A_TIME),
        **{name: engine(policy=policy, **ONE_AT_A_TIME) for name, policy in POLICIES.items()},
    }

    def start(engines: Mapping[str, Any], **variables: str) -> dict[str, Any]:
        variables = {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache")), **variables}
        return start_compiled(engines, VLLM_FL_PLUGIN_MODULES="one_token_plugin,wrong_plugin", **variables)

    return Runs({**start(engines), **start({"off": engine(**ONE_AT_A_TIME)}, VLLM_FL_FUSE_ONE_TOKEN="0")})


def calls(result: Mapping[str, Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for key, count in result["report"]["counts"].items():
        found[key.split(" ")[0]] += count
    return found


@pytest.mark.parametrize("name", ["one", "several", "off", *POLICIES])
def test_the_tokens_are_hugging_faces(
    name: str, results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert results[name]["tokens"] == expected(DENSE)
    assert results[name]["report"]["failed"] == {}


def test_a_step_of_one_token_calls_it_for_the_products_behind_norms(results: Mapping[str, Any]) -> None:
    """The two others of a layer stay products, and prompts call none."""
    assert ran(results["one"], JOINED) == {"vendor.one_token"}
    found, prompts = calls(results["one"]), len(PROMPTS) * MAX_TOKENS - STEPS
    assert found[JOINED] == 2 * LAYERS * STEPS
    assert found["linear"] == 2 * LAYERS * STEPS + 4 * LAYERS * prompts
    assert found["silu_and_mul"] == LAYERS * prompts
    assert results["one"]["report"]["compiled"]["fused products"] > 0


def test_no_row_is_quantized_in_a_step_of_one_token(results: Mapping[str, Any]) -> None:
    found, prompts = calls(results["fp8"]), len(PROMPTS) * MAX_TOKENS - STEPS
    assert found[JOINED] == 4 * QUANTIZED_LAYERS * STEPS
    assert found["scaled_linear"] == 4 * QUANTIZED_LAYERS * prompts
    assert results["fp8"]["report"]["failed"] == {}


def test_batches_of_several_tokens_never_call_it(results: Mapping[str, Any]) -> None:
    """All requests begin and end together."""
    assert results["several"]["report"]["compiled"]["fused products"] > 0
    assert not calls(results["several"])[JOINED]


def test_a_wrong_joined_operator_is_in_the_graph(
    results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert ran(results["wrong"], JOINED) == {"vendor.wrong"}
    assert results["wrong"]["tokens"] != expected(DENSE)


@pytest.mark.parametrize("name", ["off", *POLICIES])
def test_products_stay_apart_if_the_user_says_so_or_nothing_is_faster(name: str, results: Mapping[str, Any]) -> None:
    assert not ran(results[name], JOINED)
    apart = results["off"]["report"]["compiled"]["distinct"]
    assert results[name]["report"]["compiled"]["distinct"] == apart < results["one"]["report"]["compiled"]["distinct"]
    assert "fused products" not in results[name]["report"]["compiled"]


# -- configuration, without an engine ---------------------------------------------------------------------------------


@pytest.fixture
def one_vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The default manager with the plugin's implementations, and a policy that puts them first."""
    monkeypatch.syspath_prepend(PLUGINS)
    import one_token_plugin

    manager = get_default_manager()
    manager.ensure_initialized()
    one_token_plugin.register_builtins(manager.registry)
    set_global_policy(SelectionPolicy.from_dict(**RIGHT))
    yield
    set_global_policy(SelectionPolicy())
    reset_default_manager()


ALL = {"linear", "weight_only_linear", "scaled_linear"}
REFUSALS: Mapping[str, set[str]] = {
    "nothing": ALL,
    "the setting": set(),
    "another vLLM": set(),
    "another backend": set(),
    "positions of several axes": set(),
    "batch invariance": set(),
    "a rule for the norm": set(),
    "a rule for quantization": ALL - {"scaled_linear"},
    "another one's product": ALL - {"linear"},
    "another one's product of more tokens": ALL,
    "another one's product of one token": ALL - {"linear"},
}


@pytest.mark.parametrize("refused", REFUSALS)
def test_products_are_joined_unless_something_speaks_against_it(
    refused: str, one_vendor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import CompilationConfig

    from vllm_fl.compilation import compile, one_token

    rules: dict[str, Any] = {
        "a rule for the norm": {"per_op_order": (("rms_norm", ("vendor",)),)},
        "a rule for quantization": {"per_op_order": (("quantize", ("vendor",)),)},
        "batch invariance": {"batch_invariant": True},
        "another one's product": {"op_tuned": (("linear", (TunedRule(order=("reference",)),)),)},
        "another one's product of more tokens": {
            "op_tuned": (("linear", (TunedRule(order=("reference",), tokens=(2, None)),)),)
        },
        "another one's product of one token": {
            "op_tuned": (("linear", (TunedRule(order=("reference",), tokens=(1, 1)), TunedRule(order=("vendor",)))),)
        },
    }
    set_global_policy(SelectionPolicy(deny_vendors=frozenset(RIGHT["deny_vendors"]), **rules.get(refused, {})))
    settings = SimpleNamespace(fuse_one_token=refused != "the setting")
    monkeypatch.setattr(one_token, "get_settings", lambda: settings)
    monkeypatch.setattr(one_token.versions, "host_version", lambda: "0.31" if refused == "another vLLM" else "0.32")
    monkeypatch.setattr(compile, "_is_our_pass_manager", lambda: True)
    backend = "eager" if refused == "another backend" else "inductor"
    compilation = CompilationConfig(mode="VLLM_COMPILE", backend=backend)
    model = SimpleNamespace(uses_mrope=refused == "positions of several axes")
    given = SimpleNamespace(compilation_config=compilation, model_config=model)
    assert one_token.to_join(given) == REFUSALS[refused]


@pytest.mark.parametrize("fails", [False, True])
def test_a_users_own_graph_of_one_token_joins_nothing_that_failed_before_it(
    fails: bool, one_vendor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_fl.compilation import one_token, passes

    failed = {one_token.FUSED: "x"} if fails else {}
    monkeypatch.setattr(passes.VllmInductorPass, "__init__", lambda self, config: None)
    monkeypatch.setattr(one_token, "to_join", lambda config: frozenset(ALL))
    monkeypatch.setattr(one_token, "get_default_manager", lambda: SimpleNamespace(get_failed_impls=lambda: failed))
    monkeypatch.setattr(one_token, "_samples", lambda *args: [()])
    monkeypatch.setattr(one_token, "call_op", lambda *args: None)
    config = SimpleNamespace(
        additional_config={},
        compilation_config=SimpleNamespace(compile_ranges_endpoints=None),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    one_token.prepare(torch.nn.Linear(8, 8), config)
    assert passes.JoinOneToken(config).products == (frozenset() if fails else ALL)


# -- graphs of traced kernels, without an engine ----------------------------------------------------------------------

HIDDEN, INNER = 64, 128


class Captured(Exception):
    """A graph was captured; nothing runs it."""


class Driver:
    """Stands in for Triton's driver where a kernel is traced and none is compiled."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def capture(one_vendor: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[GraphModule, list[Tensor]]]:
    """Captures the graph of a function that launches our Triton kernels, as Inductor gets it, and its inputs."""
    pytest.importorskip("triton")
    import triton.runtime
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table
    from torch.utils import _triton

    from fl_dispatch.devices import launcher

    monkeypatch.setattr(_triton, "has_triton", lambda: True)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)
    monkeypatch.setattr(launcher, "INTERPRETED", True)  # so that kernels take tensors in main memory

    def captured(function: Callable[..., Any], *args: Tensor, dynamic: bool = False) -> tuple[Any, Any]:
        found: list[Any] = []

        def keep(graph: GraphModule, inputs: Any) -> Any:
            found.append(graph)

            def run(*inputs: Any) -> Any:
                found.append(inputs)
                raise Captured

            return run

        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=keep, decompositions=select_decomp_table())
        if dynamic:
            torch._dynamo.mark_dynamic(args[0], 0)
        with torch.no_grad(), pytest.raises(Captured):
            torch.compile(function, backend=backend, fullgraph=True)(*args)
        graph, inputs = found
        return graph, inputs

    return captured


def triton_ops() -> tuple[Any, Any]:
    from fl_dispatch.backends.triton.impl.rows import activation, normalization

    return normalization, activation


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.fl_dispatch.linear(x, weight, bias, "")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape) * shape[-1] ** -0.5


def weights() -> list[Tensor]:
    sizes = ((HIDDEN, HIDDEN), (HIDDEN,), (2 * INNER, HIDDEN), (HIDDEN, INNER), (HIDDEN,), (96, HIDDEN))
    return [normal(*size) for size in sizes]


def layer(x: Tensor, residual: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
    """A layer behind its attention, up to the next one's first product."""
    normalization, activation = triton_ops()
    out, first, gate_up, down, second, qkv = given
    y, total = normalization.rms_norm(linear(x, out), residual, first, 1e-5)
    y = linear(activation.silu_and_mul(linear(y, gate_up)), down)
    y, total = normalization.rms_norm(y, total, second, 1e-5)
    return linear(y, qkv), total


def by_references(x: Tensor, residual: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
    out, first, gate_up, down, second, qkv = given
    fused = fused_linear.fused_linear
    y, total = fused(linear(x, out), gate_up, None, None, None, first, residual, 1e-5, True)
    return fused(linear(y, down), qkv, None, None, None, second, total, 1e-5, False)


def joined(graph: GraphModule) -> int:
    from vllm_fl.compilation import one_token, one_token_graph

    found = one_token_graph.join(graph.graph, frozenset(one_token.PRODUCTS))
    graph.graph.lint()
    graph.recompile()
    return found


def targets(graph: GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")


LAUNCH, VIEW = "triton_kernel_wrapper_functional", f"fl_dispatch.{JOINED}.default"


def test_the_norms_and_the_gate_of_a_layer_go_into_its_products(capture: Callable[..., Any]) -> None:
    args = [normal(1, HIDDEN), normal(1, HIDDEN), *weights()]
    graph, inputs = capture(layer, *args)
    before = targets(graph)
    assert before[LAUNCH] == 3
    assert joined(graph) == 2
    after = targets(graph)
    assert set(after) == {VIEW, "fl_dispatch.linear.default", str(operator.getitem)}, after
    assert (after[VIEW], after["fl_dispatch.linear.default"]) == (2, 2)
    results = [one for one in graph(*inputs) if isinstance(one, Tensor)]
    for expected in by_references(*args):
        assert any(one.shape == expected.shape and torch.allclose(one, expected, atol=1e-5) for one in results)


@pytest.mark.parametrize("rows", ["two", "any number"])
def test_several_rows_stay_apart(rows: str, capture: Callable[..., Any]) -> None:
    args = [normal(2, HIDDEN), normal(2, HIDDEN), *weights()]
    graph, _ = capture(layer, *args, dynamic=rows == "any number")
    before = targets(graph)
    assert joined(graph) == 0
    assert targets(graph) == before


def of_norm(x: Tensor, out: Tensor, norm: Tensor, weight: Tensor, kind: str) -> tuple[Tensor, ...]:
    normalization, activation = triton_ops()
    x = linear(x, out)
    if kind == "gemma":
        return (linear(normalization.gemma_rms_norm(x, None, norm, 1e-6), weight),)
    if kind == "no weight":
        return (linear(normalization.rms_norm(x, None, None, 1e-6), weight),)
    y = normalization.rms_norm(x, None, norm, 1e-6)
    if kind == "a row for two":
        return linear(y, weight), linear(y, out)
    if kind == "the row is a result":
        return linear(y, weight), y
    if kind == "a changed row":
        return (linear(y * 2, weight),)
    if kind == "a weight made behind":
        return (linear(y, weight * x.sum()),)
    product = linear(y, weight)
    if kind == "gelu":
        return (activation.gelu_and_mul(product),)
    if kind == "a product for two":
        return activation.silu_and_mul(product), product
    if kind == "a scope":
        return (torch.ops.fl_dispatch.linear(y, weight, None, "model.layers.0"),)
    return (activation.silu_and_mul(product), x)


KINDS: Mapping[str, tuple[int, int]] = {
    "both": (1, 0),
    "gemma": (0, 1),
    "no weight": (0, 1),
    "a row for two": (0, 1),
    "the row is a result": (0, 1),
    "a changed row": (0, 1),
    "a weight made behind": (0, 1),
    "a scope": (0, 1),
    "gelu": (1, 1),
    "a product for two": (1, 1),
}
"""Kind of graph → products that are joined, and launches that are left."""


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_nobody_else_uses_goes_into_a_product(kind: str, capture: Callable[..., Any]) -> None:
    args = normal(1, HIDDEN), normal(HIDDEN, HIDDEN), normal(HIDDEN), normal(2 * INNER, HIDDEN)
    graph, inputs = capture(lambda *given: of_norm(*given, kind), *args)
    calls, left = KINDS[kind]
    assert joined(graph) == calls
    assert targets(graph)[LAUNCH] == left
    if not left:
        x = linear(args[0], args[1])
        expected, _ = fused_linear.fused_linear(x, args[3], None, None, None, args[2], None, 1e-6, True)
        torch.testing.assert_close(graph(*inputs)[0], expected, atol=1e-5, rtol=1e-5)


QUANTIZED: Mapping[str, int] = {
    "a scale a row": 2,
    "a scale that is given": 2,
    "int8": 0,
    "blocks": 0,
    "another dtype": 0,
}
"""Kind of rows → products that are joined, of two."""


@pytest.mark.parametrize("kind", QUANTIZED)
def test_rows_of_fp8_with_one_scale_are_taken_as_they_are(kind: str, capture: Callable[..., Any]) -> None:
    block = 32 if kind == "blocks" else 0
    dtype = "int8" if kind == "int8" else "float8_e4m3fn"
    given = torch.tensor([0.01]) if kind == "a scale that is given" else None
    result = "bfloat16" if kind == "another dtype" else "float32"
    views = torch.ops.fl_dispatch

    def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        rows, scales = views.quantize(x, dtype, block if given is None else -1, given, "")
        found: Tensor = views.scaled_linear(rows, scales, weight, scale, None, result, block, "")
        return found

    def two(x: Tensor, norm: Tensor, first: Tensor, scale: Tensor, second: Tensor, one: Tensor) -> Tensor:
        y = product(views.rms_norm(x, norm, 1e-6, ""), first, scale)
        return product(views.silu_and_mul(y, "").float(), second, one)

    def weight(columns: int, inner: int) -> tuple[Tensor, Tensor]:
        scales = torch.rand(columns // 32, inner // 32) if block else torch.rand(columns, 1) * 0.01
        return (torch.randn(columns, inner) * 32).to(getattr(torch, dtype)), scales

    (first, scale), (second, one) = weight(2 * INNER, HIDDEN), weight(HIDDEN, INNER)
    args = normal(1, HIDDEN), normal(HIDDEN), first, scale, second, one if block else one[:1]
    graph, inputs = capture(two, *args)
    assert joined(graph) == QUANTIZED[kind]
    if QUANTIZED[kind]:
        assert set(targets(graph)) <= {VIEW, str(operator.getitem)}
        x, norm = args[:2]
        fused = fused_linear.fused_linear
        y, _ = fused(x, first, scale, None, None, norm, None, 1e-6, True)
        expected, _ = fused(y, second, one[:1])
        torch.testing.assert_close(graph(*inputs)[0], expected, atol=1e-5, rtol=1e-5)
