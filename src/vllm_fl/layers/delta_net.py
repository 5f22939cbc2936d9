"""Gated delta net in vLLM: its layer with our convolution and delta rule, and the norm after them.

vLLM's layer projects, calls ``_forward_core`` inside one opaque operator, and projects back. Only the core is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fl_dispatch.hosting.layers.activations import operators_name
from fl_dispatch.hosting.layers.states import delta_states

from .drafted import Drafted
from .forwards import DispatchedLayer
from .states import StateLayer

OPERATORS = ("causal_conv1d", "causal_conv1d_update", "gated_delta_rule", "gated_delta_rule_update")


class DeltaNetLayer(StateLayer):
    """Base of ``QwenGatedDeltaNetAttention`` that runs four operators, two for prompts and two for single tokens."""

    fl_operator = "gated_delta_rule"
    fl_choices = OPERATORS
    fl_parts = ("fl_convolve", "fl_convolve_token", "fl_correct", "fl_correct_token")
    fl_correct: Callable[..., Tensor]
    fl_correct_token: Callable[..., Tensor]
    activation: str
    tp_size: int
    key_dim: int
    value_dim: int
    head_k_dim: int
    head_v_dim: int
    conv1d: Any
    A_log: Tensor
    dt_bias: Tensor

    def get_prefill_checkpoint_alignment(self) -> None:
        """Return ``None``: a step ends where a state must be stored, unlike vLLM's own kernels for Hopper."""

    def forward_cuda(self, hidden_states: Tensor) -> Tensor:
        """Run vLLM's own forward: its layer calls this one on an out-of-tree platform, too."""
        output: Tensor = super(DispatchedLayer, self).forward_cuda(hidden_states)  # type: ignore[misc]
        return output

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """Fill ``core_attn_out`` ``[tokens, heads, value_dim]`` for the step's tokens.

        Args:
            mixed_qkv: ``[tokens, channels]``, queries, keys and values.
            b, a: ``[tokens, heads]``, the gates.
            core_attn_out: zeros.
        """
        step = self.fl_step()
        if step is None:  # vLLM measures memory before there are states; operators for prompts take about this much
            taken = torch.empty_like(mixed_qkv), core_attn_out.new_empty(3, *core_attn_out.shape)
            del taken
            return
        if (drafted := Drafted.of(step)) is not None:
            self._fl_verify(step, drafted, mixed_qkv, b, a, core_attn_out)
            return
        decodes, single, tokens = step.num_decodes, step.num_decode_tokens, step.num_actual_tokens
        slots = step.non_spec_state_indices_tensor
        assert slots is not None
        if decodes:
            own = slots[:decodes]
            inputs, states = self._fl_states()
            x = self.fl_convolve_token(mixed_qkv[:single], *self._fl_taps(), inputs, own, self._fl_activation())
            core_attn_out[:single] = self._fl_token(x, a[:single], b[:single], states, own)
        if step.num_prefills:
            rows = slice(single, tokens)
            core_attn_out[rows] = self._fl_prompts(step, mixed_qkv[rows], b[rows], a[rows])

    def _fl_verify(self, step: Any, drafted: Drafted, mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
        """Run a step with drafts, in which other requests count as prompts; parameters as in ``_forward_core``."""
        if not step.num_prefills:
            out[: drafted.tokens] = self._fl_drafts(drafted, mixed_qkv, b, a)
            return
        own, others = step.spec_token_indx.long(), step.non_spec_token_indx.long()
        out[own] = self._fl_drafts(drafted, mixed_qkv[own], b[own], a[own])
        out[others] = self._fl_prompts(step, mixed_qkv[others], b[others], a[others])

    def _fl_drafts(self, drafted: Drafted, mixed_qkv: Tensor, b: Tensor, a: Tensor) -> Tensor:
        """Advance requests with drafts; each parameter has their tokens first."""
        x, b, a = (drafted.apart(rows[: drafted.tokens]) for rows in (mixed_qkv, b, a))
        _, states = self._fl_states()
        x = drafted.convolved(x, self.fl_convolve_token, *self._fl_taps(), self.fl_window(), self._fl_activation())
        each = drafted.each(states)
        found = [self._fl_token(x[:, place], a[:, place], b[:, place], states, own) for place, own in each]
        return drafted.together(torch.stack(found, dim=1))

    def _fl_prompts(self, step: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor) -> Tensor:
        """Read prompts; each parameter has only their tokens."""
        own, starts = step.prefill_state_indices, step.prefill_query_start_loc
        has_state = step.prefill_has_initial_state
        inputs, states = self._fl_states()
        x = self.fl_convolve(mixed_qkv, *self._fl_taps(), inputs, own, starts, has_state, self._fl_activation())
        gates = a, b, self.A_log, self.dt_bias
        return self.fl_correct(*self._fl_heads(x), *gates, states, own, starts, has_state, self.head_k_dim**-0.5)

    def _fl_token(self, x: Tensor, a: Tensor, b: Tensor, states: Tensor, slots: Tensor) -> Tensor:
        """Advance each request by one convolved token."""
        gates = a, b, self.A_log, self.dt_bias
        return self.fl_correct_token(*self._fl_heads(x), *gates, states, slots, self.head_k_dim**-0.5)

    def _fl_taps(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the convolution."""
        return self.conv1d.weight.squeeze(1), self.conv1d.bias

    def _fl_activation(self) -> str:
        return operators_name(self.activation)

    def _fl_states(self) -> tuple[Tensor, Tensor]:
        """Return both states in the operators' form."""
        return self.fl_inputs(self._fl_taps()[0]), delta_states(self.kv_cache[1])

    def _fl_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of each head."""
        key_dim, value_dim = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        query, key, value = x.split((key_dim, key_dim, value_dim), dim=1)
        by_key, by_value = (-1, self.head_k_dim), (-1, self.head_v_dim)
        return query.unflatten(1, by_key), key.unflatten(1, by_key), value.unflatten(1, by_value)
