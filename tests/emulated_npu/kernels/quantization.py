"""Emulated quantization, and the change of a tensor's format."""

from __future__ import annotations

from typing import Any

import torch

from . import FLOAT, HALF, kernel, require, require_contiguous, require_default, require_dtype, require_same_dtype
from .matmul import dtype_of

QINT8 = 12
"""The number of ``torch.qint8``."""
LARGEST = 65535
"""The largest last dimension of a product's matrices."""


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
    return _rows_to_int8(x)


@kernel("npu_dequant_swiglu_quant")
def dequant_swiglu_quant(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """swish(a) * b of int32 times its scales, as int8 with a scale for each row. Source: the wheel's docstring.

    Refused: an x that is not int32 of two dimensions, scales that are missing or not float32, a group_index that is not
    int64 or names more rows than x has, halves that are no multiple of 64 up to 10496, other than quant_mode 1.
    activation_scale is [rows] in the docstring's text, and [rows, 1] in its example and on op-plugin's page: both.
    Assumed: float32 inside, rounding to even; a row of zeros gives zeros; rows beyond the groups are 0 and NaN. Calls
    without groups, an x of half types, smooth scales, biases and the other forms of swiglu are not emulated.
    """
    require_default(**others)
    require(x.dtype == torch.int32, f"x is {x.dtype}; int32 is emulated")
    require(x.dim() == 2, f"x has {x.dim()} dimensions, not 2")
    require(quant_mode == 1, f"quant_mode={quant_mode}, not 1 with group_index")
    require(weight_scale is not None and activation_scale is not None, "an x of int32 needs both scales")
    require(group_index is not None, "calls without group_index are not emulated")
    assert weight_scale is not None
    assert activation_scale is not None
    assert group_index is not None
    require(group_index.dtype == torch.int64 and group_index.dim() == 1, "group_index must be int64, of one dimension")
    require(bool((group_index >= 0).all()), "group_index must not be negative")
    (rows, width), total = x.shape, int(group_index.sum())
    require(total <= rows, f"group_index names {total} rows, x has {rows}")
    require(width % 128 == 0 and width <= 2 * 10496, f"H is {width // 2}, no multiple of 64 up to 10496")
    for name, tensor, shapes in (
        ("weight_scale", weight_scale, [(len(group_index), width)]),
        ("activation_scale", activation_scale, [(rows,), (rows, 1)]),
    ):
        require(tensor.dtype == torch.float32, f"{name} is {tensor.dtype}, not float32")
        require(tensor.shape in shapes, f"{name} is {tuple(tensor.shape)}, not one of {shapes}")
    given = x[:total].float() * weight_scale.repeat_interleave(group_index, 0) * activation_scale.view(-1, 1)[:total]
    left, right = given.chunk(2, -1)
    if not activate_left:
        left, right = right, left
    numbers, scales = _rows_to_int8(left * torch.sigmoid(left) * right)
    made, found = torch.zeros(rows, width // 2, dtype=torch.int8), torch.full((rows,), torch.nan)
    made[:total], found[:total] = numbers, scales
    return made, found


def _rows_to_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 and max(abs(row)) / 127, rounded to even; a row of zeros gives zeros."""
    scale = x.abs().amax(-1) / 127
    return torch.round(x / torch.where(scale == 0, 1.0, scale)[..., None]).to(torch.int8), scale


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
    wants float32 with pertoken_scale, an offset is for int8, and scales must be [1] or [n]; by the Meta kernel a bias
    of bfloat16 for another result; empty tensors. Assumed: float32 for the scaling of exact integers; rounding to even.
    int4 and int64 scales are not emulated, nor is a bias of float16, which the page's list has and its table has not.
    """
    require_default(**others)
    require(x1.dtype == x2.dtype == torch.int8, f"x1 and x2 are {x1.dtype} and {x2.dtype}; int8 is emulated")
    require(2 <= x1.dim() <= 6 and 2 <= x2.dim() <= 6, "x1 and x2 must have two to six dimensions")
    m, n = x1.shape[-2], x2.shape[-1]
    require(bool(x1.numel() and x2.numel() and scale.numel()), "x1, x2 and scale must not be empty")
    require(x1.shape[-1] <= LARGEST and n <= LARGEST, f"the last dimensions must not exceed {LARGEST}")
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
        require(bias.dtype != torch.bfloat16 or made == torch.bfloat16, f"bias is bfloat16 for an output of {made}")
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


@kernel("npu_weight_quant_batchmatmul")
def weight_quant_batchmatmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    antiquant_scale: torch.Tensor,
    antiquant_offset: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> torch.Tensor:
    """x @ ((weight + offset) * scale) + bias, [M, N]. Source: op-plugin's page (Atlas A2).

    A scale for the weight, [1] or [1, 1], for each column, [N] or [1, N], or for each group of rows of a column,
    [ceil(K / group size), N]. Refused: empty tensors; other than matrices up to 65535 x 65535; an x beside float16 and
    bfloat16; scales and offsets of another dtype than x, and offsets of another shape than scales; groups that are no
    multiple of 32 from 32 to K - 1; a bias that is not contiguous, or of other than float32 for an x of bfloat16 and
    float16 for float16. Assumed: float32 inside. Weights of int32 (which carry int4), scales of int64, quantized
    results and inner_precise are not emulated.
    """
    require_default(
        quant_scale=quant_scale, quant_offset=quant_offset, inner_precise=inner_precise, weight_dtype=weight_dtype
    )
    require_dtype("x", x, HALF)
    require(weight.dtype == torch.int8, f"weight is {weight.dtype}; int8 is emulated")
    require(x.dim() == weight.dim() == 2, f"x and weight have {x.dim()} and {weight.dim()} dimensions, not 2")
    (k, n), group = weight.shape, antiquant_group_size
    require(x.shape[1] == k, f"{tuple(x.shape)} @ {tuple(weight.shape)}")
    require(bool(x.numel() and weight.numel()), "x and weight must not be empty")
    require(k <= LARGEST and n <= LARGEST, f"K and N are {k} and {n}, above {LARGEST}")
    require_same_dtype(x=x, antiquant_scale=antiquant_scale)
    scale, shapes = antiquant_scale, [(1,), (1, 1), (n,), (1, n)]
    if group:
        require(group % 32 == 0 and 32 <= group < k, f"antiquant_group_size={group} for K of {k}")
        shapes = [(-(-k // group), n)]
    require(scale.shape in shapes, f"antiquant_scale is {tuple(scale.shape)}, not one of {shapes}")

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.float().repeat_interleave(group, 0)[:k] if group else values.float()

    matrix = weight.float()
    if antiquant_offset is not None:
        require_same_dtype(antiquant_scale=scale, antiquant_offset=antiquant_offset)
        require(antiquant_offset.shape == scale.shape, f"antiquant_offset is {tuple(antiquant_offset.shape)}")
        matrix = matrix + spread(antiquant_offset)
    made = x.float() @ (matrix * spread(scale))
    if bias is not None:
        wanted = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
        require(bias.dtype == wanted, f"bias is {bias.dtype}; for an x of {x.dtype} it is {wanted}")
        require(bias.shape in ((n,), (1, n)), f"bias is {tuple(bias.shape)}, not [{n}]")
        require_contiguous(bias=bias)
        made = made + bias.float()
    return made.to(x.dtype)


@kernel("npu_quantize")
def quantize(
    input: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """round(input / scales), int8. Source: the wheel's docstring; CANN's page of aclnnQuantize for round and shapes.

    Refused: scales of other than one dimension, of one element or of the axis's; dtypes but float32 with scales of
    float32 and bfloat16 with bfloat16, which are those that both sources allow. Assumed: rounding to even; what does
    not fit becomes -128 or 127. Zero points, multiplication and results beside qint8 are not emulated.
    """
    require_default(zero_points=zero_points)
    require(div_mode, "div_mode=False is not emulated")
    require(dtype == QINT8, f"dtype={dtype} is not emulated; qint8 is")
    require_dtype("input", input, FLOAT)
    require(input.dtype != torch.float16, "input is float16, and scales cannot be of that dtype")
    require_same_dtype(input=input, scales=scales)
    require(1 <= input.dim() <= 8, f"input has {input.dim()} dimensions, not 1 to 8")
    require(-input.dim() <= axis < input.dim(), f"axis={axis} of {input.dim()} dimensions")
    require(scales.shape in ((1,), (input.shape[axis],)), f"scales is {tuple(scales.shape)}; [1] or the axis's size")
    sizes = [-1 if one == axis % input.dim() else 1 for one in range(input.dim())]
    return torch.round(input.float() / scales.float().view(sizes)).clamp(-128, 127).to(torch.int8)


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
