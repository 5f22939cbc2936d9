"""SGLang's key-value pools and page allocators for any device, without Triton kernels if none can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.utils import get_num_new_pages
from torch import Tensor

from fl_dispatch.hosting.memory import kv_layout
from fl_dispatch.hosting.memory.kv_layout import KVLayout
from fl_dispatch.logger_manager import get_logger

from ..compat import native_kernels

logger = get_logger(__name__)

DEFAULT = KVLayout.parse("(NHD|NHD)")
"""SGLang's own layout: a tensor of keys and a tensor of values for each layer."""

_in_force = DEFAULT
_hosts_own: tuple[str, ...] = ()
"""SGLang's own attention backends in force."""


def choose(page_size: int, hosts_own: Sequence[str] = ()) -> KVLayout:
    """Decide the cache's layout from the policy, and state it to the dispatch core with the page size.

    Args:
        page_size: slots of a page.
        hosts_own: SGLang's own attention backends in force, which read only its own layout.
    """
    global _in_force, _hosts_own
    _hosts_own = tuple(hosts_own)
    preferred = kv_layout.preference()
    # Pages of one token gain nothing from an optional layout.
    wanted = DEFAULT if preferred.layout is None or preferred.optional else preferred.layout
    if hosts_own and wanted != DEFAULT:
        backends = ", ".join(f"'{name}'" for name in hosts_own)
        logger.warning(
            "KV cache layout %s, not %s: SGLang's attention %s reads it", DEFAULT.name, wanted.name, backends
        )
    _in_force = DEFAULT if hosts_own else wanted
    kv_layout.state(_in_force, page_size)
    return _in_force


def _refuse_fp8_for_hosts_own(dtype: torch.dtype) -> None:
    if dtype is torch.float8_e4m3fn and _hosts_own:
        raise ValueError(f"sglang_fl does not support a KV cache in fp8 for the attention '{_hosts_own[0]}' yet")


class KVPoolFL(MHATokenToKVPool):
    """Keys and values ``[slots, kv_heads, size]`` of each layer; attention writes them by ``kv_cache_write``.

    If implementations need another layout, they are views ``[pages, page_size, kv_heads, size]`` of one tensor, which
    no other served code reads.
    """

    def _create_buffers_normal(self) -> None:
        _refuse_fp8_for_hosts_own(self.dtype)
        if _in_force == DEFAULT:
            super()._create_buffers_normal()
            return
        pages, sizes = self.size // self.page_size + 1, (self.head_dim, self.v_head_dim)  # one page for padding
        shape = (pages, self.page_size * self.head_num * sum(sizes))
        layers = [torch.zeros(shape, dtype=self.store_dtype, device=self.device) for _ in range(self.layer_num)]
        views = [_in_force.split(memory, self.page_size, self.head_num, *sizes) for memory in layers]
        self.k_buffer, self.v_buffer = ([pair[part] for pair in views] for part in (0, 1))

    def _init_kv_copy_and_warmup(self) -> None:
        """Skip SGLang's preparation, because none of its kernels copies within this cache."""
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Copy slots, for pages of one slot."""
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer[tgt_loc] = buffer[src_loc]

    def _kv_tokens_per_row(self) -> int:
        return int(super()._kv_tokens_per_row()) if _in_force == DEFAULT else int(self.page_size)


SPARSE = (
    "sglang_fl does not support sparse latent attention yet: SGLang's indexer "
    "(srt/layers/attention/dsa/dsa_indexer.py) lists tokens by kernels for CUDA, ROCm, XPU and Ascend alone"
)


class MLAPoolFL(MLATokenToKVPool):
    """Latent keys ``[slots, 1, rank + rope]`` of each layer."""

    index_keys: Sequence[Tensor] = ()
    """The indexers' keys of the same slots ``[slots, dim]``, one tensor for each."""

    def __init__(self, *args: Any, index_head_dim: int | None = None, **kwargs: Any) -> None:
        if index_head_dim is not None:
            raise ValueError(SPARSE)
        super().__init__(*args, **kwargs)
        _refuse_fp8_for_hosts_own(self.dtype)

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Copy slots, for pages of one slot."""
        for buffer in (*self.kv_buffer, *self.index_keys):
            buffer[tgt_loc] = buffer[src_loc]


class SparsePoolFL(DSATokenToKVPool):
    """Latent keys with an index: refused on construction, because SGLang asks for the class for every model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(SPARSE)


POOLS: dict[str, type] = {"mha": KVPoolFL, "mla": MLAPoolFL, "dsa": SparsePoolFL}
"""Pool class by SGLang's kind."""


class TokenAllocatorFL(TokenToKVPoolAllocator):
    """Allocator of single slots: pages of one token."""

    def __init__(self, size: int, page_size: int, **kwargs: Any) -> None:
        super().__init__(size, **kwargs)


class PagedAllocatorFL(PagedTokenToKVPoolAllocator):
    """Allocator of whole pages for each request, with tensor operations instead of SGLang's Triton kernels."""

    free_pages: Tensor  # numbers of the free pages, int64

    def alloc_extend(
        self,
        prefix_lens: Tensor,
        prefix_lens_cpu: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        last_loc: Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> Tensor | None:
        """Return slots ``[extend_num_tokens]`` int64 for tokens from ``prefix_lens`` to ``seq_lens``, or ``None``."""
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if num_new_pages > len(self.free_pages):
            self.merge_and_sort_free()
        if num_new_pages > len(self.free_pages):
            return None
        slots = torch.empty(extend_num_tokens, dtype=torch.int64, device=self.device)
        alloc_extend_naive(prefix_lens, seq_lens, last_loc, self.free_pages, slots, self.page_size, self.device)
        self.free_pages = self.free_pages[num_new_pages:]
        return slots

    def alloc_decode(self, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor) -> Tensor | None:
        """Return one slot per request ``[requests]`` int64, for the last token of ``seq_lens``, or ``None``."""
        return self.alloc_extend(seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, len(seq_lens))


def make_allocator(size: int, page_size: int, **kwargs: Any) -> TokenAllocatorFL | PagedTokenToKVPoolAllocator:
    """Make the allocator for pages of this size; SGLang calls it as a class."""
    if page_size == 1:
        return TokenAllocatorFL(size, page_size=page_size, **kwargs)
    pages = PagedTokenToKVPoolAllocator if native_kernels.start_triton() else PagedAllocatorFL
    return pages(size, page_size=page_size, **kwargs)
