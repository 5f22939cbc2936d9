"""Square blocks of merged weights with parts that are not a whole number of blocks.

A checkpoint quantizes ``q_proj``, ``k_proj`` and ``v_proj`` separately, so the last block of each part may be short.
Hosts merge the parts, and count blocks from the first row of the first part. Here every row gets its block's scale
while the checkpoint is loaded, so a host divides scales as it divides the weight. Then each part is padded to whole
blocks with rows of zeros, and their products are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...logger_manager import get_logger

logger = get_logger(__name__)


def are_whole(parts: Sequence[int], block: int, divided: bool) -> bool:
    """Whether each part begins with a new block, and ranks divide it at block boundaries.

    Args:
        parts: rows of each part of a weight on this rank.
        block: rows of a block.
        divided: whether other ranks have other rows of these parts.
    """
    return not any(size % block for size in (parts if divided else parts[:-1]))


def indivisible(inner: int, all_inner: int, block: int) -> str:
    """Return why a rank's share of a weight's rows is not a whole number of blocks; empty if it is.

    Args:
        inner: elements of a row on this rank.
        all_inner: elements of a row on all ranks.
        block: elements of a block's row.
    """
    if inner == all_inner or inner % block == 0:
        return ""
    return f"rows of {inner} elements on a rank, which are no whole blocks of {block}, in fp8 (use fewer ranks)"


def loads_rows(loader: Callable[..., Any], block: int) -> Callable[..., Any]:
    """Wrap a host's loader for scales of rows so that it takes scales of blocks of rows."""

    def load(parameter: Any, loaded: Tensor, *args: Any, **named: Any) -> Any:
        return loader(parameter, loaded.repeat_interleave(block, 0), *args, **named)

    return load


def of_rows(scales: Tensor, parts: Sequence[int], block: int) -> Tensor | None:
    """Return scales of rows as scales of the blocks of each part; ``None`` if rows of a block differ.

    Args:
        scales: ``[rows, groups]``.
        parts: rows of each part.
        block: rows of a block.

    Returns:
        ``[sum of ceil(part / block), groups]``.
    """
    each = torch.split(scales, list(parts))
    found = torch.cat([part[::block] for part in each])
    counts = torch.tensor([min(block, size - row) for size in parts for row in range(0, size, block)])
    spread = found.repeat_interleave(counts.to(scales.device), 0)
    return found if torch.equal(spread, scales) else None


def padded(rows: Tensor, parts: Sequence[int], block: int, dim: int = 0) -> Tensor:
    """Pad a tensor's parts along a dimension with zeros to whole blocks."""
    behind = (0, 0) * (rows.dim() - 1 - dim)
    # A cast, because not every device can pad or join fp8.
    values = rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows
    filled = [
        functional.pad(part, (*behind, 0, -part.shape[dim] % block)) for part in torch.split(values, list(parts), dim)
    ]
    return torch.cat(filled, dim).view(rows.dtype)


def without_padding(columns: Tensor, parts: Sequence[int], block: int) -> Tensor:
    """Return the columns of a product with a weight that was :func:`padded`, without the padding."""
    found = torch.split(columns, [size + -size % block for size in parts], -1)
    return torch.cat([part[..., :size] for part, size in zip(found, parts, strict=True)], -1)


def warn_of_powers_of_two(config: Mapping[str, Any]) -> None:
    """Log one WARNING per process if a checkpoint's model was trained with input scales that are powers of two."""
    if config.get("scale_fmt") == "ue8m0" and config.get("weight_block_size"):
        _warn_of_powers_of_two()


@cache
def _warn_of_powers_of_two() -> None:
    logger.warning(
        "'scale_fmt': 'ue8m0' says that scales of inputs were powers of two when the model was made; here they are not "
        "rounded up to such, as in Hugging Face's network, so inputs are nearer to what they were and answers may "
        "differ a little from those of other software (docs/guide/quantization.md)"
    )
