"""Mamba 1 in vLLM, alone and in Jamba: its layer with our convolution and state space; a channel is a head.

vLLM's operator of the layer calls ``forward_impl``. Its projections and norms stay vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fl_dispatch.hosting.layers.activations import operators_name

from .mamba2 import ScanLayer

TAKEN = 5
"""Tensors of the inputs' size that operators for prompts hold at once: tokens and steps, both transposed for vLLM's
kernel, and the result."""


class Mamba1Layer(ScanLayer):
    """``MambaMixer``: projects, convolves, scans, multiplies by a gate, and projects back."""

    fl_drafts = False

    in_proj: Callable[[Tensor], tuple[Tensor, Any]]
    out_proj: Callable[[Tensor], tuple[Tensor, Any]]
    _ssm_transform: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    dt_proj: Any

    def fl_try(self, hidden: Tensor) -> None:
        self(hidden, torch.empty_like(hidden))  # type: ignore[operator]

    def forward_impl(self, hidden_states: Tensor, output: Tensor) -> None:
        """Fill ``output`` for the step's tokens, and with zeros after them.

        Args:
            hidden_states: ``[tokens, hidden]``.
            output: ``[tokens, hidden]``, overwritten.
        """
        step = self.fl_step()
        if step is None:  # vLLM measures memory before there are states
            x, gate = self.in_proj(hidden_states)[0].chunk(2, dim=1)
            taken = x.new_empty(TAKEN, *x.shape)
            del taken
            output.copy_(self.out_proj(functional.silu(gate) * x)[0])
            return
        single, tokens = step.num_decode_tokens, step.num_decode_tokens + step.num_prefill_tokens
        x, gate = self.in_proj(hidden_states[:tokens])[0].chunk(2, dim=1)
        weight, bias, activation = self.conv1d.weight.squeeze(1), self.conv1d.bias, operators_name(self.activation)
        inputs, states, parts = self.fl_inputs(weight), self.kv_cache[1][:, :, None], []
        if step.num_decodes:
            own = step.state_indices_tensor_d[:, 0].contiguous()
            mixed = self.fl_convolve_token(x[:single], weight, bias, inputs, own, activation)
            parts.append(self.fl_update(*self._fl_operands(mixed), states, own))
        if step.num_prefills:
            prompts = self.fl_prompts(step)
            mixed = self.fl_convolve(x[single:], weight, bias, inputs, *prompts, activation)
            parts.append(self.fl_scan(*self._fl_operands(mixed), states, *prompts))
        scanned = parts[0] if len(parts) == 1 else torch.cat(parts)
        output[:tokens] = self.out_proj(functional.silu(gate) * scanned.squeeze(2))[0]
        output[tokens:].zero_()

    def _fl_operands(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the operands before the states; steps and both projections of a state come from the tokens."""
        dt, b, c = self._ssm_transform(x)
        return x[:, :, None], dt.t(), self.A, b[:, None], c[:, None], self.D, self.dt_proj.bias
