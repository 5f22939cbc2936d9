"""Layers of vLLM with a state for each request: the common part of those with our core.

vLLM keeps the states in blocks of its KV cache, and sorts a batch: requests with one new token and a state first, then
prompts. Such a layer runs inside one opaque operator.

Importing this module imports nothing of vLLM; neither does any other module with rows in :mod:`vllm_fl.layers.classes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from fl_dispatch import bind_op, explain
from fl_dispatch.hosting.layers.attribute import replaced
from fl_dispatch.hosting.start import warm_batches
from fl_dispatch.hosting.start.first_choices import more_than_references

from .forwards import DispatchedLayer

PROMPTS = ("causal_conv1d", "gated_delta_rule", "selective_scan")
"""The operators for prompts: vLLM captures such models only with one token per request."""


@dataclass(frozen=True)
class Step:
    """A step's batch for our layers, with the attributes of vLLM's descriptions for both kinds of layers.

    Args:
        num_decodes, num_decode_tokens: requests with a state and one new token, which come first.
        num_prefills, num_prefill_tokens, num_actual_tokens: prompts, their tokens, and all tokens.
        non_spec_state_indices_tensor: ``[requests]`` int32, the slots of a delta net.
        prefill_state_indices, prefill_query_start_loc, prefill_has_initial_state: the same of its prompts.
        state_indices_tensor_d: ``[decodes, 1]``, the slots of other layers.
        state_indices_tensor_p, query_start_loc_p, has_initial_states_p: the same of their prompts.
    """

    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    num_actual_tokens: int
    non_spec_state_indices_tensor: Tensor
    prefill_state_indices: Tensor
    prefill_query_start_loc: Tensor
    prefill_has_initial_state: Tensor
    state_indices_tensor_d: Tensor
    state_indices_tensor_p: Tensor
    query_start_loc_p: Tensor
    has_initial_states_p: Tensor
    num_accepted_tokens: None = None

    @classmethod
    def of(cls, single: int, prompts: Sequence[int], device: torch.device) -> Step:
        """Make a batch of ``single`` requests with one token, and new prompts by length, in vLLM's unused block."""
        slots = torch.zeros(single + len(prompts), dtype=torch.int32, device=device)
        starts = torch.tensor([0, *accumulate(prompts)], dtype=torch.int32, device=device)
        of_prompts = slots[single:], starts, torch.zeros(len(prompts), dtype=torch.bool, device=device)
        tokens = sum(prompts)
        counts = single, single, len(prompts), tokens, single + tokens
        return cls(*counts, slots, *of_prompts, slots[:single, None], *of_prompts)


class StateLayer(DispatchedLayer):
    """A layer with a state for each request; it binds its operators by name."""

    fl_traced = False
    fl_parts: ClassVar[tuple[str, ...]]
    """The attributes that hold the bound operators, in the order of ``fl_choices``."""
    fl_drafts = True
    """Whether a step may have several tokens of a request, some of which are rejected."""
    fl_convolve: Callable[..., Tensor]
    fl_convolve_token: Callable[..., Tensor]
    prefix: str
    kv_cache: tuple[Tensor, ...]

    def fl_bind(self, scope: str | None) -> None:
        for part, operator in zip(self.fl_parts, self.fl_choices, strict=True):
            setattr(self, part, bind_op(operator, scope))

    def fl_runs(self) -> bool:
        return True

    def fl_kind(self) -> tuple[Any, ...]:
        """Return the layer's kind: layers of one kind call the operators with arguments of the same kind."""
        states = ((tuple(state.shape[1:]), state.stride(), state.dtype) for state in self.kv_cache)
        return (type(self), *states, *warm_batches.rules(self.fl_operators(), self.fl_scope(self.prefix)))

    def fl_try(self, hidden: Tensor) -> None:
        """Run the layer as the model does."""
        self(hidden)  # type: ignore[operator]

    @contextmanager
    def fl_asked(self) -> Iterator[dict[str, str]]:
        """Make calls in this block only ask for kernels; the mapping gets operators without a kernel, and why."""
        without = dict[str, str]()
        asking = {
            part: partial(self._fl_ask, without, operator, getattr(self, part))
            for part, operator in zip(self.fl_parts, self.fl_choices, strict=True)
        }
        with replaced(self, **asking):
            yield without

    def _fl_ask(self, without: dict[str, str], operator: str, bound: Callable[..., Tensor], *args: Any) -> Tensor:
        scope = self.fl_scope(self.prefix)
        decision = explain(operator, *args, scope=scope)
        if more_than_references(explain(operator, scope=scope)) and not more_than_references(decision):
            without[operator] = "; ".join(decision.skipped_reasons())  # limits exclude the kernels, not a rule
        return bound(*args)

    def fl_step(self) -> Any:
        """Return the step's sorted batch; ``None`` while vLLM measures memory, before there are states.

        Raises:
            ValueError: the batch has drafts, which are refused at start for layers of this kind.
        """
        from vllm.forward_context import get_forward_context

        steps = get_forward_context().attn_metadata
        step = steps.get(self.prefix) if isinstance(steps, dict) else None
        if step is not None and step.num_accepted_tokens is not None and not self.fl_drafts:
            raise ValueError(f"{self.prefix} got a batch with drafts, which are refused for such layers")
        return step

    @staticmethod
    def fl_prompts(step: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return slots, starts of the tokens, and whether there is a state already, for a step's prompts."""
        return step.state_indices_tensor_p.contiguous(), step.query_start_loc_p, step.has_initial_states_p

    def fl_inputs(self, weight: Tensor) -> Tensor:
        """Return the last inputs of a convolution in its operators' form, ``[slots, channels, width - 1]``.

        Args:
            weight: ``[channels, width]``.
        """
        return self.fl_window()[:, :, : weight.shape[1] - 1]

    def fl_window(self) -> Tensor:
        """Return the last inputs of a convolution and one for each draft, ``[slots, channels, width - 1 + drafts]``."""
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

        inputs = self.kv_cache[0]
        return inputs if is_conv_state_dim_first() else inputs.transpose(1, 2)
