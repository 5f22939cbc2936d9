"""A quantized KV cache: what an engine with one should compute, whoever the host is, and what it must not.

Right is Hugging Face's network whose keys and values are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quantized_checkpoints as checkpoints
from fl_dispatch.cli import small_model
from quantized_checkpoints import CACHE_SCALES, CACHE_SCHEME, SCHEMES, Scheme
from quantized_network import (
    Computed,
    computed,
    distance,
    is_as_near,
    network,
    scores,
    with_fp8_cache,
    with_int8_cache,
)

OPERATORS = ("kv_cache_write", "paged_attention")
ONES = ((1.0, 1.0),) * len(CACHE_SCALES)
Scales = Sequence[tuple[float, float]]


@dataclass(frozen=True, eq=False)
class Cache:
    """A checkpoint that is served with such a cache.

    Args:
        scheme: the checkpoint's; ``None`` for one that is not quantized.
        owner: the module of a layer that has the scales in the checkpoint, if any; ``{}`` is ``k`` or ``v``.
        int8: whether the cache is in int8, with a scale for each token and head; else it is in fp8.
    """

    scheme: Scheme | None = None
    owner: str = ""
    int8: bool = False

    @property
    def scales(self) -> Scales:
        return CACHE_SCALES if self.owner else ONES

    def checkpoint(self, folder: Path) -> Path:
        """The checkpoint, written into a folder that is not there yet unless it is the package's own."""
        if self.scheme is None:
            return small_model.CHECKPOINT
        return checkpoints.write_checkpoint(folder, self.scheme, self.owner)

    def right(self, scales: Scales, dtype: torch.dtype = torch.float32) -> Any:
        """Hugging Face's network with such a cache, in fp8 of these scales."""
        made = network(self.scheme, dtype=dtype)
        return with_int8_cache(made) if self.int8 else with_fp8_cache(made, scales)

    def computed(self, texts: Sequence[Sequence[int]]) -> Computed:
        """That network's answers with the checkpoint's scales."""
        return computed(self.right(self.scales), texts)

    def distances_of_others(self, texts: Sequence[Sequence[int]], got: Tensor) -> Mapping[str, float]:
        """An engine's distances from networks with other caches."""
        others = {"not quantized": network(self.scheme)}
        if self.int8:
            others["fp8"] = with_fp8_cache(network(self.scheme), ONES)
            others["numbers up to 120"] = with_int8_cache(network(self.scheme), 120)
        else:
            others["scales of 2"] = self.right(((2.0, 2.0),) * len(CACHE_SCALES))
        if self.owner:
            others["keys' and values' exchanged"] = self.right(tuple((v, k) for k, v in self.scales))
            others["scales of the layer before"] = self.right((self.scales[-1], *self.scales[:-1]))
        return {name: distance(got, scores(made, texts)) for name, made in others.items()}

    def is_as_near_in_bfloat16(self, texts: Sequence[Sequence[int]], got: Tensor) -> bool:
        """Whether an engine in bfloat16 is about as near to the network in float32 as Hugging Face's in bfloat16.

        It must also be nearer to it than to the network that rounds no keys and values; int8 rounds them by about as
        little as bfloat16 does, so it tells nothing there.
        """
        exact, half = self.computed(texts).scores, scores(self.right(self.scales, torch.bfloat16), texts)
        told_apart = self.int8 or distance(got, exact) < distance(got, scores(network(self.scheme), texts))
        return is_as_near(got, exact, half) and told_apart


PLAIN = Cache()
INT8 = Cache(int8=True)
_COMPRESSED = SCHEMES["compressed-tensors W4A16"]
COMPRESSED = Cache(
    Scheme({**_COMPRESSED.config, "kv_cache_scheme": CACHE_SCHEME}, _COMPRESSED.write, _COMPRESSED.layer), "self_attn"
)
"""A ``compressed-tensors`` checkpoint that asks for the cache."""
HOSTS_NAMES = Cache(COMPRESSED.scheme, "self_attn.attn")
"""The same checkpoint with the scales' names in hosts' own models."""
FP8 = Cache(SCHEMES["fp8"], "self_attn.{}_proj")
"""An ``fp8`` checkpoint that has scales for one."""
