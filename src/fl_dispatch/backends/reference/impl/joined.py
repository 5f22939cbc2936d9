"""References of the operators that do at once what two others do: the two, one after the other."""

from __future__ import annotations

from torch import Tensor

from . import activation, attention, normalization, quantization, rotary


def rms_norm_quantize(
    x: Tensor,
    dtype: str,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    epsilon: float = 1e-6,
    group_size: int = 0,
    scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """See :data:`fl_dispatch.ops.joined.rms_norm_quantize`."""
    normalized = normalization.rms_norm(x, residual, weight, epsilon)
    if isinstance(normalized, Tensor):
        return quantization.quantize(normalized, dtype, group_size, scale)
    y, total = normalized
    return total, *quantization.quantize(y, dtype, group_size, scale)


def silu_and_mul_quantize(
    x: Tensor, dtype: str, group_size: int = 0, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.joined.silu_and_mul_quantize`."""
    return quantization.quantize(activation.silu_and_mul(x), dtype, group_size, scale)


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
) -> tuple[Tensor, Tensor]:
    """See :data:`fl_dispatch.ops.joined.rotary_embedding_kv_cache_write`."""
    turned, turned_key = rotary.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved, inplace=False)
    assert turned_key is not None
    attention.kv_cache_write(turned_key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    return turned, turned_key
