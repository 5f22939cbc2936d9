"""Emulated RMS norms."""

from __future__ import annotations

import torch

from . import FLOAT, kernel, require, require_contiguous, require_dtype, require_same_dtype


def _normalized(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x / RMS(x) in float32, and 1 / RMS(x), over the dimensions that gamma has."""
    require(0 < gamma.dim() <= x.dim(), f"gamma has {gamma.dim()} dimensions, the input {x.dim()}")
    require(
        x.shape[-gamma.dim() :] == gamma.shape,
        f"gamma {tuple(gamma.shape)} must be the last dimensions of the input {tuple(x.shape)}",
    )
    over = tuple(range(-gamma.dim(), 0))
    rstd = 1 / torch.sqrt(x.float().square().mean(over, keepdim=True) + epsilon)
    return x.float() * rstd, rstd


@kernel("npu_rms_norm")
def rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """Source: the wheel's docstring. Refused: dtypes beside float16, bfloat16, float32; a gamma of another dtype.

    Assumed: float32 inside, rounded once. The docstring's "2 to 8 dimensions" of gamma is not enforced, because its
    own example has one.
    """
    require_dtype("input", input, FLOAT)
    require_same_dtype(input=input, gamma=gamma)
    require(2 <= input.dim() <= 8, f"input has {input.dim()} dimensions, not 2 to 8")
    normalized, rstd = _normalized(input, gamma, epsilon)
    return (normalized * gamma.float()).to(input.dtype), rstd


@kernel("npu_add_rms_norm")
def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Source: op-plugin's page. Functional: (norm, 1 / RMS in float32, sum). Refused: empty tensors, mixed dtypes.

    Assumed: the norm is that of the sum as it is returned, rounded to its dtype; float32 inside.
    """
    require_dtype("x1", x1, FLOAT)
    require_same_dtype(x1=x1, x2=x2, gamma=gamma)
    require(x1.shape == x2.shape, f"x1 {tuple(x1.shape)} and x2 {tuple(x2.shape)} must have one shape")
    require(1 <= x1.dim() <= 8, f"x1 has {x1.dim()} dimensions, not 1 to 8")
    require(x1.numel() > 0, "x1 is empty")
    total = x1 + x2
    normalized, rstd = _normalized(total, gamma, epsilon)
    return (normalized * gamma.float()).to(x1.dtype), rstd, total


@kernel("npu_gemma_rms_norm")
def gemma_rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Source: the wheel's docstring, and CANN's page of aclnnGemmaRmsNorm for x / RMS(x) * (1 + gamma).

    Refused: tensors that are not contiguous or empty, a gamma of another dtype.
    Assumed: float32 inside. The docstring gives 1 / RMS the input's dtype, the Meta kernel float32, which is taken.
    """
    require_dtype("input", input, FLOAT)
    require_same_dtype(input=input, gamma=gamma)
    require_contiguous(input=input, gamma=gamma)
    require(input.numel() > 0, "input is empty")
    normalized, rstd = _normalized(input, gamma, epsilon)
    return (normalized * (1 + gamma.float())).to(input.dtype), rstd


@kernel("npu_layer_norm_eval")
def layer_norm_eval(
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Source: the wheel's docstring, which says that it is ``torch.nn.functional.layer_norm``.

    Refused: a shape that is not the input's last dimensions, a weight or bias of another one or another dtype.
    Assumed: the dtypes of its fellows, float32 inside.
    """
    require_dtype("input", input, FLOAT)
    last = tuple(normalized_shape)
    require(0 < len(last) <= input.dim() and input.shape[-len(last) :] == last, f"{last} are not the last dimensions")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            require_same_dtype(**{"input": input, name: tensor})
            require(tensor.shape == last, f"{name} is {tuple(tensor.shape)}, not {last}")
    over = tuple(range(-len(last), 0))
    centred = input.float() - input.float().mean(over, keepdim=True)
    made = centred / torch.sqrt(centred.square().mean(over, keepdim=True) + eps)
    made = made if weight is None else made * weight.float()
    return (made if bias is None else made + bias.float()).to(input.dtype)
