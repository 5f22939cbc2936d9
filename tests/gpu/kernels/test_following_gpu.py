"""Quantized products of one row that ask for the next one's weight, on a GPU: the same bits, in engines too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("vllm")

from engines import STEP, ran, start

import quantized_checkpoints as checkpoints
from fl_dispatch import successors
from fl_dispatch.backends.triton.impl import launch
from fl_dispatch.backends.triton.impl.products import prefetch, scaled_linear
from fl_dispatch.backends.triton.impl.rows import quantization

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
FP8 = "float8_e4m3fn"
SIZES = {
    "projection": (6144, 4096),
    "few columns": (24, 4096),
    "odd": (1001, 1000),
    "vocabulary": (128_256, 2048),
    "tiny": (1, 16),
}
"""Columns and elements of a weight."""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Nothing follows anything after a test."""
    if (launch.capability(CUDA) or (0, 0)) < prefetch.CAPABILITY:
        pytest.skip("needs an NVIDIA GPU of compute capability 9")
    yield
    with successors.recorded():
        pass


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16)


def made(columns: int, inner: int, kind: str = FP8) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """A weight, its scales, and a product of one row with them."""
    (weight, scales), x = (
        quantization.quantize(normal(columns, inner), kind),
        quantization.quantize(normal(1, inner), kind),
    )
    return weight, scales, lambda: scaled_linear.scaled_linear(*x, weight, scales)


def asks() -> int:
    """The compiled kernels of one row that have the instruction."""
    kernels = scaled_linear._launch_row._compiled.values()
    return sum("cp.async.bulk.prefetch.L2" in kernel.asm["ptx"] for kernel in kernels if kernel)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [FP8, "int8"])
def test_results_are_the_same_bits_and_the_instruction_runs(
    kind: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever follows, and however much of it is asked for."""
    weight, _, product = made(*SIZES[size], kind)
    expected = product().clone()
    nexts = [normal(*SIZES[other]) for other in SIZES]
    for following_weight in nexts:
        for asked in (16, 1 << 20, 24 << 20):
            monkeypatch.setattr(prefetch, "BYTES", asked)
            scaled_linear._launch_row._compiled.clear()
            with successors.recorded():
                successors.after(weight)
                successors.after(following_weight)
            for _ in range(3):
                assert torch.equal(product(), expected)
            assert (
                asks() == (kind == FP8) or not scaled_linear._launch_row._short
            )  # the public launch keeps no kernel here
    torch.cuda.synchronize()


def test_a_graph_that_asks_has_the_same_bits_while_weights_change_in_place() -> None:
    products = [made(4096, 4096) for _ in range(4)]
    before = [product().clone() for _, _, product in products]
    with successors.recorded():
        for _, _, product in products:
            product()
    assert successors.known() == 3

    def step() -> list[Tensor]:
        return [product() for _, _, product in products]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(found, before, strict=True))
    for weight, scales, _ in products:
        for part in (weight.view(torch.uint8), scales):
            part.copy_(part.flip(0))
    for _ in range(3):
        graph.replay()
    assert all(torch.equal(one, other.flip(1)) for one, other in zip(found, before, strict=True))


ENGINE: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 30,
    "enforce_eager": False,
    "enable_prefix_caching": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]},
}
OURS = {
    "VLLM_FL_DENY_VENDORS": "cuda",
    "USE_FLAGGEMS": "0",
    "VLLM_FL_PER_OP": "scaled_linear=impl:default.triton|reference",
}
KNOWS = "products know the weight that the next one reads"


def test_engines_that_ask_answer_as_those_that_do_not(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """One request at a time, so that graphs of one row decode. A model without quantized weights asks for nothing."""
    scheme = checkpoints.SCHEMES["compressed-tensors W8A8 fp8"]
    quantized = checkpoints.write_checkpoint(tmp_path / "quantized", scheme, model=checkpoint("llama"))
    steps = [{**STEP, "prompts": [prompt]} for prompt in STEP["prompts"]]
    runs = [
        start(model, *steps, engine=ENGINE, variables={**OURS, "VLLM_FL_CHIP_FEATURES": on})
        for model, on in ((quantized, "1"), (quantized, "0"), (checkpoint("llama"), "1"))
    ]
    asking, silent, plain = (run.result() for run in runs)
    assert [step["tokens"] for step in asking["steps"]] == [step["tokens"] for step in silent["steps"]]
    assert KNOWS in asking["log"]
    assert KNOWS not in plain["log"]
    assert ran(asking, "scaled_linear") >= {"default.triton"}
    assert asking["report"]["failed"] == {}
