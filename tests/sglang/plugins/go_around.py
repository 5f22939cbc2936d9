"""A plugin of another distribution that makes one of SGLang's layers go around the function that we hook."""

from __future__ import annotations

from typing import Any

import torch


def silu_and_mul(layer: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def load() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.layers.activation.SiluAndMul.forward", silu_and_mul, HookType.REPLACE)
