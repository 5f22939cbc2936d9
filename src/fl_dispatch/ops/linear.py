"""Products with weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .declaration import LayerForm, Mode, Sample, Work, operator, row_terms
from .inputs import rows as row_probes
from .inputs import shapes
from .inputs.source import Source


def products(x: Tensor, weight: Tensor) -> Tensor:
    """Return an empty result with one number for each row and column."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _work(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Work:
    columns, inner = weight.shape
    rows = x.shape[:-1].numel()
    elements = rows * (inner + columns) + weight.numel() + (0 if bias is None else bias.numel())
    return Work(elements * x.element_size(), 2 * rows * weight.numel())


def _samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    normal = Source(dtype, device, generator).normal

    def weight(columns: int, inner: int) -> Tensor:
        return normal(columns, inner, scale=inner**-0.5)

    for rows, columns, inner in ((1, 1024, 2048), (1, 6144, 256), (4, 768, 1024), (32, 256, 1024), (40, 256, 512)):
        yield Sample(f"{rows} of {inner} to {columns}", (normal(rows, inner), weight(columns, inner), None))
    for rows in (1, 7):
        yield Sample(f"{rows} with bias", (normal(rows, 512), weight(384, 512), normal(384)))
    for rows in (1, 3):
        name = f"{rows} of 1431 to 77"
        yield Sample(name, (normal(rows, 1431), weight(77, 1431), normal(77)), serving=False)
        strided = normal(rows, 160)[:, :96], normal(40, 200, scale=0.1)[:, 50:146]
        yield Sample(f"{rows}, rows apart", (*strided, None), serving=False)
        columns_first = normal(64, 48, scale=0.1).t()
        yield Sample(f"{rows}, weights by columns", (normal(rows, 64), columns_first, None), serving=False)
    yield Sample("one column", (normal(2, 64), weight(1, 64), None), serving=False)
    yield Sample("a vector", (normal(64), weight(32, 64), None), serving=False)
    yield Sample("3-d 2x3", (normal(2, 3, 64), weight(32, 64), normal(32)), serving=False)
    yield Sample("empty batch", (normal(0, 64), weight(32, 64), None), serving=False)
    for scale in (1e-3, 4.0):
        yield Sample(f"scale {scale:g}", (normal(1, 256, scale=scale), weight(64, 256), None), serving=False)


@operator(
    weights=("weight",),
    layer=LayerForm({"weight": "weight", "bias": "bias"}),
    modes=frozenset({Mode.INLINE, Mode.OPAQUE, Mode.EAGER}),
    fake=products,
    samples=_samples,
    probes=row_probes.linear,
    shapes=shapes.products,
    aliases=("matmul", "gemm", "mm", "dense"),
    terms=row_terms,
    work=_work,
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product with weights: ``y = x @ weight.T + bias``, as in ``torch.nn.functional.linear``.

    Products are summed with PyTorch's current settings, or in float32, and rounded once.

    Args:
        x: ``[..., inner]``, floating point.
        weight: ``[columns, inner]``, dtype of ``x``.
        bias: ``[columns]``, dtype of ``x``, or ``None``.

    Returns:
        ``[..., columns]``, dtype of ``x``.
    """
    return torch.nn.functional.linear(x, weight, bias)
