"""SGLang's own kernels for the device, and its graph runner, together with our operators.

On a device that SGLang supports (:attr:`~fl_dispatch.devices.spec.DeviceSpec.host_kernels`) layers without our
operators run SGLang's kernels. On other devices none of these run. SGLang has kernels that fuse several layers; those
that are hooked here are not used if any of their layers is ours, because the operator would silently never be called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from fl_dispatch import bind_op
from fl_dispatch.devices import detect_device
from fl_dispatch.devices.triton import why_unserved
from fl_dispatch.settings import get_settings

from ..host import HOST
from .runtime import ATTENTION, hosts_own_attention

NATIVE_KEY = "fl"
"""Suffix of ``forward_<key>`` methods that no SGLang layer has, so that unbridged layers run their native forward."""


def key() -> str:
    """Return the suffix of the forwards that SGLang's layers run if no operator replaces them."""
    return detect_device().host_kernels.get(HOST.name, NATIVE_KEY)


@cache
def start_triton() -> bool:
    """Whether SGLang's own Triton kernels run."""
    return HOST.name in detect_device().host_kernels and not why_unserved()


def unless_triton(form: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that runs our form of a function of SGLang's if its own Triton kernels do not run."""

    @wraps(form)
    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return (original if start_triton() else form)(*args, **kwargs)

    return run


def capture() -> bool:
    """Whether SGLang's graph runner captures decoding with our operators."""
    device = detect_device()
    return device.graphs and HOST.name in device.host_kernels


def rotate_and_write(original: Callable[[Any], bool], batch: Any) -> bool:
    """Whether SGLang's kernel fuses the rotation and the cache write: only if neither is our operator."""
    ours = get_settings().registers("RotaryEmbedding", "rotary_embedding") or not hosts_own_attention()
    return not ours and bool(original(batch))


def norm_queries_and_keys(original: Callable[..., bool], head_dim: int, dtype: torch.dtype) -> bool:
    """Whether SGLang's kernel fuses the norms of queries and keys: only if norms are not our operators."""
    return not get_settings().registers("RMSNorm", "rms_norm") and bool(original(head_dim, dtype))


def norm_drafters_inputs(
    original: Callable[..., Tensor],
    inputs_embeds: Tensor,
    previous_hidden: Tensor,
    enorm_weight: Tensor,
    hnorm_weight: Tensor,
    eps: float,
) -> Tensor:
    """Return the norms of a predictor's inputs side by side, ``[tokens, 2 * hidden]``.

    SGLang's kernel fuses both norms on NVIDIA GPUs; it runs only if norms are not our operators.
    """
    if not get_settings().registers("RMSNorm", "rms_norm"):
        return original(inputs_embeds, previous_hidden, enorm_weight, hnorm_weight, eps)
    pairs = (inputs_embeds, enorm_weight), (previous_hidden, hnorm_weight)
    return torch.cat([_norm()(x, None, weight, eps) for x, weight in pairs], dim=-1)


@cache
def _norm() -> Callable[..., Any]:
    return bind_op("rms_norm")


def prepare_attention(original: Callable[..., Any], layer: Any, positions: Tensor, hidden_states: Tensor) -> Any:
    """Return queries, keys, values and gate of Qwen3.5: SGLang's kernel norms and rotates unless either is ours."""
    settings = get_settings()
    ours = settings.registers("RotaryEmbedding", "rotary_embedding") or settings.registers(
        "GemmaRMSNorm", "gemma_rms_norm"
    )
    return layer.forward_prepare_native(positions, hidden_states) if ours else original(layer, positions, hidden_states)


def multiply_and_activate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return how SGLang's kernel fuses product and activation; ``None`` for no fusion, if the activation is ours.

    Only Blackwell GPUs have that kernel, but SGLang imports its compiler on all NVIDIA GPUs to find that out.
    """
    return None if get_settings().registers("SiluAndMul", "silu_and_mul") else original(*args, **kwargs)


def supports_triton(original: Callable[[str], bool], backend: str) -> bool:
    """Whether SGLang treats an attention backend as Triton; ours is one if SGLang's Triton kernels run."""
    return (backend != ATTENTION or start_triton()) and bool(original(backend))


@unless_triton
def last_locations(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    """Return the slots of the last tokens in the cache."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices, prefix_lens)


def cap_logits(original: Callable[[Tensor, float], Tensor], logits: Tensor, cap: float) -> Tensor:
    """Return logits with a soft cap, overwritten if no Triton kernel runs."""
    return logits.div_(cap).tanh_().mul_(cap) if why_unserved() else original(logits, cap)
