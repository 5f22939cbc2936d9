"""Re-encode MXFP4 weights as fp8 with a scale per block at load: the same numbers in twice the memory.

An e2m1 number times a power of two is a float8_e4m3fn number if the powers within a block span less than 2**15. That
depends on the checkpoint, so each tensor is compared element by element, and refused if one differs. Inputs stay
unquantized, because products that quantize them to fp8 give other answers.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from ...devices import detect_device
from ...ops.quantization import unpacked
from ...settings import get_settings

VARIABLE = "VLLM_FL_MXFP4_AS_FP8"
BLOCK = 128
"""Rows and columns of a block."""
HIGHEST = 2.0**6
"""The largest power of two with products in float8_e4m3fn for all e2m1 numbers."""


def asked() -> bool:
    """Whether the user asks for it.

    Raises:
        ValueError: the device has no fp8.
    """
    if (wanted := get_settings().mxfp4_as_fp8) and not (device := detect_device()).float8:
        raise ValueError(f"{VARIABLE}: {device.name} has no float8_e4m3fn; unset it")
    return wanted


def in_blocks(name: str, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight as float8_e4m3fn, and scales for the parts of its rows within a block.

    Args:
        name: the weight's name, for the error.
        weight: ``[.., columns, inner / 2]``, float4_e2m1fn_x2.
        scale: ``[.., columns, groups]``, powers of two.

    Raises:
        ValueError: some numbers would change.
    """
    if weight.dim() == 2:
        found, scales, wrong = _encoded(weight, scale)
    else:
        parts = [_encoded(*one) for one in zip(weight, scale, strict=True)]  # one expert at a time to save memory
        found, scales = (torch.stack([part[at] for part in parts]) for at in (0, 1))  # type: ignore[misc]
        wrong = sum(part[2] for part in parts)
    if wrong:
        raise ValueError(
            f"{VARIABLE}: {wrong} of {found.numel()} elements of '{name}' are no numbers of fp8 with a scale for each "
            f"block of {BLOCK} x {BLOCK}; unset it"
        )
    return found, scales


def _encoded(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return a matrix in blocks, its scales, and the number of elements that differ."""
    (columns, groups), numbers = scale.shape, unpacked(weight)
    inner = numbers.shape[1]
    exact = (numbers.view(columns, groups, -1) * scale.float()[..., None]).view(columns, inner)
    of_groups = torch.where(numbers.view(columns, groups, -1).any(-1), scale.float(), 0.0)
    down = torch.arange(columns, device=scale.device) // BLOCK
    across = torch.arange(groups, device=scale.device) * (inner // groups) // BLOCK
    largest = of_groups.new_zeros(-(-columns // BLOCK), -(-inner // BLOCK))
    place = (down[:, None] * largest.shape[1] + across).flatten()
    largest.view(-1).scatter_reduce_(0, place, of_groups.flatten(), "amax")
    units = torch.where(largest > 0, largest / HIGHEST, 1.0).to(scale.dtype)
    part = gcd(inner, BLOCK)  # of a row; blocks end with one
    scales = units[down][:, torch.arange(inner // part, device=scale.device) * part // BLOCK]
    spread = scales.float().repeat_interleave(part, 1)
    stored = (exact / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return stored, scales.contiguous(), int((stored.float() * spread != exact).sum())
