"""Short convolutions in vLLM, as in LFM2: its layer with our convolution between two gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .drafted import Drafted
from .states import StateLayer

OPERATORS = ("causal_conv1d", "causal_conv1d_update")


class ShortConvLayer(StateLayer):
    """``ShortConv``: projects, multiplies by a gate, convolves, multiplies by another, and projects back."""

    fl_operator = "causal_conv1d"
    fl_choices = OPERATORS
    fl_parts = ("fl_convolve", "fl_convolve_token")
    in_proj: Callable[[Tensor], tuple[Tensor, Any]]
    out_proj: Callable[[Tensor], tuple[Tensor, Any]]
    conv: Any

    def fl_try(self, hidden: Tensor) -> None:
        self(hidden, torch.empty_like(hidden))  # type: ignore[operator]

    def forward_cuda(self, hidden_states: Tensor, output: Tensor) -> None:
        """Fill ``output`` for the step's tokens, and with zeros after them; vLLM calls it on every device.

        Args:
            hidden_states: ``[tokens, hidden]``.
            output: ``[tokens, hidden]``, overwritten.
        """
        step = self.fl_step()
        if step is None:  # vLLM measures memory before there are states
            before, behind, x = self.in_proj(hidden_states)[0].chunk(3, dim=1)
            output.copy_(self.out_proj(behind * (before * x))[0])
            return
        single, tokens = step.num_decode_tokens, step.num_decode_tokens + step.num_prefill_tokens
        before, behind, x = self.in_proj(hidden_states[:tokens])[0].chunk(3, dim=1)
        x, weight, bias = before * x, self.conv.weight.squeeze(1), self.conv.bias
        inputs, parts = self.fl_inputs(weight), []
        if step.num_decodes and (drafted := Drafted.of(step)) is not None:
            rows = drafted.apart(x[:single])
            found = drafted.convolved(rows, self.fl_convolve_token, weight, bias, self.fl_window(), "none")
            parts.append(drafted.together(found))
        elif step.num_decodes:
            own = step.state_indices_tensor_d[:, 0].contiguous()
            parts.append(self.fl_convolve_token(x[:single], weight, bias, inputs, own, "none"))
        if step.num_prefills:
            parts.append(self.fl_convolve(x[single:], weight, bias, inputs, *self.fl_prompts(step), "none"))
        output[:tokens] = self.out_proj(behind * torch.cat(parts))[0]
        output[tokens:].zero_()
