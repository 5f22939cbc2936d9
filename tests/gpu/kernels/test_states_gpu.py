"""Layers with a state on a GPU: kernels at the sizes of a real model, and Hugging Face's tokens of small ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import STEP, expected_tokens, ran, start

from architectures import build_architecture
from fl_dispatch import get_default_manager
from fl_dispatch.evidence.verify import implementations, verify
from fl_dispatch.ops import OPERATORS, Sample
from fl_dispatch.ops.inputs.recurrent import Convolutions, DeltaRules
from vllm_fl.layers import delta_net, short_conv

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LENGTHS, REQUESTS = (700, 1, 64, 130, 3), (1, 40)
HEADS, DIMS = (16, 32), (128, 128)
CHANNELS = 8192
"""Qwen3-Next: heads of keys and of values, their sizes, and the channels of its convolution."""
KERNELS = {"_convolve", "_keep", "_prepare", "_advance", "_update"}
EAGER = {"enforce_eager": True, "gpu_memory_utilization": 0.1}
GRAPHS = {"enforce_eager": False, "gpu_memory_utilization": 0.1}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
NEUTRAL = {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}
RUNS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, str], tuple[str, ...], str]] = {
    "delta net and experts, V2, eager": ("qwen3_next", EAGER, NEUTRAL, delta_net.OPERATORS, "default.triton"),
    "delta net and experts, V2, graphs": ("qwen3_next", GRAPHS, NEUTRAL, delta_net.OPERATORS, "default.triton"),
    "delta net, V1, graphs": ("qwen3_5", GRAPHS, {**V1, **NEUTRAL}, delta_net.OPERATORS, "default.triton"),
    "short convolutions, V2, graphs": ("lfm2", GRAPHS, NEUTRAL, short_conv.OPERATORS, "default.triton"),
    "short convolutions, V1, eager": ("lfm2", EAGER, {**V1, **NEUTRAL}, short_conv.OPERATORS, "default.triton"),
    "references": ("qwen3_5", EAGER, {"VLLM_FL_PREFER": "reference"}, delta_net.OPERATORS, "reference.torch"),
}
"""Name → checkpoint, arguments of ``LLM``, variables, operators of the layers, and what must run them."""


def samples(name: str, dtype: torch.dtype) -> list[Sample]:
    """Inputs of an operator at the sizes of Qwen3-Next, its states as vLLM lays them."""
    generator = torch.Generator().manual_seed(0)
    if "conv" in name:
        make: Any = Convolutions(dtype, CUDA, generator)
        given: tuple[Any, ...] = (CHANNELS,)
        more: dict[str, Any] = {}
    else:
        make, given, more = DeltaRules(dtype, CUDA, generator), (HEADS, DIMS), {"by_key": True, "apart": 4096}
    if name.endswith("update"):
        return [make.tokens(f"{requests} tokens", requests, *given, **more) for requests in REQUESTS]
    return [make.sequences("prompts", LENGTHS, *given, new=(0, 2), **more)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", delta_net.OPERATORS)
def test_a_kernel_is_right_at_the_sizes_of_qwen3_next(name: str, dtype: torch.dtype) -> None:
    manager = get_default_manager()
    (impl,) = implementations(manager, [name], ["default.triton"])
    found = verify(manager, impl, dtype, CUDA, samples=samples(name, dtype))
    assert found.problems == []
    assert not found.declined


@pytest.mark.parametrize("name", [name for name in delta_net.OPERATORS if name.endswith("update")])
def test_a_graph_of_one_token_advances_states_at_each_replay(name: str) -> None:
    (sample,) = samples(name, torch.float32)[1:]
    place = list(OPERATORS[name].parameters).index("states")
    (impl,) = implementations(get_default_manager(), [name], ["default.triton"])
    states = sample.args[place]
    assert isinstance(states, torch.Tensor)
    before = states.clone()
    expected = [impl.fn(*sample.args).clone() for _ in range(3)]
    after = states.clone()
    states.copy_(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = impl.fn(*sample.args)
    for one in expected:
        graph.replay()
        torch.testing.assert_close(out, one, rtol=0, atol=0)
    torch.testing.assert_close(states, after, rtol=0, atol=0)
    assert not torch.equal(states, before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda family: build_architecture(family, folder / family))


@pytest.mark.parametrize("run", RUNS)
def test_tokens_equal_hugging_face_twice_the_second_time_from_the_prefix_cache(
    run: str, checkpoint: Callable[[str], Path]
) -> None:
    family, engine, variables, operators, impl_id = RUNS[run]
    result = start(checkpoint(family), STEP, STEP, engine=engine, variables=variables).result()
    expected = expected_tokens(checkpoint(family))
    assert [step["tokens"] for step in result["steps"]] == [expected, expected]
    prompts = [name for name in operators if not name.endswith("update")]
    for name in operators if engine["enforce_eager"] else prompts:  # in a graph a replay is no call
        assert ran(result, name) == {impl_id}, name
    assert result["report"]["failed"] == {}
    assert result["report"]["native_layers"] == {}
    assert result["steps"][1]["cached"] != [0] * len(expected)
    late = re.findall(r"during inference: (\S+)", result["log"])  # vLLM's monitor; its own kernels may be late
    assert not {name.rpartition(".")[2].rstrip(".") for name in late} & KERNELS
