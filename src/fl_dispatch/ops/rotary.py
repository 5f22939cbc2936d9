"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

import torch
from torch import Tensor

from .declaration import (
    SEVERAL_ROUNDINGS,
    STANDARD_TOLERANCE,
    Access,
    LayerForm,
    Mode,
    Sample,
    Tolerance,
    Work,
    Write,
    operator,
    tokens_workload,
)
from .inputs import shapes
from .inputs.source import Source

MODES = frozenset({Mode.INLINE, Mode.OPAQUE, Mode.EAGER})
# The two products of a rotation may cancel, and kernels that work in the half type round each of them first, so the
# error follows the size of the pair (about 5 in a large normal sample: three roundings), not that of the result.
TOLERANCES = MappingProxyType(
    {**STANDARD_TOLERANCE, torch.float16: Tolerance(2e-3, 2.5e-3), torch.bfloat16: Tolerance(1.6e-2, 2e-2)}
)


def _fake(query: Tensor, key: Tensor | None, inplace: bool) -> tuple[Tensor, Tensor | None]:
    if inplace:
        return query, key
    return query.new_empty(query.shape), None if key is None else key.new_empty(key.shape)


def _work(query: Tensor, key: Tensor | None, cos: Tensor, position_ids: Tensor, inplace: bool) -> Work:
    heads = query.shape[1] + (0 if key is None else key.shape[1])
    rotated = query.shape[0] * heads * 2 * cos.shape[-1]
    moved = rotated if inplace else query.shape[0] * heads * query.shape[2]
    rows = query.shape[0] * 2 * cos.shape[-1] * cos.element_size()
    return Work(2 * moved * query.element_size() + rows + position_ids.nbytes, 3 * rotated)


class Rotations(Source):
    """Source of inputs of operators that rotate."""

    def tables(self, rotary_dim: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of 512 positions, in one table as in hosts."""
        frequencies = 10000.0 ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
        angles = torch.outer(torch.arange(512, dtype=torch.float64), frequencies)
        cos, sin = torch.cat((angles.cos(), angles.sin()), -1).to(self.device, dtype or self.dtype).chunk(2, -1)
        return cos, sin

    def positions(self, tokens: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return a position for each token."""
        return torch.randint(0, 512, (tokens,), generator=self.generator).to(device=self.device, dtype=dtype)

    def sample(
        self,
        label: str,
        tokens: int,
        heads: tuple[int, int],
        head_dim: int,
        rotary_dim: int | None = None,
        *,
        fused: bool = True,
        interleaved: bool = False,
        inplace: bool = True,
        index: torch.dtype = torch.int64,
        table: torch.dtype | None = None,
        before: int = 0,
        serving: bool = True,
    ) -> Sample:
        # As in hosts, one projection holds query, key and value.
        total = heads[0] + 2 * heads[1]
        projection = self.normal(tokens, total, before + head_dim)
        query, key, _ = torch.tensor_split(projection[..., before:], (heads[0], sum(heads)), dim=1)
        if not fused:
            query, key = query.contiguous(), key.contiguous()
        tables, positions = self.tables(rotary_dim or head_dim, table), self.positions(tokens, index)
        return Sample(label, (query, key if heads[1] else None, *tables, positions, interleaved, inplace), serving)


def _samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    sample = Rotations(dtype, device, generator).sample
    yield sample("decode, 32 tokens", 32, (32, 8), 128)
    yield sample("prefill, 128 tokens", 128, (16, 4), 64)
    yield sample("half of the head, 16 tokens", 16, (32, 2), 80, 32)
    yield sample("interleaved, 16 tokens", 16, (16, 16), 128, 64, interleaved=True)
    yield sample("interleaved whole head, one token", 1, (8, 1), 64, interleaved=True)
    # as in latent attention: the last part of each query head, and one key for all
    yield sample("last 64 of 192 elements, one key, interleaved", 9, (16, 1), 64, interleaved=True, before=128)
    yield sample("no key", 5, (16, 0), 64)
    yield sample("not in place", 9, (8, 2), 128, inplace=False)
    yield sample("not in place, half of the head, interleaved", 9, (8, 2), 96, 64, interleaved=True, inplace=False)
    yield sample("separate tensors", 9, (8, 2), 64, fused=False)
    yield sample("int32 positions", 9, (8, 2), 64, index=torch.int32, serving=False)
    wide = torch.promote_types(dtype, torch.float32)
    yield sample("float32 table", 9, (8, 2), 64, table=wide, serving=False)
    yield sample("rotary dimension 20 of 24", 5, (3, 1), 24, 20, serving=False)
    yield sample("empty batch", 0, (8, 2), 64, serving=False)
    yield sample("empty batch, not in place", 0, (8, 2), 64, inplace=False, serving=False)


def _probes(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    sample = Rotations(dtype, device, generator).sample
    yield sample("4100 tokens", 4100, (2, 1), 16, serving=False)
    yield sample("8200 tokens, not in place", 8200, (1, 1), 16, inplace=False, serving=False)
    yield sample("66000 tokens", 66000, (1, 0), 8, serving=False)
    yield sample("128 heads", 5, (128, 8), 64, serving=False)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return the rotated leading elements of each head, ``[tokens, heads, rotary_dim]``, in the dtype of ``cos``."""
    part = x[..., : 2 * cos.shape[-1]].to(cos.dtype)
    if interleaved:
        first, second = part[..., 0::2], part[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    first, second = part.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@operator(
    writes={"query": Write(Access.UPDATE, given="inplace"), "key": Write(Access.UPDATE, given="inplace")},
    layer=LayerForm(),
    modes=MODES,
    fake=_fake,
    samples=_samples,
    probes=_probes,
    shapes=shapes.rotary,
    aliases=("rope", "apply_rotary_pos_emb", "apply_rotary_emb"),
    tolerances=TOLERANCES,
    mean_error=SEVERAL_ROUNDINGS,
    workload=tokens_workload,
    work=_work,
    batch_invariant=True,
)
def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    rotary_interleaved: bool = False,
    inplace: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Rotate pairs of the first ``rotary_dim`` elements of each head by the angle of the token's position.

    ``(a, b)`` becomes ``(a * cos - b * sin, b * cos + a * sin)`` (Su et al., arXiv 2104.09864). Pair ``i`` is elements
    ``i`` and ``i + rotary_dim / 2``, or ``2 * i`` and ``2 * i + 1`` when interleaved. The rest of the head passes
    through.

    Args:
        query: ``[tokens, heads, head_dim]``, floating point. Overwritten if ``inplace``; otherwise only read.
        key: ``[tokens, kv_heads, head_dim]``, dtype of ``query``, or ``None``. Overwritten if ``inplace``.
        cos: ``[max_position, rotary_dim / 2]``, floating point, ``rotary_dim <= head_dim``.
        sin: same shape and dtype as ``cos``.
        position_ids: ``[tokens]``, int32 or int64, below ``max_position``.
        rotary_interleaved: whether pairs are interleaved, see above.
        inplace: whether to overwrite and return the given tensors instead of new ones.

    Returns:
        ``(query, key)`` rotated, shapes and dtypes of the inputs; ``key`` is ``None`` if none was given.
    """
    wide = torch.promote_types(torch.promote_types(query.dtype, cos.dtype), torch.float32)
    cos, sin = (table[position_ids].unsqueeze(1).to(wide) for table in (cos, sin))

    def apply(x: Tensor) -> Tensor:
        rotated = _rotated(x, cos, sin, rotary_interleaved).to(x.dtype)
        if not inplace:
            return torch.cat((rotated, x[..., rotated.shape[-1] :]), dim=-1).contiguous()
        x[..., : rotated.shape[-1]] = rotated
        return x

    return apply(query), None if key is None else apply(key)
