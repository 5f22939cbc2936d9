"""Multi-head latent attention for vLLM over ``kv_cache_write``, ``mla_decode`` and ``mla_prefill``.

vLLM's ``MLAAttention`` layer splits a batch: requests with one new token take the absorbed form (``forward_mqa``),
longer ones the multi-head form (``forward_mha``), which attends over the new tokens, then over the cached context in
chunks of a bounded size, and merges the parts by their log-sum-exp. vLLM's own classes supply the layer, the split and
the plan of the chunks; plain PyTorch replaces their compiled and Triton kernels (reading the cache, merging).

An fp8 cache has one scale per layer for latents and rotary parts, as in vLLM. Queries are not quantized, as in vLLM's
Triton class; nor are the new tokens' own latents in the multi-head form, as in all of vLLM's classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend, MLACommonImpl
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.ops import dcp

from fl_dispatch import bind_op, get_default_manager
from fl_dispatch.hosting.start import warm_batches

from . import kv_layout
from .attention_class import LatentQuestions
from .cache_slots import real
from .divided import DividedAttention, correct
from .mla_context import context_rows
from .mla_metadata import MLAFLMetadata, MLAFLMetadataBuilder
from .mla_prefill import merge
from .mla_weight import ask_exactly

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionLayer

OPERATORS = ("kv_cache_write", "mla_decode", "mla_prefill")


class MLAFLImpl(MLACommonImpl[MLAFLMetadata]):
    """One layer's latent attention."""

    supports_dcp: bool = True  # ranks may divide the cache by tokens
    can_return_lse_for_decode: bool = True
    _split: tuple[Tensor | None, Tensor, Tensor] = (None, torch.empty(0), torch.empty(0))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = signature(MLACommonImpl.__init__).bind(self, *args, **kwargs).arguments
        asked = {
            "ALiBi": given["alibi_slopes"],
            "a sliding window": given["sliding_window"],
            "a soft cap": given["logits_soft_cap"],
            f"attention type '{given['attn_type']}'": given["attn_type"] != AttentionType.DECODER,
        }
        if refused := [feature for feature, value in asked.items() if value]:
            raise NotImplementedError(f"MLAFLBackend does not support {' and '.join(refused)}")
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False
        self.fl_fp8 = given["kv_cache_dtype"] in kv_layout.FP8_DTYPES
        self.fl_dtype = torch.get_default_dtype()  # vLLM makes layers with the model's dtype
        self._use_flashinfer_concat_mla_k = False
        speculation = get_current_vllm_config().speculative_config
        self.fl_longest_decode = 1 + (speculation.num_speculative_tokens if speculation else 0)
        if self.dcp_world_size > 1:
            dcp.correct_attn_out = correct  # vLLM's is a kernel of Triton
        self.fl_bind(None)

    def fused_output_quant_supported(self, quant_key: object) -> bool:
        """Return ``False``, because vLLM's common code quantizes with compiled operators."""
        return False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Dequantize ``kv_b_proj``: vLLM multiplies ones by it to get the weight, which an input scale would round."""
        if any(getattr(self.kv_b_proj, name, None) is not None for name in ("input_scale", "input_global_scale")):
            raise ValueError("vllm_fl does not support latent attention with scales for inputs in the checkpoint yet")
        ask_exactly()
        super().process_weights_after_loading(act_dtype)

    def fl_bind(self, scope: str | None) -> None:
        """Bind the three operators for the layer with this prefix."""
        self.fl_scope = scope
        self.fl_write = bind_op("kv_cache_write", scope)
        self.fl_decode = bind_op("mla_decode", scope)
        self.fl_prefill = bind_op("mla_prefill", scope)
        self.fl_divided = DividedAttention(scope, self.scale) if self.dcp_world_size > 1 else None
        self.fl_in_parts = get_default_manager().all_take("mla_decode", ("query_rope",))

    def fl_kind(self) -> tuple[Any, ...]:
        """Return the layer's kind: layers of one kind call the operators with arguments of the same kind."""
        dims = (self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim)
        return (self.num_heads, *dims, self.scale, *warm_batches.rules(OPERATORS, self.fl_scope))

    def fl_try(self, kv_cache: Tensor, queries: Sequence[int], longest: int) -> None:
        """Call the operators on a batch of requests with ``queries`` new tokens; the cache keeps its contents.

        Args:
            kv_cache: a layer's cache.
            queries: new tokens of each request; requests have no earlier tokens.
            longest: the announced number of keys.
        """
        device, tokens, most = kv_cache.device, sum(queries), max(queries)
        starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=device)
        dtype, scale = (self.fl_dtype, 1.0) if self.fl_fp8 else (kv_cache.dtype, None)
        latents = torch.zeros(tokens, self.kv_lora_rank, dtype=dtype, device=device)
        rotary = latents.new_zeros(tokens, 1, self.qk_rope_head_dim)
        self._write(latents, rotary, kv_cache, torch.full((tokens,), -1, device=device), scale)
        if most <= self.fl_longest_decode:
            query = latents.new_zeros(tokens, self.num_heads, self.kv_lora_rank)
            not_absorbed = latents.new_zeros(tokens, self.num_heads, self.qk_head_dim)
            blocks = -(-longest // kv_cache.shape[1])
            table = torch.zeros(len(queries), blocks, dtype=torch.int32, device=device)
            absorbed, rope = self._taken((query, not_absorbed[..., self.qk_nope_head_dim :]))
            rest = (most, longest, self.scale, self.kv_lora_rank, None, True, scale, rope)
            self.fl_decode(absorbed, self._stored(kv_cache), table, starts, starts.diff(), *rest)
            return
        query = latents.new_zeros(tokens, self.num_heads, self.qk_head_dim)
        key, value = self._project(latents, rotary)
        out = query.new_empty(tokens, self.num_heads, self.v_head_dim)
        self.fl_prefill(query, key, value, starts, starts, most, most, self.scale, out, True)
        self.fl_prefill(query, key, value, starts, starts, most, most, self.scale, None, False)

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write this step's latents and rotary keys into ``kv_cache`` ``[blocks, block_size, rank + rope]``."""
        if kv_cache.numel() > 0:  # vLLM measures memory before there is a cache
            self._write(kv_c_normed, k_pe, kv_cache, slot_mapping, self._scale())

    def _write(self, latents: Tensor, rotary: Tensor, kv_cache: Tensor, slots: Tensor, scale: float | None) -> None:
        """Write new latents and rotary keys into the cache; its two views are kept from call to call."""
        if kv_cache is not self._split[0]:
            rows = self._stored(kv_cache).unsqueeze(2)
            self._split = (kv_cache, rows[..., : self.kv_lora_rank], rows[..., self.kv_lora_rank :])
        slots, may_skip = real(slots.flatten())
        tokens = slots.shape[0]
        new = latents[:tokens].unsqueeze(1), rotary[:tokens]
        self.fl_write(*new, *self._split[1:], slots, scale, scale, may_skip=may_skip)

    def _stored(self, kv_cache: Tensor) -> Tensor:
        """Return the cache in the dtype of its numbers; vLLM passes an fp8 cache as bytes."""
        return kv_cache.view(torch.float8_e4m3fn) if self.fl_fp8 else kv_cache

    def _scale(self) -> float | None:
        """Return the scale of an fp8 cache as a host number; reading vLLM's tensor would wait for the device."""
        if not self.fl_fp8:
            return None
        scale: float = get_forward_context().no_compile_layers[self.fl_scope]._k_scale_float
        return scale

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLAFLMetadata,
        layer: AttentionLayer,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend in the absorbed form; ``q`` is ``[tokens, heads, rank + rope]``, whole or in its two parts.

        If ranks divide the cache, ``q`` is whole and has the heads of all ranks, and the log-sum-exp is returned too.
        """
        decode = attn_metadata.decode
        assert decode is not None
        if self.fl_divided is not None and (part := decode.part) is not None:
            assert isinstance(q, Tensor)
            assert decode.max_query_len == 1  # a request's last token sees all rows
            rows = kv_c_and_k_pe_cache[part.blocks, part.offsets].unsqueeze(1)
            firsts, hosts = (part.starts, part.key_starts), (part.starts_host, part.key_starts_host)
            found, lse = self.fl_divided.over(q, rows, rows[..., : self.kv_lora_rank], firsts, hosts, 1, part.longest)
            return found, lse.T
        query, rope = self._taken(q)
        out = self.fl_decode(
            query,
            self._stored(kv_c_and_k_pe_cache),
            decode.block_table,
            decode.query_start_loc,
            decode.seq_lens,
            decode.max_query_len,
            decode.max_seq_len,
            self.scale,
            self.kv_lora_rank,
            None,
            attn_metadata.causal,
            layer._k_scale_float if self.fl_fp8 else None,
            rope,
            decode.query_start_loc_host,
            decode.seq_lens_host,
        )
        return out, None

    def _taken(self, query: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return a query in the form that implementations take: its two parts, or the whole query and ``None``."""
        if not isinstance(query, tuple):
            return query, None
        return query if self.fl_in_parts else (torch.cat(query, dim=-1), None)

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLAFLMetadata,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Attend in the multi-head form, and write ``output`` ``[tokens, heads * v_head_dim]``."""
        prefill, on_host = attn_metadata.prefill, attn_metadata.prefill_starts
        assert prefill is not None
        assert on_host is not None
        starts, longest = prefill.query_start_loc, prefill.max_query_len
        key, value = self._project(kv_c_normed, k_pe)
        filled = output.view(-1, self.num_heads, self.v_head_dim)
        result, lse = self.fl_prefill(
            q, key, value, starts, starts, longest, longest, self.scale, filled, True, on_host.new, on_host.new
        )
        if result is not filled:
            if result.shape != filled.shape:
                raise ValueError(f"'mla_prefill' returned {tuple(result.shape)} instead of {tuple(filled.shape)}")
            filled.copy_(result)
        chunks = prefill.chunked_context.chunks if prefill.chunked_context else ()
        cache, scale = self._stored(kv_c_and_k_pe_cache), self._scale()
        for chunk, chunk_on_host in zip(chunks, on_host.chunks, strict=True):
            latents = context_rows(cache, prefill.block_table, chunk, q.dtype, self.kv_lora_rank, scale)
            key, value = self._project(latents[:, : self.kv_lora_rank], latents[:, None, self.kv_lora_rank :])
            part, part_lse = self.fl_prefill(
                q[chunk.token_slice],
                key,
                value,
                chunk.query_start_loc,
                chunk.cu_seq_lens,
                chunk.max_query_len,
                chunk.max_seq_len,
                self.scale,
                None,
                False,
                *chunk_on_host,
            )
            merge(filled[chunk.token_slice], lse[:, chunk.token_slice], part, part_lse)

    def _project(self, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys ``[tokens, heads, qk_head_dim]`` and values of latents ``[tokens, rank]`` and rotary parts."""
        projected = self.kv_b_proj(latents)[0].view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        key, value = projected.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        return self._concat_k_nope_k_pe(key, rotary), value


class MLAFLBackend(LatentQuestions, MLACommonBackend):
    """The attention class that ``attention_backend(use_mla=True)`` selects unless a vendor's is preferred."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*kv_layout.PLAIN_DTYPES, *kv_layout.FP8_DTYPES]

    @staticmethod
    def get_impl_cls() -> type[MLAFLImpl]:
        return MLAFLImpl

    @staticmethod
    def get_builder_cls() -> type[MLAFLMetadataBuilder]:
        return MLAFLMetadataBuilder
