"""Requests with drafts in layers with a state: a state after each token, of which the next step takes one.

vLLM gives such a request a slot for the state after each of its tokens in a step. The next step knows how many of them
were accepted and continues from that slot, so a rejected draft leaves no trace. A convolution keeps its inputs in the
first slot only: those before the step's second token, and those of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Drafted:
    """The requests of a step with drafts, each with one to ``width`` tokens. No method waits for the device.

    Args:
        slots: ``[requests, width]``, int32: the slot for the state after each token.
        accepted: ``[requests]``: number of accepted tokens of the step before, at least one.
        starts: ``[requests + 1]``: first token of each request, and the end of the last one.
        tokens: the number of tokens.
    """

    slots: Tensor
    accepted: Tensor
    starts: Tensor
    tokens: int

    @classmethod
    def of(cls, step: Any) -> Drafted | None:
        """Read a step from vLLM's description for either kind of layer; ``None`` if it has no drafts."""
        if step.num_accepted_tokens is None:
            return None
        if hasattr(step, "spec_state_indices_tensor"):  # a delta net's description
            slots, starts = step.spec_state_indices_tensor, step.spec_query_start_loc
            tokens = step.num_actual_tokens - step.num_prefill_tokens
        else:
            slots, starts, tokens = step.state_indices_tensor_d, step.query_start_loc_d, step.num_decode_tokens
        return cls(slots, step.num_accepted_tokens, starts, tokens)

    @property
    def width(self) -> int:
        """Return the largest number of tokens of a request: one and its drafts."""
        return self.slots.shape[1]

    def apart(self, rows: Tensor) -> Tensor:
        """Reshape ``[tokens, …]`` to ``[requests, width, …]``; requests with fewer tokens have other requests' rows."""
        if self._is_even():
            return rows.unflatten(0, self.slots.shape)
        return rows[self._places().clamp(max=self.tokens - 1)]

    def together(self, found: Tensor) -> Tensor:
        """Reshape ``[requests, width, …]`` to ``[tokens, …]``."""
        if self._is_even():
            return found.flatten(0, 1)
        places = self._places()
        inside = places < self.starts[1:, None]
        rows = found.new_empty(self.tokens + 1, *found.shape[2:])
        rows[torch.where(inside, places, self.tokens)] = found
        return rows[: self.tokens]

    def convolved(
        self,
        x: Tensor,
        kernel: Callable[..., Tensor],
        weight: Tensor,
        bias: Tensor | None,
        inputs: Tensor,
        activation: str,
    ) -> Tensor:
        """Convolve the requests' tokens, and keep their inputs.

        Args:
            x: ``[requests, width, channels]``.
            kernel: the operator ``causal_conv1d_update``.
            weight: ``[channels, taps]``.
            bias: ``[channels]``, or ``None``.
            inputs: ``[slots, channels, taps - 2 + width]``, overwritten.
            activation: the operator's activation.

        Returns:
            ``[requests, width, channels]``.
        """
        first, kept = self.slots[:, 0].long(), weight.shape[1] - 1
        columns = self.accepted[:, None].long() - 1 + torch.arange(kept, device=x.device)
        before = inputs[first].gather(2, columns[:, None].expand(-1, inputs.shape[1], -1))
        inputs[first] = torch.cat((before[:, :, 1:], x.transpose(1, 2).to(inputs.dtype)), dim=2)
        own = torch.arange(len(first), dtype=torch.int32, device=x.device)
        found = [kernel(x[:, place], weight, bias, before, own, activation) for place in range(self.width)]
        return torch.stack(found, dim=1)

    def each(self, states: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the places of tokens, each with its slots, to which the previous state was copied.

        Args:
            states: ``[slots, …]``, overwritten.
        """
        source = self.slots.gather(1, self.accepted[:, None].long() - 1)[:, 0].long()
        for place in range(self.width):
            own = self.slots[:, place].contiguous()
            states[own.long()] = states[source]
            yield place, own
            source = own.long()

    def _is_even(self) -> bool:
        """Whether all requests have the largest number of tokens."""
        return self.tokens == self.slots.numel()

    def _places(self) -> Tensor:
        return self.starts[:-1, None].long() + torch.arange(self.width, device=self.starts.device)
