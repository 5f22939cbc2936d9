"""Shared experts of a mixture on a stream of their own; that engines answer alike: ``test_vllm_gpu.py``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts, SharedExpertsOrder
from vllm.platforms import current_platform

from vllm_fl.layers.shared_experts import SharedExpertsFL, on_separate_stream

pytestmark = pytest.mark.gpu
FEW, MANY = 256, 257
"""Tokens, on both sides of vLLM's threshold."""
PARALLEL = SimpleNamespace(enable_eplb=False, all2all_backend="", use_fi_nvl_two_sided_kernels=False)


class Doubled(torch.nn.Module):
    """Notes its stream."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.streams.append(torch.cuda.current_stream())
        for _ in range(50):  # long enough for another stream to be ahead
            x = x * 2 / 2
        return x * 2


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> SharedExperts:
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda *given: False)
    return SharedExperts(Doubled(), SimpleNamespace(moe_parallel_config=PARALLEL), False, lambda: False)


def test_few_tokens_run_beside_the_routed_experts(experts: SharedExperts) -> None:
    found = on_separate_stream(experts)
    assert isinstance(found, SharedExpertsFL)
    x = torch.ones(FEW, 4096, device="cuda")
    assert found.maybe_forward_async(x)
    found.wait()
    assert torch.equal(found.output, x * 2)
    assert experts._layer.streams[0] != torch.cuda.current_stream()


def test_many_tokens_keep_one_stream(experts: SharedExperts) -> None:
    found = on_separate_stream(experts)
    x = torch.ones(MANY, 8, device="cuda")
    assert found is not None
    assert not found.maybe_forward_async(x)
    found(x, SharedExpertsOrder.NO_OVERLAP)
    assert torch.equal(found.output, x * 2)
    assert experts._layer.streams == [torch.cuda.current_stream()]


def test_a_graph_holds_both_streams(experts: SharedExperts) -> None:
    found = on_separate_stream(experts)
    assert found is not None
    x = torch.ones(FEW, 4096, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert found.maybe_forward_async(x)
        found.wait()
        out = found.output + 1
    x.fill_(3)
    graph.replay()
    assert torch.equal(out, x * 2 + 1)


def test_vllms_variable_switches_it_off(experts: SharedExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "1")
    assert on_separate_stream(experts) is experts
