"""Quantized products on a GPU: every kernel against float64, and engines against the dequantized network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import MAX_TOKENS, PROMPTS, ran, start_features

import quantized_checkpoints as checkpoints
import scoring
from fl_dispatch import get_default_manager, weight_forms
from fl_dispatch.backends.triton.impl.products import scaled_linear
from fl_dispatch.evidence.verify import DTYPES, implementations, verify
from fl_dispatch.ops import OPERATORS
from fl_dispatch.ops.inputs import mixtures
from fl_dispatch.ops.inputs.mixtures import Mixture
from fl_dispatch.ops.inputs.quantized import Products
from fl_dispatch.ops.named import of_arguments
from fl_dispatch.ops.results import errors, flat
from fl_dispatch.types import OpImpl
from quantized_checkpoints import SCHEMES, W4, compressed, few_bits
from quantized_engines import Run, comparisons, divisible
from quantized_mixture import LAYERS, experts_kernel, mixture, operator
from quantized_network import answered, computed, distance, network, right_perplexity, scores, tolerance

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
NAMES = ("quantize", "scaled_linear", "weight_only_linear", "scaled_moe", "weight_only_moe")
HALF = (torch.float16, torch.bfloat16)
DEEP_GEMM = "vendor.cuda.deep_gemm"
RESULTS = {DEEP_GEMM: (torch.bfloat16,)}
"""Types of results that an implementation has, where they are not both."""
DROPS_NAN = ("quantize", "vendor.cuda")
"""The operator whose kernels of vLLM's have no NaN: they make the least number of it."""


def kernels() -> list[OpImpl]:
    """Every implementation of these operators that runs here, but for the references."""
    found = implementations(get_default_manager(), NAMES)
    ours = [impl for impl in found if "cuda" in (impl.device_types or ()) and impl.impl_id != "reference.torch"]
    return [impl for impl in ours if impl.available is None or impl.available()]


each_kernel = pytest.mark.parametrize("impl", kernels(), ids=lambda impl: f"{impl.op_name}-{impl.impl_id}")


# -- operators --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@each_kernel
def test_a_kernel_is_right(impl: OpImpl, dtype: torch.dtype) -> None:
    found = verify(get_default_manager(), impl, dtype, CUDA)
    dropped = "NaN and infinities" if (impl.op_name, impl.impl_id) == DROPS_NAN else "no label"
    assert [problem for problem in found.problems if dropped not in problem] == []
    if impl.impl_id == "default.triton":
        assert not found.declined
    elif dtype in RESULTS.get(impl.impl_id, HALF):
        assert found.samples, found.declined


def test_every_family_of_kernels_is_there() -> None:
    assert {(impl.op_name, impl.impl_id) for impl in kernels()} >= {
        ("quantize", "default.triton"),
        ("quantize", "vendor.cuda"),
        ("scaled_linear", "default.triton"),
        ("scaled_linear", "vendor.cuda.cutlass"),
        ("scaled_linear", "vendor.cuda.cutlass.blocks"),
        ("weight_only_linear", "default.triton"),
        ("weight_only_linear", "vendor.cuda.marlin"),
        ("scaled_moe", "default.triton"),
        ("weight_only_moe", "default.triton"),
        *([("weight_only_linear", "vendor.cuda.machete")] if torch.cuda.get_device_capability()[0] == 9 else []),
    }


ROWS = (1, 2, 16, 33, 64, 65, 200, 256, 1001)
"""On both sides of each change of kernel, and some that are no multiple of four."""
WEIGHTS = ((6144, 4096), (4096, 14336))
"""Columns and elements of two weights of an 8B model: the joint projection of attention, the last of its network."""


KINDS: Mapping[str, tuple[str, ...]] = {
    "int8": ("vendor.cuda.cutlass",),
    "fp8": ("vendor.cuda.cutlass",),
    "fp8 in blocks": ("vendor.cuda.cutlass.blocks", DEEP_GEMM),
    "4 bits": ("vendor.cuda.marlin", "vendor.cuda.machete"),
    "4 bits, zero points": ("vendor.cuda.marlin",),
}
"""Kinds of weights, and the vendor's kernels that have to take them where they are."""


def large(kind: str, rows: int, columns: int, inner: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of a product as large as a model's."""
    generator = torch.Generator().manual_seed(rows)
    name = str(dtype).removeprefix("torch.")
    if kind.startswith("4 bits"):
        source = Products(dtype, CUDA, generator, torch.int8)
        weight = source.weight(columns, inner, 4, 128, kind.endswith("zero points"))
        return source.normal(rows, inner), *weight
    source = Products(dtype, CUDA, generator, torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    if kind == "fp8 in blocks":
        return *source.blocks(rows, columns, inner, 128), None, name, 128
    return *source.both(rows, columns, inner), None, name


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_is_right_for_a_models_weights(kind: str, weight: tuple[int, int]) -> None:
    name = "weight_only_linear" if kind.startswith("4") else "scaled_linear"
    operator, dtype = OPERATORS[name], torch.bfloat16
    reference = get_default_manager().registry.get_implementation(name, "reference.torch")
    assert reference is not None
    answered_by, wrong = set(), []
    for rows in ROWS:
        args = operator.bind(large(kind, rows, *weight, dtype), {})
        weight_forms.declare_all(operator.stay(args))
        (right,) = flat(reference.fn(*[_wide(arg) for arg in args]))
        for impl in kernels():
            if impl.op_name != name:
                continue
            if impl.supports is None or of_arguments(impl.supports, operator.parameters)(*args) is True:
                size = max(1.0, float(right.std()))  # with zero points results are larger than one
                _, share = errors(impl.fn(*args), right, operator.tolerance(dtype, args), size)
                answered_by.add(impl.impl_id)
                if not float(share.max()) <= 1:
                    wrong.append((impl.impl_id, rows, float(share.max())))
    assert wrong == []
    there = {impl.impl_id for impl in kernels() if impl.op_name == name}
    assert answered_by == {"default.triton", *KINDS[kind]} & there


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_wide_tiles_are_right(kind: str) -> None:
    """Weights of so many columns that some rows take the widest tiles where a processor has room for two."""
    operator, dtype = OPERATORS["scaled_linear"], torch.bfloat16
    reference = get_default_manager().registry.get_implementation("scaled_linear", "reference.torch")
    assert reference is not None
    columns, inner = scaled_linear.WIDE[0] * scaled_linear.processors(torch.device("cuda", 0)), 1024
    for rows in (2, 16, 33, scaled_linear.SOME_ROWS):
        args = operator.bind(large(kind, rows, columns, inner, dtype), {})
        (right,) = flat(reference.fn(*[_wide(arg) for arg in args]))
        size = max(1.0, float(right.std()))
        _, share = errors(scaled_linear.scaled_linear(*args), right, operator.tolerance(dtype, args), size)
        assert float(share.max()) <= 1, rows


def _wide(arg: Any) -> Any:
    """Arguments with which the reference computes in float64."""
    return arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() and arg.itemsize > 1 else arg


BEYOND = 2e-3
"""The share of results of experts that may lie beyond the tolerance."""
FAR, FAR_FEW, FEW = 2e-2, 4e-2, 16
"""The root mean square of their errors, in the standard deviation of results; and of fewer tokens than so many, whose
elements share the quantized inputs that became another number."""
TOKENS = (1, 2, 16, 64, 200, 1000)
"""Few pairs of a token and an expert, which are not sorted, and each plan of tiles."""
EXPERTS: Mapping[str, tuple[str, int]] = {
    "int8": ("scaled_moe", 0),
    "fp8": ("scaled_moe", 0),
    "fp8 in blocks": ("scaled_moe", 128),
    "4 bits": ("weight_only_moe", 0),
    "4 bits, zero points": ("weight_only_moe", 0),
    "8 bits": ("weight_only_moe", 0),
}
"""Kinds of experts, their operator, and the side of their blocks."""


@cache
def largest_mixture(kind: str) -> tuple[Any, ...]:
    """Arguments of a mixture of 32 experts, each as large as one of Qwen3-30B-A3B's, for the most tokens."""
    generator, (name, block), dtype = torch.Generator().manual_seed(0), EXPERTS[kind], torch.bfloat16
    mixture = Mixture(TOKENS[-1], 32, 8, 2048, 768)
    if name == "weight_only_moe":
        bits = 4 if kind.startswith("4") else 8
        args = mixtures.weight_only(dtype, CUDA, generator, bits, 128, kind.endswith("zero points"))(mixture)
        return OPERATORS[name].bind(args, {})
    quantized = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    products = Products(dtype, torch.device("cpu"), generator, quantized)
    weights = (*products.experts(32, 1536, 2048, block), *products.experts(32, 2048, 768, block))
    x, routing = products.normal(mixture.tokens, 2048), mixture.routing(CUDA, generator)
    return OPERATORS[name].bind((*(one.to(CUDA) for one in (x, *weights)), *routing, *[None] * 4, block), {})


def large_mixture(kind: str, tokens: int) -> tuple[Any, ...]:
    """The same for so many tokens."""
    args = largest_mixture(kind)
    return tuple(one[:tokens].clone() if place in (0, 5, 6) else one for place, one in enumerate(args))


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_right_for_a_models_weights(kind: str) -> None:
    """A number between two quantized ones may become either; so a share of all elements may be off by a little more."""
    name, dtype = EXPERTS[kind][0], torch.bfloat16
    operator = OPERATORS[name]
    ours, reference = (
        get_default_manager().registry.get_implementation(name, impl_id)
        for impl_id in ("default.triton", "reference.torch")
    )
    assert ours is not None
    assert reference is not None
    wrong = []
    for tokens in TOKENS:
        args = large_mixture(kind, tokens)
        (right,) = flat(reference.fn(*[_wide(arg) for arg in args]))
        size = max(1.0, float(right.std()))
        found = ours.fn(*args)
        _, share = errors(found, right, operator.tolerance(dtype, args), size)
        beyond = float((share > 1).double().mean())
        distance = float((found - right).square().mean().sqrt() / right.std())
        if not (float(share.max()) <= 4 and beyond <= BEYOND and distance <= (FAR_FEW if tokens < FEW else FAR)):
            wrong.append((tokens, float(share.max()), beyond, distance))
    assert wrong == []


@pytest.mark.parametrize("tokens", [1, 16, 300])
@pytest.mark.parametrize("kind", EXPERTS)
def test_a_graph_holds_experts(kind: str, tokens: int) -> None:
    """Replays read what lies in the arguments then: other tokens, other choices."""
    name = EXPERTS[kind][0]
    impl = get_default_manager().registry.get_implementation(name, "default.triton")
    assert impl is not None
    args = large_mixture(kind, tokens)
    impl.fn(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = impl.fn(*args)
    args[0].copy_(args[0].flip(0) * 0.5)
    args[6].copy_(args[6].flip(0).roll(1, -1))
    graph.replay()
    assert torch.equal(captured, impl.fn(*args))


def test_a_repacked_weight_that_is_written_keeps_its_place() -> None:
    """Captured graphs read the form at its address."""
    args = OPERATORS["weight_only_linear"].bind(large("4 bits", 4, 256, 256, torch.bfloat16), {})
    forms = [weight_forms.declare(tensor) for tensor in args[1:3]]
    for impl in kernels():
        if impl.op_name == "weight_only_linear" and impl.impl_id != "default.triton":
            before = impl.fn(*args)
            places = [_places(form.made[impl.impl_id]) for form in forms]
            args[1].bitwise_xor_(255)
            after = impl.fn(*args)
            assert [_places(form.made[impl.impl_id]) for form in forms] == places
            assert not torch.equal(before, after)


def _places(form: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in flat(form)]


# -- engines ----------------------------------------------------------------------------------------------------------

ASKED: Mapping[str, Any] = {
    "do": "generate",
    "prompts": PROMPTS,
    "sampling": {"max_tokens": MAX_TOKENS, "logprobs": 0, "prompt_logprobs": 0},
}
FEW_GRAPHS: Mapping[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]}}
CHECKPOINTS = (
    "compressed-tensors W8A8 fp8",
    "fp8, blocks of 128",
    "gptq",
    "compressed-tensors W8A8 int8",
    "compressed-tensors W4A8 int8",
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Answers of compiled engines with graphs: in float32 with our kernels, in bfloat16 with the vendor's.

    Where calls are counted, graphs hold decoding alone: what is replayed from a graph is not counted.
    """
    folder = tmp_path_factory.mktemp("quantized")
    written = {
        name: checkpoints.write_checkpoint(folder / name.replace(" ", "-"), SCHEMES[name]) for name in CHECKPOINTS
    }

    def start(step: Mapping[str, Any], engine: Mapping[str, Any], **variables: str) -> Any:
        common = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30, "enforce_eager": False}
        arguments = {**common, "enable_prefix_caching": False, **engine}
        return start_features(*((path, [step], arguments) for path in written.values()), **variables)

    started = {
        "ours": start(ASKED, {"dtype": "float32", **FEW_GRAPHS}, VLLM_FL_DENY_VENDORS="cuda", USE_FLAGGEMS="0"),
        "vendor": start(scoring.step(), {"dtype": "bfloat16", "max_num_batched_tokens": 1024}, VLLM_FL_PREFER="vendor"),
    }
    return {choice: dict(zip(CHECKPOINTS, run.result()["runs"], strict=True)) for choice, run in started.items()}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_our_kernels_compute_what_the_dequantized_network_does(name: str, answers: dict[str, dict[str, Any]]) -> None:
    run = answers["ours"][name]
    texts, got = answered(PROMPTS, run["steps"][0])
    right = computed(network(SCHEMES[name]), texts)
    assert distance(got, right.scores) <= right.rounding
    assert distance(got, scores(network(None), texts)) > right.rounding, "rounding hides the quantization"
    operators = SCHEMES[name].operators
    assert {one: ran(run, one) for one in operators} == {one: {"default.triton"} for one in operators}
    assert run["report"]["failed"] == {}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_vendors_kernels_give_the_dequantized_networks_perplexity(
    name: str, answers: dict[str, dict[str, Any]]
) -> None:
    scheme, run = SCHEMES[name], answers["vendor"][name]
    limit = tolerance(scheme, "bfloat16")
    assert scoring.difference(run["steps"][0], right_perplexity(network(scheme))) <= limit
    products = ran(run, scheme.operators[-1])
    assert any(found.startswith("vendor.cuda") for found in products), products
    assert run["report"]["failed"] == {}


REPACKED = ("vendor.cuda.marlin", "vendor.cuda.machete")


@pytest.fixture(scope="module")
def repacked_answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Implementation → an engine of its own, compiled and with graphs, whose weights of 4 bits it repacks."""
    folder = tmp_path_factory.mktemp("repacked")
    config = compressed("pack-quantized", {**W4, "group_size": 64}, None)
    scheme = replace(SCHEMES["compressed-tensors W4A16"], config=config, write=few_bits("packed", 4, 64, False))
    model = checkpoints.write_checkpoint(folder / "quantized", scheme, model=divisible(folder / "whole"))
    arguments = {
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 1 << 30,
        "enforce_eager": False,
        "enable_prefix_caching": False,
        "dtype": "bfloat16",
    }
    steps: list[Mapping[str, Any]] = [{"do": "replays"}, {"do": "forms"}]
    for prompt in PROMPTS:
        steps += [{**ASKED, "prompts": [prompt]}, {"do": "forms"}]
    steps.append({"do": "replays"})
    started = {
        name: start_features((model, steps, arguments), VLLM_FL_PER_OP=f"weight_only_linear=impl:{name}")
        for name in REPACKED
        if name != "vendor.cuda.machete" or torch.cuda.get_device_capability()[0] == 9
    }
    return {name: run.result()["runs"][0] for name, run in started.items()}


@pytest.mark.parametrize("name", REPACKED)
def test_a_compiled_engine_repacks_each_weight_once(name: str, repacked_answers: dict[str, dict[str, Any]]) -> None:
    """The start makes no form twice, so no captured graph makes one, and neither does a prompt of any length."""
    if (run := repacked_answers.get(name)) is None:
        pytest.skip("Machete needs compute capability 9")
    first, *after = run["steps"][1::2]
    assert first["of"] == [name]
    assert first["made"] == first["kept"] > 0
    assert after == [first] * len(PROMPTS)
    assert run["steps"][-1], "no graph was replayed"
    assert run["report"]["compiled"]["mode"] == "VLLM_COMPILE"
    assert run["report"]["failed"] == {}


# -- engines with experts ---------------------------------------------------------------------------------------------

MIXTURES = ("compressed-tensors W8A8 fp8", "fp8, blocks of 128", "awq", "gptq")


@pytest.fixture(scope="module")
def whole_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture(tmp_path_factory.mktemp("experts") / "whole")


@pytest.fixture(scope="module")
def expert_answers(tmp_path_factory: pytest.TempPathFactory, whole_mixture: Path) -> dict[Run, dict[str, Any]]:
    """Answers of compiled engines with graphs, in float32 with our kernels."""
    folder = tmp_path_factory.mktemp("quantized-experts")
    arguments = {
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 1 << 30,
        "enforce_eager": False,
        "enable_prefix_caching": False,
        "dtype": "float32",
        **FEW_GRAPHS,
    }
    runs = [Run(name, arguments, "compiled, with graphs") for name in MIXTURES]
    paths = [
        checkpoints.write_checkpoint(folder / name.replace(" ", "-"), SCHEMES[name], model=whole_mixture)
        for name in MIXTURES
    ]
    asked = ((path, [ASKED], arguments) for path in paths)
    found = start_features(*asked, VLLM_FL_DENY_VENDORS="cuda", USE_FLAGGEMS="0").result()
    return dict(zip(runs, found["runs"], strict=True))


@pytest.mark.parametrize("name", MIXTURES)
def test_our_experts_compute_what_the_dequantized_network_does(
    name: str, expert_answers: dict[Run, dict[str, Any]], whole_mixture: Path
) -> None:
    (run,) = (one for one in expert_answers if one.scheme == name)
    answer = expert_answers[run]
    assert comparisons(lambda one: answered(PROMPTS, answer["steps"][0]), whole_mixture)(run).agrees
    assert answer["report"]["layers"][experts_kernel(run.scheme)] == LAYERS
    assert ran(answer, operator(run.made)) == {"default.triton"}
    assert answer["report"]["failed"] == {}
