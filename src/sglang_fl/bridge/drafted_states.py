"""States after each draft of a step that verifies drafts.

SGLang keeps a request's state as it was before the step, and a state after each draft, in its pool of states. Once it
knows the accepted drafts, it takes the state after the last of them
(:func:`~sglang_fl.compat.state_forms.commit_states`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def parents(retrieve_next_token: Tensor, retrieve_next_sibling: Tensor) -> Tensor:
    """Return ``[requests, width]``: the column that each column follows, or -1; siblings come one after the other.

    Args:
        retrieve_next_token: ``[requests, width]``; the first column that follows a column, or -1.
        retrieve_next_sibling: the next column that follows the same column, or -1.
    """
    requests, width = retrieve_next_token.shape
    parent = torch.full((requests, width + 1), -1, dtype=torch.long, device=retrieve_next_token.device)
    for column in range(width):
        for link, above in ((retrieve_next_token, column), (retrieve_next_sibling, None)):
            place = link[:, column].long()
            value = torch.full_like(place, above) if above is not None else parent[:, column].clone()
            parent.scatter_(1, torch.where(place < 0, width, place)[:, None], value[:, None])
    return parent[:, :width]


@dataclass(frozen=True)
class Drafts:
    """The drafts of each request, in columns; each column follows an earlier one.

    Args:
        parents: ``[requests, width]`` int64; the column before each column, or -1.
    """

    parents: Tensor

    @classmethod
    def of(cls, metadata: Any, width: int) -> Drafts:
        """Return the drafts of SGLang's description of a step; without links they are a chain."""
        links = metadata.retrieve_next_token, metadata.retrieve_next_sibling
        if links[0] is not None:
            return cls(parents(*links))
        slots = metadata.mamba_cache_indices
        return cls(torch.arange(-1, width - 1, device=slots.device).expand(len(slots), -1))

    def run(
        self, states: Tensor, slots: Tensor, after: Tensor, token: Callable[[Tensor, Tensor, slice], Tensor]
    ) -> Tensor:
        """Run an operator for single tokens over the drafts, column by column.

        Args:
            states: ``[slots, ...]``; unchanged.
            slots: the slot of each request.
            after: ``[requests or more, width or more, ...]``; becomes the states after each draft.
            token: states, slots of the requests and their rows among the tokens → the result of these rows.

        Returns:
            The results of all rows ``[requests * width, ...]``.
        """
        requests, width = self.parents.shape
        table = states.new_empty(requests, 1 + width, *states.shape[1:])
        table[:, 0] = states[slots.long()]
        numbers = torch.arange(requests, device=slots.device)
        first, made = numbers.to(slots.dtype) * (1 + width), list[Tensor]()
        for column in range(width):
            table[:, 1 + column] = table[numbers, 1 + self.parents[:, column]]
            made.append(token(table.flatten(0, 1), first + 1 + column, slice(column, None, width)))
            after[:requests, column].copy_(table[:, 1 + column])
        return torch.stack(made, 1).flatten(0, 1)
