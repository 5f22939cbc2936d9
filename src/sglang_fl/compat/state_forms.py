"""SGLang's Triton kernels beside a layer with a state, in PyTorch, where no Triton kernels of SGLang's are started.

Also its choice how the prefix cache remembers states: at the ends of prompts and answers, because in the midst of a
prompt its own kernels alone put a state aside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fl_dispatch.devices import detect_device

from .native_kernels import start_triton

STATES = "layers with a state for each request"


def remembers_within(original: Callable[..., bool], view: Any, hf_config: Any) -> bool:
    """Whether the prefix cache remembers states within a prompt (SGLang's strategy ``extra_buffer``): never.

    Raises:
        ValueError: such a model is asked for on an accelerator. SGLang would end for its cache's pages before we are
            asked about the model.
    """
    device = detect_device()
    if device.accelerator:
        raise ValueError(f"sglang_fl does not support {STATES} on {device.name} yet")
    return False


def keep_model_type(dtype: torch.dtype) -> None:
    """Let convolutions keep their last inputs as the model computes them, where the user chose no type for them.

    SGLang keeps them in bfloat16 whatever the model's type is.
    """
    from sglang.srt.environ import envs

    if not envs.SGLANG_MAMBA_CONV_DTYPE.is_set():
        envs.SGLANG_MAMBA_CONV_DTYPE.set(str(dtype).removeprefix("torch."))


KERNELS = ("causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_fn_triton", "causal_conv1d_update_triton")
"""Names of SGLang's module of Mamba 2 that it has on its own devices alone, and its module of Mamba 1 imports."""


def name_kernels() -> None:
    """Let SGLang import its models with Mamba 1. Their layers call none of these names: their forward is ours."""
    from sglang.srt.layers.attention.mamba import mamba

    for name in KERNELS:
        vars(mamba).setdefault(name, None)


def split_groups(
    original: Callable[..., Any],
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort projections that have the parts of each head of keys together.

    Returns:
        Queries, keys and values ``[tokens, channels]``, the norm's gate ``[tokens, heads_v, head_v]``, and the gates of
        the delta rule ``[tokens, heads_v]``: how much is written, and how much decays.
    """
    if start_triton():
        return original(mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v)
    of_value = num_heads_v // num_heads_qk
    parts = mixed_qkvz.unflatten(1, (num_heads_qk, -1)).split((head_qk, head_qk, *2 * (of_value * head_v,)), dim=2)
    query, key, value, z = (part.flatten(1) for part in parts)
    b, a = (part.flatten(1) for part in mixed_ba.unflatten(1, (num_heads_qk, 2, of_value)).unbind(2))
    return torch.cat((query, key, value), dim=1), z.unflatten(1, (num_heads_v, head_v)), b, a


def split_parts(
    original: Callable[..., Any],
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`split_groups` where the projections have one part after the other."""
    if start_triton():
        return original(mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v)
    values = num_heads_v * head_v
    mixed_qkv, z = mixed_qkvz.split((mixed_qkvz.shape[1] - values, values), dim=1)
    b, a = mixed_ba.chunk(2, dim=1)
    return mixed_qkv, z.unflatten(1, (num_heads_v, head_v)), b, a


def gate_attention(
    original: Callable[..., Any], attn_output: Tensor, gate: Tensor, inplace: bool = False, quant: bool = False
) -> Any:
    """The product of attention's output and the sigmoid of a gate; a quantized one is SGLang's alone."""
    if start_triton() or quant:
        return original(attn_output, gate, inplace, quant)
    product = attn_output * gate.reshape(attn_output.shape).sigmoid()
    return attn_output.copy_(product) if inplace else product


def gate_shared(original: Callable[..., Tensor], hidden_states: Tensor, gate_weight: Tensor, shared: Tensor) -> Tensor:
    """The output of shared experts times the sigmoid of their gate."""
    if start_triton():
        return original(hidden_states, gate_weight, shared)
    return shared * (hidden_states @ gate_weight)[:, None].sigmoid()


def add_gated_shared(
    original: Callable[..., None], hidden_states: Tensor, gate_weight: Tensor, shared: Tensor, total: Tensor
) -> None:
    """Add what :func:`gate_shared` gives to the output of the other experts."""
    if start_triton():
        original(hidden_states, gate_weight, shared, total)
    else:
        total.add_(shared * (hidden_states @ gate_weight)[:, None].sigmoid())
