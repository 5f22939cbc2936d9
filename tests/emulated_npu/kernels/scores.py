"""Attention of one sequence: which scores count, softmax and values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from . import require

COMPRESSED = 2048
"""Rows and columns of the causal mask that sparse modes 2, 3 and 4 take."""
UNBOUNDED = 2147483647


@dataclass(frozen=True)
class Sparsity:
    """Which scores count: ``sparse_mode`` with its mask and window."""

    mode: int
    mask: torch.Tensor | None
    before: int
    after: int

    def check(self) -> None:
        require(self.mode in (0, 1, 2, 3, 4), f"sparse_mode={self.mode} is not one of 0 to 4")
        if self.mode == 1:
            require(self.mask is not None, "sparse_mode=1 needs atten_mask")
        if self.mode >= 2:
            require(self.mask is not None, f"sparse_mode={self.mode} needs the atten_mask of 2048 x 2048")
            assert self.mask is not None
            shape = tuple(self.mask.shape)
            wanted = (COMPRESSED, COMPRESSED)
            require(shape in (wanted, (1, *wanted), (1, 1, *wanted)), f"atten_mask is {shape}, not 2048 x 2048")
            triangle = torch.ones(wanted, dtype=torch.bool).triu_(1)
            require(
                torch.equal(self.mask.view(wanted) != 0, triangle),
                "atten_mask must be 1 above the diagonal and 0 elsewhere",
            )

    def hidden(self, batch: int, queries: int, keys: int) -> torch.Tensor | None:
        """True where a score does not count, [queries, keys]; None if all count."""
        if self.mode == 0 and self.mask is None:
            return None
        row, column = torch.arange(queries)[:, None], torch.arange(keys)
        if self.mode in (0, 1):
            given = self._full(batch, queries, keys)
            if self.mode == 0:
                given = given | (column < row - self.before) | (column > row + self.after)
            return given
        if self.mode == 2:
            return column > row
        last = row + keys - queries
        if self.mode == 3:
            return column > last
        return (column < last - self.before) | (column > last + self.after)

    def _full(self, batch: int, queries: int, keys: int) -> torch.Tensor:
        mask = self.mask
        assert mask is not None
        while mask.dim() > 2:
            mask = mask[batch if mask.shape[0] > 1 else 0]
        require(
            mask.shape[0] >= queries and mask.shape[1] >= keys,
            f"atten_mask is {tuple(mask.shape)}, and a sequence has {queries} queries and {keys} keys",
        )
        return mask[:queries, :keys] != 0


@dataclass
class Attended:
    """Attention of one sequence: output [queries, heads, D], the rest [queries, heads] in float32."""

    output: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor

    @property
    def lse(self) -> torch.Tensor:
        """Log of the sum of exponentials; infinite where no key counts."""
        lse = self.total.log() + self.maximum
        return torch.where(self.total == 0, torch.inf, lse)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    hidden: torch.Tensor | None,
    sink: torch.Tensor | None = None,
) -> Attended:
    """Softmax(scale * Q K) V of one sequence, in float32.

    Args:
        query: [queries, heads, D]
        key, value: [keys, KV heads, D]; each serves heads / KV heads consecutive heads.
        hidden: scores that do not count, [queries, keys].
        sink: a score for each head that takes its share of the softmax and has no value.
    """
    queries, heads, _ = query.shape
    keys, kv_heads, size = value.shape
    groups = heads // kv_heads
    q, k, v = query.float(), key.float().repeat_interleave(groups, 1), value.float().repeat_interleave(groups, 1)
    scores = torch.matmul(q.transpose(0, 1), k.permute(1, 2, 0)) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    if keys == 0:
        empty = torch.zeros(queries, heads)
        return Attended(torch.zeros(queries, heads, size), empty, empty)
    maximum = scores.amax(-1)
    if sink is not None:
        maximum = torch.maximum(maximum, sink.float()[:, None])
    maximum = torch.where(maximum == -math.inf, 0.0, maximum)
    weights = torch.exp(scores - maximum[..., None])
    total = weights.sum(-1)
    if sink is not None:
        total = total + torch.exp(sink.float()[:, None] - maximum)
    output = torch.matmul(weights, v.transpose(0, 1)) / torch.where(total == 0, 1.0, total)[..., None]
    return Attended(output.transpose(0, 1), maximum.t(), total.t())
