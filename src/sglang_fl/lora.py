"""LoRA where no memory can be pinned: SGLang's adapters pin without asking, and PyTorch refuses on such a machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fl_dispatch.devices import detect_device
from fl_dispatch.hosting.unpinned import unpinned

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

BACKEND = "torch_native"
"""The one of SGLang's LoRA backends that is written in PyTorch."""
PINNING = ("fetch_new_loras", "load_lora_adapter", "load_lora_adapter_from_tensors", "prepare_lora_batch")
"""The methods of SGLang's manager of adapters that its model runner calls and that pin memory."""


def init_lora_manager(original: Callable[[ModelRunner], None], runner: ModelRunner) -> None:
    """Make SGLang's manager of adapters; where memory cannot be pinned, neither it nor its methods do.

    Raises:
        ValueError: the model's layers have adapters in Triton only.
    """
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    device = detect_device()
    for present, what in (
        (runner.use_mla_backend, "latent attention"),
        (any(isinstance(layer, FusedMoE) for layer in runner.model.modules()), "a model with experts"),
    ):
        if present:
            path = runner.model_config.model_path
            raise ValueError(f"sglang_fl does not support LoRA of {what} on {device.name} yet (model {path})")
    if device.pin_memory:
        original(runner)
        return
    unpinned(original)(runner)
    for name in PINNING:
        setattr(runner.lora_manager, name, unpinned(getattr(runner.lora_manager, name)))
