"""Activations: elementwise ones, and gated ones, which halve the last dimension.

Hosts and checkpoints know the tanh form of GELU by several names (``gelu_new``, ``gelu_fast``, ``gelu_pytorch_tanh``,
NewGELU). These differ in rounding only, so they are one operator here, ``gelu(x, "tanh")``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .declaration import LayerForm, Mode, Operator, Reference, Sample, Samples, Work, operator, same
from .inputs import rows, shapes
from .inputs.source import Source

MODES = frozenset({Mode.INLINE, Mode.OPAQUE, Mode.EAGER})


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = _wide(x).chunk(2, dim=-1)
    return gate, up


# -- of every element --------------------------------------------------------------------------------------------------


def _each_work(x: Tensor) -> Work:
    return Work(2 * x.nbytes, 3 * x.numel())


def _each_samples(*settings: tuple[object, ...]) -> Samples:
    """Return samples of an elementwise activation, for each setting of its other parameters."""

    def samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
        normal = Source(dtype, device, generator).normal
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
    for sample in _each_samples(())(dtype, device, generator):
        positive, negative = (torch.rand(1, generator=generator).to(device=device, dtype=dtype) for _ in range(2))
        yield Sample(sample.label, (*sample.args, positive, negative, 0.5, -1e-6), sample.serving)


def _elementwise(*settings: tuple[object, ...], **declaration: Any) -> Callable[[Reference], Operator[Reference]]:
    """Declare an elementwise activation; samples use each setting of its other parameters, probes the first."""
    settings = settings or ((),)
    samples, probes = _each_samples(*settings), rows.elementwise(*settings[0])
    made = {"layer": LayerForm(), "modes": MODES, "fake": same, "samples": samples, "probes": probes}
    return operator(**{**made, "work": _each_work, **declaration})


@_elementwise(
    ("none",),
    ("tanh",),
    layer=LayerForm({"approximate": "approximate"}),
    aliases=("gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
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
    return functional.gelu(_wide(x), approximate=approximate).to(x.dtype).contiguous()


@_elementwise()
def quick_gelu(x: Tensor) -> Tensor:
    """GELU's sigmoid approximation, ``x * sigmoid(1.702 * x)`` (arXiv 1606.08415, section 2).

    Args:
        x: ``[..., width]``, floating point.

    Returns:
        Shape and dtype of ``x``, contiguous.
    """
    wide = _wide(x)
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype).contiguous()


@_elementwise()
def relu2(x: Tensor) -> Tensor:
    """Squared rectifier, ``max(x, 0) ** 2`` (So et al., arXiv 2109.08668).

    Args:
        x: ``[..., width]``, floating point.

    Returns:
        Shape and dtype of ``x``, contiguous.
    """
    return functional.relu(_wide(x)).square().to(x.dtype).contiguous()


@_elementwise(samples=_xielu_samples, probes=rows.xielu)
def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, epsilon: float = -1e-6) -> Tensor:
    """Expanded integral of the ELU (Huang and Schlag, arXiv 2411.13010).

    With ``p = softplus(alpha_p)`` and ``n = beta + softplus(alpha_n)``: ``p * x * x + beta * x`` where ``x > 0``, else
    ``(expm1(min(x, epsilon)) - x) * n + beta * x``.

    Args:
        x: ``[..., width]``, floating point.
        alpha_p: ``[1]``, floating point; before the softplus.
        alpha_n: ``[1]``, floating point; before the softplus.
        beta: slope at zero.
        epsilon: largest argument of the exponential.

    Returns:
        Shape and dtype of ``x``, contiguous.
    """
    wide = _wide(x)
    positive = functional.softplus(_wide(alpha_p)) * wide * wide
    negative = (torch.expm1(wide.clamp(max=epsilon)) - wide) * (beta + functional.softplus(_wide(alpha_n)))
    return (torch.where(wide > 0, positive, negative) + beta * wide).to(x.dtype).contiguous()


# -- gated -------------------------------------------------------------------------------------------------------------


def empty_result(x: Tensor) -> Tensor:
    """Return an uninitialized tensor for the result of a gate, ``[..., n]`` to ``[..., n / 2]``."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _work(x: Tensor) -> Work:
    outputs = x.numel() // 2
    return Work(3 * outputs * x.element_size(), 4 * outputs)


def _plain_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    normal = Source(dtype, device, generator).normal
    for tokens, width in ((1, 4096), (32, 2048), (128, 1024), (7, 1536)):
        yield Sample(f"{tokens}x{width}", (normal(tokens, 2 * width),))
    yield Sample("3-d 2x5x64", (normal(2, 5, 128),))
    yield Sample("empty batch", (normal(0, 128),), serving=False)
    yield Sample("odd width 67", (normal(3, 134),), serving=False)
    yield Sample("row stride larger than the row", (normal(4, 320)[:, :256],), serving=False)
    yield Sample("batch dimensions swapped", (normal(3, 5, 128).transpose(0, 1),), serving=False)
    yield Sample("scale 0.0001", (normal(4, 256, scale=1e-4),), serving=False)
    # Only the gate is large: the product of two such halves would overflow float16.
    yield Sample("gate scale 300", (torch.cat((normal(4, 128, scale=300.0), normal(4, 128)), -1),), serving=False)


def _samples(*settings: tuple[object, ...]) -> Samples:
    """Return samples of a gated activation, for each setting of its other parameters."""

    def samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
        for setting in settings:
            for sample in _plain_samples(dtype, device, generator):
                label = ", ".join((sample.label, *map(str, setting)))
                yield Sample(label, (*sample.args, *setting), sample.serving)

    return samples


def _gated(*settings: tuple[object, ...], **declaration: Any) -> Callable[[Reference], Operator[Reference]]:
    """Declare a gated activation; samples use each setting of its other parameters, probes the first."""
    settings = settings or ((),)
    samples, probes = _samples(*settings), rows.gated(*settings[0])
    made = {"layer": LayerForm(), "modes": MODES, "fake": empty_result, "samples": samples, "probes": probes}
    return operator(**{**made, "work": _work, **declaration})


@_gated(shapes=shapes.gated, aliases=("swiglu", "silu_mul", "silu_mul_fwd", "swiglu_and_mul"))
def silu_and_mul(x: Tensor) -> Tensor:
    """SiLU of the first half of the last dimension times the second half (SwiGLU, Shazeer, arXiv 2002.05202).

    Args:
        x: ``[..., 2 * width]``, floating point.

    Returns:
        ``x[..., :width] * sigmoid(x[..., :width]) * x[..., width:]``, ``[..., width]``, dtype of ``x``, contiguous.
    """
    gate, up = _halves(x)
    return (functional.silu(gate) * up).to(x.dtype).contiguous()


@_gated(
    ("none",),
    ("tanh",),
    layer=LayerForm({"approximate": "approximate"}),
    shapes=shapes.gated,
    aliases=("geglu", "gelu_mul", "gelu_tanh_and_mul"),
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
    gate, up = _halves(x)
    return (functional.gelu(gate, approximate=approximate) * up).to(x.dtype).contiguous()


@_gated()
def mul_and_silu(x: Tensor) -> Tensor:
    """The first half of the last dimension times SiLU of the second half: ``silu_and_mul`` with the halves swapped.

    Args:
        x: ``[..., 2 * width]``, floating point.

    Returns:
        ``[..., width]``, dtype of ``x``, contiguous.
    """
    up, gate = _halves(x)
    return (up * functional.silu(gate)).to(x.dtype).contiguous()


@_gated((0.0,), (0.25,), layer=LayerForm({"threshold": "threshold"}))
def fatrelu_and_mul(x: Tensor, threshold: float = 0.0) -> Tensor:
    """Thresholded rectifier of the first half of the last dimension times the second half (arXiv 2402.13516).

    Args:
        x: ``[..., 2 * width]``, floating point.
        threshold: gates at or below it are zero.

    Returns:
        ``[..., width]``, dtype of ``x``, contiguous.
    """
    gate, up = _halves(x)
    return (functional.threshold(gate, threshold, 0.0) * up).to(x.dtype).contiguous()


def _clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float, beta: float) -> Tensor:
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + beta)


@_gated((1.702, 7.0), (1.0, 1.5), layer=LayerForm({"alpha": "alpha", "limit": "limit"}))
def swigluoai_and_mul(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """SwiGLU of gpt-oss: gate and up columns alternate, both are clamped, and 1 is added to up.

    With ``g = min(x[..., 0::2], limit)`` and ``u = clamp(x[..., 1::2], -limit, limit)``: ``g * sigmoid(alpha * g) * (u
    + 1)``.

    Args:
        x: ``[..., 2 * width]``, floating point.
        alpha: factor inside the sigmoid.
        limit: bound of gate and up.

    Returns:
        ``[..., width]``, dtype of ``x``, contiguous.
    """
    wide = _wide(x)
    return _clamped_swiglu(wide[..., 0::2], wide[..., 1::2], limit, alpha, 1.0).to(x.dtype).contiguous()


@_gated(
    (7.0, 1.0, 0.0), (1.5, 1.702, 1.0), layer=LayerForm({"limit": "swiglu_limit", "alpha": "alpha", "beta": "beta"})
)
def silu_and_mul_with_clamp(x: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """SwiGLU of clamped input.

    With ``g = min(x[..., :width], limit)`` and ``u = clamp(x[..., width:], -limit, limit)``:
    ``g * sigmoid(alpha * g) * (u + beta)``.

    Args:
        x: ``[..., 2 * width]``, floating point.
        limit: bound of gate and up.
        alpha: factor inside the sigmoid.
        beta: added to up.

    Returns:
        ``[..., width]``, dtype of ``x``, contiguous.
    """
    return _clamped_swiglu(*_halves(x), limit, alpha, beta).to(x.dtype).contiguous()


@_gated((7.0,), (0.5,), layer=LayerForm({"limit": "limit"}))
def swiglustep_and_mul(x: Tensor, limit: float = 7.0) -> Tensor:
    """SwiGLU with clamped factors: ``min(silu(x[..., :width]), limit) * clamp(x[..., width:], -limit, limit)``.

    Args:
        x: ``[..., 2 * width]``, floating point.
        limit: bound of the two factors.

    Returns:
        ``[..., width]``, dtype of ``x``, contiguous.
    """
    gate, up = _halves(x)
    return (functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)).to(x.dtype).contiguous()


@_gated((1.0, None), (2.0, 1.5), layer=LayerForm({"beta": "beta", "linear_beta": "linear_beta"}))
def situ_and_mul(x: Tensor, beta: float = 1.0, linear_beta: float | None = None) -> Tensor:
    """Sigmoid and tanh of the first half of the last dimension times the second half, as in Kimi models.

    ``beta * tanh(g / beta) * sigmoid(g) * u`` with ``g = x[..., :width]`` and ``u = x[..., width:]``, or ``u =
    linear_beta * tanh(x[..., width:] / linear_beta)``.

    Args:
        x: ``[..., 2 * width]``, floating point.
        beta: bound of the gate.
        linear_beta: bound of up; ``None`` for no bound.

    Returns:
        ``[..., width]``, dtype of ``x``, contiguous.
    """
    gate, up = _halves(x)
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up).to(x.dtype).contiguous()


@_gated(
    (1.6448536, "tanh"),
    (0.0, "none"),
    layer=LayerForm({"std_multiplier": "std_multiplier", "approximate": "approximate"}),
)
def gelu_and_mul_sparse(x: Tensor, std_multiplier: float, approximate: str = "none") -> Tensor:
    """``gelu_and_mul`` with a sparse gate, as in Gemma 3n: only elements far above the mean of their row pass.

    The gate is ``max(g - (mean + std_multiplier * std), 0)`` with mean and (biased) standard deviation of ``g = x[...,
    :width]`` over the last dimension.

    Args:
        x: ``[..., 2 * width]``, floating point.
        std_multiplier: the cut-off, in standard deviations above the mean.
        approximate: see ``gelu_and_mul``.

    Returns:
        ``[..., width]``, dtype of ``x``, contiguous.
    """
    gate, up = _halves(x)
    centred = gate - gate.mean(dim=-1, keepdim=True)
    deviation = centred.square().mean(dim=-1, keepdim=True).sqrt()
    sparse = functional.relu(centred - std_multiplier * deviation)
    return (functional.gelu(sparse, approximate=approximate) * up).to(x.dtype).contiguous()
