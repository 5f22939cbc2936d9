"""Ragged rows: the request of each token in a flat batch, without reading their number from the device.

On an accelerator a form reads no tensor on the host, because the host would wait for the device in each step. In main
memory there is no such wait, and unneeded rows are skipped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """A flat batch, token by token.

    Args:
        request: int64, the request of each token; the last one's number for tokens after the end.
        offset: int64, the token's index within its request.
        inside: bool, whether the token is before the end.
    """

    request: Tensor
    offset: Tensor
    inside: Tensor


def rows_of(start_loc: Tensor, requests: int, tokens: int) -> Rows:
    """Return the requests of ``tokens`` flat tokens.

    Args:
        start_loc: int, ``[>= requests + 1]``: the first token of each request, then the end.
        requests: the number of requests, at least one.
        tokens: length of the flat batch, which may exceed the requests' tokens.
    """
    starts = start_loc[: requests + 1].to(torch.int64)
    token = torch.arange(tokens, device=start_loc.device)
    found = torch.bucketize(token, starts[1:], right=True)
    request = found.clamp(max=requests - 1)
    return Rows(request, token - take(starts, request), found < requests)


def take(values: Tensor, index: Tensor) -> Tensor:
    """Return ``values[index]`` for int64 indices of the first dimension, faster on a CPU."""
    return values.index_select(0, index)


def put(target: Tensor, index: Tensor, values: Tensor, written: Tensor) -> None:
    """Write elements of a tensor of integers where ``written`` is true.

    Args:
        target: contiguous; overwritten.
        index: int64, flat places in ``target``; written places are distinct, others may be any numbers.
        values, written: broadcast to the shape of ``index``; ``written`` is bool.
    """
    place = torch.where(written, index, 0).flatten()
    change = torch.where(written, values.to(target.dtype) - take(flat(target), place).view_as(index), 0)
    flat(target).index_add_(0, place, change.flatten())


def candidate_rows(mask: Tensor) -> Tensor:
    """Return the true places of a bool tensor ``[rows]`` in main memory; all places on an accelerator."""
    if mask.get_device() < 0:
        return mask.nonzero()[:, 0]
    return torch.arange(len(mask), device=mask.device)


def flat(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as one dimension, sharing its memory."""
    return tensor.view(-1)
