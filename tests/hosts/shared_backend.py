"""One backend, written once: plain PyTorch of its own, which counts its calls. It names no host, and needs none."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fl_dispatch import BackendImplKind
from fl_dispatch.backends.base import Backend, Registry

calls: Counter[str] = Counter()


class SharedBackend(Backend):
    """``vendor.shared``; its methods are named and parametrised as the operators are declared."""

    @property
    def name(self) -> str:
        return "shared"

    @property
    def vendor(self) -> str:
        return "shared"

    def is_available(self) -> bool:
        return True

    def silu_and_mul(self, x: Tensor) -> Tensor:
        calls["silu_and_mul"] += 1
        gate, up = x.chunk(2, dim=-1)
        return gate * torch.sigmoid(gate) * up

    def gelu_and_mul(self, x: Tensor, approximate: str = "none") -> Tensor:
        calls["gelu_and_mul"] += 1
        gate, up = x.chunk(2, dim=-1)
        return functional.gelu(gate, approximate=approximate) * up

    def rms_norm(
        self, x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
    ) -> Any:
        calls["rms_norm"] += 1
        return _norm(x, residual, weight, epsilon)

    def gemma_rms_norm(
        self, x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6
    ) -> Any:
        calls["gemma_rms_norm"] += 1
        return _norm(x, residual, None if weight is None else weight + 1, epsilon)

    def rotary_embedding(
        self,
        query: Tensor,
        key: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor,
        rotary_interleaved: bool = False,
        inplace: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        calls["rotary_embedding"] += 1
        cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)

        def turned(x: Tensor) -> Tensor:
            size = 2 * cos.shape[-1]
            part, rest = x[..., :size], x[..., size:]
            pair = (part[..., 0::2], part[..., 1::2]) if rotary_interleaved else part.chunk(2, dim=-1)
            both = (pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin)
            joined = torch.stack(both, dim=-1).flatten(-2) if rotary_interleaved else torch.cat(both, dim=-1)
            result = torch.cat((joined, rest), dim=-1)
            return x.copy_(result) if inplace else result

        return turned(query), None if key is None else turned(key)

    def kv_cache_write(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        calls["kv_cache_write"] += 1
        block_size = key_cache.shape[1]
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                key_cache[slot // block_size, slot % block_size] = key[token]
                value_cache[slot // block_size, slot % block_size] = value[token]

    def paged_attention(
        self,
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
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        calls["paged_attention"] += 1
        if alibi_slopes is not None or sinks is not None or not causal:
            raise NotImplementedError
        out = query.new_empty((*query.shape[:2], value_cache.shape[-1])) if out is None else out
        for request, length in enumerate(seq_lens.tolist()):
            begin, end = query_start_loc[request : request + 2].tolist()
            blocks = block_table[request, : -(-length // key_cache.shape[1])]
            keys, values = (cache[blocks].flatten(0, 1)[:length] for cache in (key_cache, value_cache))
            for token in range(begin, end):
                seen = length - (end - token) + 1
                first = 0 if sliding_window is None else max(0, seen - sliding_window)
                out[token] = _attend(query[token], keys[first:seen], values[first:seen], scale, softcap)
        return out

    def topk_softmax(
        self, router_logits: Tensor, topk: int, renormalize: bool = False, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        calls["topk_softmax"] += 1
        if bias is not None:
            raise NotImplementedError
        weights, ids = router_logits.float().softmax(dim=-1).topk(topk)
        return weights / weights.sum(dim=-1, keepdim=True) if renormalize else weights, ids.int()

    def fused_moe(
        self,
        hidden_states: Tensor,
        w13: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: str = "silu",
        apply_router_weight_on_input: bool = False,
        expert_map: Tensor | None = None,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        calls["fused_moe"] += 1
        if activation != "silu" or apply_router_weight_on_input or expert_map is not None or w13_bias is not None:
            raise NotImplementedError
        total = torch.zeros_like(hidden_states)
        for token, (weights, experts) in enumerate(zip(topk_weights, topk_ids.tolist(), strict=True)):
            for weight, expert in zip(weights, experts, strict=True):
                gate, up = (w13[expert] @ hidden_states[token]).chunk(2)
                total[token] += weight * (w2[expert] @ (functional.silu(gate) * up))
        return total if out is None else out.copy_(total)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> Any:
    total = x if residual is None else x + residual
    result = total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + epsilon)
    result = result if weight is None else result * weight
    return result if residual is None else (result, total)


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float) -> Tensor:
    """One token's attention, ``[heads, size]``; gathered keys ``[tokens, kv_heads, size]`` are copied, so their layout
    does not change how they are summed.
    """
    repeats = query.shape[0] // keys.shape[1]
    keys, values = (part.repeat_interleave(repeats, dim=1).transpose(0, 1).contiguous() for part in (keys, values))
    scores = (keys @ query.unsqueeze(-1)).squeeze(-1) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores.softmax(dim=-1).unsqueeze(1) @ values).squeeze(1)


def register_builtins(registry: Registry) -> None:
    registry.register_many(SharedBackend().implementations(BackendImplKind.VENDOR, "vendor.shared", 100))
