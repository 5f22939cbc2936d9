"""Activations of every element.

Hosts and checkpoints know the tanh form of GELU by several names (``gelu_new``, ``gelu_fast``, ``gelu_pytorch_tanh``,
NewGELU): they differ in rounding only and are one operator here, ``gelu(x, "tanh")``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .declaration import LayerForm, Mode, Sample, Samples, Work, operator
from .inputs import rows

MODES = frozenset({Mode.INLINE, Mode.OPAQUE, Mode.EAGER})


def _fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _work(x: Tensor) -> Work:
    return Work(2 * x.numel() * x.element_size(), 3 * x.numel())


def _samples(*settings: tuple[object, ...]) -> Samples:
    """Samples of an activation of every element, for each setting of its other parameters."""

    def samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(device=device, dtype=dtype)

        for setting in settings:
            inputs = {
                "1x4096": normal(1, 4096),
                "32x2048": normal(32, 2048),
                "3-d 2x5x64": normal(2, 5, 64),
                "empty batch": normal(0, 64),
                "odd width 67": normal(3, 67),
                "row stride larger than the row": normal(4, 320)[:, :256],
                "scale 0.0001": normal(4, 256, scale=1e-4),
                "scale 30": normal(4, 256, scale=30.0),
            }
            for index, (label, x) in enumerate(inputs.items()):
                yield Sample(", ".join((label, *map(str, setting))), (x, *setting), index < 3)

    return samples


def _xielu_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    for sample in _samples(())(dtype, device, generator):
        positive, negative = (torch.rand(1, generator=generator).to(device=device, dtype=dtype) for _ in range(2))
        yield Sample(sample.label, (*sample.args, positive, negative, 0.5, -1e-6), sample.serving)


@operator(
    layer=LayerForm({"approximate": "approximate"}),
    modes=MODES,
    fake=_fake,
    samples=_samples(("none",), ("tanh",)),
    probes=rows.elementwise("none"),
    aliases=("gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
    work=_work,
)
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit (Hendrycks and Gimpel, arXiv 1606.08415).

    Args:
        x: ``[..., width]``, floating point.
        approximate: ``"none"`` for ``x * Phi(x)`` with the normal distribution function, ``"tanh"`` for
            ``0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))``.

    Returns:
        Shape and dtype of ``x``, contiguous.
    """
    raise NotImplementedError


@operator(
    layer=LayerForm(),
    modes=MODES,
    fake=_fake,
    samples=_samples(()),
    probes=rows.elementwise(),
    work=_work,
)
def quick_gelu(x: Tensor) -> Tensor:
    """GELU's sigmoid approximation, ``x * sigmoid(1.702 * x)`` (arXiv 1606.08415, section 2).

    Args:
        x: ``[..., width]``, floating point.

    Returns:
        Shape and dtype of ``x``, contiguous.
    """
    raise NotImplementedError


@operator(
    layer=LayerForm(),
    modes=MODES,
    fake=_fake,
    samples=_samples(()),
    probes=rows.elementwise(),
    work=_work,
)
def relu2(x: Tensor) -> Tensor:
    """Squared rectifier, ``max(x, 0) ** 2`` (So et al., arXiv 2109.08668).

    Args:
        x: ``[..., width]``, floating point.

    Returns:
        Shape and dtype of ``x``, contiguous.
    """
    raise NotImplementedError


@operator(
    layer=LayerForm(),
    modes=MODES,
    fake=_fake,
    samples=_xielu_samples,
    probes=rows.xielu,
    work=_work,
)
def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, epsilon: float = -1e-6) -> Tensor:
    """Expanded integral of the ELU (Huang and Schlag, arXiv 2411.13010).

    With ``p = softplus(alpha_p)`` and ``n = beta + softplus(alpha_n)``: ``p * x * x + beta * x`` where ``x > 0``, else
    ``(expm1(min(x, epsilon)) - x) * n + beta * x``.

    Args:
        x: ``[..., width]``, floating point.
        alpha_p: ``[1]``, floating point; before the softplus.
        alpha_n: ``[1]``, likewise.
        beta: slope at zero.
        epsilon: largest argument of the exponential.

    Returns:
        Shape and dtype of ``x``, contiguous.
    """
    raise NotImplementedError
