"""Limits and tables of the operators that vLLM's builds for GPUs and for CPUs have in common."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
PLACES = {"cuda": "a GPU", "cpu": "the CPU"}


def problem(device: str, name: str, tensor: Tensor, like: Tensor | None = None, contiguous: bool = True) -> str:
    """Return why the operators cannot take this tensor, or an empty string; its dtype must be that of ``like``."""
    if tensor.device.type != device:
        return f"{name} is on {tensor.device}, not on {PLACES[device]}"
    if like is not None and tensor.dtype is not like.dtype:
        return f"{name} is {tensor.dtype}, not {like.dtype}"
    if tensor.dtype not in DTYPES:
        return f"{name} is {tensor.dtype}, not float32, float16 or bfloat16"
    if contiguous and not tensor.is_contiguous():
        return f"{name} is not contiguous"
    return ""


def rotary_problem(device: str, query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, inplace: bool) -> str:
    """Return why ``rotary_embedding`` cannot take these tensors: it needs one dtype and adjacent heads."""
    for name, tensor in (("query", query), ("key", key), ("cos", cos), ("sin", sin)):
        if tensor is not None and (why := problem(device, name, tensor, like=query, contiguous=False)):
            return why
    for name, tensor in (("query", query), ("key", key)):
        if inplace and tensor is not None and tensor.stride()[1:] != (tensor.shape[2], 1):
            return f"the heads of {name} do not lie side by side (strides {tensor.stride()})"
    return ""


def rotary_table(cos: Tensor, sin: Tensor, position_ids: Tensor, as_it_is: bool = True) -> tuple[Tensor, Tensor]:
    """Return the kernel's table, with cosines and sines of a row side by side, and each token's row in it.

    Args:
        as_it_is: whether the kernel takes a table with the dtype of ``cos``.
    """
    half = cos.shape[-1]
    if (
        as_it_is
        and cos.stride() == sin.stride() == (2 * half, 1)
        and sin.data_ptr() == cos.data_ptr() + half * cos.element_size()
        and sin.untyped_storage().data_ptr() == cos.untyped_storage().data_ptr()
    ):
        table = cos.as_strided((cos.shape[0], 2 * half), (2 * half, 1))  # hosts store them this way: no copy
        return table, position_ids.to(torch.int64).contiguous()
    rows = torch.cat((cos[position_ids], sin[position_ids]), dim=-1)
    return rows, torch.arange(len(position_ids), device=position_ids.device)
