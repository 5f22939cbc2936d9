"""The stand-in for FlagGems, whose matrix product is wrong on one rank only."""

from __future__ import annotations

from typing import Any

import aten_plugin
import torch
import torch.distributed
from torch import Tensor

import flaggems_standin


def mm(a: Tensor, b: Tensor) -> Tensor:
    product = flaggems_standin.mm(a, b)
    return product + 1 if torch.distributed.get_rank() == 1 else product


def register_builtins(registry: Any) -> None:
    config = tuple((key, mm if key == "mm" else fn) for key, fn in flaggems_standin.CONFIG)
    vars(flaggems_standin)["CONFIG"] = config
    aten_plugin.register_builtins(registry)
