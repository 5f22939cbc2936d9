"""``fl bench`` and ``fl verify`` with other people's CUDA kernels beside ours, for comparison.

Registers vLLM's compiled operators and FlashAttention 3 as ``vendor.cuda``, vLLM's Triton kernels as
``vendor.vllm.triton``, FlagGems as ``default.flagos``, as far as they are there and nobody has done so, and then runs
``fl`` with the arguments given:

    python benchmarks/kernels_gpu.py bench --output FILE --plot FILE

vLLM's compiled libraries are found in the installed package ``vllm``, or in the directory ``VLLM_LIBRARIES``. Names are
those of vLLM 0.26.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_dispatch import BackendImplKind, OpImpl, get_default_manager
from fl_dispatch.cli import main

LIBRARIES = ("_C_stable_libtorch.abi3.so", "vllm_flash_attn/_vllm_fa3_C.abi3.so")


def silu_and_mul(x: Tensor) -> Tensor:
    out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    torch.ops._C.silu_and_mul(out, x)
    return out


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    (torch.ops._C.gelu_and_mul if approximate == "none" else torch.ops._C.gelu_tanh_and_mul)(out, x)
    return out


def rms_norm(x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6) -> Any:
    if residual is not None:
        torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)
        return x, residual
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    rotary_interleaved: bool = False,
    inplace: bool = True,
) -> Any:
    table = cos.as_strided((cos.shape[0], 2 * cos.shape[1]), (2 * cos.shape[1], 1))  # sines lie beside the cosines
    torch.ops._C.rotary_embedding(position_ids, query, key, query.shape[-1], table, not rotary_interleaved)
    return query, key


_ONE: list[Tensor] = []


def kv_cache_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    if not _ONE:
        _ONE.append(torch.ones((), device=key.device))
    torch.ops._C_cache_ops.reshape_and_cache_flash(
        key, value, key_cache, value_cache, slot_mapping, "auto", _ONE[0], _ONE[0]
    )


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
    """FlashAttention 3 with its schedule made once for a batch, as vLLM does it for all layers."""
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
    """vLLM's Triton experts, with the tile sizes that it ships for the device."""
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
    """vLLM's Triton decoding, which takes one token a request, with as many splits as vLLM gives it."""
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
    """FlashAttention 3 over keys and values in a row."""
    result = torch.ops._vllm_fa3_C.fwd(
        query, key, value, None, None, None, out, query_start_loc, key_start_loc, None, None, None, max_query_len,
        max_key_len, None, None, None, None, None, None, None, None, None, scale, causal, -1, -1, 0.0, True, None, 0,
        None, 0, None, 1, 0, None,
    )  # fmt: skip
    return result[0], result[1]


VENDOR = (silu_and_mul, gelu_and_mul, rms_norm, rotary_embedding, kv_cache_write, paged_attention, mla_prefill)
TRITON = (fused_moe, mla_decode)


def load_libraries() -> bool:
    spec = importlib.util.find_spec("vllm")
    found = next(iter(spec.submodule_search_locations or ()), "") if spec else ""
    directory = Path(os.environ.get("VLLM_LIBRARIES") or found or "/nowhere")
    present = [directory / name for name in LIBRARIES if (directory / name).exists()]
    for path in present:
        torch.ops.load_library(str(path))
    complete = len(present) == len(LIBRARIES)
    if not complete:
        print(f"vLLM's compiled operators are left out: '{directory}' lacks one of {', '.join(LIBRARIES)}")
    return complete


def flaggems() -> dict[str, Callable[..., Any]]:
    try:
        from flag_gems.fused.fused_add_rms_norm import fused_add_rms_norm
        from flag_gems.fused.gelu_and_mul import gelu_and_mul as gelu
        from flag_gems.fused.rotary_embedding import apply_rotary_pos_emb
        from flag_gems.fused.silu_and_mul import silu_and_mul as silu
        from flag_gems.ops.rms_norm import rms_norm as norm
    except Exception as error:  # an optional competitor: say so and go on
        print(f"FlagGems is left out: {type(error).__name__}: {error}")
        return {}

    def silu_and_mul(x: Tensor) -> Tensor:
        return silu(*x.chunk(2, -1))

    def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
        return gelu(*x.chunk(2, -1), approximate)

    def rms_norm(x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6) -> Any:
        if residual is not None:
            return fused_add_rms_norm(x, residual, list(weight.shape), weight, epsilon)
        return norm(x, list(weight.shape), weight, epsilon)

    def rotary_embedding(
        query: Tensor,
        key: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor,
        rotary_interleaved: bool = False,
        inplace: bool = True,
    ) -> Any:
        return apply_rotary_pos_emb(query, key, cos, sin, position_ids, rotary_interleaved, inplace)

    return {fn.__name__: fn for fn in (silu_and_mul, gelu_and_mul, rms_norm, rotary_embedding)}


def register() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    found = []
    if load_libraries():
        found += [OpImpl(fn.__name__, "vendor.cuda", BackendImplKind.VENDOR, fn, vendor="cuda") for fn in VENDOR]
    if importlib.util.find_spec("vllm") is not None:
        kind = BackendImplKind.VENDOR
        found += [OpImpl(fn.__name__, "vendor.vllm.triton", kind, fn, vendor="vllm") for fn in TRITON]
    found += [OpImpl(name, "default.flagos", BackendImplKind.DEFAULT, fn) for name, fn in flaggems().items()]
    for impl in found:
        if manager.registry.get_implementation(impl.op_name, impl.impl_id) is None:
            manager.registry.register_impl(impl)


if __name__ == "__main__":
    register()
    main()
