"""Mamba 2 in vLLM: its layer with our convolution and state space, and the norm after them.

vLLM's layer projects, calls ``conv_ssm_forward``, and projects back. Only that is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fl_dispatch.hosting.layers.activations import operators_name
from fl_dispatch.hosting.start.first_choices import states_kept

from .drafted import Drafted
from .forwards import DispatchedLayer
from .states import StateLayer

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec

OPERATORS = ("causal_conv1d", "causal_conv1d_update", "selective_scan", "selective_state_update")
DIVIDED = ("weight", "weight_scale")
"""Parameters of ``in_proj`` with a row per column that vLLM divides if ranks share a group."""


class ScanLayer(StateLayer):
    """A layer with a convolution and a state space: four operators, two for prompts and two for single tokens."""

    fl_operator = "selective_scan"
    fl_choices = OPERATORS
    fl_parts = ("fl_convolve", "fl_convolve_token", "fl_scan", "fl_update")
    fl_scan: Callable[..., Tensor]
    fl_update: Callable[..., Tensor]
    activation: str
    conv1d: Any
    A: Tensor
    D: Tensor


class StateSpaceLayer(ScanLayer):
    """``MambaMixer2``: vLLM's projections around our convolution and state space."""

    in_proj: Any
    tp_size: int
    head_dim: int
    ssm_state_size: int
    groups_ssm_state_size: int
    tped_intermediate_size: int
    tped_conv_size: int
    tped_dt_size: int
    dt_bias: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make vLLM's layer.

        Raises:
            ValueError: ranks share a group of the state, but vLLM's loader divides only some of the quantized
                parameters of ``in_proj`` for that.
        """
        super().__init__(*args, **kwargs)
        parameters = dict(self.in_proj.named_parameters(recurse=False))
        columns = len(parameters["weight"]) if "weight" in parameters else 0
        divided = all(
            name == "bias" or (name in DIVIDED and len(found) == columns) for name, found in parameters.items()
        )
        if self.tp_size > 1 and len(self.in_proj.output_partition_sizes) == 1 and not divided:
            raise ValueError(
                f"vllm_fl does not support ranks that share a group of a state with weights that have no scale a column"
                f" ({self.in_proj.prefix}) yet; use one rank"
            )

    def get_kv_cache_spec(self, vllm_config: Any) -> KVCacheSpec | None:
        """Return vLLM's spec without states stored within a prompt, because a step ends there."""
        from vllm.model_executor.layers.mamba.abstract import MambaBase

        return MambaBase.get_kv_cache_spec(self, vllm_config)

    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> None:
        """Fill ``output`` ``[tokens, heads * head_dim]`` for the step's tokens, and with zeros after them.

        Args:
            projected_states: ``[tokens, gate | channels of the convolution | heads]``, the last part the steps.
            output: overwritten.
        """
        step = self.fl_step()
        if step is None:  # vLLM measures memory before there are states
            self._fl_take(projected_states, output)
            output.zero_()
            return
        sizes = self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size
        _, mixed, dt = projected_states.split(sizes, dim=1)
        single, tokens = step.num_decode_tokens, step.num_decode_tokens + step.num_prefill_tokens
        output[tokens:].zero_()
        weight, bias, activation = self.conv1d.weight.squeeze(1), self.conv1d.bias, operators_name(self.activation)
        inputs, states = self.fl_inputs(weight), self.kv_cache[1]
        if step.num_decodes and (drafted := Drafted.of(step)) is not None:
            x, each = drafted.apart(mixed[:single]), drafted.apart(dt[:single])
            x = drafted.convolved(x, self.fl_convolve_token, weight, bias, self.fl_window(), activation)
            found = [
                self.fl_update(*self._fl_operands(x[:, place], each[:, place]), states, own)
                for place, own in drafted.each(states)
            ]
            output[:single] = drafted.together(torch.stack(found, dim=1)).flatten(1)
        elif step.num_decodes:
            own = step.state_indices_tensor_d[:, 0].contiguous()
            x = self.fl_convolve_token(mixed[:single], weight, bias, inputs, own, activation)
            output[:single] = self.fl_update(*self._fl_operands(x, dt[:single]), states, own).flatten(1)
        if step.num_prefills:
            prompts, rows = self.fl_prompts(step), slice(single, tokens)
            x = self.fl_convolve(mixed[rows], weight, bias, inputs, *prompts, activation)
            output[rows] = self.fl_scan(*self._fl_operands(x, dt[rows]), states, *prompts).flatten(1)

    def _fl_take(self, projected: Tensor, output: Tensor) -> None:
        """Allocate and free about the memory of operators for prompts: two results, and states of chunks."""
        states = states_kept(self.fl_operator, len(output)), self.tped_dt_size, self.head_dim, self.ssm_state_size
        results = projected.new_empty(len(output), self.tped_conv_size), torch.empty_like(output)
        chunks = output.new_empty(states, dtype=torch.float32)
        del results, chunks

    def _fl_operands(self, x: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
        """Return the operands before the states: a convolution's channels belong to the heads, and to both groups."""
        keys = self.groups_ssm_state_size // self.tp_size
        tokens, b, c = x.split((self.tped_intermediate_size, keys, keys), dim=1)
        b, c = (part.unflatten(1, (-1, self.ssm_state_size)) for part in (b, c))
        return tokens.unflatten(1, (-1, self.head_dim)), dt, self.A, b, c, self.D, self.dt_bias


class StateSpaceNormLayer(DispatchedLayer):
    """``Mixer2RMSNormGated``: ``forward(x, gate)``; the gate comes first.

    vLLM's own forward runs if there is no norm, or if a mean spans several ranks.
    """

    fl_operator = "rms_norm_gated"
    weight: Tensor
    variance_epsilon: float
    group_size: int
    n_groups: int
    tp_size: int
    use_rms_norm: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.use_rms_norm or self.n_groups % self.tp_size:
            self._forward_method = self.forward_native

    def forward_oot(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.fl_call(x, gate, self.weight, self.variance_epsilon, "silu", self.group_size, False)
