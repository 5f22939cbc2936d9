"""Emulated matrix products."""

from __future__ import annotations

from typing import Any

import torch

from . import FLOAT, HALF, kernel, require, require_default, require_dtype, require_same_dtype

IN_A_WORD = 8
"""Numbers of int4 in an int32."""


@kernel("npu_transpose_batchmatmul")
def transpose_batchmatmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    perm_x1: list[int] | None = None,
    perm_x2: list[int] | None = None,
    perm_y: list[int] | None = None,
    batch_split_factor: int | None = 1,
) -> torch.Tensor:
    """(x1 permuted @ weight) permuted, [M, B, N]. Source: op-plugin's page.

    Refused: bias, K or N no multiple of 16, permutations beside [0, 1, 2] and [1, 0, 2] of the input, [0, 1, 2] of
    the weight and [1, 0, 2] of the result. Assumed: float32 inside. A scale and a split are not emulated.
    """
    require_default(bias=bias, scale=scale)
    require(batch_split_factor == 1, f"batch_split_factor={batch_split_factor} is not emulated")
    require_dtype("input", input, FLOAT)
    require_same_dtype(input=input, weight=weight)
    first, second, last = perm_x1 or [0, 1, 2], perm_x2 or [0, 1, 2], perm_y or [1, 0, 2]
    require(first in ([0, 1, 2], [1, 0, 2]), f"perm_x1={first}, not [0, 1, 2] or [1, 0, 2]")
    require(second == [0, 1, 2], f"perm_x2={second}, not [0, 1, 2]")
    require(last == [1, 0, 2], f"perm_y={last}, not [1, 0, 2]")
    require(input.dim() == weight.dim() == 3, "input and weight must have three dimensions")
    x = input.permute(first)
    k, n = weight.shape[1:]
    require(k % 16 == 0 and n % 16 == 0, f"K and N are {k} and {n}, no multiples of 16")
    require(k < 65536 and n < 65536, f"K and N are {k} and {n}, not below 65536")
    require(first == [0, 1, 2] or k * len(x) < 65536, f"K * B is {k * len(x)}, not below 65536")
    require(len(x) == len(weight) and x.shape[2] == k, f"{tuple(x.shape)} @ {tuple(weight.shape)}")
    return torch.matmul(x.float(), weight.float()).permute(last).contiguous().to(input.dtype)


def _products(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    bias: list[torch.Tensor] | None,
    ends: list[int] | None,
    split_item: int,
) -> list[torch.Tensor]:
    """The product of each group, m axis. ``ends`` are cumulative; None: a tensor of x is a group."""
    matrices = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else weight
    rows = x
    if ends is not None:
        require(
            all(0 <= a <= b for a, b in zip([0, *ends], ends, strict=False)), "group_list must not be negative or fall"
        )
        require(len(ends) == len(matrices), f"group_list has {len(ends)} groups, weight {len(matrices)}")
        starts = [0, *ends[:-1]]
        if len(x) == 1:
            require(ends[-1] == len(x[0]), f"group_list names {ends[-1]} rows, x has {len(x[0])}")
            rows = [x[0][a:b] for a, b in zip(starts, ends, strict=True)]
        else:
            sizes = [b - a for a, b in zip(starts, ends, strict=True)]
            require([len(one) for one in x] == sizes, f"group_list names groups of {sizes} rows")
    require(len(rows) == len(matrices), f"{len(rows)} groups of x, {len(matrices)} of weight")
    made = []
    for number, (one, matrix) in enumerate(zip(rows, matrices, strict=True)):
        require(matrix.dim() == 2 and one.shape[-1] == matrix.shape[0], f"{tuple(one.shape)} @ {tuple(matrix.shape)}")
        require(one.shape[-1] < 65536 and matrix.shape[-1] < 65536, "the last dimensions must be below 65536")
        exact = torch.float32 if one.is_floating_point() else torch.float64
        product = one.to(exact) @ matrix.to(exact)
        if bias is not None:
            flat = bias[0] if len(bias) == 1 and bias[0].dim() == 2 else bias
            product = product + flat[number].float()
        made.append(product)
    if split_item in (2, 3):
        return [torch.cat(made)]
    return made


def _check_plain(x: list[torch.Tensor], weight: list[torch.Tensor], bias: list[torch.Tensor] | None) -> None:
    require(len(x) <= 128 and len(weight) <= 128, "x and weight may have 128 tensors")
    for tensor in (*x, *weight):
        require_dtype("x and weight", tensor, FLOAT)
        require(tensor.dtype == x[0].dtype, "x and weight must have one dtype; quantized weights are not emulated")
    wanted = torch.float32 if x[0].dtype == torch.bfloat16 else x[0].dtype
    require(bias is None or all(one.dtype == wanted for one in bias), f"bias must be {wanted} for x of {x[0].dtype}")
    require(all(one.is_contiguous() for one in x), "x must not be transposed")


@kernel("npu_grouped_matmul")
def grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    *,
    bias: list[torch.Tensor] | None = None,
    scale: list[torch.Tensor] | None = None,
    antiquant_scale: list[torch.Tensor] | None = None,
    antiquant_offset: list[torch.Tensor] | None = None,
    per_token_scale: list[torch.Tensor] | None = None,
    group_list: torch.Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: list[int] | None = None,
    output_dtype: int | None = None,
    **others: Any,
) -> list[torch.Tensor]:
    """x_i @ weight_i for each group. Source: op-plugin's page, the table for a group_list that is a tensor; CANN's page
    of aclnnGroupedMatmulV4 for shapes of scales, results of int32 and offsets of groups.

    Plain products; int8 with a scale for each channel and token, or none; quantized weights. group_type -1 (every
    tensor a group) and 0 (rows in groups; the weight is one tensor [E, K, N] or several [K, N]); group_list_type 0
    (cumulative) and 1 (sizes).
    Refused: a group_list that is not int64, that does not cover x, or has one entry of type 1; activations without
    scales for tokens; split_item that does not fit the group type; mixed dtypes.
    Assumed: float32 inside. k groups (group_type 2) and an x of int4 are not emulated.
    """
    require_default(**others)
    kind = -1 if group_type is None else group_type
    split = split_item or 0
    require(kind in (-1, 0), f"group_type={group_type} is not emulated; -1 and 0 are")
    require(group_list_type in (0, 1), f"group_list_type={group_list_type} is not emulated; 0 and 1 are")
    require(act_type in (None, 0) or per_token_scale is not None, "an activation needs per_token_scale")
    require(act_type in (None, 0), f"act_type={act_type} is not emulated")
    ends = None
    if kind == -1:
        require(group_list is None, "group_list must be empty for group_type -1")
        require(split in (0, 1), f"split_item={split}, not 0 or 1 for group_type -1")
        require(all(one.dim() == 2 for one in weight), "weight must have two dimensions for group_type -1")
    else:
        require(split in (2, 3), f"split_item={split}, not 2 or 3 for group_type 0")
        require(all(one.dim() == 2 for one in x), "x must have two dimensions")
        require(group_list is not None or len(x) > 1, "group_list must be given for one x")
        if group_list is not None:
            require(group_list.dtype == torch.int64, f"group_list is {group_list.dtype}, not int64")
            require(group_list.dim() == 1, f"group_list has {group_list.dim()} dimensions, not 1")
            require(len(group_list) <= 1024, f"group_list has {len(group_list)} groups, above 1024")
            require(group_list_type == 0 or len(group_list) > 1, "group_list of type 1 must have more than one entry")
            require(bool((group_list >= 0).all()), "group_list must not be negative")
            ends = (group_list if group_list_type == 0 else group_list.cumsum(0)).tolist()
        if len(x) == len(weight) == 1:
            require(weight[0].dim() == 3, f"one weight has {weight[0].dim()} dimensions, not 3")
        else:
            require(all(one.dim() == 2 for one in weight), "weights of a list must have two dimensions")
    if x[0].dtype == torch.int8:
        require_default(antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset)
        return _int8(x, weight, bias, scale, per_token_scale, ends, split, output_dtype)
    require_default(scale=scale, per_token_scale=per_token_scale, tuning_config=tuning_config)
    if weight[0].dtype in (torch.int8, torch.int32):
        weight = _dequantized(x, weight, bias, antiquant_scale, antiquant_offset, ends)
    else:
        require_default(antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset)
        _check_plain(x, weight, bias)
    wanted = x[0].dtype if output_dtype is None else dtype_of(output_dtype)
    require(wanted == x[0].dtype, f"output_dtype {wanted} for x of {x[0].dtype}")
    return [one.to(wanted) for one in _products(x, weight, bias, ends, split)]


def dtype_of(code: int | torch.dtype) -> torch.dtype:
    """The dtype of ``output_dtype``: torch's own, or its number (the operator's schema has integers)."""
    numbers = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
    found = code if isinstance(code, torch.dtype) else numbers.get(code)
    require(found is not None, f"output_dtype={code} is not emulated")
    assert found is not None
    return found


def _int8(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    bias: list[torch.Tensor] | None,
    scale: list[torch.Tensor] | None,
    per_token_scale: list[torch.Tensor] | None,
    ends: list[int] | None,
    split: int,
    output_dtype: int | None,
) -> list[torch.Tensor]:
    """int8 products with scales: float16 of float32 scales, bfloat16 of bfloat16 scales, as the table says; or int32
    without any."""
    require(all(one.dtype == torch.int8 for one in weight), "weight must be int8 for x of int8")
    require(len(x) == len(weight) == 1 and ends is not None, "int8 is emulated for one x and one weight, in groups")
    require(bias is None, "a bias of int8 products is not emulated")
    require(output_dtype is not None, "int8 results are not emulated; name output_dtype")
    assert output_dtype is not None
    assert ends is not None
    made = dtype_of(output_dtype)
    if made == torch.int32:
        require(scale is None and per_token_scale is None, "int32 results have no scales")
        return [one.to(made) for one in _products(x, weight, None, ends, split)]
    require(scale is not None and len(scale) == 1, "scale must be given for int8")
    assert scale is not None
    wanted = {torch.float16: torch.float32, torch.bfloat16: torch.bfloat16}.get(made)
    require(scale[0].dtype == wanted, f"scale is {scale[0].dtype}; output {made} wants {wanted}")
    require(scale[0].shape == (len(weight[0]), weight[0].shape[2]), "scale must be [E, N]")
    (product,) = _products(x, weight, None, ends, split)
    sizes = torch.tensor([b - a for a, b in zip([0, *ends[:-1]], ends, strict=True)])
    product = product.float() * scale[0].float().repeat_interleave(sizes, 0)
    if per_token_scale is not None:
        require(per_token_scale[0].dtype == torch.float32, "per_token_scale must be float32")
        require(per_token_scale[0].shape == (len(x[0]),), "per_token_scale must be [rows]")
        product = product * per_token_scale[0][:, None]
    return [product.to(made)]


def _dequantized(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    bias: list[torch.Tensor] | None,
    scale: list[torch.Tensor] | None,
    offset: list[torch.Tensor] | None,
    ends: list[int] | None,
) -> list[torch.Tensor]:
    """(weight + offset) * scale, of int8 or of int4 in words of int32, whose first number is in the lowest bits.

    Scales are [E, N], those of int4 also [E, G, N]. Words lie along the last dimension of the weight, or along K if it
    is transposed, as the Meta kernel has it. Refused: scales or offsets that are missing or of another dtype than x;
    groups of int8, groups that do not divide K, or of an odd size if transposed; an offset of groups that is not zero,
    which CANN's page has for whole columns only.
    """
    require(len(x) == len(weight) == 1 and ends is not None, "quantized weights are emulated for one x and one weight")
    require(bias is None, "a bias of quantized weights is not emulated")
    require_dtype("x", x[0], HALF)
    require(scale is not None and offset is not None, "antiquant_scale and antiquant_offset must be given")
    assert scale is not None
    assert offset is not None
    require(len(scale) == len(offset) == 1, "antiquant_scale and antiquant_offset have the length of weight")
    require_same_dtype(x=x[0], antiquant_scale=scale[0], antiquant_offset=offset[0])
    numbers, words = weight[0], weight[0].dtype == torch.int32
    transposed = numbers.stride(-2) == 1 and numbers.stride(-1) == numbers.shape[-2]
    if words:
        numbers = _int4(numbers.transpose(1, 2)).transpose(1, 2) if transposed else _int4(numbers)
    experts, k, n = numbers.shape
    groups = scale[0].shape[1] if scale[0].dim() == 3 else 1
    shape = (experts, groups, n) if scale[0].dim() == 3 else (experts, n)
    require(scale[0].shape == shape, f"antiquant_scale is {tuple(scale[0].shape)}, not {shape}")
    require(offset[0].shape == shape, f"antiquant_offset is {tuple(offset[0].shape)}, not {shape}")
    if scale[0].dim() == 3:
        require(words, "int8 takes a scale for each column")
        require(k % groups == 0, f"{groups} groups of {k}")
        require(not transposed or k // groups % 2 == 0, f"groups of {k // groups} of a transposed weight, not even")
        require(not bool(offset[0].any()), "antiquant_offset of groups must be zero")

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.float().view(experts, groups, n).repeat_interleave(k // groups, 1)

    return [(numbers.float() + spread(offset[0])) * spread(scale[0])]


def _int4(words: torch.Tensor) -> torch.Tensor:
    """The numbers of words along the last dimension, from -8 to 7."""
    shifts = torch.arange(IN_A_WORD, dtype=torch.int32) * 4
    numbers = (words[..., None] >> shifts & 15).flatten(-2)
    return numbers - 16 * (numbers > 7).int()


@kernel("npu_grouped_matmul.List")
def grouped_matmul_list(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    *,
    bias: list[torch.Tensor] | None = None,
    group_list: list[int] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    output_dtype: torch.dtype | None = None,
    **others: Any,
) -> list[torch.Tensor]:
    """The same with cumulative ends on the host. Source: op-plugin's page, the table for a group_list that is a list.

    Refused: a group_type, a list of one entry, weights of three dimensions. Assumed: float32 inside.
    """
    require_default(**others)
    require(group_type is None, f"group_type={group_type}, not None for a list")
    require(group_list is None or len(group_list) != 1, "group_list must not have one entry")
    require(all(one.dim() == 2 for one in weight), "weight must have two dimensions for a list")
    require(len(x) > 1 or len(weight) == 1 or bool(group_list), "group_list must be given for one x")
    require(group_list is None or all(one.dim() == 2 for one in x), "group_list is for x of two dimensions")
    _check_plain(x, weight, bias)
    require(output_dtype in (None, x[0].dtype), f"output_dtype {output_dtype} for x of {x[0].dtype}")
    made = _products(x, weight, bias, group_list or None, split_item or 0)
    return [one.to(x[0].dtype) for one in made]


@kernel("npu_linear")
def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """input @ weight transposed + bias, [M, N]. Source: the wheel's docstring, its example for the transposition.

    Refused: other than matrices and a bias of one dimension, bfloat16 (the docstring names float32, float16, int32 and
    int8). Assumed: float32 inside, one dtype. Integers are not emulated.
    """
    require_dtype("input", input, (torch.float32, torch.float16))
    require_same_dtype(input=input, weight=weight)
    require(
        input.dim() == weight.dim() == 2, f"input and weight have {input.dim()} and {weight.dim()} dimensions, not 2"
    )
    require(
        input.shape[1] == weight.shape[1], f"{tuple(input.shape)} and {tuple(weight.shape)} share no inner dimension"
    )
    made = input.float() @ weight.float().t()
    if bias is not None:
        require_same_dtype(input=input, bias=bias)
        require(bias.shape == weight.shape[:1], f"bias is {tuple(bias.shape)}, one a row of weight is wanted")
        made += bias.float()
    return made.to(input.dtype)
