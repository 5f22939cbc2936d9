"""SGLang's layers with a state for each request, over the operators for prompts and for single tokens.

SGLang keeps the states in a separate pool, with a slot for each request and each cached prefix, and describes a step to
all such layers at once. Its description and its copies of states stay; the computation with a state is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional

from fl_dispatch import bind_op
from fl_dispatch.hosting.layers.states import delta_states

from .base import Bridge
from .drafted_states import Drafts

NO_ACTIVATION = "none"


@dataclass(frozen=True)
class Step:
    """A step for these layers: the new tokens of each request; a decoding request has one, or drafts to verify.

    Args:
        convolved: the last inputs of a layer's convolution, ``[slots, channels, width - 1]``.
        states: its other states, ``[slots, ...]``; unused by a layer with only a convolution.
        slots: the slot of each request, int32.
        starts: the first row of each request and the end, int32; ``None`` if each has a state, and one row or drafts.
        has_state: whether a request's slot holds a state already; ``None`` with ``starts``.
        drafts: the drafts of each request, which are its rows; ``None`` for other steps.
        after: the two tensors that get the states after each draft, ``[requests, drafts, ...]``; ``None`` without
            drafts.
    """

    convolved: Tensor
    states: Tensor
    slots: Tensor
    starts: Tensor | None
    has_state: Tensor | None
    drafts: Drafts | None = None
    after: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, number: int, batch: Any) -> Step:
        """Return the step of the layer with this number, from SGLang's attention backend."""
        from sglang.srt.model_executor.forward_context import get_attn_backend

        backend = get_attn_backend().linear_attn_backend
        cache, mode = backend.req_to_token_pool.mamba2_layer_cache(number), batch.forward_mode
        width = batch.spec_info.draft_token_num if mode.is_target_verify() else 0
        has_state = None if width or mode.is_decode() else batch.extend_prefix_lens > 0
        return cls.described(cache, backend.forward_metadata, has_state, width)

    @classmethod
    def described(cls, cache: Any, metadata: Any, has_state: Tensor | None, width: int) -> Step:
        """Return the step in SGLang's description, with the layer's states.

        Args:
            width: the number of each request's drafts to verify.
        """
        slots = metadata.mamba_cache_indices.int()
        if has_state is None:  # padding of a graph's batch has slot -1; slot 0 belongs to no request
            slots, starts = slots.clamp(min=0), None
        else:
            starts = metadata.query_start_loc
        step = cls(cache.conv[0], cache.temporal, slots, starts, has_state)
        if not width:
            return step
        after = cache.intermediate_conv_window[0], cache.intermediate_ssm
        return replace(step, drafts=Drafts.of(metadata, width), after=after)

    def convolve_rows(self, token: Callable[[Tensor, Tensor, slice], Tensor]) -> Tensor:
        """Convolve single tokens by an operator: the states, the slots and the rows → the result of these rows."""
        return self._run(self.convolved, 0, token)

    def update_rows(self, token: Callable[[Tensor, Tensor, slice], Tensor]) -> Tensor:
        """Update the other states by single tokens, as :meth:`convolve_rows` does."""
        return self._run(self.states, 1, token)

    def _run(self, states: Tensor, part: int, token: Callable[[Tensor, Tensor, slice], Tensor]) -> Tensor:
        if self.drafts is None or self.after is None:
            return token(states, self.slots, slice(None))
        return self.drafts.run(states, self.slots, self.after[part], token)


class StateBridge(Bridge):
    """A layer with operators for prompts, and one for single tokens for each of them."""

    fl_parts: ClassVar[tuple[str, ...]]
    """The attributes that hold the bound operators, in the order of ``fl_choices``."""

    def fl_bind(self, scope: str | None) -> None:
        for part, operator in zip(self.fl_parts, self.fl_choices, strict=True):
            setattr(self, part, bind_op(operator, scope))

    def convolve(self, step: Step, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """Convolve the tokens ``[tokens, channels]`` of a step."""
        if step.starts is None:
            return step.convolve_rows(
                lambda states, slots, rows: self.fl_convolve_token(x[rows], weight, bias, states, slots, activation)
            )
        return self.fl_convolve(x, weight, bias, step.convolved, step.slots, step.starts, step.has_state, activation)

    fl_convolve: Any
    fl_convolve_token: Any


class DeltaNetBridge(StateBridge):
    """``RadixLinearAttention``: ``forward(forward_batch, mixed_qkv, a, b)``, a gated delta net between projections."""

    fl_operator = "gated_delta_rule"
    fl_choices = ("causal_conv1d", "causal_conv1d_update", "gated_delta_rule", "gated_delta_rule_update")
    fl_parts = ("fl_convolve", "fl_convolve_token", "fl_correct", "fl_correct_token")
    fl_correct: Any
    fl_correct_token: Any

    def forward(self, forward_batch: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        layer = self.layer
        step = Step.of(layer.layer_id, forward_batch)
        x = self.convolve(step, mixed_qkv, layer.conv_weights, layer.bias, layer.activation)
        query, key, value = x.split((layer.q_dim, layer.k_dim, layer.v_dim), dim=1)
        heads = (part.unflatten(1, (-1, size)) for part, size in ((query, layer.head_k_dim), (key, layer.head_k_dim)))
        operands = *heads, value.unflatten(1, (-1, layer.head_v_dim)), a, b
        gates, scale = (layer.A_log, layer.dt_bias), layer.head_k_dim**-0.5
        if step.starts is not None:
            states = delta_states(step.states)
            return self.fl_correct(*operands, *gates, states, step.slots, step.starts, step.has_state, scale)[None]

        def correct(states: Tensor, slots: Tensor, rows: slice) -> Tensor:
            part = (operand[rows] for operand in operands)
            result: Tensor = self.fl_correct_token(*part, *gates, delta_states(states), slots, scale)
            return result

        return step.update_rows(correct)[None]


class ScanBridge(StateBridge):
    """A mixer around a state space: projects, convolves, scans, gates, and projects back."""

    fl_operator = "selective_scan"
    fl_choices = ("causal_conv1d", "causal_conv1d_update", "selective_scan", "selective_state_update")
    fl_parts = ("fl_convolve", "fl_convolve_token", "fl_scan", "fl_update")
    fl_scan: Any
    fl_update: Any

    def forward(
        self,
        *,
        hidden_states: Tensor,
        output: Tensor | None = None,
        layer_cache: Any,
        metadata: Any,
        mup_vector: Tensor | None = None,
        use_triton_causal_conv: bool = False,
    ) -> tuple[Tensor, None, None]:
        # In a batch all requests read a prompt, or all have one new token, or all have drafts.
        prompts = metadata.mixed_metadata if metadata.num_prefills else None
        width = metadata.draft_token_num if metadata.is_target_verify else 0
        step = Step.described(layer_cache, metadata, None if prompts is None else prompts.has_initial_states, width)
        projected = self.layer.in_proj(hidden_states)[0]
        if mup_vector is not None:
            projected = projected * mup_vector
        result: Tensor = self.layer.out_proj(self.mix(step, projected))[0]
        if output is not None:
            output[: len(result)] = result
        return result, None, None

    def mix(self, step: Step, projected: Tensor) -> Tensor:
        """Return the tensor to project back."""
        raise NotImplementedError

    def convolve_inputs(self, step: Step, x: Tensor) -> Tensor:
        """Convolve with the layer's own weight."""
        layer = self.layer
        return self.convolve(step, x, layer.conv1d.weight.squeeze(1), layer.conv1d.bias, layer.activation)

    def scan(self, step: Step, operands: tuple[Any, ...]) -> Tensor:
        """Scan the tokens of a step, to which the operands belong: tokens, steps, decays, two groups, weights."""
        if step.starts is None:
            x, dt, a, b, c, *weights = operands

            def update(states: Tensor, slots: Tensor, rows: slice) -> Tensor:
                result: Tensor = self.fl_update(x[rows], dt[rows], a, b[rows], c[rows], *weights, states, slots)
                return result

            return step.update_rows(update)
        return self.fl_scan(*operands, step.states, step.slots, step.starts, step.has_state)


class StateSpaceBridge(ScanBridge):
    """``MambaMixer2``; its norm includes the gate."""

    def mix(self, step: Step, projected: Tensor) -> Tensor:
        layer = self.layer
        ranks, keys = layer.tp_size, layer.groups_ssm_state_size
        sizes = (layer.intermediate_size, layer.conv_dim, layer.num_heads)
        gate, x, dt = projected.split([size // ranks for size in sizes], dim=1)
        x = self.convolve_inputs(step, x)
        x, b, c = x.split([size // ranks for size in (layer.intermediate_size, keys, keys)], dim=1)
        b, c = (part.unflatten(1, (-1, layer.ssm_state_size)) for part in (b, c))
        operands = x.unflatten(1, (-1, layer.head_dim)), dt, layer.A, b, c, layer.D, layer.dt_bias
        normed: Tensor = layer.norm(self.scan(step, operands).flatten(1), gate)
        return normed


class ChannelsBridge(ScanBridge):
    """``MambaMixer1``: a state space with a head for each channel, which projects steps and groups from tokens."""

    def mix(self, step: Step, projected: Tensor) -> Tensor:
        layer = self.layer
        x, gate = projected.chunk(2, dim=1)
        x = self.convolve_inputs(step, x)
        dt, b, c = layer._ssm_params(x)
        operands = x[:, :, None], dt, -layer.A_log.float().exp(), b[:, None], c[:, None], layer.D, None
        return functional.silu(gate) * self.scan(step, operands).squeeze(2)


class ShortConvBridge(StateBridge):
    """``Lfm2ShortConv``: ``forward(hidden_states, forward_batch)``, a convolution between two gates."""

    fl_operator = "causal_conv1d"
    fl_choices = ("causal_conv1d", "causal_conv1d_update")
    fl_parts = ("fl_convolve", "fl_convolve_token")

    def forward(self, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        layer = self.layer
        if forward_batch.forward_mode.is_idle():
            return hidden_states
        step = Step.of(layer.layer_idx, forward_batch)
        before, behind, x = layer.in_proj(hidden_states)[0].chunk(3, dim=-1)
        x = self.convolve(step, before * x, layer.conv_weight, layer.conv_bias, NO_ACTIVATION)
        result: Tensor = layer.out_proj(behind * x)[0]
        return result


KINDS = (DeltaNetBridge, ScanBridge, ShortConvBridge)
OPERATORS = frozenset(kind.fl_operator for kind in KINDS)
"""The operators by which layers with a state are known."""


def for_tokens(operators: Set[str]) -> set[str]:
    """Return the operators for single tokens of the layers with a state that are known by some of these operators."""
    return {one for kind in KINDS if kind.fl_operator in operators for one in kind.fl_choices[1::2]}
