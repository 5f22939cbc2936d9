"""Probes of row-wise operators: strides, sizes, and parameters that an ordinary input would not show."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..declaration import Sample, Samples
from .source import Source

WIDE = 14336
"""Columns of a gated activation in large served models."""
LARGE_HIDDEN = 8192
"""Hidden size of large served models."""
MANY = (4100, 8200, 66000)
"""Numbers of rows: above 4,096, above 8,192, and more than a second grid dimension holds (65,535)."""


def _probe(label: str, *args: object) -> Sample:
    return Sample(label, args, serving=False)


def fused_norm(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of a normalization with an optional residual."""
    normal = Source(dtype, device, generator).normal

    def apart(rows: int, hidden: int, gap: int) -> Tensor:
        return normal(rows, hidden + gap)[:, :hidden]

    yield _probe("x apart, residual not", apart(5, 96, 32), normal(5, 96), normal(96), 1e-6)
    yield _probe("residual apart, x not", normal(5, 96), apart(5, 96, 64), normal(96), 1e-6)
    yield _probe("x and residual apart by different strides", apart(5, 96, 32), apart(5, 96, 64), normal(96), 1e-6)
    query, key, _ = torch.tensor_split(normal(5, 12, 128), (6, 9), dim=1)
    yield _probe("query heads cut out of one projection", query, None, normal(128), 1e-6)
    yield _probe("key heads cut out of one projection", key, None, normal(128), 1e-6)
    yield _probe("heads cut out, with residual", key, normal(5, 3, 128), normal(128), 1e-6)
    for epsilon in (1e-2, 0.0):
        x = normal(4, 128, scale=0.1)
        yield _probe(f"epsilon {epsilon:g}, scale 0.1", x, None, normal(128), epsilon)
        yield _probe(f"epsilon {epsilon:g}, scale 0.1, with residual", x.clone(), x * 0.5, normal(128), epsilon)
    for hidden in (LARGE_HIDDEN, WIDE):
        yield _probe(f"3x{hidden}", normal(3, hidden), None, normal(hidden), 1e-6)
        yield _probe(f"3x{hidden} with residual", normal(3, hidden), normal(3, hidden), normal(hidden), 1e-6)
    for rows in MANY:
        yield _probe(f"{rows} rows", normal(rows, 16), None, normal(16), 1e-6)
    yield _probe(f"{MANY[1]} rows with residual", normal(MANY[1], 16), normal(MANY[1], 16), normal(16), 1e-6)


def layer_norm(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``layer_norm``."""
    normal = Source(dtype, device, generator).normal
    key = torch.tensor_split(normal(5, 12, 128), (6, 9), dim=1)[1]
    yield _probe("key heads cut out of one projection", key, normal(128), normal(128), 1e-6)
    x = normal(4, 128, scale=0.1)
    yield _probe("epsilon 0.01, scale 0.1", x, normal(128), normal(128), 1e-2)
    yield _probe(f"3x{LARGE_HIDDEN}", normal(3, LARGE_HIDDEN), normal(LARGE_HIDDEN), normal(LARGE_HIDDEN), 1e-5)
    # The variance of these rows is small, so that epsilon matters at this width too.
    flat = normal(3, LARGE_HIDDEN, scale=0.1)
    yield _probe(f"3x{LARGE_HIDDEN}, epsilon 0.01", flat, normal(LARGE_HIDDEN), None, 1e-2)
    for rows in MANY:
        yield _probe(f"{rows} rows", normal(rows, 16), normal(16), normal(16), 1e-5)


def _activation(factor: int, setting: tuple[object, ...]) -> Samples:
    def probes(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
        normal = Source(dtype, device, generator).normal

        def probe(label: str, x: Tensor) -> Sample:
            return _probe(", ".join((label, *map(str, setting))), x, *setting)

        yield probe(f"3x{WIDE}", normal(3, factor * WIDE))
        cut = normal(5, 12, 64 * factor)[:, 6:9]
        yield probe("middle of a projection, 3-d", cut)
        yield probe("row stride of an odd number", normal(5, 131 * factor)[:, : 128 * factor])
        for rows in MANY:
            yield probe(f"{rows} rows", normal(rows, 16 * factor))
        yield probe("260x4224", normal(260, 4224 * factor))

    return probes


def gated(*setting: object) -> Samples:
    """Inputs of an activation that halves the last dimension, with one setting of its other parameters."""
    return _activation(2, setting)


def elementwise(*setting: object) -> Samples:
    """Inputs of an elementwise activation, with one setting of its other parameters."""
    return _activation(1, setting)


def xielu(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``xielu``, with parameters in tensors."""
    for sample in elementwise()(dtype, device, generator):
        alphas = (torch.rand(1, generator=generator).to(device=device, dtype=dtype) for _ in range(2))
        yield _probe(sample.label, *sample.args, *alphas, 0.5, -1e-6)


def linear(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``linear``."""
    normal = Source(dtype, device, generator).normal

    def weight(columns: int, inner: int) -> Tensor:
        return normal(columns, inner, scale=inner**-0.5)

    yield _probe("middle of a projection, 3-d", normal(5, 12, 64)[:, 6:9], weight(40, 64), normal(40))
    yield _probe(f"2 of {WIDE} to 64", normal(2, WIDE), weight(64, WIDE), None)
    yield _probe(f"2 of 64 to {WIDE}", normal(2, 64), weight(WIDE, 64), None)
    for rows in MANY[:2]:
        yield _probe(f"{rows} rows", normal(rows, 32), weight(24, 32), normal(24))


def moe_sum(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    """Inputs of ``moe_sum``."""
    normal = Source(dtype, device, generator).normal
    yield _probe(f"3x2x{LARGE_HIDDEN}", normal(3, 2, LARGE_HIDDEN), None)
    for rows in MANY:
        yield _probe(f"{rows} tokens", normal(rows, 2, 16), None)
    yield _probe("choices apart", normal(5, 4, 64)[:, :2], None)
