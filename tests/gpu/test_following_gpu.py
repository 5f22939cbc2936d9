"""Products of one row that ask for the next product's weight, on a GPU: the same bits, in calls, graphs and engines."""

from __future__ import annotations

import sys
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
sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))

from engines import STEP, ran, start

from fl_dispatch import following
from fl_dispatch.backends.triton.impl import ahead, launch, linear, quantize, scaled, weight_only

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
    if (launch.capability(CUDA) or (0, 0)) < ahead.CAPABILITY:
        pytest.skip("needs an NVIDIA GPU of compute capability 9")
    yield
    with following.recorded():
        pass


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA, dtype=torch.bfloat16)


def plain(columns: int, inner: int) -> tuple[Tensor, Callable[[], Tensor], Any]:
    """A weight, a product of one row with it, and the kernel's launcher."""
    weight, x = normal(columns, inner), normal(1, inner)
    return weight, lambda: linear.linear(x, weight), linear._launch_row


def quantized(columns: int, inner: int) -> tuple[Tensor, Callable[[], Tensor], Any]:
    (weight, scales), x = quantize.quantize(normal(columns, inner), FP8), quantize.quantize(normal(1, inner), FP8)
    return weight, lambda: scaled.scaled_linear(*x, weight, scales), scaled._launch_row


def packed(columns: int, inner: int) -> tuple[Tensor, Callable[[], Tensor], Any]:
    weight = torch.randint(0, 256, (columns, inner // 2), device=CUDA, dtype=torch.uint8)
    x, scales = normal(1, inner // 2 * 2), normal(columns, 1)
    return weight, lambda: weight_only.weight_only_linear(x, weight, scales), weight_only._launch_row


FORMS = {"bf16": plain, "fp8": quantized, "4 bits": packed}


def asks(launcher: Any) -> int:
    """The compiled kernels of a product that have the instruction."""
    return sum("cp.async.bulk.prefetch.L2" in kernel.asm["ptx"] for kernel in launcher._compiled.values() if kernel)


@pytest.mark.parametrize("first", [False, True], ids=["at the end", "first"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_results_are_the_same_bits_and_the_instruction_runs(
    form: str, size: str, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever follows, and however much of it is asked for."""
    monkeypatch.setattr(ahead, "EARLY", first)
    weight, product, launcher = FORMS[form](*SIZES[size])
    expected = product().clone()
    nexts = [normal(*SIZES[other]) for other in SIZES]
    for following_weight in nexts:
        for asked in (16, 1 << 20, 24 << 20):
            monkeypatch.setattr(ahead, "BYTES", asked)
            launcher._compiled.clear()
            with following.recorded():
                following.after(weight)
                following.after(following_weight)
            for _ in range(3):
                assert torch.equal(product(), expected)
            assert asks(launcher) == 1 or not launcher._short  # the public launch keeps no kernel here
    torch.cuda.synchronize()


def test_a_graph_that_asks_has_the_same_bits_while_weights_change_in_place() -> None:
    products = [plain(4096, 4096) for _ in range(4)]
    before = [product().clone() for _, product, _ in products]
    with following.recorded():
        for _, product, _ in products:
            product()
    assert following.known() == 3

    def step() -> list[Tensor]:
        return [product() for _, product, _ in products]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(found, before, strict=True))
    for weight, _, _ in products:
        weight.copy_(weight.flip(0))
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
OURS = {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0", "VLLM_FL_PER_OP": "linear=impl:default.triton|reference"}
KNOWS = "products know the weight that the next one reads"


def test_engines_that_ask_answer_as_those_that_do_not(checkpoint: Callable[[str], Path]) -> None:
    """One request at a time, so that graphs of one row decode."""
    steps = [{**STEP, "prompts": [prompt]} for prompt in STEP["prompts"]]
    runs = [
        start(checkpoint("llama"), *steps, engine=ENGINE, variables={**OURS, "VLLM_FL_CHIP_FEATURES": on})
        for on in ("1", "0")
    ]
    asking, silent = (run.result() for run in runs)
    assert [step["tokens"] for step in asking["steps"]] == [step["tokens"] for step in silent["steps"]]
    assert KNOWS in asking["log"]
    assert ran(asking, "linear") >= {"default.triton"}
    assert asking["report"]["failed"] == {}
