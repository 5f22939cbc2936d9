"""Shared experts of a mixture on a separate stream.

vLLM does this only on its own CUDA platform: router and routed experts run at the same time, so the small products of
shared experts take no extra time. A step of prompts keeps one stream, because its products fill the chip.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts, SharedExpertsOrder
from vllm.platforms import current_platform

from fl_dispatch.devices import CUDA, detect_device
from vllm import envs

_streams: dict[int, torch.cuda.Stream] = {}
"""Stream by device; all layers share one, because they follow each other."""


class SharedExpertsFL(SharedExperts):
    """vLLM's shared experts, running in parallel to the routed ones."""

    def __init__(self, host: SharedExperts) -> None:
        super().__init__(host._layer, host._moe_config, host.enable_dbo, host._mk_can_overlap_shared_experts)
        device = torch.cuda.current_device()
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        self._stream = _streams[device]
        self._input_ready_event, self._output_ready_event = ([torch.cuda.Event(), torch.cuda.Event()] for _ in range(2))

    def _determine_shared_experts_order(self, hidden_states: Tensor) -> SharedExpertsOrder:
        order = super()._determine_shared_experts_order(hidden_states)
        if order is not SharedExpertsOrder.NO_OVERLAP or self._disable_shared_experts_overlap:
            return order
        few = len(hidden_states) <= envs.VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
        return SharedExpertsOrder.MULTI_STREAM_OVERLAPPED if few else order


def on_separate_stream(host: SharedExperts | None) -> SharedExperts | None:
    """Put a layer's shared experts on a separate stream on an NVIDIA GPU, if the platform is not vLLM's own."""
    ours = detect_device() is CUDA and not current_platform.is_cuda_alike()
    if host is None or not ours or envs.VLLM_DISABLE_SHARED_EXPERTS_STREAM:
        return host
    return SharedExpertsFL(host)
