"""When shared experts of a mixture run on a stream of their own; that they do: ``tests/gpu``."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts, SharedExpertsOrder

from fl_dispatch.devices import CUDA
from vllm_fl.layers import shared_experts

PLAIN: dict[str, Any] = {"enable_eplb": False, "all2all_backend": "", "use_fi_nvl_two_sided_kernels": False}


def experts(overlaps: bool = False, **parallel: Any) -> SharedExperts:
    """vLLM's; ``overlaps``: those of its kernel that do so by themselves."""
    config: Any = SimpleNamespace(moe_parallel_config=SimpleNamespace(**PLAIN | parallel))
    return SharedExperts(torch.nn.Identity(), config, False, lambda: overlaps)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NVIDIA GPU, as far as this module asks."""
    monkeypatch.setattr(shared_experts, "detect_device", lambda: CUDA)
    monkeypatch.setattr(shared_experts, "_streams", {0: SimpleNamespace()})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
    for name in ("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("tokens", "host", "order"),
    [
        (1, experts(), SharedExpertsOrder.MULTI_STREAM_OVERLAPPED),
        (256, experts(), SharedExpertsOrder.MULTI_STREAM_OVERLAPPED),
        (257, experts(), SharedExpertsOrder.NO_OVERLAP),
        (1, experts(overlaps=True), SharedExpertsOrder.MK_INTERNAL_OVERLAPPED),
        (1, experts(enable_eplb=True, all2all_backend="other"), SharedExpertsOrder.NO_OVERLAP),
    ],
)
def test_few_tokens_have_a_stream_unless_the_host_forbids_it(
    tokens: int, host: SharedExperts, order: SharedExpertsOrder
) -> None:
    found = shared_experts.on_separate_stream(host)
    assert isinstance(found, shared_experts.SharedExpertsFL)
    assert found._determine_shared_experts_order(torch.empty(tokens, 8)) is order


@pytest.mark.usefixtures("on_gpu")
def test_the_hosts_variable_and_layers_without_any_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_experts.on_separate_stream(None) is None
    monkeypatch.setenv("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "1")
    host = experts()
    assert shared_experts.on_separate_stream(host) is host


@pytest.mark.usefixtures("on_gpu")
def test_other_devices_keep_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those too whose PyTorch device has the name of NVIDIA's."""
    monkeypatch.setattr(shared_experts, "detect_device", lambda: replace(CUDA, name="other"))
    host = experts()
    assert shared_experts.on_separate_stream(host) is host
