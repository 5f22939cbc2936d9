"""``fl bench`` and ``fl verify`` with additional kernels for comparison.

The program registers these kernels, if available, and then runs ``fl`` with its arguments:

- ``vendor.vllm.fa3``: FlashAttention 3 as called by vLLM, with one schedule for all layers, or over contiguous keys;
- ``vendor.vllm.triton``: vLLM's Triton kernels;
- ``vendor.flaggems.mm``: FlagGems' matrix product, which first tunes itself for every size;
- ``vendor.torch.inductor``: references of operators that move bytes, compiled by Inductor for each shape.

    python benchmarks/kernels_gpu.py bench --json FILE --plot FILE

The code uses names of vLLM 0.26, and for layers with a state those of 0.32 and 0.33. vLLM's other compiled operators
and FlagGems already have backends: ``vendor.cuda`` and ``default.flagos``.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from fl_dispatch import BackendImplKind, OpImpl, get_default_manager
from fl_dispatch.backends.vendor.cuda import library
from fl_dispatch.cli import main

_ONE: list[Tensor] = []


_schedules: dict[tuple[int, ...], Tensor] = {}


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    out: Tensor | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """FlashAttention 3 with one schedule per batch, which vLLM shares among all layers."""
    if query.dtype is torch.float32:
        raise NotImplementedError("FlashAttention 3 has no float32")
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
    batch = (seq_lens.data_ptr(), len(seq_lens), max_query_len, max_seq_len)
    schedule = _schedules.get(batch)
    if schedule is None and not torch.cuda.is_current_stream_capturing():
        schedule = torch.ops._vllm_fa3_C.get_scheduler_metadata(
            len(seq_lens), max_query_len, max_seq_len, query.shape[1], key_cache.shape[2], query.shape[2],
            value_cache.shape[3], query.dtype, seq_lens, query_start_loc, None, None, None, None, key_cache.shape[1],
            0, causal, *window, softcap > 0, 0, None, 0,
        )  # fmt: skip
        _schedules[batch] = schedule
    result: Tensor = torch.ops._vllm_fa3_C.fwd(
        query, key_cache, value_cache, None, None, None, out, query_start_loc, None, None, None, seq_lens,
        max_query_len, max_seq_len, block_table, None, None, None, None, None, None, None, None, scale, causal,
        *window, softcap, True, schedule, 0, None, 0, None, 1, 0, None,
    )[0]  # fmt: skip
    return result


def fused_moe(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
) -> Tensor:
    """vLLM's Triton experts, with the tile sizes that vLLM ships for the device."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts_impl

    result: Tensor = fused_experts_impl(
        hidden_states, w13, w2, topk_weights, topk_ids, activation, apply_router_weight_on_input
    )
    return result


def mla_decode(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    kv_lora_rank: int,
    out: Tensor | None = None,
) -> Tensor:
    """vLLM's Triton decode kernel for one token per request, with vLLM's number of splits."""
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    requests, heads, _ = query.shape
    if out is None:
        out = query.new_empty((requests, heads, kv_lora_rank))
    if not _ONE:
        _ONE.append(torch.ones((), device=query.device))
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    splits = min(1 << max(0, max_seq_len // 512 - 1).bit_length(), 2 * processors)
    logits = query.new_empty((requests, heads, splits, kv_lora_rank + 1), dtype=torch.float32)
    cache = kv_cache.unsqueeze(2)
    decode_attention_fwd(
        query, cache, cache[..., :kv_lora_rank], out, query.new_empty((requests, heads)), block_table, seq_lens, logits,
        splits, scale, kv_cache.shape[1], k_scale=_ONE[0], v_scale=_ONE[0], is_mla=True,
    )  # fmt: skip
    return out


def mla_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    max_query_len: int,
    max_key_len: int,
    scale: float,
    out: Tensor | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """FlashAttention 3 over contiguous keys and values."""
    result = torch.ops._vllm_fa3_C.fwd(
        query, key, value, None, None, None, out, query_start_loc, key_start_loc, None, None, None, max_query_len,
        max_key_len, None, None, None, None, None, None, None, None, None, scale, causal, -1, -1, 0.0, True, None, 0,
        None, 0, None, 1, 0, None,
    )  # fmt: skip
    return result[0], result[1]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """FlagGems' matrix product."""
    import flag_gems

    if bias is not None:
        raise NotImplementedError("a bias is another operator of FlagGems'")
    result: Tensor = flag_gems.mm(x, weight.t())
    return result


_programs: dict[tuple[int, int, int], Any] = {}


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    has_state: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """vLLM's Triton convolution of prompts, with one list of programs per batch, which all layers share."""
    from vllm.model_executor.layers.mamba.ops import causal_conv1d as ops
    from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

    batch = (query_start_loc.data_ptr(), len(state_indices), len(x))
    if batch not in _programs:
        made = compute_causal_conv1d_metadata(query_start_loc.cpu(), device=x.device)
        names = ("nums_dict", "batch_ptr", "token_chunk_offset_ptr")
        _programs[batch] = SimpleNamespace(**dict(zip(names, made, strict=True)))
    result: Tensor = ops.causal_conv1d_fn(
        x.t(), weight, bias, states, query_start_loc, state_indices, has_state,
        None if activation == "none" else activation, metadata=_programs[batch],
    )  # fmt: skip
    return result.t()


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    state_indices: Tensor,
    activation: str = "silu",
) -> Tensor:
    """vLLM's Triton convolution of single tokens, with ``out`` because it would overwrite ``x`` otherwise."""
    from vllm.model_executor.layers.mamba.ops import causal_conv1d as ops

    kind, out = None if activation == "none" else activation, torch.empty_like(x)
    result: Tensor = ops.causal_conv1d_update(x, states, weight, bias, kind, conv_state_indices=state_indices, out=out)
    return result


def _packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return query, key and value as parts of one product, as in layers and in benchmark shapes."""
    width = query.shape[1:].numel() + key.shape[1:].numel() + value.shape[1:].numel()
    if query.stride(0) != width:
        return torch.cat([part.flatten(1) for part in (query, key, value)], dim=1)
    return query.as_strided((len(query), width), (width, 1))


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    has_state: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """vLLM's Triton kernels for prompts, which read copies of the states and return new ones."""
    from vllm.third_party.flash_linear_attention.ops import chunk_gated_delta_rule, fused_post_conv_prep

    _, key_heads, dim = key.shape
    rows = fused_post_conv_prep(_packed(query, key, value), a, b, a_log, dt_bias, key_heads, dim, value.shape[2])
    own = states.transpose(2, 3)
    first = own[state_indices]
    if has_state is not None:
        first[~has_state, ...] = 0
    out, last = chunk_gated_delta_rule(
        *(part[None] for part in rows), scale=scale, initial_state=first, output_final_state=True,
        cu_seqlens=query_start_loc,
    )  # fmt: skip
    own[state_indices] = last.to(own.dtype)
    result: Tensor = out[0]
    return result


def gated_delta_rule_update(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    state_indices: Tensor,
    scale: float = 1.0,
) -> Tensor:
    """vLLM's Triton kernel for single tokens, which skips requests with slot 0."""
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent_gated_delta_rule_packed_decode

    out = value.new_empty(len(value), 1, *value.shape[1:])
    fused_recurrent_gated_delta_rule_packed_decode(
        _packed(query, key, value), a, b, a_log, dt_bias, scale, states.transpose(2, 3), out, state_indices, True
    )
    return out[:, 0]


FLASH_ATTENTION: tuple[Callable[..., Any], ...] = (paged_attention, mla_prefill)
STATES: tuple[Callable[..., Any], ...] = (
    causal_conv1d,
    causal_conv1d_update,
    gated_delta_rule,
    gated_delta_rule_update,
)
TRITON: tuple[Callable[..., Any], ...] = (fused_moe, mla_decode, *STATES)
PRODUCTS: tuple[Callable[..., Any], ...] = (linear,)
MOVE_BYTES = ("silu_and_mul", "gelu_and_mul", "rms_norm", "gemma_rms_norm", "rotary_embedding")


def inductor(op_name: str) -> Callable[..., Any]:
    """Return the operator's reference, compiled by Inductor for each shape.

    Results are new tensors instead of overwritten arguments, which moves the same number of bytes. Query and key are
    parts of one tensor, and compiled code that overwrites parts assumes one form of the whole without a check.
    """
    reference = get_default_manager().registry.get_implementation(op_name, "reference.torch").fn
    compiled = torch.compile(reference, dynamic=False, fullgraph=True)

    signature = inspect.signature(reference)

    @functools.wraps(reference)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        return compiled(**{name: False if name == "inplace" else value for name, value in given.items()})

    return run


def register() -> None:
    """Register the available kernels."""
    manager = get_default_manager()
    manager.ensure_initialized()
    found: dict[str, tuple[Callable[..., Any], ...]] = {}
    if why := library.why_unavailable(library.ATTENTION):
        print(f"vendor.vllm.fa3 is left out: {why}")
    else:
        found["vendor.vllm.fa3"] = FLASH_ATTENTION
    if importlib.util.find_spec("vllm") is None:
        print("vendor.vllm.triton is left out: vLLM is not installed")
    else:
        found["vendor.vllm.triton"] = TRITON
    if importlib.util.find_spec("flag_gems") is not None:
        found["vendor.flaggems.mm"] = PRODUCTS
    for impl_id, functions in found.items():
        for fn in functions:
            impl = OpImpl(fn.__name__, impl_id, BackendImplKind.VENDOR, fn, vendor="vllm")
            manager.registry.register_impl(impl)
    torch._dynamo.config.recompile_limit = 1024  # each shape is compiled
    for name in MOVE_BYTES:
        impl = OpImpl(name, "vendor.torch.inductor", BackendImplKind.VENDOR, inductor(name), vendor="torch")
        manager.registry.register_impl(impl)


if __name__ == "__main__":
    register()
    main()
