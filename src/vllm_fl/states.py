"""Layers of vLLM that keep a state for each request: what those have in common whose core is ours.

vLLM keeps the states in blocks of its KV cache, and sorts a batch: requests with one new token and a state first, then
prompts. Such a layer runs inside one operator that no compiled graph looks into.

Importing this module imports nothing of vLLM, as for every module that :mod:`vllm_fl.layers` has rows of.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .forwards import DispatchedLayer


class StateLayer(DispatchedLayer):
    """A layer with a state for each request, whose operators are bound by name."""

    fl_traced = False
    prefix: str
    kv_cache: tuple[Tensor, ...]

    def fl_runs(self) -> bool:
        return True

    def fl_step(self) -> Any:
        """How the step's batch is sorted, or ``None`` while vLLM measures memory, before there are states.

        Raises:
            ValueError: the batch has drafts, which are refused for such models at start.
        """
        from vllm.forward_context import get_forward_context

        steps = get_forward_context().attn_metadata
        step = steps.get(self.prefix) if isinstance(steps, dict) else None
        if step is not None and step.num_accepted_tokens is not None:
            raise ValueError(f"{self.prefix} got a batch with drafts, which are refused for layers with a state")
        return step

    def fl_inputs(self) -> Tensor:
        """The last inputs of a convolution as its operators have them, ``[slots, channels, width - 1]``."""
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

        inputs = self.kv_cache[0]
        return inputs if is_conv_state_dim_first() else inputs.transpose(1, 2)
