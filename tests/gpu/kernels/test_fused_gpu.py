"""Products of one row with the norm before them and the gate behind them, on a GPU: kernels, a graph, and engines."""

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

from engines import MAX_TOKENS, PROMPTS, STEP, start, start_features

import quantized_checkpoints as checkpoints
from fl_dispatch import get_default_manager
from fl_dispatch.backends.triton.impl.fusion.fused_linear import APART, fused_linear, supports
from fl_dispatch.evidence.verify import DTYPES, verify
from quantized_checkpoints import SCHEMES
from quantized_network import answered, computed, distance, network

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
OURS = {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}
"""Variables of engines with our kernels."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_is_right(dtype: torch.dtype) -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    impl = manager.registry.get_implementation("fused_linear", "default.triton")
    assert impl is not None
    found = verify(manager, impl, dtype, CUDA)
    assert found.problems == []
    assert set(found.declined.values()) <= {
        "more than one row, or none",
        "numbers of 4 bits, int8, zero points, and scales of groups",
        APART,
    }


SIZES = {"qkv": (6144, 4096), "gate_up": (28672, 4096), "o": (4096, 4096), "down": (4096, 14336)}


def arguments(name: str, kind: str) -> tuple[Any, ...]:
    """A row, a weight, and what goes with it in a layer of Llama-3.1-8B, in bfloat16."""
    torch.manual_seed(0)
    columns, inner = SIZES[name]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=CUDA)

    weight, scale = random(columns, inner) * inner**-0.5, None
    if kind == "fp8":
        scale = (torch.rand(columns, 1, device=CUDA) + 0.5) / 64
        weight = (weight * 64).to(torch.float8_e4m3fn)
    else:
        weight = weight.bfloat16()
    norm = name in ("qkv", "gate_up")
    extra = (random(inner).bfloat16(), random(1, inner).bfloat16()) if norm else (None, None)
    return random(1, inner).bfloat16(), weight, scale, None, None, *extra, 1e-5, name == "gate_up"


def right(
    x: Tensor, weight: Tensor, scale: Tensor | None, zero: None, bias: None, norm: Tensor | None, residual: Any,
    epsilon: float, gated: bool,
) -> Tensor:  # fmt: skip
    row = x.double() if residual is None else x.double() + residual.double()
    if norm is not None:
        row = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + epsilon) * norm.double()
    product = row @ weight.double().t()
    if scale is not None:
        product *= scale.double().view(1, -1)
    if not gated:
        return product
    gate, up = product.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
@pytest.mark.parametrize("name", SIZES)
def test_it_is_right_for_a_models_weights(name: str, kind: str) -> None:
    given = arguments(name, kind)
    if supports(*given) is not True:
        given = (*given[:5], None, None, *given[7:])
    y, total = fused_linear(*given)
    expected = right(*given)
    error = (y.double() - expected).square().mean().sqrt() / expected.std()
    assert error < 0.01
    if given[6] is not None:
        assert torch.equal(total, given[0] + given[6])


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_a_graph_holds_it(kind: str) -> None:
    given = arguments("gate_up", kind)
    if supports(*given) is not True:
        given = (*given[:5], None, None, *given[7:])
    fused_linear(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fused_linear(*given)
    given[0].normal_()
    graph.replay()
    for found, expected in zip(captured, fused_linear(*given), strict=True):
        assert torch.equal(found, expected)


# -- engines ----------------------------------------------------------------------------------------------------------

ONE_AT_A_TIME: Mapping[str, Any] = {
    "dtype": "float32",
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
    "enforce_eager": False,
    "enable_prefix_caching": False,
    "max_num_seqs": 1,
}


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_engines_join_products_of_one_row_and_answer_as_hugging_face(
    family: str, mode: str, checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]]
) -> None:
    compilation = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [1]}
    engine = {**ONE_AT_A_TIME, "compilation_config": compilation}
    found = start(checkpoint(family), STEP, engine=engine, variables=OURS).result()
    assert found["steps"][0]["tokens"] == expected(family)
    assert found["report"]["compiled"]["fused products"] > 0
    assert found["report"]["failed"] == {}


def test_an_engine_of_fp8_takes_rows_as_they_are_and_computes_what_the_dequantized_network_does(
    tmp_path: Path,
) -> None:
    name = "compressed-tensors W8A8 fp8"
    asked = {
        "do": "generate",
        "prompts": PROMPTS,
        "sampling": {"max_tokens": MAX_TOKENS, "logprobs": 0, "prompt_logprobs": 0},
    }
    engine = {**ONE_AT_A_TIME, "compilation_config": {"cudagraph_capture_sizes": [1]}}
    folder = checkpoints.write_checkpoint(tmp_path / "fp8", SCHEMES[name])
    (run,) = start_features((folder, [asked], engine), **OURS).result()["runs"]
    texts, got = answered(PROMPTS, run["steps"][0])
    network_right = computed(network(SCHEMES[name]), texts)
    assert distance(got, network_right.scores) <= network_right.rounding
    assert run["report"]["compiled"]["fused products"] > 0
    assert run["report"]["failed"] == {}
