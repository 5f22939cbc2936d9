"""State spaces on a GPU: our kernels at the sizes of real models, and engines whose tokens are Hugging Face's.

``test_triton_gpu.py`` runs all declared inputs, and ``test_state_space_vendor_gpu.py`` vLLM's kernels.
"""

from __future__ import annotations

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
from fl_dispatch.backends.triton.impl.states import state_space
from fl_dispatch.evidence.verify import implementations, verify
from fl_dispatch.ops.inputs.state_space import _StateSpaces

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Mamba2-2.7B": {"heads": (80, 1), "dims": (64, 128)},
    "Granite 4 Tiny": {"heads": (48, 1), "dims": (64, 128)},
    "Granite 4 Small": {"heads": (128, 1), "dims": (64, 128)},
    "Nemotron Nano v2": {"heads": (128, 8), "dims": (64, 128)},
    "Falcon-H1 34B": {"heads": (32, 2), "dims": (128, 256)},
    "mamba-2.8b": {"heads": (5120, 1), "dims": (1, 16), "by_column": True},
}
LENGTHS = (333, 1, 64, 130)
REQUESTS = 33


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", MODELS)
def test_a_kernel_is_right_at_the_size_of_a_model(model: str, dtype: torch.dtype) -> None:
    make, manager = _StateSpaces(dtype, CUDA, torch.Generator().manual_seed(0)), get_default_manager()
    samples = {
        "selective_scan": make.sequences(model, LENGTHS, new=(1, 3), **MODELS[model]),
        "selective_state_update": make.tokens(model, REQUESTS, **MODELS[model]),
    }
    for name, sample in samples.items():
        (impl,) = implementations(manager, [name], ["default.triton"])
        found = verify(manager, impl, dtype, CUDA, samples=[sample])
        assert found.problems == []
        assert not found.declined


def test_one_token_runs_in_a_graph_over_states_that_change() -> None:
    make = _StateSpaces(torch.bfloat16, CUDA, torch.Generator().manual_seed(0))
    *rows, states, slots = make.tokens("graph", 4, **MODELS["Mamba2-2.7B"]).args
    first = states.clone()
    state_space.selective_state_update(*rows, states, slots)  # compiles
    once = states.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = state_space.selective_state_update(*rows, states, slots)
    states.copy_(first)
    graph.replay()
    assert torch.equal(states, once)
    expected = state_space.selective_state_update(*rows, states, slots)
    states.copy_(once)
    graph.replay()
    assert torch.equal(out, expected)
    assert not torch.equal(states, once)


GRAPHS = {"enforce_eager": False, "gpu_memory_utilization": 0.1}
EAGER = {"enforce_eager": True, "gpu_memory_utilization": 0.1}
NEUTRAL = {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}
ENGINES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Mamba 2, graphs": ("mamba2", GRAPHS),
    "Granite's hybrid, eager": ("granitemoehybrid", EAGER),
    "Mamba, graphs": ("mamba", GRAPHS),
    "Jamba, eager": ("jamba", EAGER),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda family: build_architecture(family, folder / family))


@pytest.mark.parametrize("name", ENGINES)
def test_tokens_equal_hugging_face_twice_by_our_kernels(name: str, checkpoint: Callable[[str], Path]) -> None:
    family, engine = ENGINES[name]
    result = start(checkpoint(family), STEP, STEP, engine=engine, variables=NEUTRAL).result()
    expected = expected_tokens(checkpoint(family))
    assert [step["tokens"] for step in result["steps"]] == [expected, expected]
    assert ran(result, "selective_scan") == {"default.triton"}
    assert ran(result, "selective_state_update") == {"default.triton"}
    if family == "granitemoehybrid":
        assert ran(result, "rms_norm_gated") == {"default.triton"}
    assert result["report"]["failed"] == {}
    assert result["report"]["native_layers"] == {}
    assert "during inference: " not in result["log"]  # vLLM's monitor of late compilations
