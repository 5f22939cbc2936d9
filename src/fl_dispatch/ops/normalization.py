"""Normalization operators.

References round as vLLM's native operators do, so that a model gives the same tokens. With a residual they add in
float32 and normalize the *unrounded* sum; the returned sum is rounded to the input dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .declaration import Access, LayerForm, Mode, Sample, Work, Write, bytes_of, operator, same
from .inputs import rows, shapes
from .inputs.source import Source

MODES = frozenset({Mode.INLINE, Mode.OPAQUE, Mode.EAGER})
# With a residual the host treats both as consumed, so an implementation may work in place; without one nothing is
# written.
FUSED_WRITES = {"x": Write(Access.UPDATE, given="residual"), "residual": Write(Access.UPDATE, given="residual")}
NORM_LAYER = LayerForm({"weight": "weight", "epsilon": "variance_epsilon"})


def _fake(x: Tensor, residual: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape)
    return out if residual is None else (out, residual.new_empty(residual.shape))


def _work(x: Tensor, residual: Tensor | None, weight: Tensor | None) -> Work:
    tensors = 2 if residual is None else 4
    return Work(tensors * x.nbytes + bytes_of(weight), (4 if residual is None else 5) * x.numel())


def _gated_work(x: Tensor, weight: Tensor | None) -> Work:
    return Work(3 * x.nbytes + bytes_of(weight), 9 * x.numel())


def _layer_norm_work(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Work:
    return Work(2 * x.nbytes + bytes_of(weight, bias), 7 * x.numel())


def _samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    normal = Source(dtype, device, generator).normal
    for tokens, hidden in ((1, 4096), (32, 4096), (256, 2048), (7, 5120)):
        for residual in (None, normal(tokens, hidden)):
            name = f"{tokens}x{hidden}" + ("" if residual is None else " with residual")
            yield Sample(name, (normal(tokens, hidden), residual, normal(hidden), 1e-6))
    yield Sample("3-d heads 5x8x128", (normal(5, 8, 128), None, normal(128), 1e-6))
    yield Sample("no weight", (normal(3, 64), None, None, 1e-5), serving=False)
    yield Sample("empty batch", (normal(0, 64), None, normal(64), 1e-6), serving=False)
    yield Sample("odd hidden size 67", (normal(3, 67), normal(3, 67), normal(67), 1e-6), serving=False)
    yield Sample("row stride larger than the row", (normal(4, 160)[:, :96], None, normal(96), 1e-6), serving=False)
    for scale in (1e-4, 300.0):
        yield Sample(f"scale {scale:g}", (normal(4, 128, scale=scale), None, normal(128), 1e-6), serving=False)
    yield Sample("5000 short rows", (normal(5000, 64), normal(5000, 64), normal(64), 1e-6), serving=False)


def _gated_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    normal = Source(dtype, device, generator).normal

    def sample(label: str, *shape: int, scale: float = 1.0, serving: bool = True, **options: Any) -> Sample:
        weight = normal(shape[-1])
        rest = {"epsilon": 1e-6, "activation": "silu", "group_size": 0, "norm_first": True, **options}
        return Sample(label, (normal(*shape, scale=scale), normal(*shape), weight, *rest.values()), serving)

    yield sample("decode, 32 tokens, 32 heads of 128", 32, 32, 128)
    yield sample("heads 1x16x128, sigmoid", 1, 16, 128, activation="sigmoid")
    yield sample("gate first, 7x4096", 7, 4096, norm_first=False)
    yield sample("gate first, groups of 512", 7, 4096, norm_first=False, group_size=512)
    yield sample("groups of 64", 5, 256, group_size=64, epsilon=1e-5)
    product = normal(6, 2, 4, 96)
    yield Sample("cut out of one product", (product[:, 0, :, :64], product[:, 1, :, :64], normal(64), 1e-6))
    yield Sample("no weight", (normal(3, 64), normal(3, 64)), serving=False)
    yield sample("epsilon 0.01, scale 0.1", 4, 128, scale=0.1, epsilon=1e-2, serving=False)
    yield sample("gate first, sigmoid, scale 300", 4, 128, scale=300.0, activation="sigmoid", norm_first=False,
                 serving=False)  # fmt: skip
    yield sample("odd size 67", 3, 67, serving=False)
    yield sample("empty batch", 0, 4, 64, serving=False)


def _layer_norm_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale + mean).to(device=device, dtype=dtype)

    for tokens, hidden in ((1, 4096), (32, 4096), (7, 5120)):
        yield Sample(f"{tokens}x{hidden}", (normal(tokens, hidden), normal(hidden), normal(hidden), 1e-5))
    yield Sample("3-d heads 5x8x128", (normal(5, 8, 128), normal(128), normal(128), 1e-6))
    yield Sample("no bias", (normal(3, 64), normal(64), None, 1e-5))
    yield Sample("neither weight nor bias", (normal(3, 64), None, None, 1e-5), serving=False)
    yield Sample("empty batch", (normal(0, 64), normal(64), normal(64), 1e-5), serving=False)
    yield Sample("odd hidden size 67", (normal(3, 67), normal(67), normal(67), 1e-5), serving=False)
    strided = normal(4, 160)[:, :96]
    yield Sample("row stride larger than the row", (strided, normal(96), normal(96), 1e-5), serving=False)
    yield Sample("mean 20", (normal(4, 128, mean=20.0), normal(128), normal(128), 1e-5), serving=False)
    for scale in (1e-4, 300.0):
        x = normal(4, 128, scale=scale)
        yield Sample(f"scale {scale:g}", (x, normal(128), normal(128), 1e-5), serving=False)


def _normalized(x: Tensor, residual: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the sum and its normalization, both at least in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
    return total, total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + epsilon)


def _result(y: Tensor, total: Tensor, x: Tensor, residual: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    y = y.to(x.dtype).contiguous()
    if residual is None:
        return y
    total = total.to(x.dtype).contiguous()
    if torch.compiler.is_compiling():
        # Inductor would add the two again in the next norm. A view like this forces the sum into memory.
        total = total.as_strided(tuple(total.shape), total.stride())
    return y, total


_fused: Mapping[str, Any] = {
    "writes": FUSED_WRITES,
    "layer": NORM_LAYER,
    "modes": MODES,
    "fake": _fake,
    "samples": _samples,
    "probes": rows.fused_norm,
    "shapes": shapes.norm,
    "work": _work,
}


@operator(**_fused, aliases=("rmsnorm", "add_rms_norm", "fused_add_rms_norm", "fused_rms_norm", "skip_rms_norm"))
def rms_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """Root-mean-square normalization over the last dimension, with an optional residual sum before it.

    ``s = x + residual``; ``y = s / sqrt(mean(s * s) + epsilon) * weight`` (Zhang and Sennrich, arXiv 1910.07467).

    Args:
        x: ``[..., hidden]``, floating point. May be overwritten if ``residual`` is given; otherwise only read.
        residual: same shape and dtype as ``x``, or ``None``. May be overwritten.
        weight: ``[hidden]``, or ``None`` for ones.
        epsilon: added to the mean square.

    Returns:
        ``y``, shape and dtype of ``x``; with a residual the pair ``(y, s)``.
    """
    total, y = _normalized(x, residual, epsilon)
    if weight is not None:
        # Rounded before the product, as in vLLM and in Llama's original code. A half weight on a wide input rounds
        # nothing.
        y = y.to(torch.promote_types(x.dtype, weight.dtype)) * weight
    return _result(y, total, x, residual)


@operator(**_fused, aliases=("gemma_fused_add_rms_norm",))
def gemma_rms_norm(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS normalization of Gemma: the scale is ``1 + weight``, applied in float32 before the cast back.

    Args:
        x: ``[..., hidden]``, floating point. May be overwritten if ``residual`` is given; otherwise only read.
        residual: same shape and dtype as ``x``, or ``None``. May be overwritten.
        weight: ``[hidden]``, the offset from one, or ``None`` for zero.
        epsilon: added to the mean square.

    Returns:
        ``y``, shape and dtype of ``x``; with a residual the pair ``(y, x + residual)``.
    """
    total, y = _normalized(x, residual, epsilon)
    if weight is not None:
        y = y * (1.0 + weight.to(y.dtype))  # one rounding only, after the product
    return _result(y, total, x, residual)


@operator(
    layer=LayerForm({"weight": "weight", "epsilon": "eps", "activation": "activation"}),
    modes=MODES,
    fake=same,
    samples=_gated_samples,
    aliases=("gated_rms_norm", "fused_rms_norm_gated", "layernorm_gated"),
    work=_gated_work,
)
def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    epsilon: float = 1e-6,
    activation: str = "silu",
    group_size: int = 0,
    norm_first: bool = True,
) -> Tensor:
    """RMS normalization and the product with an activated gate, the end of linear-attention and state-space layers.

    ``rms_norm(x) * weight * activation(gate)``, or with the gate first ``rms_norm(x * activation(gate)) * weight`` (Dao
    and Gu, arXiv 2405.21060, section 7.1). The computation is in float32, with one rounding.

    Args:
        x: ``[..., hidden]``, floating point, any strides.
        gate: shape and dtype of ``x``, any strides.
        weight: ``[hidden]``, or ``None`` for ones.
        epsilon: added to the mean square.
        activation: ``"silu"`` or ``"sigmoid"``.
        group_size: elements of the last dimension that share a mean square; 0 for all.
        norm_first: whether the norm comes before the product with the gate.

    Returns:
        Shape and dtype of ``x``, contiguous.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    gate = gate.to(wide)
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"there is no activation '{activation}' here, only silu and sigmoid")
    factor = torch.nn.functional.silu(gate) if activation == "silu" else gate.sigmoid()
    total = x.to(wide) if norm_first else x.to(wide) * factor
    size = group_size or x.shape[-1]
    groups = total.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    y = (groups * torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + epsilon)).flatten(-2)
    if weight is not None:
        y = y * weight.to(wide)
    return (y * factor if norm_first else y).to(x.dtype).contiguous()


@operator(
    layer=LayerForm({"weight": "weight", "bias": "bias", "epsilon": "eps"}),
    modes=MODES,
    fake=same,
    samples=_layer_norm_samples,
    probes=rows.layer_norm,
    work=_layer_norm_work,
)
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, epsilon: float = 1e-5) -> Tensor:
    """Layer normalization over the last dimension (Ba et al., arXiv 1607.06450).

    ``(x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias`` with the biased variance.

    Args:
        x: ``[..., hidden]``, floating point.
        weight: ``[hidden]``, or ``None`` for ones. May be wider than ``x``.
        bias: ``[hidden]``, or ``None`` for zero.
        epsilon: added to the variance.

    Returns:
        Shape and dtype of ``x``, contiguous.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if tensor is None else tensor.to(wide) for tensor in (weight, bias))
    return torch.nn.functional.layer_norm(x.to(wide), x.shape[-1:], weight, bias, epsilon).to(x.dtype).contiguous()
