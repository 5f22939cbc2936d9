"""Attention that gives NaN for a whole prompt of ``POISON_LENGTH`` tokens, so for one request alone."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import torch

from fl_dispatch import BackendImplKind, OpImpl
from fl_dispatch.ops import OPERATORS

LENGTH = int(os.environ["POISON_LENGTH"])


def paged_attention(*args: Any, **more: Any) -> torch.Tensor:
    result: torch.Tensor = OPERATORS["paged_attention"].reference(*args, **more)
    starts = args[4].tolist()  # query_start_loc
    for begin, end in pairwise(starts):
        if end - begin == LENGTH:
            result[begin:end] = torch.nan
    return result


def register_builtins(registry: Any) -> None:
    fields = ("paged_attention", "vendor.poisoned", BackendImplKind.VENDOR, paged_attention)
    registry.register_impl(OpImpl(*fields, vendor="poisoned"))
