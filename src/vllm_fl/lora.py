"""LoRA in plain PyTorch: vLLM's own wrapper for the CPU, with requests of no adapter left alone.

vLLM marks their tokens with the index -1, and its PyTorch functions use that index as it is, so such a token would get
the last adapter's product (github.com/vllm-project/vllm/pull/48421). A product with zeros is zero whatever the adapter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


def _without_base_rows(x: Tensor, indices: Tensor) -> Tensor:
    """``x`` with zeros in the rows whose adapter index is negative."""
    return x.view(-1, x.shape[-1]).masked_fill((indices < 0)[:, None], 0.0)


class PunicaWrapperFL(PunicaWrapperCPU):
    """The three entry points whose ``x`` is read for the adapters only; arguments as in the base class."""

    def add_lora_linear(self, y: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> None:
        super().add_lora_linear(y, _without_base_rows(x, self.token_lora_indices), *args, **kwargs)

    def add_lora_embedding(self, y: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> None:
        super().add_lora_embedding(y, _without_base_rows(x, self.token_lora_indices), *args, **kwargs)

    def add_lora_logits(self, y: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> None:
        super().add_lora_logits(y, _without_base_rows(x, self.sampler_indices), *args, **kwargs)
