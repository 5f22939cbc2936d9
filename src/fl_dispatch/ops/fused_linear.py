"""A product with weights for the few rows of decoding, fused with the norm before it and the gate after it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .activation import silu_and_mul
from .declaration import SEVERAL_ROUNDINGS, Mode, Sample, Tolerance, Work, bytes_of, operator, row_terms
from .inputs import quantized, shapes
from .linear import linear
from .normalization import rms_norm
from .quantization import FP8, weight_only_linear

TOLERANCES = {
    torch.float64: Tolerance(1e-12, 1e-12),
    torch.float32: Tolerance(4e-5, 4e-6),
    torch.float16: Tolerance(4e-3, 2e-3),
    torch.bfloat16: Tolerance(3.2e-2, 2e-2),
}
"""Twice the tolerances of one product, because the normalized row and both gated halves may or may not be rounded."""


def _fake(x: Tensor, weight: Tensor, residual: Tensor | None, gated: bool) -> tuple[Tensor, Tensor]:
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    return x.new_empty((*x.shape[:-1], columns)), x.new_empty((0,) if residual is None else x.shape)


def _work(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    gated: bool,
) -> Work:
    rows, columns = x.shape[:-1].numel(), weight.shape[0]
    elements = x.numel() * (1 if residual is None else 3) + rows * (columns // 2 if gated else columns)
    return Work(
        bytes_of(weight, scale, zero, bias, norm_weight) + elements * x.element_size(), 2 * rows * columns * x.shape[-1]
    )


def _samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    source = quantized.Products(dtype, device, generator, FP8)
    normal = source.normal

    def sample(
        label: str,
        x: Tensor,
        weights: tuple[Tensor | None, ...],
        *,
        bias: bool = False,
        norm: bool = True,
        add: bool = True,
        gated: bool = False,
        epsilon: float = 1e-6,
        serving: bool = True,
    ) -> Sample:
        assert weights[0] is not None
        weight, scale, zero = (*weights, None, None)[:3]
        added = normal(weights[0].shape[0]) if bias else None
        norm_weight, residual = normal(x.shape[-1]) if norm else None, normal(*x.shape) if add else None
        args = (x, weight, scale, zero, added, norm_weight, residual, epsilon, gated)
        return Sample(label, args, serving)

    def plain(columns: int, inner: int) -> tuple[Tensor]:
        return (normal(columns, inner, scale=inner**-0.5),)

    def float8(columns: int, inner: int, scales: int) -> tuple[Tensor, Tensor]:
        return source.matrix(columns, inner), source.scales(scales, 1, size=inner**-0.5 / 24)

    yield sample("1 of 2048 to 1024", normal(1, 2048), plain(1024, 2048))
    yield sample("1 of 1024 to 3072, gated", normal(1, 1024), plain(3072, 1024), gated=True)
    yield sample("1 of 1024 to 768, no residual", normal(1, 1024), plain(768, 1024), add=False)
    yield sample("1 of 512 to 384, bias", normal(1, 512), plain(384, 512), bias=True)
    yield sample(
        "1 of 1024 to 512, no norm, gated", normal(1, 1024), plain(512, 1024), norm=False, add=False, gated=True
    )
    yield sample("float8, 1 of 1024 to 512", normal(1, 1024), float8(512, 1024, 512))
    yield sample("float8, 1 of 1024 to 1536, gated", normal(1, 1024), float8(1536, 1024, 1536), gated=True)
    yield sample("float8, 1 of 3072 to 256, no norm", normal(1, 3072), float8(256, 3072, 256), norm=False, add=False)
    yield sample(
        "float8, 1 of 1024 to 1536, no norm, gated", normal(1, 1024), float8(1536, 1024, 1536), norm=False, add=False,
        gated=True,
    )  # fmt: skip
    yield sample("float8, bias, no norm", normal(1, 512), float8(192, 512, 192), bias=True, norm=False, add=False)
    yield sample("float8, one scale", normal(1, 512), float8(256, 512, 1))
    yield sample("float8, one scale, no norm", normal(1, 512), float8(256, 512, 1), norm=False, add=False)
    yield sample("float8, bias, no residual", normal(1, 512), float8(192, 512, 192), bias=True, add=False)
    few = quantized.Products(dtype, device, generator, torch.int8).weight
    yield sample("4 bits, groups of 128", normal(1, 1024), few(512, 1024, 4, 128))
    yield sample("4 bits, groups of 128, gated", normal(1, 512), few(512, 512, 4, 128), gated=True)
    yield sample("4 bits, zero points, groups of 32, bias", normal(1, 256), few(192, 256, 4, 32, True), bias=True)
    yield sample("4 bits, no norm", normal(1, 1024), few(256, 1024, 4, 128), norm=False, add=False)
    yield sample("int8, groups of 128", normal(1, 512), few(256, 512, 8, 128))
    yield sample("int8, one scale a column, gated", normal(1, 512), few(256, 512, 8, 512), gated=True)
    for rows in (2, 7):
        yield sample(f"{rows} of 512 to 256", normal(rows, 512), plain(256, 512))
        yield sample(f"{rows} of 512 to 512, float8, gated", normal(rows, 512), float8(512, 512, 512), gated=True)
    yield sample("33 rows, gated", normal(33, 256), plain(384, 256), gated=True)
    yield sample("odd sizes", normal(1, 131), plain(77, 131), bias=True, serving=False)
    yield sample("odd sizes, float8", normal(1, 131), float8(77, 131, 77), bias=True, serving=False)
    yield sample(
        "odd sizes, float8, no norm, gated", normal(1, 131), float8(78, 131, 78), bias=True, norm=False, add=False,
        gated=True, serving=False,
    )  # fmt: skip
    yield sample("a residual and no norm", normal(1, 256), plain(96, 256), norm=False, serving=False)
    yield sample("epsilon 0.01", normal(1, 128, scale=0.1), plain(64, 128), add=False, epsilon=1e-2, serving=False)
    yield sample("row stride larger than the row", normal(3, 160)[:, :96], plain(64, 96), serving=False)
    yield sample("weights' rows apart", normal(1, 96), (normal(40, 200, scale=0.1)[:, 50:146],), serving=False)
    yield sample("a vector", normal(64), plain(32, 64), serving=False)
    yield sample("3-d 2x3", normal(2, 3, 64), plain(32, 64), serving=False)
    yield sample("empty batch", normal(0, 64), plain(32, 64), serving=False)
    yield sample("empty batch, gated", normal(0, 64), float8(32, 64, 32), gated=True, add=False, serving=False)


@operator(
    weights=("weight", "scale", "zero"),
    modes=frozenset({Mode.OPAQUE, Mode.EAGER}),
    fake=_fake,
    samples=_samples,
    shapes=shapes.fused_products,
    tolerances=TOLERANCES,
    mean_error=SEVERAL_ROUNDINGS,
    aliases=("rms_norm_linear", "linear_silu_and_mul", "norm_gemv", "fused_qkv", "gate_up_silu"),
    terms=row_terms,
    work=_work,
)
def fused_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    residual: Tensor | None = None,
    epsilon: float = 1e-6,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """Optional ``rms_norm``, then ``linear`` or ``weight_only_linear``, then optional ``silu_and_mul``.

    An implementation may round the normalized row and the product before the gate to the dtype of ``x``.

    Args:
        x: ``[..., inner]``, floating point, only read.
        weight: ``[columns, inner]``, dtype of ``x``; or see ``weight_only_linear``.
        scale: ``[columns, groups]`` or ``[1, 1]``, dtype of ``x`` or float32; ``None`` for a weight of that dtype.
        zero: see ``weight_only_linear``.
        bias: ``[columns]``, dtype of ``x``, or ``None``.
        norm_weight: ``[inner]``, dtype of ``x``; ``None`` for a product without the norm.
        residual: same shape and dtype as ``x``, added to ``x`` first, or ``None``. Only read.
        epsilon: added to the mean square.
        gated: whether the result is SiLU of the first half of the columns times the second half.

    Returns:
        ``y``, ``[..., columns]`` or ``[..., columns / 2]``, dtype of ``x``; and ``x + residual``, shape and dtype of
        ``x``, or ``[0]`` without a residual.
    """
    rows, total = x, x.new_empty(0)
    if norm_weight is not None:
        normalized = rms_norm.reference(x, residual, norm_weight, epsilon)
        rows, total = (normalized, total) if isinstance(normalized, Tensor) else normalized
    elif residual is not None:
        rows = total = x + residual
    if scale is None:
        y = linear.reference(rows, weight, bias)
    else:
        columns = scale.expand(weight.shape[0], -1)
        y = weight_only_linear.reference(rows, weight, columns, zero, bias)
    return silu_and_mul.reference(y) if gated else y, total
