"""Operators that do at once what two others do, on a GPU: at a model's sizes, in a graph, and in engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import MAX_TOKENS, PROMPTS, STEP, ran, start, start_features

import quantized_checkpoints as checkpoints
from fl_dispatch import get_default_manager
from fl_dispatch.evidence.verify import DTYPES, verify
from fl_dispatch.ops.results import flat
from quantized_checkpoints import SCHEMES
from quantized_network import answered, computed, distance, network

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
OURS = {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}
"""Variables of engines with our kernels."""
ROTATING = {**OURS, "VLLM_FL_FUSE_ROPE_KVCACHE": "1"}
JOINED = ("rms_norm_quantize", "silu_and_mul_quantize")
ROTATE_AND_WRITE = "rotary_embedding_kv_cache_write"
TYPES = ("int8", "float8_e4m3fn")


def ours(name: str) -> Any:
    get_default_manager().ensure_initialized()
    impl = get_default_manager().registry.get_implementation(name, "default.triton")
    assert impl is not None
    return impl


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*JOINED, ROTATE_AND_WRITE])
def test_a_kernel_is_right(name: str, dtype: torch.dtype) -> None:
    found = verify(get_default_manager(), ours(name), dtype, CUDA)
    assert found.problems == []
    assert not found.declined


# -- one launch, or two -----------------------------------------------------------------------------------------------

ROWS = (1, 2, 33, 512, 4097)
"""The last ones are so many that the norm's loads stay in the cache."""
HIDDEN, WIDTH = 4096, 14336
FORMS: Mapping[str, tuple[int, float | None]] = {"rows": (0, None), "groups of 128": (128, None), "given": (-1, 0.02)}
UNLIKE = 1e-3
"""The share of quantized numbers that may differ: the two kernels of a norm may add up a row in other orders."""


def apart(name: str, dtype: str, how: tuple[Any, ...], *args: Any) -> tuple[Tensor, ...]:
    """The results of a joined operator, by two kernels."""
    y, *total = flat(ours(name.removesuffix("_quantize")).fn(*args))
    return *total, *ours("quantize").fn(y, dtype, *how)


def inputs(rows: int, *sizes: int) -> list[Tensor]:
    generator = torch.Generator(CUDA).manual_seed(rows)
    return [torch.randn((rows, size), generator=generator, device=CUDA, dtype=torch.bfloat16) for size in sizes]


def unlike(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> list[float]:
    """The share of quantized numbers that differ, and the largest relative difference of scales; sums are equal."""
    *total, q, scales = found
    *right, right_q, right_scales = expected
    assert all(torch.equal(one, other) for one, other in zip(total, right, strict=True))
    different = (q.view(torch.uint8) != right_q.view(torch.uint8)).double().mean()
    return [float(different), float(((scales - right_scales) / right_scales).abs().max())]


def form(name: str) -> tuple[Any, ...]:
    group, scale = FORMS[name]
    return group, None if scale is None else torch.tensor([scale], device=CUDA)


@pytest.mark.parametrize("add", [True, False], ids=["residual", "no residual"])
@pytest.mark.parametrize("how", FORMS)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_norm_joined_is_the_norm_and_the_quantization(dtype: str, how: str, add: bool) -> None:
    weight = torch.rand(HIDDEN, device=CUDA).add(0.5).to(torch.bfloat16)
    for rows in ROWS:
        x, residual = inputs(rows, HIDDEN, HIDDEN)
        expected = apart(JOINED[0], dtype, form(how), x.clone(), residual.clone() if add else None, weight, 1e-5)
        before = x.clone()
        found = ours(JOINED[0]).fn(x, dtype, residual if add else None, weight, 1e-5, *form(how))
        assert torch.equal(x, before)
        numbers, scales = unlike(found, expected)
        assert numbers <= UNLIKE
        assert scales <= 2**-7


@pytest.mark.parametrize("how", FORMS)
@pytest.mark.parametrize("dtype", TYPES)
def test_an_activation_joined_is_the_activation_and_the_quantization(dtype: str, how: str) -> None:
    for rows in ROWS:
        (x,) = inputs(rows, 2 * WIDTH)
        found = ours(JOINED[1]).fn(x, dtype, *form(how))
        numbers, scales = unlike(found, apart(JOINED[1], dtype, form(how), x))
        assert numbers <= UNLIKE
        assert scales <= 2**-7


def test_a_graph_holds_them() -> None:
    """Replays read what lies in the arguments then."""
    weight = torch.ones(HIDDEN, device=CUDA, dtype=torch.bfloat16)
    x, residual, gates = inputs(4, HIDDEN, HIDDEN, 2 * WIDTH)
    first = residual.clone()

    def run() -> tuple[Tensor, ...]:
        joined = ours(JOINED[0]).fn(x, TYPES[1], residual, weight, 1e-5)
        return *joined, *ours(JOINED[1]).fn(gates, TYPES[1])

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    x.copy_(x.flip(0) * 0.5)
    gates.copy_(gates.flip(0))
    residual.copy_(first)
    graph.replay()
    kept = [one.clone() for one in captured]
    residual.copy_(first)
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(kept, run(), strict=True)
    )


# -- rotations and the write of keys and values -----------------------------------------------------------------------

BATCHES = (1, 3, 32, 256, 4097)
SHAPES = {"Llama": (32, 8, 128, 128), "part of a head": (16, 2, 128, 64), "one of each": (1, 1, 64, 64)}
"""Heads of queries and keys, their size, and how much of it is rotated."""


def rotated(
    tokens: int, shape: str, dtype: torch.dtype, interleaved: bool, quantized: bool
) -> tuple[list[Any], list[Any], list[Tensor]]:
    """Arguments as a model has them, those with caches of their own, and the memory of both caches; a slot is -1."""
    heads, kv_heads, size, part = SHAPES[shape]
    generator = torch.Generator(CUDA).manual_seed(tokens)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=CUDA, dtype=torch.float32).to(dtype)

    projection = normal(tokens, (heads + 2 * kv_heads) * size)
    query, key, value = projection.split([heads * size, kv_heads * size, kv_heads * size], -1)
    parts = [query.view(tokens, heads, size), key.view(tokens, kv_heads, size), value.view(tokens, kv_heads, size)]
    tables = torch.rand(4096, part, generator=generator, device=CUDA).mul(2).sub(1).to(dtype).chunk(2, -1)
    positions = torch.randint(0, 4096, (tokens,), generator=generator, device=CUDA)
    blocks = tokens // 16 + 2
    stored = normal(blocks, kv_heads, 16, 2 * size)
    stored = stored.to(torch.float8_e4m3fn) if quantized else stored
    slots = torch.randperm(16 * blocks, generator=generator, device=CUDA)[:tokens]
    slots[tokens // 2] = -1
    memory = [stored.clone(), stored.clone()]
    rest = [slots, interleaved, *((0.03, 0.02) if quantized else ())]
    found = [[*parts, *tables, positions, *one.transpose(1, 2).chunk(2, -1), *rest] for one in memory]
    return found[0], found[1], memory


def rotate_apart(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """The results of the joined operator, by two kernels."""
    keys, values, slots, interleaved, *scales = rest
    turned = ours("rotary_embedding").fn(query, key, cos, sin, positions, interleaved, False)
    ours("kv_cache_write").fn(turned[1], value, keys, values, slots, *scales)
    return turned[0], turned[1]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotation_joined_with_the_write_is_the_two_bit_by_bit(
    dtype: torch.dtype, shape: str, interleaved: bool, quantized: bool
) -> None:
    for tokens in BATCHES:
        one, other, memory = rotated(tokens, shape, dtype, interleaved, quantized)
        pairs = zip(ours(ROTATE_AND_WRITE).fn(*one), rotate_apart(*other), strict=True)
        assert all(torch.equal(bits(found), bits(expected)) for found, expected in pairs)
        assert torch.equal(bits(memory[0]), bits(memory[1]))


def test_a_graph_holds_the_rotation_and_the_write() -> None:
    """Replays rotate and write what lies in the arguments then."""
    one, other, memory = rotated(4, "Llama", torch.bfloat16, interleaved=False, quantized=False)
    before = memory[0].clone()
    ours(ROTATE_AND_WRITE).fn(*one)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ours(ROTATE_AND_WRITE).fn(*one)
    memory[0].copy_(before)
    for changed in (5, 8):  # positions and slots, which both share
        one[changed].copy_(one[changed].flip(0))
    graph.replay()
    assert all(torch.equal(found, right) for found, right in zip(captured, rotate_apart(*other), strict=True))
    assert torch.equal(memory[0], memory[1])


FAMILIES = ("llama", "qwen3")
WHOLE: Mapping[str, Any] = {
    "dtype": "float32",
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
    "enforce_eager": False,
    "enable_prefix_caching": False,
}


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
@pytest.mark.parametrize("family", FAMILIES)
def test_engines_rotate_and_write_at_once_and_answer_as_hugging_face(
    family: str, mode: str, checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]]
) -> None:
    """Graphs hold decoding, and pieces of short prompts; outside of them, where calls count, are longer ones."""
    compilation = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4, 8]}
    engine = {**WHOLE, "compilation_config": compilation}
    found = start(checkpoint(family), STEP, engine=engine, variables=ROTATING).result()
    assert found["steps"][0]["tokens"] == expected(family)
    assert ran(found, ROTATE_AND_WRITE) == {"default.triton"}
    assert not ran(found, "kv_cache_write")
    assert found["report"]["manifest"]["whole"] == ["rotary_embedding"]
    assert found["report"]["compiled"]["rotations"] > 0
    assert found["report"]["failed"] == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_beside_a_joined_write_is_not_written(
    family: str, checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]]
) -> None:
    """Three requests run in graphs of four; the second time their prompts are read from the cache."""
    three = {**STEP, "prompts": PROMPTS[:3]}
    compilation = {"cudagraph_capture_sizes": [4]}
    engine = {**WHOLE, "enable_prefix_caching": True, "compilation_config": compilation}
    found = start(checkpoint(family), three, three, engine=engine, variables=ROTATING).result()
    assert [step["tokens"] for step in found["steps"]] == [expected(family)[:3]] * 2
    assert ran(found, ROTATE_AND_WRITE) == {"default.triton"}


# -- engines ----------------------------------------------------------------------------------------------------------

ASKED: Mapping[str, Any] = {
    "do": "generate",
    "prompts": PROMPTS,
    "sampling": {"max_tokens": MAX_TOKENS, "logprobs": 0, "prompt_logprobs": 0},
}
CHECKPOINTS = ("compressed-tensors W8A8 fp8", "fp8, blocks of 128")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Compiled engines in float32 with our kernels; graphs hold decoding, prompts run outside, where calls count."""
    folder = tmp_path_factory.mktemp("joined")
    arguments = {
        "dtype": "float32",
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 1 << 30,
        "enforce_eager": False,
        "enable_prefix_caching": False,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]},
    }
    runs = (
        (checkpoints.write_checkpoint(folder / name.replace(" ", "-"), SCHEMES[name]), [ASKED], arguments)
        for name in CHECKPOINTS
    )
    found = start_features(*runs, **OURS).result()
    return dict(zip(CHECKPOINTS, found["runs"], strict=True))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_engines_join_and_compute_what_the_dequantized_network_does(
    name: str, answers: dict[str, dict[str, Any]]
) -> None:
    run = answers[name]
    texts, got = answered(PROMPTS, run["steps"][0])
    right = computed(network(SCHEMES[name]), texts)
    assert distance(got, right.scores) <= right.rounding
    assert all(ran(run, operator) == {"default.triton"} for operator in (*JOINED, "quantize", "scaled_linear"))
    assert run["report"]["failed"] == {}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_only_the_attentions_result_is_quantized_by_itself(name: str, answers: dict[str, dict[str, Any]]) -> None:
    counts = answers[name]["report"]["counts"]
    alone = counts["quantize default.triton"]
    assert alone
    assert counts["rms_norm_quantize default.triton"] == 2 * alone
    assert counts["silu_and_mul_quantize default.triton"] == alone


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_equal_layers_are_compiled_once(name: str, answers: dict[str, dict[str, Any]]) -> None:
    compiled = answers[name]["report"]["compiled"]
    assert compiled["distinct"] < compiled["compilations"]  # a piece is asked for in each range of batch sizes
