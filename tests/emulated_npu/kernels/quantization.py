"""Emulated quantization, and the change of a tensor's format."""

from __future__ import annotations

from typing import Any

import torch

from . import HALF, kernel, require, require_default, require_dtype
from .matmul import dtype_of


@kernel("npu_dynamic_quant")
def dynamic_quant(
    input: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 and float32 scales, max(abs(row)) / 127. Source: op-plugin's page.

    Refused: dtypes beside float16 and bfloat16, one dimension, smooth_scales of other than the last dimension's size.
    Assumed: rounding to even; a row of zeros gives zeros. int4, groups and other modes are not emulated.
    """
    require_default(group_index=group_index, dst_type_max=dst_type_max)
    require_dtype("input", input, HALF)
    require(input.dim() > 1, "input must have more than one dimension")
    require(dst_type in (None, 1, torch.int8), f"dst_type={dst_type} is not emulated; int8 is")
    require(quant_mode == "pertoken", f"quant_mode={quant_mode!r} is not emulated; 'pertoken' is")
    x = input.float()
    if smooth_scales is not None:
        require(smooth_scales.shape == input.shape[-1:], f"smooth_scales must be [{input.shape[-1]}]")
        require(smooth_scales.dtype == input.dtype, f"smooth_scales is {smooth_scales.dtype}, input {input.dtype}")
        x = x * smooth_scales.float()
    scale = x.abs().amax(-1) / 127
    quantized = torch.round(x / torch.where(scale == 0, 1.0, scale)[..., None])
    return quantized.to(torch.int8), scale


@kernel("npu_quant_matmul")
def quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    **others: Any,
) -> torch.Tensor:
    """int8 @ int8 with scales, to float16, bfloat16 or int8. Source: op-plugin's page, table 2 (Atlas A2).

    Refused: dtypes and their combinations that the table lacks: bfloat16 wants scales of float32 or bfloat16, float16
    wants float32 with pertoken_scale, an offset is for int8, and scales must be [1] or [n]. Assumed: float32 for the
    scaling of exact integers; rounding to even. int4 and int64 scales are not emulated.
    """
    require_default(**others)
    require(x1.dtype == x2.dtype == torch.int8, f"x1 and x2 are {x1.dtype} and {x2.dtype}; int8 is emulated")
    require(2 <= x1.dim() <= 6 and 2 <= x2.dim() <= 6, "x1 and x2 must have two to six dimensions")
    m, n = x1.shape[-2], x2.shape[-1]
    require(x1.shape[-1] <= 65535 and n <= 65535, "the last dimensions must not exceed 65535")
    made = torch.int8 if output_dtype is None else dtype_of(output_dtype)
    require(made in (torch.int8, torch.float16, torch.bfloat16), f"output_dtype {made} is not emulated")
    require(scale.shape in ((1,), (n,)), f"scale is {tuple(scale.shape)}, not [1] or [{n}]")
    allowed = (torch.float32, torch.bfloat16) if made == torch.bfloat16 else (torch.float32,)
    require(scale.dtype in allowed, f"scale is {scale.dtype}; output {made} wants {allowed}")
    require(offset is None or made == torch.int8, "offset is for an output of int8")
    require(pertoken_scale is None or made != torch.int8, "pertoken_scale is for an output of float16 or bfloat16")
    require(made != torch.float16 or pertoken_scale is not None, "float16 with a float32 scale wants pertoken_scale")
    product = torch.matmul(x1.double(), x2.double())
    if bias is not None:
        floats = made != torch.int8
        require(bias.shape == (n,), f"bias is {tuple(bias.shape)}; [{n}] is emulated")
        require(
            bias.dtype == torch.int32 or (floats and bias.dtype in (torch.float32, torch.bfloat16)),
            f"bias is {bias.dtype} for an output of {made}",
        )
        if bias.dtype == torch.int32:
            product, bias = product + bias, None
    result = product.float() * scale.float()
    if pertoken_scale is not None:
        require(pertoken_scale.dtype == torch.float32, f"pertoken_scale is {pertoken_scale.dtype}, not float32")
        require(pertoken_scale.shape == (m,), f"pertoken_scale is {tuple(pertoken_scale.shape)}, not [{m}]")
        result = result * pertoken_scale[:, None]
    if bias is not None:
        result = result + bias.float()
    if made != torch.int8:
        return result.to(made)
    if offset is not None:
        result = result + offset.float()
    return torch.round(result).clamp(-128, 127).to(torch.int8)


@kernel("npu_format_cast")
def format_cast(
    input: torch.Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> torch.Tensor:
    """A copy. Source: the wheel's docstring.

    Assumed: a format changes the order of memory and no value that PyTorch sees; the emulated order stays, so
    ``torch_npu.get_npu_format`` says ND. Refused: formats beside ND (2) and FRACTAL_NZ (29), and NZ of one dimension.
    """
    require_default(customize_dtype=customize_dtype, input_dtype=input_dtype)
    require(acl_format in (2, 29), f"acl_format={acl_format} is not emulated; 2 (ND) and 29 (FRACTAL_NZ) are")
    require(acl_format == 2 or input.dim() >= 2, "FRACTAL_NZ needs two dimensions")
    return input.clone()
