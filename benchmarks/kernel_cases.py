"""Compile kernels for sm_90 without a GPU, on tensors without memory: attention, experts, products, state spaces.

``kernel_code.py`` runs this file once for each compared tree, with that tree's ``src`` on the path. Operators choose
their kernels as on an H200 with 132 processors; a launch compiles the kernel and does not run it.

    python benchmarks/kernel_cases.py FOLDER [--case TEXT]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from fl_dispatch.backends.triton.impl import hopper, launch
from fl_dispatch.backends.triton.impl.attention import latent_decode, latent_prefill, paged
from fl_dispatch.backends.triton.impl.experts import fused_moe
from fl_dispatch.backends.triton.impl.products import scaled_linear, weight_only_linear
from fl_dispatch.backends.triton.impl.rows import quantization
from fl_dispatch.devices.launcher import Launcher

with contextlib.suppress(ImportError):  # older trees have no cases for it
    from fl_dispatch.backends.triton.impl.attention import cache, index_cache, index_topk, sparse_latent
    from fl_dispatch.backends.triton.impl.experts import quantized_moe
    from fl_dispatch.backends.triton.impl.fusion import quantized_rows, rotary_cache
    from fl_dispatch.backends.triton.impl.products import lora
    from fl_dispatch.backends.triton.impl.rows import activation, gated_norm, normalization, rotary
    from fl_dispatch.backends.triton.impl.states import convolution, delta_rule, state_space

TARGET = GPUTarget("cuda", 90, 32)
H200 = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 << 10, major=9, minor=0)


class CompilingDriver:
    """A replacement for Triton's driver with a target but no device."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of an operator, and whether the kernels for Hopper are offered."""

    name: str
    call: Callable[[], object]
    hopper: bool = True


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _integers(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int32)


def _paged(
    dim: int,
    heads: int,
    kv_heads: int,
    new: int,
    *,
    dim_v: int = 0,
    requests: int = 4,
    block_size: int = 16,
    blocks: int = 1024,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> None:
    paged.paged_attention(
        _empty(new * requests, heads, dim, dtype=dtype),
        _empty(blocks, block_size, kv_heads, dim, dtype=dtype),
        _empty(blocks, block_size, kv_heads, dim_v or dim, dtype=dtype),
        _integers(requests, 256),
        _integers(requests + 1),
        _integers(requests),
        new,
        4096,
        0.1,
        **options,
    )


def _latent(
    heads: int,
    new: int,
    requests: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    stored: torch.dtype | None = None,
    parted: bool = False,
    **options: Any,
) -> None:
    tokens = new * requests
    if parted:
        options["query_rope"] = _empty(tokens, heads, 192, dtype=dtype)[..., 128:]
    latent_decode.mla_decode(
        _empty(tokens, heads, 512 if parted else 576, dtype=dtype),
        _empty(1024, 64, 576, dtype=stored or dtype),
        _integers(requests, 64),
        _integers(requests + 1),
        _integers(requests),
        new,
        4096,
        0.1,
        512,
        **options,
    )


def _latent_prefill(dim: int, dim_v: int, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    query, key, value = (_empty(2048, 16, size, dtype=dtype) for size in (dim, dim, dim_v))
    latent_prefill.mla_prefill(query, key, value, _integers(5), _integers(5), 512, 512, 0.1, **options)


def _indexed(
    new: int, requests: int, context: int, *, stored: torch.dtype = torch.float8_e4m3fn, heads: int = 64
) -> None:
    dim, topk, tokens = 128, 2048, new * requests
    scales = _empty(1024, 64, 1, dtype=WIDE) if stored is FP8 else None
    index_topk.index_topk(
        _empty(tokens, heads, dim),
        _empty(tokens, heads, dtype=WIDE),
        _empty(1024, 64, dim, dtype=stored),
        _integers(requests, context // 64),
        _integers(requests + 1),
        _integers(requests),
        new,
        context,
        topk,
        key_scales=scales,
    )


def _index_keys(tokens: int) -> None:
    slots, scales = _empty(tokens, dtype=torch.int64), _empty(1024, 64, 1, dtype=WIDE)
    index_cache.index_key_write(_empty(tokens, 128), _empty(1024, 64, 128, dtype=FP8), slots, scales)


def _listed(heads: int, tokens: int, requests: int, **options: Any) -> None:
    sparse_latent.mla_sparse(
        _empty(tokens, heads, 512),
        _empty(1024, 64, 576, dtype=options.pop("stored", torch.bfloat16)),
        _integers(tokens, 2048),
        _integers(requests, 64),
        _integers(requests + 1),
        tokens // requests,
        0.1,
        512,
        query_rope=_empty(tokens, heads, 192)[..., 128:],
        **options,
    )


def _experts(tokens: int, *, dtype: torch.dtype = torch.bfloat16, gated: bool = True, **options: Any) -> None:
    experts, hidden, inner, topk = 64, 2048, 1024, 8
    fused_moe.fused_moe(
        _empty(tokens, hidden, dtype=dtype),
        _empty(experts, 2 * inner if gated else inner, hidden, dtype=dtype),
        _empty(experts, hidden, inner, dtype=dtype),
        _empty(tokens, topk, dtype=torch.float32),
        _integers(tokens, topk),
        **options,
    )


def _routed(tokens: int, experts: int) -> tuple[Tensor, Tensor]:
    return _empty(tokens, 8, dtype=WIDE), _integers(tokens, 8)


def _scaled_experts(
    tokens: int, kind: torch.dtype, block: int = 0, *, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> None:
    experts, hidden, inner = 64, 2048, 1024

    def weight(columns: int, width: int) -> tuple[Tensor, Tensor]:
        down, across = (columns // block, width // block) if block else (columns, 1)
        return _empty(experts, columns, width, dtype=kind), _empty(experts, down, across, dtype=WIDE)

    quantized_moe.scaled_moe(
        _empty(tokens, hidden, dtype=dtype),
        *weight(2 * inner, hidden),
        *weight(hidden, inner),
        *_routed(tokens, experts),
        block_size=block,
        **options,
    )


def _packed_experts(tokens: int, bits: int, group: int = 128, *, dtype: torch.dtype = torch.bfloat16) -> None:
    experts, hidden, inner = 64, 2048, 1024

    def weight(columns: int, width: int) -> tuple[Tensor, Tensor]:
        stored, kind = (width // 2, torch.uint8) if bits == 4 else (width, torch.int8)
        return _empty(experts, columns, stored, dtype=kind), _empty(experts, columns, width // group, dtype=dtype)

    zeros = [
        _empty(experts, columns, width // group, dtype=torch.int8) for columns, width in ((2048, 2048), (2048, 1024))
    ]
    quantized_moe.weight_only_moe(
        _empty(tokens, hidden, dtype=dtype),
        *weight(2 * inner, hidden),
        *weight(hidden, inner),
        *_routed(tokens, experts),
        w13_zero=zeros[0] if bits == 4 else None,
        w2_zero=zeros[1] if bits == 4 else None,
    )


def _quantized(rows: int, kind: str, group: int = 0) -> None:
    quantization.quantize(_empty(rows, 4096), kind, group)


def _joined_norm(rows: int, add: bool, group: int = 0, scale: Tensor | None = None) -> None:
    residual = _empty(rows, 4096) if add else None
    quantized_rows.rms_norm_quantize(_empty(rows, 4096), FP8_NAME, residual, _empty(4096), 1e-6, group, scale)


def _rotated(
    at_once: bool, dim: int = 128, part: int = 128, *, kind: torch.dtype = torch.bfloat16, interleaved: bool = False
) -> None:
    """Run 32 tokens of a projection, with vLLM's shapes and its cache."""
    heads, kv_heads = 32, 8
    parts = _empty(32, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], 1)
    tables = *_empty(4096, part).chunk(2, -1), _empty(32, dtype=torch.int64)
    caches = _empty(512, kv_heads, 16, 2 * dim, dtype=kind).transpose(1, 2).chunk(2, -1)
    slots, scales = _empty(32, dtype=torch.int64), (0.5, 0.5) if kind is FP8 else ()
    if at_once:
        rotary_cache.rotary_embedding_kv_cache_write(*parts, *tables, *caches, slots, interleaved, *scales)
    else:
        rotary.rotary_embedding(*parts[:2], *tables, interleaved, False)
        cache.kv_cache_write(parts[1], parts[2], *caches, slots, *scales)


def _scaled(rows: int, kind: torch.dtype, block: int = 0, columns: int = 4096) -> None:
    inner = 4096
    x, weight = (_empty(count, inner, dtype=kind) for count in (rows, columns))
    across, down = (inner // block, columns // block) if block else (1, columns)
    scaled_linear.scaled_linear(
        x, _empty(rows, across, dtype=WIDE), weight, _empty(down, across, dtype=WIDE), block_size=block
    )


def _packed(rows: int, bits: int, columns: int = 4096) -> None:
    weight = _empty(columns, 2048, dtype=torch.uint8) if bits == 4 else _empty(columns, 4096, dtype=torch.int8)
    weight_only_linear.weight_only_linear(_empty(rows, 4096), weight, _empty(columns, 32))


def _adapters(tokens: int, rank: int, *, inner: int = 4096, dtype: torch.dtype = torch.bfloat16) -> None:
    parts, slots = 3, 4
    down, up = _empty(slots, rank, inner, dtype=dtype), _empty(slots, inner, rank, dtype=dtype)
    products = _empty(parts, tokens, rank, dtype=WIDE)
    mapping = (_integers(tokens), _integers(tokens), _integers(slots + 1), torch.ones(1, dtype=torch.int32))
    lora.lora_shrink(_empty(tokens, inner, dtype=dtype), products, down, *mapping, 1.0, down, down)
    lora.lora_expand(_empty(tokens, parts * inner, dtype=dtype), products, up, *mapping, 0, up, up)


def _convolutions(rows: int, prompts: bool, channels: int = 8192) -> None:
    requests = 4 if prompts else rows
    states = _empty(requests, 3, channels).transpose(1, 2)
    parts = _empty(rows, channels), _empty(channels, 4), None, states, _integers(requests)
    if prompts:
        convolution.causal_conv1d(*parts, _integers(requests + 1), _empty(requests, dtype=torch.bool))
    else:
        convolution.causal_conv1d_update(*parts)


def _corrections(
    rows: int, prompts: bool, dim: int = 128, *, dtype: torch.dtype = torch.bfloat16, by_key: bool = True
) -> None:
    """Run a layer with a state; ``by_key``: keys are adjacent in the states, as in vLLM."""
    key_heads, heads, requests = 16, 32, 4 if prompts else rows
    query, key, value = _empty(rows, (2 * key_heads + heads) * dim, dtype=dtype).split(
        (key_heads * dim, key_heads * dim, heads * dim), dim=1
    )
    gates = (_empty(rows, heads, dtype=dtype) for _ in range(2))
    states = _empty(requests, heads, dim, dim, dtype=WIDE)
    parts = (
        *(part.unflatten(1, (-1, dim)) for part in (query, key, value)), *gates, _empty(heads, dtype=WIDE),
        _empty(heads, dtype=dtype), states.transpose(2, 3) if by_key else states, _integers(requests),
    )  # fmt: skip
    if prompts:
        delta_rule.gated_delta_rule(*parts, _integers(requests + 1), _empty(requests, dtype=torch.bool), 0.1)
    else:
        delta_rule.gated_delta_rule_update(*parts, 0.1)


def _space(rows: int, heads: int, groups: int, dim: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    a = _empty(heads, columns, dtype=WIDE) if dim == 1 else _empty(heads, dtype=WIDE)
    b, c = (_empty(rows, groups, columns, dtype=dtype) for _ in range(2))
    d, bias = (_empty(heads, dtype=dtype) for _ in range(2))
    return _empty(rows, heads, dim, dtype=dtype), _empty(rows, heads, dtype=dtype), a, b, c, d, bias


def _states(heads: int, dim: int, columns: int) -> Tensor:
    return _empty(64, heads, dim, columns, dtype=WIDE)


def _scanned(
    heads: int, groups: int, dim: int, columns: int, *, requests: int = 4, dtype: torch.dtype = torch.bfloat16
) -> None:
    tensors = _space(2048, heads, groups, dim, columns, dtype)
    known = _empty(requests, dtype=torch.bool)
    states = _states(heads, dim, columns)
    state_space.selective_scan(*tensors, states, _integers(requests), _integers(requests + 1), known)


def _updated(heads: int, groups: int, dim: int, columns: int, *, dtype: torch.dtype = torch.bfloat16) -> None:
    tensors = _space(64, heads, groups, dim, columns, dtype)
    state_space.selective_state_update(*tensors, _states(heads, dim, columns), _integers(64))


HALF, WIDE = torch.float16, torch.float32
FP8 = torch.float8_e4m3fn
FP8_NAME = "float8_e4m3fn"
CASES = (
    Case("prefill 64", lambda: _paged(64, 8, 8, 512)),
    Case("prefill 128", lambda: _paged(128, 32, 8, 512)),
    Case("prefill 128, float16", lambda: _paged(128, 32, 8, 512, dtype=HALF)),
    Case("prefill 128, not causal", lambda: _paged(128, 32, 8, 512, causal=False)),
    Case("prefill 128, one request of 8192", lambda: _paged(128, 32, 8, 8192, requests=1, block_size=32)),
    Case("prefill 128, caches beyond 2**31", lambda: _paged(128, 32, 8, 512, blocks=1 << 18)),
    Case("prefill 192 and 128", lambda: _paged(192, 16, 16, 512, dim_v=128)),
    Case("latent prefill 192 and 128", lambda: _latent_prefill(192, 128)),
    Case("latent prefill 192 and 128, not causal", lambda: _latent_prefill(192, 128, causal=False)),
    Case("latent prefill 128 and 64, float16", lambda: _latent_prefill(128, 64, dtype=HALF)),
    Case("latent decode 128 heads", lambda: _latent(128, 1, 256)),
    Case("latent decode 128 heads, query in parts", lambda: _latent(128, 1, 256, parted=True)),
    Case("latent decode 128 heads, float16", lambda: _latent(128, 1, 256, dtype=HALF)),
    Case("latent decode 128 heads, keys split", lambda: _latent(128, 1, 4)),
    Case("latent decode 16 heads, 4 new", lambda: _latent(16, 4, 256)),
    Case("latent decode 64 heads, not causal", lambda: _latent(64, 1, 256, causal=False)),
    Case("latent listed 128 heads, prompts", lambda: _listed(128, 4096, 4)),
    Case("latent listed 128 heads, decode", lambda: _listed(128, 32, 32)),
    Case("index scores, prompts", lambda: _indexed(1024, 4, 8192)),
    Case("index scores, prompts, 32 heads", lambda: _indexed(1024, 4, 8192, heads=32)),
    Case("plain prefill 128", lambda: _paged(128, 32, 8, 512), hopper=False),
    Case("plain prefill 128, window, cap, sinks", lambda: _paged(
        128, 32, 8, 512, sliding_window=1024, softcap=30.0, sinks=_empty(32), alibi_slopes=_empty(32, dtype=WIDE)
    ), hopper=False),
    Case("plain prefill 128, float32", lambda: _paged(128, 32, 8, 512, dtype=WIDE), hopper=False),
    Case("plain decode 128", lambda: _paged(128, 32, 8, 1), hopper=False),
    Case("plain decode 256, not split", lambda: _paged(256, 16, 8, 1, requests=512), hopper=False),
    Case("plain latent decode 16 heads", lambda: _latent(16, 1, 4), hopper=False),
    Case("plain latent decode 16 heads, query in parts", lambda: _latent(16, 1, 4, parted=True), hopper=False),
    Case("plain latent decode 128 heads", lambda: _latent(128, 1, 256), hopper=False),
    Case("plain latent decode 16 heads, fp8", lambda: _latent(16, 1, 4, stored=FP8, cache_scale=0.1), hopper=False),
    Case("plain latent decode 128 heads, fp8", lambda: _latent(128, 1, 256, stored=FP8, cache_scale=0.1), hopper=False),
    Case("plain latent prefill 192 and 128", lambda: _latent_prefill(192, 128), hopper=False),
    Case("plain latent prefill, not causal", lambda: _latent_prefill(192, 128, causal=False), hopper=False),
    Case("index keys, 8 tokens", lambda: _index_keys(8), hopper=False),
    Case("indexer, decode, 32768", lambda: _indexed(1, 4, 32768), hopper=False),
    Case("indexer, decode, 4096", lambda: _indexed(1, 4, 4096), hopper=False),
    Case("indexer, prompts", lambda: _indexed(1024, 4, 8192), hopper=False),
    Case("indexer, bfloat16 keys", lambda: _indexed(1, 4, 8192, stored=torch.bfloat16), hopper=False),
    Case("listed rows, 128 heads, decode", lambda: _listed(128, 1, 1), hopper=False),
    Case("listed rows, 128 heads, prompts", lambda: _listed(128, 4096, 4), hopper=False),
    Case("listed rows, 16 heads, decode", lambda: _listed(16, 4, 4), hopper=False),
    Case("listed rows, 128 heads, fp8", lambda: _listed(128, 4, 4, stored=FP8, cache_scale=0.1), hopper=False),
    Case("experts, 4 tokens", lambda: _experts(4), hopper=False),
    Case("experts, 1 token", lambda: _experts(1), hopper=False),
    Case("experts, 128 tokens", lambda: _experts(128), hopper=False),
    Case("experts, 4096 tokens", lambda: _experts(4096), hopper=False),
    Case("experts, no gate, weight on input", lambda: _experts(
        256, gated=False, activation="relu2_no_mul", apply_router_weight_on_input=True
    ), hopper=False),
    Case("experts, 64 tokens, float32", lambda: _experts(64, dtype=WIDE), hopper=False),
    Case("fp8 rows of 4096", lambda: _quantized(64, "float8_e4m3fn"), hopper=False),
    Case("fp8 groups of 128", lambda: _quantized(64, "float8_e4m3fn", 128), hopper=False),
    Case("int8 rows of 4096", lambda: _quantized(64, "int8"), hopper=False),
    Case("norm of 4096 with a residual", lambda: normalization.rms_norm(
        _empty(64, 4096), _empty(64, 4096), _empty(4096)
    ), hopper=False),
    Case("norm of 4096", lambda: normalization.rms_norm(_empty(64, 4096), None, _empty(4096)), hopper=False),
    Case("norm of 5120 with a residual, float32", lambda: normalization.rms_norm(
        _empty(64, 5120, dtype=WIDE), _empty(64, 5120, dtype=WIDE), _empty(5120, dtype=WIDE)
    ), hopper=False),
    Case("gate of 14336", lambda: activation.silu_and_mul(_empty(64, 28672)), hopper=False),
    Case("gate of 14336 by the error function", lambda: activation.gelu_and_mul(_empty(64, 28672)), hopper=False),
    Case("norm to fp8, 4096, with a residual", lambda: _joined_norm(64, True), hopper=False),
    Case("norm to fp8, 4096", lambda: _joined_norm(64, False), hopper=False),
    Case("norm to fp8, 4096, in groups of 128", lambda: _joined_norm(64, True, 128), hopper=False),
    Case("norm to fp8, 4096, by a given scale", lambda: _joined_norm(
        64, True, -1, _empty(1, dtype=WIDE)
    ), hopper=False),
    Case("gate to fp8, 14336", lambda: quantized_rows.silu_and_mul_quantize(_empty(64, 28672), FP8_NAME), hopper=False),
    Case("gate to fp8, 14336, in groups of 128", lambda: quantized_rows.silu_and_mul_quantize(
        _empty(64, 28672), FP8_NAME, 128
    ), hopper=False),
    Case("rotation and write, 128", lambda: _rotated(True), hopper=False),
    Case("rotation and write, 128, interleaved", lambda: _rotated(True, interleaved=True), hopper=False),
    Case("rotation and write, 64 of 128, fp8", lambda: _rotated(True, part=64, kind=FP8), hopper=False),
    Case("rotation, then write, 128", lambda: _rotated(False), hopper=False),
    Case("rotation, then write, 64 of 128, fp8", lambda: _rotated(False, part=64, kind=FP8), hopper=False),
    Case("int8 product, 1 row", lambda: _scaled(1, torch.int8), hopper=False),
    Case("int8 product, 4096 rows", lambda: _scaled(4096, torch.int8), hopper=False),
    Case("fp8 product, 1 row", lambda: _scaled(1, FP8), hopper=False),
    Case("fp8 product, 16 rows", lambda: _scaled(16, FP8), hopper=False),
    Case("fp8 product, 16 rows, many columns", lambda: _scaled(16, FP8, columns=28672), hopper=False),
    Case("fp8 product, 64 rows, many columns", lambda: _scaled(64, FP8, columns=28672), hopper=False),
    Case("fp8 product, 256 rows", lambda: _scaled(256, FP8), hopper=False),
    Case("fp8 product, 4096 rows", lambda: _scaled(4096, FP8), hopper=False),
    Case("fp8 product of blocks, 1 row", lambda: _scaled(1, FP8, 128), hopper=False),
    Case("fp8 product of blocks, 4096 rows", lambda: _scaled(4096, FP8, 128), hopper=False),
    Case("fp8 product of blocks, 32 rows", lambda: _scaled(32, FP8, 128), hopper=False),
    Case("4 bits, 1 row", lambda: _packed(1, 4), hopper=False),
    Case("4 bits, 8 rows", lambda: _packed(8, 4), hopper=False),
    Case("4 bits, 16 rows", lambda: _packed(16, 4), hopper=False),
    Case("4 bits, 64 rows, many columns", lambda: _packed(64, 4, 28672), hopper=False),
    Case("4 bits, 256 rows", lambda: _packed(256, 4), hopper=False),
    Case("8 bits, 32 rows", lambda: _packed(32, 8), hopper=False),
    Case("adapters of rank 16, 1 token", lambda: _adapters(1, 16), hopper=False),
    Case("adapters of rank 64, 2048 tokens", lambda: _adapters(2048, 64), hopper=False),
    Case("adapters of rank 8, 4 tokens, float32", lambda: _adapters(4, 8, inner=64, dtype=WIDE), hopper=False),
    Case("adapters of rank 128, 300 tokens, odd rows", lambda: _adapters(300, 128, inner=4100), hopper=False),
    Case("fp8 experts, 1 token", lambda: _scaled_experts(1, FP8), hopper=False),
    Case("fp8 experts, 16 tokens", lambda: _scaled_experts(16, FP8), hopper=False),
    Case("fp8 experts, 128 tokens", lambda: _scaled_experts(128, FP8), hopper=False),
    Case("fp8 experts, 256 tokens", lambda: _scaled_experts(256, FP8), hopper=False),
    Case("fp8 experts, 4096 tokens", lambda: _scaled_experts(4096, FP8), hopper=False),
    Case("fp8 experts, float32", lambda: _scaled_experts(16, FP8, dtype=WIDE), hopper=False),
    Case("fp8 experts, scales of rows given", lambda: _scaled_experts(
        16, FP8, x13_scale=_empty(64, dtype=WIDE), x2_scale=_empty(64, dtype=WIDE)
    ), hopper=False),
    Case("fp8 experts of blocks, 1 token", lambda: _scaled_experts(1, FP8, 128), hopper=False),
    Case("fp8 experts of blocks, 16 tokens", lambda: _scaled_experts(16, FP8, 128), hopper=False),
    Case("fp8 experts of blocks, 256 tokens", lambda: _scaled_experts(256, FP8, 128), hopper=False),
    Case("fp8 experts of blocks, 4096 tokens", lambda: _scaled_experts(4096, FP8, 128), hopper=False),
    Case("int8 experts, 16 tokens", lambda: _scaled_experts(16, torch.int8), hopper=False),
    Case("int8 experts, 128 tokens", lambda: _scaled_experts(128, torch.int8), hopper=False),
    Case("int8 experts, 4096 tokens", lambda: _scaled_experts(4096, torch.int8), hopper=False),
    Case("4 bits experts, 1 token", lambda: _packed_experts(1, 4), hopper=False),
    Case("4 bits experts, 16 tokens", lambda: _packed_experts(16, 4), hopper=False),
    Case("4 bits experts, 128 tokens", lambda: _packed_experts(128, 4), hopper=False),
    Case("4 bits experts, 256 tokens, groups of 32", lambda: _packed_experts(256, 4, 32), hopper=False),
    Case("4 bits experts, 4096 tokens", lambda: _packed_experts(4096, 4), hopper=False),
    Case("4 bits experts, 16 tokens, float32", lambda: _packed_experts(16, 4, dtype=WIDE), hopper=False),
    Case("8 bits experts, 16 tokens", lambda: _packed_experts(16, 8), hopper=False),
    Case("8 bits experts, 4096 tokens", lambda: _packed_experts(4096, 8), hopper=False),
    Case("convolution, 4 prompts", lambda: _convolutions(2048, True), hopper=False),
    Case("convolution, 32 tokens", lambda: _convolutions(32, False), hopper=False),
    Case("delta rule, 4 prompts", lambda: _corrections(2048, True), hopper=False),
    Case("delta rule, 4 prompts, states by value", lambda: _corrections(2048, True, by_key=False), hopper=False),
    Case("delta rule, 4 prompts, float16", lambda: _corrections(2048, True, dtype=HALF), hopper=False),
    Case("delta rule, 4 prompts, float32", lambda: _corrections(2048, True, dtype=WIDE), hopper=False),
    Case("delta rule, 4 prompts, heads of 64", lambda: _corrections(2048, True, 64), hopper=False),
    Case("delta rule, 1 token", lambda: _corrections(1, False), hopper=False),
    Case("delta rule, 32 tokens", lambda: _corrections(32, False), hopper=False),
    Case("scan, 80 heads of 64, 128 columns", lambda: _scanned(80, 1, 64, 128), hopper=False),
    Case("scan, 80 heads of 64, 128 columns, float16", lambda: _scanned(80, 1, 64, 128, dtype=HALF), hopper=False),
    Case("scan, 80 heads of 64, 128 columns, float32", lambda: _scanned(80, 1, 64, 128, dtype=WIDE), hopper=False),
    Case("scan, 32 heads of 128, 2 groups, 256 columns", lambda: _scanned(32, 2, 128, 256), hopper=False),
    Case("scan, 5120 channels, 16 columns", lambda: _scanned(5120, 1, 1, 16), hopper=False),
    Case("scan, 5120 channels, 16 columns, float32", lambda: _scanned(5120, 1, 1, 16, dtype=WIDE), hopper=False),
    Case("state update, 80 heads of 64, 128 columns", lambda: _updated(80, 1, 64, 128), hopper=False),
    Case("state update, 5120 channels, 16 columns", lambda: _updated(5120, 1, 1, 16), hopper=False),
    Case("gated norm, 5120, one group", lambda: gated_norm.rms_norm_gated(
        _empty(64, 5120), _empty(64, 5120), _empty(5120), norm_first=False
    ), hopper=False),
)  # fmt: skip


@contextlib.contextmanager
def h200(offer_hopper: bool) -> Iterator[None]:
    """Make operators choose their kernels as on an H200; from then on Triton compiles for it in this process."""
    gpu = SimpleNamespace(
        compute_units=lambda index: H200.multi_processor_count,
        shared_memory=lambda index: H200.shared_memory_per_block_optin,
    )
    triton.runtime.driver.set_active(CompilingDriver())
    with (
        mock.patch.object(paged, "device_of", return_value=gpu, create=True),  # older trees ask torch.cuda
        mock.patch.object(hopper, "device_of", return_value=gpu, create=True),
        mock.patch.object(launch, "device_of", return_value=gpu, create=True),
        mock.patch.object(weight_only_linear, "capability", return_value=(9, 0), create=True),
        mock.patch.object(hopper, "TESTED_LISTS", (hopper._version(),), create=True),
        mock.patch.object(hopper, "TESTED_SCORES", (hopper._version(),), create=True),
        mock.patch.object(hopper, "why_unavailable", return_value="" if offer_hopper else "not offered"),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=H200),
    ):
        yield


@contextlib.contextmanager
def launches(offer_hopper: bool, compiled: list[Any]) -> Iterator[None]:
    """Compile launched kernels instead of running them."""

    def compile_only(
        launcher: Any, grid: Any, tensors: Any, numbers: Any, *, sizes: Any = (), warps: int = 4, stages: int = 3
    ) -> None:
        arguments = (*tensors, *sizes, *numbers)
        compiled.append(launcher.kernel.warmup(*arguments, grid=grid, num_warps=warps, num_stages=stages))

    with h200(offer_hopper), mock.patch.object(Launcher, "__call__", compile_only):
        yield


def compile_case(case: Case) -> list[Any]:
    """Return the kernels that a case launches, compiled, each once."""
    compiled: list[Any] = []
    with launches(case.hopper, compiled):
        case.call()
    return list({id(kernel): kernel for kernel in compiled}.values())


def main() -> None:
    """Write each kernel's code into the folder, and ``kernels.json``, which names them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--case", default="", help="only cases with this text in their name")
    options = parser.parse_args()
    kernels: list[dict[str, Any]] = []
    for case in CASES:
        if options.case not in case.name:
            continue
        try:
            compiled = compile_case(case)
        except (triton.CompilationError, RuntimeError) as error:
            kernels.append({"case": case.name, "error": str(error).strip().splitlines()[-1]})
            continue
        for kernel in compiled:
            file = f"{len(kernels)}.cubin"
            (options.folder / file).write_bytes(kernel.asm["cubin"])
            row = {"case": case.name, "name": kernel.metadata.name, "file": file, "shared": kernel.metadata.shared}
            kernels.append(row)
    ptxas = triton.knobs.nvidia.ptxas
    made = {
        "tree": str(Path(hopper.__file__).parents[5]),
        "tools": str(Path(ptxas.path).parent),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "ptxas": ptxas.version,
        "kernels": kernels,
    }
    (options.folder / "kernels.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main()
