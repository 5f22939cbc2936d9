"""Gated activation operators."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .declaration import LayerForm, Mode, Sample, Work, operator

MODES = frozenset({Mode.INLINE, Mode.OPAQUE, Mode.EAGER})


def _fake(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _gelu_fake(x: Tensor, approximate: str = "none") -> Tensor:
    return _fake(x)


def _work(x: Tensor, approximate: str = "none") -> Work:
    outputs = x.numel() // 2
    return Work(3 * outputs * x.element_size(), 4 * outputs)


def _samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device=device, dtype=dtype)

    for tokens, width in ((1, 4096), (32, 2048), (128, 1024), (7, 1536)):
        yield Sample(f"{tokens}x{width}", (normal(tokens, 2 * width),))
    yield Sample("3-d 2x5x64", (normal(2, 5, 128),))
    yield Sample("empty batch", (normal(0, 128),), serving=False)
    yield Sample("odd width 67", (normal(3, 134),), serving=False)
    yield Sample("row stride larger than the row", (normal(4, 320)[:, :256],), serving=False)
    yield Sample("batch dimensions swapped", (normal(3, 5, 128).transpose(0, 1),), serving=False)
    yield Sample("scale 0.0001", (normal(4, 256, scale=1e-4),), serving=False)
    # Only the gate is large: the product of two such halves is outside float16.
    yield Sample("gate scale 300", (torch.cat((normal(4, 128, scale=300.0), normal(4, 128)), -1),), serving=False)


def _gelu_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    for approximate in ("none", "tanh"):
        for sample in _samples(dtype, device, generator):
            yield Sample(f"{sample.label}, {approximate}", (*sample.args, approximate), sample.serving)


@operator(layer=LayerForm(), modes=MODES, fake=_fake, samples=_samples, work=_work)
def silu_and_mul(x: Tensor) -> Tensor:
    """SiLU of the first half of the last dimension times the second half (SwiGLU, Shazeer, arXiv 2002.05202).

    Args:
        x: ``[..., 2 * width]``, floating point.

    Returns:
        ``x[..., :width] * sigmoid(x[..., :width]) * x[..., width:]``, ``[..., width]``, dtype of ``x``, contiguous.
    """
    raise NotImplementedError


@operator(
    layer=LayerForm({"approximate": "approximate"}),
    modes=MODES,
    fake=_gelu_fake,
    samples=_gelu_samples,
    work=_work,
)
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU of the first half of the last dimension times the second half (GEGLU, Shazeer, arXiv 2002.05202).

    Args:
        x: ``[..., 2 * width]``, floating point.
        approximate: ``"none"`` for the error function, ``"tanh"`` for its approximation (Hendrycks and Gimpel, arXiv
            1606.08415).

    Returns:
        ``gelu(x[..., :width]) * x[..., width:]``, ``[..., width]``, dtype of ``x``, contiguous.
    """
    raise NotImplementedError
