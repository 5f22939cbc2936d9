"""Operators that fuse two others and give the same results.

The result of a norm or a gated activation is rounded to its dtype and quantized, without being stored in between.
Rotated keys are written into the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .activation import silu_and_mul
from .attention import STATE, kv_cache_write, small_caches, written_slots
from .declaration import (
    SEVERAL_ROUNDINGS,
    Access,
    Mode,
    Sample,
    SmallState,
    Tolerance,
    Work,
    Write,
    bytes_of,
    operator,
    tokens_workload,
)
from .inputs import quantized, rotated, shapes
from .normalization import rms_norm
from .quantization import LARGEST, TENSOR, groups, quantize
from .rotary import TOLERANCES, rotary_embedding

OPAQUE = frozenset({Mode.OPAQUE, Mode.EAGER})
SETTLED = {
    torch.float64: Tolerance(1e-6, 1e-14),
    torch.float32: Tolerance(1e-5, 1e-12),
    torch.float16: Tolerance(5e-4, 1e-12),
    torch.bfloat16: Tolerance(4e-3, 1e-12),
}
"""Tolerances: every right implementation quantizes the samples alike; a scale is rounded like its input."""


def _quantized(rows: Tensor, width: int, dtype: str, group_size: int) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(rows.dtype, torch.float32)
    leading = rows.shape[:-1]
    return rows.new_empty((*leading, width), dtype=getattr(torch, dtype)), rows.new_empty(
        (*leading, groups(width, group_size)), dtype=wide
    )


# -- norm -------------------------------------------------------------------------------------------------------------


def _norm_fake(
    x: Tensor, dtype: str, residual: Tensor | None, group_size: int
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    q, scales = _quantized(x, x.shape[-1], dtype, group_size)
    return (q, scales) if residual is None else (residual.new_empty(residual.shape), q, scales)


def _norm_work(x: Tensor, residual: Tensor | None) -> Work:
    tensors = 1 if residual is None else 3
    return Work(x.numel() * (tensors * x.element_size() + 1), (7 if residual is None else 8) * x.numel())


def _norm_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    source = quantized.Normed(dtype, device, generator)
    wide = torch.promote_types(dtype, torch.float32)
    for name in LARGEST:

        def sample(
            label: str, rows: int, hidden: int, *rest: object, add: bool = True, serving: bool = True, name: str = name
        ) -> Sample:
            x, residual = source.pair(rows, hidden) if add else (source.rows(rows, hidden), None)
            args = (x, name, residual, source.weight(hidden), 1e-6, *rest)
            return Sample(f"{name}, {label}", args, serving)

        yield sample("decode, 32 tokens", 32, 1024)
        yield sample("prefill, 200 tokens", 200, 512)
        yield sample("one token", 1, 4096)
        yield sample("no residual", 17, 512, add=False)
        yield sample("groups of 128", 17, 512, 128)
        yield sample("groups of 128, no residual", 3, 1024, 128, add=False)
        given = torch.tensor([0.03], dtype=wide, device=device)
        yield sample("a scale that is given", 8, 256, TENSOR, given)
        yield sample("one scale for all rows", 9, 256, TENSOR, serving=False)
        yield sample("a short last group", 3, 200, 128, serving=False)
        yield sample("groups of 24", 3, 120, 24, serving=False)
        yield sample("odd width", 3, 67, serving=False)
        yield sample("empty batch", 0, 64, serving=False)
        x, residual = source.pair(6, 64)
        three = x.view(2, 3, 64), name, residual.view(2, 3, 64), source.weight(64), 1e-6
        yield Sample(f"{name}, 3-d", three, serving=False)
        yield Sample(f"{name}, no weight", (source.rows(4, 64), name), serving=False)
        apart = source.rows(4, 160)
        apart[:, :96] = source.rows(4, 96)
        strided = apart[:, :96], name, None, source.weight(96), 1e-6
        yield Sample(f"{name}, row stride larger than the row", strided, serving=False)
        zeros = torch.zeros(3, 64, dtype=dtype, device=device)
        yield Sample(f"{name}, rows of zeros", (zeros, name, None, source.weight(64), 1e-6), serving=False)


@operator(
    writes={"residual": Write(Access.UPDATE, given="residual")},
    modes=OPAQUE,
    fake=_norm_fake,
    samples=_norm_samples,
    shapes=shapes.quantized_norm,
    tolerances=SETTLED,
    aliases=("rms_norm_dynamic_per_token_quant", "fused_add_rms_norm_static_fp8_quant", "add_rms_norm_quant"),
    work=_norm_work,
)
def rms_norm_quantize(
    x: Tensor,
    dtype: str,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    epsilon: float = 1e-6,
    group_size: int = 0,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """``rms_norm``, rounded to the dtype of ``x`` and then quantized as ``quantize`` does.

    Args:
        x: ``[..., hidden]``, floating point, only read.
        dtype: ``"int8"`` or ``"float8_e4m3fn"``.
        residual: same shape and dtype as ``x``, or ``None``. May be overwritten.
        weight: ``[hidden]``, or ``None`` for ones.
        epsilon: added to the mean square.
        group_size, scale: see ``quantize``.

    Returns:
        ``q``, shape of ``x``, and its scales, see ``quantize``; with a residual ``(x + residual, q, scales)``.
    """
    normalized = rms_norm.reference(x, residual, weight, epsilon)
    if isinstance(normalized, Tensor):
        return quantize.reference(normalized, dtype, group_size, scale)
    y, total = normalized
    return total, *quantize.reference(y, dtype, group_size, scale)


# -- gated activation -------------------------------------------------------------------------------------------------


def _gated_fake(x: Tensor, dtype: str, group_size: int) -> tuple[Tensor, Tensor]:
    return _quantized(x, x.shape[-1] // 2, dtype, group_size)


def _gated_work(x: Tensor) -> Work:
    outputs = x.numel() // 2
    return Work(outputs * (2 * x.element_size() + 1), 7 * outputs)


def _gated_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    for name, largest in LARGEST.items():
        source = quantized.TieFree(dtype, device, generator, getattr(torch, name), largest)

        def sample(label: str, x: Tensor, *rest: object, serving: bool = True, name: str = name) -> Sample:
            return Sample(f"{name}, {label}", (x, name, *rest), serving)

        yield sample("decode, 32 tokens", source.gated(32, 1024))
        yield sample("prefill, 200 tokens", source.gated(200, 512))
        yield sample("one token", source.gated(1, 4096))
        yield sample("groups of 128", source.gated(17, 512, group=128), 128)
        given = torch.tensor([0.01], dtype=torch.promote_types(dtype, torch.float32), device=device)
        yield sample("a scale that is given", source.gated(8, 256, scale=given), TENSOR, given)
        yield sample("one scale for all rows", source.gated(9, 256, group=TENSOR), TENSOR, serving=False)
        yield sample("a short last group", source.gated(3, 200, group=128), 128, serving=False)
        yield sample("groups of 24", source.gated(3, 120, group=24), 24, serving=False)
        yield sample("odd width", source.gated(3, 67), serving=False)
        yield sample("3-d", source.gated(6, 64).view(2, 3, 128), serving=False)
        whole = torch.cat((source.gated(4, 96), source.gated(4, 32)), -1)
        yield sample("row stride larger than the row", whole[:, :192], serving=False)
        yield sample("rows of zeros", torch.zeros(3, 64, dtype=dtype, device=device), serving=False)
        yield sample("empty batch", source.gated(0, 64), serving=False)


@operator(
    modes=OPAQUE,
    fake=_gated_fake,
    samples=_gated_samples,
    shapes=shapes.quantized_gated,
    tolerances=SETTLED,
    aliases=("silu_and_mul_quant", "silu_mul_fp8_quant", "silu_and_mul_per_block_quant", "swiglu_quant"),
    work=_gated_work,
)
def silu_and_mul_quantize(
    x: Tensor, dtype: str, group_size: int = 0, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``silu_and_mul``, rounded to the dtype of ``x`` and then quantized as ``quantize`` does.

    Args:
        x: ``[..., 2 * width]``, floating point.
        dtype: ``"int8"`` or ``"float8_e4m3fn"``.
        group_size, scale: see ``quantize``.

    Returns:
        ``q``, ``[..., width]``, contiguous; and its scales, see ``quantize``.
    """
    return quantize.reference(silu_and_mul.reference(x), dtype, group_size, scale)


# -- rotation and cache -----------------------------------------------------------------------------------------------


def _rotation_fake(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _rotation_work(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    position_ids: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
) -> Work:
    tokens, heads = query.shape[0], query.shape[1] + key.shape[1]
    both, kept = query.numel() + key.numel(), key.numel() + value.numel()
    table = tokens * 2 * cos.shape[-1] * cos.element_size()
    moved = 2 * both * query.element_size() + value.nbytes + kept * key_cache.element_size()
    return Work(moved + table + bytes_of(position_ids, slot_mapping), 3 * tokens * heads * 2 * cos.shape[-1])


def _in_small_caches(key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> dict[str, Any]:
    return small_caches(key_cache, value_cache, slot_mapping)


def _written_slots(key: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> tuple[Tensor, ...]:
    return written_slots(key, key_cache, value_cache, slot_mapping)


@operator(
    hints=("may_skip",),
    writes={"key_cache": STATE, "value_cache": STATE},
    small_state=SmallState(_in_small_caches, _written_slots),
    modes=frozenset({Mode.EAGER}),  # a view's first results are the arguments that it writes
    fake=_rotation_fake,
    samples=rotated.samples,
    probes=rotated.probes,
    shapes=shapes.rotated_writes,
    tolerances=TOLERANCES,
    mean_error=SEVERAL_ROUNDINGS,
    aliases=("fused_rope_and_unified_kv_cache_update", "rope_and_reshape_and_cache", "fused_qk_rope_reshape_and_cache"),
    workload=tokens_workload,
    work=_rotation_work,
    waits=True,
    batch_invariant=True,
)
def rotary_embedding_kv_cache_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    rotary_interleaved: bool = False,
    key_scale: float | None = None,
    value_scale: float | None = None,
    may_skip: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """``rotary_embedding``, not in place, followed by ``kv_cache_write`` of the rotated keys.

    Args:
        query: ``[tokens, heads, head_dim]``, floating point, only read.
        key: ``[tokens, kv_heads, head_dim]``, dtype of ``query``, only read.
        value: ``[tokens, kv_heads, value_dim]``, dtype of ``query``, any strides.
        cos, sin, position_ids, rotary_interleaved: see ``rotary_embedding``.
        key_cache, value_cache: see ``kv_cache_write``, but not in int8. The addressed slots are overwritten.
        slot_mapping: ``[at most tokens]``, int64. Tokens beyond it are padding, and are rotated but not written.
        key_scale, value_scale, may_skip: see ``kv_cache_write``.

    Returns:
        ``(query, key)`` rotated, shapes and dtypes of the inputs, contiguous.
    """
    turned, keys = rotary_embedding.reference(query, key, cos, sin, position_ids, rotary_interleaved, inplace=False)
    assert keys is not None
    kv_cache_write.reference(keys, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    return turned, keys
