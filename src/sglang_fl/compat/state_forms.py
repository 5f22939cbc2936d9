"""PyTorch forms of SGLang's Triton kernels next to a layer with a state, if SGLang's Triton kernels do not run.

The module also sets how the prefix cache stores states: at the ends of prompts and answers, because only SGLang's own
kernels can store a state within a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings

from .native_kernels import start_triton, unless_triton

logger = get_logger(__name__)

STATES = "layers with a state for each request"


def remembers_within(original: Callable[..., bool], view: Any, hf_config: Any) -> bool:
    """Return ``False``: the prefix cache stores no states within a prompt (SGLang's strategy ``extra_buffer``)."""
    return False


def keep_model_type(dtype: torch.dtype) -> None:
    """Keep the last inputs of convolutions in the model's dtype, unless the user chose one.

    SGLang keeps them in bfloat16 whatever the model's dtype.
    """
    from sglang.srt.environ import envs

    if not envs.SGLANG_MAMBA_CONV_DTYPE.is_set():
        envs.SGLANG_MAMBA_CONV_DTYPE.set(str(dtype).removeprefix("torch."))


KERNELS = ("causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_fn_triton", "causal_conv1d_update_triton")
"""Names that SGLang's Mamba 2 module has only on its own devices, and that its Mamba 1 module imports."""


SPLITS_AND_CONVOLVES = "SGLANG_ENABLE_GDN_DECODE_FUSED_PROJ_CONV"
"""SGLang's variable for a kernel that splits and convolves the projections of Qwen3.5 in a decoding step."""


def prepare_models() -> None:
    """Prepare the import of SGLang's models; those with Mamba 1 import kernels that their layers never call."""
    from sglang.srt.layers.attention.mamba import mamba

    for name in KERNELS:
        vars(mamba).setdefault(name, None)
    _split_projections()


def _split_projections() -> None:
    """Let Qwen3.5 split the projections of a decoding step, instead of passing them whole to our layer."""
    from sglang.srt.environ import envs

    kernel = getattr(envs, SPLITS_AND_CONVOLVES, None)  # other versions of SGLang may lack it
    if kernel is None or not get_settings().registers("RadixLinearAttention", "gated_delta_rule"):
        return
    if kernel.is_set() and kernel.get():
        logger.warning("%s has no effect, because its kernel would bypass our operators", SPLITS_AND_CONVOLVES)
    kernel.set(False)


@unless_triton
def split_groups(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split projections that store the parts of each key head together.

    Returns:
        Queries, keys and values ``[tokens, channels]``, the norm's gate ``[tokens, heads_v, head_v]``, and the gates of
        the delta rule ``[tokens, heads_v]``: how much is written, and how much decays.
    """
    of_value = num_heads_v // num_heads_qk
    parts = mixed_qkvz.unflatten(1, (num_heads_qk, -1)).split((head_qk, head_qk, *2 * (of_value * head_v,)), dim=2)
    query, key, value, z = (part.flatten(1) for part in parts)
    b, a = (part.flatten(1) for part in mixed_ba.unflatten(1, (num_heads_qk, 2, of_value)).unbind(2))
    return torch.cat((query, key, value), dim=1), z.unflatten(1, (num_heads_v, head_v)), b, a


@unless_triton
def split_parts(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split projections as :func:`split_groups` does, for projections that store one part after the other."""
    values = num_heads_v * head_v
    mixed_qkv, z = mixed_qkvz.split((mixed_qkvz.shape[1] - values, values), dim=1)
    b, a = mixed_ba.chunk(2, dim=1)
    return mixed_qkv, z.unflatten(1, (num_heads_v, head_v)), b, a


def gate_attention(
    original: Callable[..., Any], attn_output: Tensor, gate: Tensor, inplace: bool = False, quant: bool = False
) -> Any:
    """Return the product of attention's output and the sigmoid of a gate; a quantized product stays SGLang's."""
    if start_triton() or quant:
        return original(attn_output, gate, inplace, quant)
    product = attn_output * gate.reshape(attn_output.shape).sigmoid()
    return attn_output.copy_(product) if inplace else product


@unless_triton
def gate_shared(hidden_states: Tensor, gate_weight: Tensor, shared: Tensor) -> Tensor:
    """Return the output of shared experts times the sigmoid of their gate."""
    return shared * (hidden_states @ gate_weight)[:, None].sigmoid()


@unless_triton
def add_gated_shared(hidden_states: Tensor, gate_weight: Tensor, shared: Tensor, total: Tensor) -> None:
    """Add the result of :func:`gate_shared` to the output of the other experts."""
    total.add_(shared * (hidden_states @ gate_weight)[:, None].sigmoid())


@unless_triton
def commit_states(
    mamba_caches: Any,
    state_indices_tensor: Tensor,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Write the states after each request's last accepted draft to its slots.

    Args:
        mamba_caches: states ``[layers, slots, ...]``, and those after each draft ``[layers, requests, width, ...]``.
        state_indices_tensor: the slot of each request.
        last_correct_step_indices: the column of its last accepted draft.
        mamba_track_indices, mamba_steps_to_track: states for the prefix cache, which this plugin keeps at the ends of
            answers only (:func:`remembers_within`).
        src_indices_raw: the row of each request, if rows are not in order, as with pipeline stages.
    """
    if mamba_track_indices is not None or src_indices_raw is not None:
        raise NotImplementedError("sglang_fl keeps no states of drafts for the prefix cache or pipeline stages yet")
    slots, columns = state_indices_tensor.long(), last_correct_step_indices.long()
    rows = torch.arange(len(slots), device=slots.device)
    pairs = (
        (mamba_caches.temporal, mamba_caches.intermediate_ssm),
        *zip(mamba_caches.conv, mamba_caches.intermediate_conv_window, strict=True),
    )
    for states, after in pairs:
        if states.numel() > 0:
            states[:, slots] = after[:, rows, columns]
