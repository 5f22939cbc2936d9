"""Attention over a cache that ranks divide by tokens (vLLM's decode context parallelism), by ``mla_prefill``.

The ranks of such a group have the same keys and values of a step, because there are more ranks than key-value heads. So
a rank keeps only its part of the tokens. It attends with the queries of all ranks over its part, and the ranks merge
the results by the log-sum-exp of the scores. Then it attends over the step's own keys and values.

Latent attention in its absorbed form has one head of keys, the latent rows. vLLM's layer gathers the queries and merges
the results, with a kernel of Triton that :func:`correct` replaces. For prefills a rank collects a chunk's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from fl_dispatch import bind_op

from .mla_prefill import merge

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata


@dataclass(frozen=True)
class Part:
    """The part of a step's cached tokens on this rank.

    Args:
        starts, key_starts: ``[requests + 1]`` int32; the first new token of each request, and its first row here.
        starts_host, key_starts_host: the same numbers.
        blocks, offsets: ``[rows]`` int64; block and offset of each row, request after request.
        longest: largest number of rows of a request on this rank.
        somewhere: whether any rank has a row.
    """

    starts: Tensor
    key_starts: Tensor
    starts_host: list[int]
    key_starts_host: list[int]
    blocks: Tensor
    offsets: Tensor
    longest: int
    somewhere: bool


def part_of(common: CommonAttentionMetadata, parallel: ParallelConfig, block_size: int) -> Part:
    """Return the part of a batch's context on this rank; ``block_size`` counts tokens of this rank."""
    group, new = get_dcp_group(), common.query_start_loc_cpu.diff()
    context = common.seq_lens[: len(new)].cpu() - new
    local = get_dcp_local_seq_lens(context, group.world_size, group.rank_in_group, parallel.cp_kv_cache_interleave_size)
    starts = common.query_start_loc, common.query_start_loc_cpu.tolist()
    return rows_of(local, *starts, common.block_table_tensor, block_size, bool((context > 0).any()))


def rows_of(
    local: Tensor, starts: Tensor, starts_host: list[int], table: Tensor, block_size: int, somewhere: bool = True
) -> Part:
    """Return the part with ``local`` rows of each request on this rank, on the host; ``table``: their blocks."""
    counts: list[int] = local.tolist()
    key_starts = [0, *accumulate(counts)]
    request = torch.arange(len(counts)).repeat_interleave(local)
    row = torch.arange(key_starts[-1]) - torch.tensor(key_starts)[request]
    place = table.device
    blocks = table[request.to(place), (row // block_size).to(place)].long()
    firsts = torch.tensor(key_starts, dtype=torch.int32, device=place)
    rest = (blocks, (row % block_size).to(place), max(counts, default=0), somewhere)
    return Part(starts, firsts, starts_host, key_starts, *rest)


def correct(
    out: Tensor, lses: Tensor, cp_rank: int, ctx: Any = None, is_lse_base_on_e: bool = True
) -> tuple[Tensor, Tensor]:
    """Weight this rank's result by its share of all ranks' scores, and return it with the log-sum-exp of all.

    Args:
        out: ``[tokens, heads, head_size_v]``.
        lses: ``[ranks, tokens, heads]``.
    """
    total = lses.logsumexp(0)
    weight = torch.exp(lses[cp_rank] - total.clamp_min(torch.finfo(total.dtype).min))
    return (out * weight[..., None]).to(out.dtype), total


class DividedAttention:
    """One layer's attention; its operator is bound for the layer with this prefix."""

    def __init__(self, scope: str | None, scale: float) -> None:
        self._attend, self._scale = bind_op("mla_prefill", scope), scale

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, part: Part, out: Tensor
    ) -> None:
        """Attend causally over the context on all ranks and the step's own tokens; write ``out``.

        Args:
            query: ``[tokens, heads, head_size]``.
            key, value: ``[tokens, 1, ...]``, of the step's tokens.
            key_cache, value_cache: ``[blocks, block_size, 1, ...]``, of this rank.
            part: this rank's part of the context.
            out: ``[tokens, heads, head_size_v]``.
        """
        longest = max((end - begin for begin, end in pairwise(part.starts_host)), default=0)
        firsts, hosts = (part.starts, part.starts), (part.starts_host, part.starts_host)
        found, lse = self.over(query, key, value, firsts, hosts, longest, longest, causal=True)
        if part.somewhere:
            keys, values = (cache[part.blocks, part.offsets] for cache in (key_cache, value_cache))
            firsts, hosts = (part.starts, part.key_starts), (part.starts_host, part.key_starts_host)
            every = get_dcp_group().all_gather(query.contiguous(), dim=1)
            merge(found, lse, *_merged(*self.over(every, keys, values, firsts, hosts, longest, part.longest)))
        out.copy_(found)

    def over(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        firsts: tuple[Tensor, Tensor],
        hosts: tuple[Sequence[int], Sequence[int]],
        most: int,
        longest: int,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Attend over gathered keys and values, repeated for all heads; return the result and its log-sum-exp.

        The other arguments are those of ``mla_prefill``.
        """
        key, value = (rows.expand(-1, query.shape[1], -1).contiguous() for rows in (key, value))
        found: tuple[Tensor, Tensor] = self._attend(
            query, key, value, *firsts, most, longest, self._scale, None, causal, *hosts
        )
        return found


def _merged(found: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the results of all ranks for all heads, and return those of this rank's heads.

    Args:
        found: ``[tokens, heads of all ranks, head_size_v]``.
        lse: ``[heads of all ranks, tokens]``.
    """
    group = get_dcp_group()
    every = group.all_gather(lse.contiguous(), dim=0).view(group.world_size, *lse.shape)
    weighted, total = correct(found, every.transpose(1, 2), group.rank_in_group)
    heads = lse.shape[0] // group.world_size
    mine = slice(heads * group.rank_in_group, heads * (group.rank_in_group + 1))
    return group.reduce_scatter(weighted.contiguous(), dim=1), total.T[mine]
