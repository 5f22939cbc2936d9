"""Emulated writes to the paged KV cache."""

from __future__ import annotations

import torch

from . import HALF, kernel, require, require_contiguous, require_default, require_dtype, require_same_dtype, waived
from .rotary import interleaved


def _check_slots(slots: torch.Tensor, total: int) -> None:
    used = slots[slots >= 0]
    require(bool((used < total).all()), f"slot {int(slots.max()) if slots.numel() else 0} of {total}")
    require(len(used.unique()) == len(used), "slots must not repeat, else the result is undefined")


def _store_nz(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, block_size: int) -> None:
    """Write rows [tokens, elements] into [blocks, elements // last, block_size, last]."""
    last = cache.shape[-1]
    blocks, offsets = slots // block_size, slots % block_size
    cache[blocks, :, offsets] = rows.view(len(rows), -1, last)


@kernel("npu_scatter_pa_kv_cache")
def scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Source: the wheel's docstring, cases one ('PA_NZ') and two (None or 'Norm'), with keys of three dimensions.

    Refused: tensors that are not contiguous, mixed dtypes, caches of other than four dimensions, slots that repeat
    or lie beyond the cache. Assumed: a negative slot is skipped, as in op-plugin's own test of the operator, though
    the docstring's range begins at 0. Compression (case three) is not emulated.
    """
    require_default(compress_lens=compress_lens, compress_seq_offsets=compress_seq_offsets, seq_lens=seq_lens)
    require_contiguous(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    require_same_dtype(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    require(
        slot_mapping.dtype in (torch.int32, torch.int64), f"slot_mapping is {slot_mapping.dtype}, not int32 or int64"
    )
    require(key.dim() == value.dim() == 3, f"key has {key.dim()} dimensions; three are emulated")
    require(key.shape[:2] == value.shape[:2], "key and value must have the same tokens and heads")
    require(key_cache.dim() == value_cache.dim() == 4, f"key_cache has {key_cache.dim()} dimensions, not 4")
    require(slot_mapping.shape == key.shape[:1], f"slot_mapping is {tuple(slot_mapping.shape)}, one a token is wanted")
    require(cache_mode in (None, "Norm", "PA_NZ"), f"cache_mode={cache_mode!r}, not None, 'Norm' or 'PA_NZ'")
    slots, kept = slot_mapping.long(), slot_mapping >= 0
    block_size = key_cache.shape[2 if cache_mode == "PA_NZ" else 1]
    _check_slots(slots, key_cache.shape[0] * block_size)
    for source, cache in ((key, key_cache), (value, value_cache)):
        if cache_mode == "PA_NZ":
            last = 32 // cache.element_size()
            wanted = (cache.shape[0], source[0].numel() // last, block_size, last)
            require(cache.shape == wanted, f"a cache of 'PA_NZ' is {wanted}, not {tuple(cache.shape)}")
            _store_nz(cache, slots[kept], source[kept].flatten(1), block_size)
        else:
            wanted = (cache.shape[0], block_size, *source.shape[1:])
            require(cache.shape == wanted, f"a cache of 'Norm' is {wanted}, not {tuple(cache.shape)}")
            cache.view(-1, *source.shape[1:])[slots[kept]] = source[kept]


@kernel("npu_kv_rmsnorm_rope_cache")
def kv_rmsnorm_rope_cache(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None,
    k_rope_offset: torch.Tensor | None = None,
    c_kv_offset: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """MLA's write: RMS norm of the latent part, rotation of the rest, both into their caches, which are returned.

    Source: op-plugin's page. kv is [B, 1, S, 512 + 64]: the latent part first. The rotary part goes from pairs to
    halves and is then rotated, as in ``npu_interleave_rope``. Modes Norm, PA, PA_BNSD and PA_NZ.
    Refused: sizes beside 512 and 64, dtypes beside float16 and bfloat16, an index that is not int64, that repeats or
    that lies beyond the cache; more than one head. Assumed: float32 inside; a negative index is refused, because
    nothing says that it is skipped; without ``is_output_kv`` the last two results are not written (NaN).
    """
    require_default(
        k_rope_scale=k_rope_scale, c_kv_scale=c_kv_scale, k_rope_offset=k_rope_offset, c_kv_offset=c_kv_offset, v=v
    )
    require_dtype("kv", kv, HALF)
    require_same_dtype(kv=kv, gamma=gamma, cos=cos, sin=sin, k_cache=k_cache, ckv_cache=ckv_cache)
    latent, rope = gamma.shape[-1], cos.shape[-1]
    require((latent, rope) == (512, 64) or waived("head_size"), f"sizes {latent} and {rope}, not 512 and 64")
    require(kv.dim() == 4 and kv.shape[1] == 1, f"kv is {tuple(kv.shape)}, not [B, 1, S, {latent + rope}]")
    require(kv.shape[-1] == latent + rope, f"kv has {kv.shape[-1]} elements, not {latent} + {rope}")
    require(cos.shape == sin.shape == (*kv.shape[:3], rope), f"cos is {tuple(cos.shape)}, not [B, 1, S, {rope}]")
    require(index.dtype == torch.int64, f"index is {index.dtype}, not int64")
    require(bool((index >= 0).all()), "index must not be negative")
    x = kv[..., :latent].float()
    y = (x / torch.sqrt(x.square().mean(-1, keepdim=True) + epsilon) * gamma.float()).to(kv.dtype)
    k = interleaved(kv[..., latent:], cos, sin).to(kv.dtype)
    for cache, rows in ((k_cache, k), (ckv_cache, y)):
        size = rows.shape[-1]
        if cache_mode == "Norm":
            require(cache.dim() == 4 and cache.shape[1] == 1, "a cache of 'Norm' is [B, 1, length, size]")
            require(index.shape == (kv.shape[0], kv.shape[2]), "an index of 'Norm' is [B, S]")
            for batch, positions in enumerate(index):
                _check_slots(positions, cache.shape[2])
                cache[batch, 0, positions] = rows[batch, 0]
            continue
        require(cache_mode in ("PA", "PA_BNSD", "PA_NZ"), f"cache_mode={cache_mode!r} is not emulated")
        require(
            cache.dim() == 4 and cache.shape[2:] == (1, size),
            f"a cache of {cache_mode!r} is [blocks, block_size, 1, {size}], not {tuple(cache.shape)}",
        )
        require_contiguous(cache=cache)
        require(index.shape == (kv.shape[0] * kv.shape[2],), "a paged index is [B * S]")
        blocks, block_size = cache.shape[:2]
        _check_slots(index, blocks * block_size)
        if cache_mode == "PA_NZ":
            _store_nz(cache.view(blocks, size // 16, block_size, 16), index, rows.reshape(-1, size), block_size)
        else:
            cache.view(-1, size)[index] = rows.reshape(-1, size)
    if not is_output_kv or cache_mode == "Norm":
        k, y = torch.full_like(k, torch.nan), torch.full_like(y, torch.nan)
    return k_cache, ckv_cache, k, y


@kernel("npu_scatter_nd_update_")
def scatter_nd_update_(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """Rows of ``input`` that ``indices`` [..., a] name by their first a dimensions become ``updates``; in place.

    Source: the wheel's docstring. Refused: other dtypes than it names for the Atlas A2, float32, float16, bfloat16,
    bool, int64 and int8; indices of one dimension, of other types than int32 and int64, or beyond the input.
    Assumed: a negative index is beyond it, and a row that is named twice gets either value.
    """
    require_dtype("input", input, (torch.float32, *HALF, torch.bool, torch.int64, torch.int8))
    require_same_dtype(input=input, updates=updates)
    require(1 <= input.dim() <= 8, f"input has {input.dim()} dimensions, not 1 to 8")
    require(indices.dtype in (torch.int32, torch.int64), f"indices are {indices.dtype}, not int32 or int64")
    require(indices.dim() >= 2, f"indices have {indices.dim()} dimensions, at least 2 are wanted")
    axes = indices.shape[-1]
    require(axes <= input.dim(), f"indices name {axes} dimensions of {input.dim()}")
    wanted = (*indices.shape[:-1], *input.shape[axes:])
    require(updates.shape == wanted, f"updates are {tuple(updates.shape)}, not {tuple(wanted)}")
    places = [indices[..., axis].long().flatten() for axis in range(axes)]
    for axis, place in enumerate(places):
        inside = (place >= 0) & (place < input.shape[axis])
        require(bool(inside.all()), f"an index is outside of dimension {axis}, which has {input.shape[axis]} elements")
    input[tuple(places)] = updates.flatten(0, indices.dim() - 2)
    return input
