"""Slots of states hold NaN where SGLang would clear them, so who reads what another left gets wrong tokens."""

from __future__ import annotations

import torch

from fl_dispatch import OpRegistry


def register_builtins(registry: OpRegistry) -> None:
    from sglang.srt.mem_cache.memory_pool import MambaPool

    def leave(pool: MambaPool, indices: torch.Tensor) -> None:
        for states in (*pool.mamba_cache.conv, pool.mamba_cache.temporal):
            states[:, indices.long()] = torch.nan

    MambaPool.clear_slots = leave
