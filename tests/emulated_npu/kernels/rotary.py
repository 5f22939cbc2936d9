"""Emulated rotary position embeddings."""

from __future__ import annotations

from itertools import pairwise

import torch

from . import FLOAT, HALF, kernel, require, require_contiguous, require_dtype, require_same_dtype, waived


def _rotated(x: torch.Tensor, mode: str) -> torch.Tensor:
    """(-x2, x1) of the two halves, or of each pair."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


HALF_MODE = {(0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 1, 0), (1, 1, 0), (1, 0, 0)}
"""Dimensions that r1 may share with the input, the others 1: 11SD B1SD BNSD, 1S1D BS1D BSND, S11D SB1D SBND."""
INTERLEAVE_MODE = {(0, 0, 1), (0, 1, 0), (1, 0, 0)}


def _broadcasts(r: torch.Tensor, x: torch.Tensor, allowed: set[tuple[int, int, int]]) -> bool:
    return any(
        all(r.shape[i] == (x.shape[i] if shared else 1) for i, shared in enumerate(pattern)) for pattern in allowed
    )


@kernel("npu_rotary_mul")
def rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """r1 * x + r2 * rotated(x). Source: the wheel's docstring and op-plugin's page, jit_compile=False.

    Refused: other modes, D odd or from 896 on, coefficients that do not broadcast as the layouts BNSD, BSND, SBND
    and TND allow, B and N from 1000 on (interleave: B * N), tensors of other than 3 or 4 dimensions.
    Assumed: float32 inside; one dtype for all, because the page names one set. The layout is not an argument, so a
    limit of B and N holds if any two dimensions keep it.
    """
    require_dtype("input", input, FLOAT)
    require_same_dtype(input=input, r1=r1, r2=r2)
    require(rotary_mode in ("half", "interleave"), f"rotary_mode={rotary_mode!r}, not 'half' or 'interleave'")
    size = input.shape[-1]
    require(size < 896 and size % 2 == 0, f"D is {size}, and must be even and below 896")
    require(r1.shape == r2.shape, f"r1 {tuple(r1.shape)} and r2 {tuple(r2.shape)} must have one shape")
    require(input.dim() in (3, 4) and r1.dim() == input.dim(), f"{input.dim()} and {r1.dim()} dimensions, not 3 or 4")
    require(r1.shape[-1] == size, f"r1 has D {r1.shape[-1]}, the input {size}")
    if input.dim() == 3:
        heads = (1, input.shape[1]) if rotary_mode == "half" else (1,)
        fits = r1.shape[0] == input.shape[0] and r1.shape[1] in heads
    else:
        fits = _broadcasts(r1, input, HALF_MODE if rotary_mode == "half" else INTERLEAVE_MODE)
        lengths = sorted(input.shape[:3])
        small = lengths[1] < 1000 if rotary_mode == "half" else lengths[0] * lengths[1] < 1000
        require(small, f"B and N must be below 1000 (interleave: their product), and the input is {tuple(input.shape)}")
    require(fits, f"r1 {tuple(r1.shape)} is no layout of coefficients for an input {tuple(input.shape)}")
    x = input.float()
    if rotate is None:
        turned = _rotated(x, rotary_mode)
    else:
        require(rotate.shape == (size, size), f"rotate is {tuple(rotate.shape)}, not ({size}, {size})")
        turned = x @ rotate.float()
    return (r1.float() * x + r2.float() * turned).to(input.dtype)


@kernel("npu_apply_rotary_pos_emb")
def apply_rotary_pos_emb(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key are overwritten and returned, though the schema does not say so. Source: the wheel's docstring.

    Refused: D beside 64 and 128, layouts beside BSND and TND, modes beside half, mixed dtypes, cos of more than one
    head, empty tensors. Assumed: float32 inside; cos of another D than the query's is refused, as undocumented.
    """
    require_dtype("query", query, FLOAT)
    require_same_dtype(query=query, key=key, cos=cos, sin=sin)
    require(layout in ("BSND", "TND"), f"layout={layout!r}, not 'BSND' or 'TND' (Atlas A2)")
    require(rotary_mode == "half", f"rotary_mode={rotary_mode!r}, not 'half' (Atlas A2)")
    leading = len(layout) - 2
    for name, tensor in (("query", query), ("key", key), ("cos", cos), ("sin", sin)):
        require(tensor.dim() == len(layout), f"{name} has {tensor.dim()} dimensions, layout {layout}")
        require(tensor.numel() > 0, f"{name} is empty")
        require(tensor.shape[-1] in (64, 128), f"{name} has D {tensor.shape[-1]}, not 64 or 128 (Atlas A2)")
        require(tensor.shape[:leading] == query.shape[:leading], f"{name} and query differ before the heads")
    require(cos.shape == sin.shape and cos.shape[-2] == 1, "cos and sin must have one shape, with one head")
    require(query.shape[-1] == key.shape[-1] == cos.shape[-1], "query, key and cos must have one D")
    for tensor in (query, key):
        x = tensor.float()
        tensor.copy_(x * cos.float() + _rotated(x, "half") * sin.float())
    return query, key


@kernel("npu_interleave_rope")
def interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs become halves, which are then rotated. Source: op-plugin's page.

    Refused: dtypes beside float16 and bfloat16, D beside 64, cos of more than one head, S of cos neither 1 nor x's,
    tensors that are not contiguous. Assumed: float32 inside.
    """
    require_dtype("x", x, HALF)
    require_same_dtype(x=x, cos=cos, sin=sin)
    require_contiguous(x=x, cos=cos, sin=sin)
    require(x.dim() == cos.dim() == 4 and cos.shape == sin.shape, "x, cos and sin must be [B, N, S, D]")
    require(x.shape[-1] == 64 or waived("head_size"), f"D is {x.shape[-1]}, not 64")
    require(cos.shape[-1] == x.shape[-1] and cos.shape[0] == x.shape[0], "cos must have x's B and D")
    require(cos.shape[1] == 1, f"cos has N {cos.shape[1]}, not 1")
    require(cos.shape[2] in (1, x.shape[2]), f"cos has S {cos.shape[2]}, neither 1 nor x's {x.shape[2]}")
    return interleaved(x, cos, sin).to(x.dtype)


def interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """In float32: q = the pairs as halves, q * cos + rotated halves of q * sin."""
    q = torch.cat((x[..., 0::2], x[..., 1::2]), -1).float()
    return q * cos.float() + _rotated(q, "half") * sin.float()


@kernel("npu_mrope")
def mrope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    *,
    mrope_section: list[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first rotary_dim elements of each head are rotated, the others copied. Source: the wheel's docstring.

    Refused: query or key not of two dimensions, rotary_dim no multiple of 32 (float32: 16), positions beyond the
    cache, sections whose sum is not rotary_dim / 2, sections and rows of positions of different numbers.
    Assumed: float32 inside; a row of the cache is the cosines and then the sines; cache_mode 'interleave' is not
    emulated; mode 'interleave' (the wheel) and 'interleaved' (the page) are one.
    """
    require_dtype("query", query, FLOAT)
    require_same_dtype(query=query, key=key, cos_sin_cache=cos_sin_cache)
    require(query.dim() == key.dim() == cos_sin_cache.dim() == 2, "query, key and cos_sin_cache must be 2-dimensional")
    require(positions.dtype in (torch.int32, torch.int64), f"positions are {positions.dtype}, not int32 or int64")
    require(rotary_mode in ("half", "interleave", "interleaved"), f"rotary_mode={rotary_mode!r}")
    require(cache_mode == "default", f"cache_mode={cache_mode!r} is not emulated")
    rotary_dim = cos_sin_cache.shape[-1]
    multiple = 16 if query.dtype == torch.float32 else 32
    require(rotary_dim % multiple == 0, f"rotary_dim is {rotary_dim}, no multiple of {multiple}")
    require(rotary_dim <= head_size, f"rotary_dim {rotary_dim} exceeds head_size {head_size}")
    require(
        positions.numel() == 0 or 0 <= int(positions.min()) <= int(positions.max()) < cos_sin_cache.shape[0],
        f"positions reach beyond the cache's {cos_sin_cache.shape[0]} rows",
    )
    cos, sin = cos_sin_cache.float()[positions.long()].chunk(2, -1)
    if mrope_section and any(mrope_section):
        require(positions.dim() == 2 and len(positions) == len(mrope_section), "positions must have a row a section")
        require(sum(mrope_section) == rotary_dim // 2, f"mrope_section {mrope_section} must sum to {rotary_dim // 2}")
        ends = [0]
        for section in mrope_section:
            ends.append(ends[-1] + section)
        cos = torch.cat([cos[row, :, a:b] for row, (a, b) in enumerate(pairwise(ends))], -1)
        sin = torch.cat([sin[row, :, a:b] for row, (a, b) in enumerate(pairwise(ends))], -1)
    require(cos.dim() == 2, "positions of two dimensions need mrope_section")
    mode = "half" if rotary_mode == "half" else "interleave"
    cos, sin = (
        (torch.cat((part, part), -1) if mode == "half" else part.repeat_interleave(2, -1))[:, None]
        for part in (cos, sin)
    )

    def embedded(x: torch.Tensor) -> torch.Tensor:
        heads = x.float().view(len(x), -1, head_size)
        rotary, rest = heads[..., :rotary_dim], heads[..., rotary_dim:]
        return torch.cat((rotary * cos + _rotated(rotary, mode) * sin, rest), -1).view(x.shape).to(x.dtype)

    return embedded(query), embedded(key)
