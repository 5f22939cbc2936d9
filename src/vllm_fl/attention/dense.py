"""Attention for vLLM over the operators ``kv_cache_write`` and ``paged_attention``.

vLLM passes the cache as one tensor ``[blocks, kv_heads, block_size, head_size + head_size_v]``; keys and values are
strided views of it, in the layout that ``kv_layout`` decides. Encoder-only layers have no cache: each new token is
treated as a block of one slot, in place, so that the same operator attends over the batch's own keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType, MultipleOf

from fl_dispatch import BackendImplKind, OpImpl, OpRegistry, bind_op
from fl_dispatch.hosting.start import warm_batches

from . import kv_layout
from .attention_class import CacheQuestions
from .cache_slots import real
from .divided import DividedAttention
from .metadata import AttentionFLMetadata, AttentionFLMetadataBuilder

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionLayer
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

OPERATORS = ("kv_cache_write", "paged_attention")
ROTATION, ROTATE_AND_WRITE = "rotary_embedding", "rotary_embedding_kv_cache_write"
Scales = tuple[float | None, float | None, Tensor | None, Tensor | None]
"""The scales of a layer's keys and values: one number each, or one tensor each with a scale for each token and head."""
NO_SCALES: Scales = (None, None, None, None)
ATTENTION_TYPES = (AttentionType.DECODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER)


def _flash_attention(use_mla: bool = False) -> str:
    """Implement ``vendor.cuda.flash_attn``: vLLM's own class over its FlashAttention."""
    if use_mla:
        raise NotImplementedError("vLLM's FlashAttention class has no latent attention")
    return "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"


def _triton_attention(use_mla: bool = False) -> str:
    """Implement ``vendor.cuda.triton_attn``: vLLM's own class over its Triton kernels."""
    if use_mla:
        raise NotImplementedError("vLLM's Triton class has no latent attention")
    return "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"


def _is_native_cuda() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def register_backend(registry: OpRegistry) -> None:
    """Register the implementations of ``attention_backend`` that are vLLM's own classes. Idempotent."""
    operator, vendor = "attention_backend", BackendImplKind.VENDOR
    if registry.get_implementation(operator, "vendor.cuda.flash_attn") is None:
        for name, function in (("flash_attn", _flash_attention), ("triton_attn", _triton_attention)):
            registry.register_impl(
                OpImpl(operator, f"vendor.cuda.{name}", vendor, function, vendor="cuda", available=_is_native_cuda)
            )


class Rotation(NamedTuple):
    """The form of a rotation: the number of pairs, the tables' layout, and dtypes."""

    half: int
    row_stride: int
    table: torch.dtype
    positions: torch.dtype
    interleaved: bool

    def zeros(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return cosines and sines of one position, all zeros, and that position for each token."""
        table = torch.zeros(1, self.row_stride, dtype=self.table, device=device)
        begin = self.half if self.row_stride >= 2 * self.half else 0
        cos, sin = table[:, : self.half], table[:, begin : begin + self.half]
        return cos, sin, torch.zeros(tokens, dtype=self.positions, device=device)


class AttentionFLImpl(AttentionImpl[AttentionFLMetadata]):
    """One layer's attention: write the new keys and values, then attend over the cache."""

    supports_dcp: bool = True
    can_return_lse_for_decode: bool = True  # the part of a cache that ranks divide
    _split: tuple[Tensor | None, Tensor, Tensor, Scales] = (None, torch.empty(0), torch.empty(0), NO_SCALES)

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if attn_type not in ATTENTION_TYPES:
            raise NotImplementedError(f"attention type '{attn_type}' is not supported by AttentionFLBackend")
        self.encoder_only = attn_type == AttentionType.ENCODER_ONLY
        self.crosses = attn_type == AttentionType.ENCODER_DECODER
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.scale = float(scale)
        self.sliding_window = sliding_window
        self.softcap = float(logits_soft_cap or 0.0)
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks
        self.kv_cache_dtype = kv_cache_dtype
        self.fl_fp8 = kv_cache_dtype in kv_layout.FP8_DTYPES
        self.fl_int8 = kv_cache_dtype == kv_layout.INT8_DTYPE
        self.fl_dtype = torch.get_default_dtype()  # vLLM makes layers with the model's dtype
        self.kv_layout = kv_layout.in_force()
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        bounded = bool(alibi_slopes or sliding_window or logits_soft_cap or sinks is not None)
        if self.dcp_world_size > 1 and (bounded or attn_type != AttentionType.DECODER):
            raise NotImplementedError("decode context parallelism with windows, soft caps, ALiBi, sinks or encoders")
        self.fl_rotates = False
        self.fl_rotation: Rotation | None = None
        self.fl_bind(None)

    def fl_bind(self, scope: str | None) -> None:
        """Bind the operators for the layer with this prefix."""
        self.fl_scope = scope
        self.fl_write = bind_op("kv_cache_write", scope)
        self.fl_attend = bind_op("paged_attention", scope)
        self.fl_divided = DividedAttention(scope, self.scale) if self.dcp_world_size > 1 else None
        if self.fl_rotates:
            self.fl_rotate = bind_op(ROTATION)
            self.fl_rotate_and_write = bind_op(ROTATE_AND_WRITE, scope)

    def fl_join(self) -> bool:
        """Prepare for :meth:`rotate_and_cache`; return whether the layer writes its own tokens' keys and values."""
        if self.kv_sharing_target_layer_name is not None or self.encoder_only or self.crosses:
            return False
        self.fl_rotates = True
        self.fl_bind(self.fl_scope)
        return True

    def fl_kind(self) -> tuple[Any, ...]:
        """Return the layer's kind: layers of one kind call the operators with arguments of the same kind."""
        given = (self.alibi_slopes is not None, self.sinks is not None, self.sliding_window, self.softcap, self.scale)
        rules = warm_batches.rules(OPERATORS, self.fl_scope)
        return (self.num_heads, self.num_kv_heads, self.head_size, *rules, *given)

    def fl_try(self, kv_cache: Tensor, queries: Sequence[int], longest: int) -> None:
        """Call the operators on a batch of requests with ``queries`` new tokens; the cache keeps its contents.

        Args:
            kv_cache: a layer's cache.
            queries: new tokens of each request; requests have no earlier tokens.
            longest: the announced number of keys.
        """
        device, tokens = kv_cache.device, sum(queries)
        options = {"dtype": torch.int32, "device": device}
        starts = torch.tensor([0, *accumulate(queries)], **options)  # type: ignore[arg-type]
        block_size = kv_cache.shape[2]
        table = torch.zeros(len(queries), -(-longest // block_size), **options)  # type: ignore[call-overload]
        key_cache, value_cache, scales = self._caches(kv_cache)
        scales = (1.0, 1.0, None, None) if self.fl_fp8 else scales
        dtype = self.fl_dtype if self.fl_fp8 or self.fl_int8 else kv_cache.dtype
        query = torch.zeros(tokens, self.num_heads, self.head_size, dtype=dtype, device=device)
        key = query.new_zeros(tokens, self.num_kv_heads, self.head_size)
        value = query.new_zeros(tokens, self.num_kv_heads, value_cache.shape[-1])
        slots = torch.full((tokens,), -1, device=device)
        self.fl_write(key, value, key_cache, value_cache, slots, *scales)
        if self.fl_rotation is not None:
            sizes = [one[0].numel() for one in (query, key, value)]
            cut = query.new_zeros(tokens, sum(sizes)).split_with_sizes(sizes, -1)  # a projection has all three
            parts = [part.view(one.shape) for part, one in zip(cut, (query, key, value), strict=True)]
            rotation, caches = self.fl_rotation.zeros(tokens, device), (key_cache, value_cache)
            self.fl_rotate_and_write(*parts, *rotation, *caches, slots, self.fl_rotation.interleaved, *scales[:2])
        rest = (max(queries), longest, self.scale, query.new_empty(*query.shape[:2], value.shape[-1]), True)
        bounds = (self.sliding_window, self.softcap, self.alibi_slopes, self.sinks)
        self.fl_attend(query, key_cache, value_cache, table, starts, starts.diff(), *rest, *bounds, *scales)

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor, Scales]:
        """Return keys and values as views ``[blocks, block_size, kv_heads, size]`` of vLLM's tensor, and scales."""
        if kv_cache is not self._split[0]:
            if self.fl_int8:
                rows = kv_layout.split(self.kv_layout, kv_cache, self.head_size + kv_layout.SCALE_BYTES)
                (keys, key_scales), (values, value_scales) = map(kv_layout.split_scales, rows)
                self._split = (kv_cache, keys, values, (None, None, key_scales, value_scales))
            else:
                stored = kv_cache.view(torch.float8_e4m3fn) if self.fl_fp8 else kv_cache  # vLLM passes bytes
                self._split = (kv_cache, *kv_layout.split(self.kv_layout, stored, self.head_size), NO_SCALES)
        return self._split[1:]

    def _of(self, layer: AttentionLayer, kv_cache: Tensor) -> tuple[Tensor, Tensor, Scales]:
        """Return the keys and values of a layer's cache, with vLLM's scales (loaded, or 1) for an fp8 cache."""
        keys, values, scales = self._caches(kv_cache)
        return keys, values, (layer._k_scale_float, layer._v_scale_float, None, None) if self.fl_fp8 else scales

    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write this step's keys and values; a layer without its own cache writes nothing.

        A decoder layer takes one key and value per token of the encoder, not of the step.
        """
        if self.kv_sharing_target_layer_name is None and not self.encoder_only:
            slots, may_skip = (slot_mapping, False) if self.crosses else real(slot_mapping)
            tokens = slots.shape[0]
            if key.shape[0] != tokens:
                key, value = key[:tokens], value[:tokens]
            key_cache, value_cache, scales = self._of(layer, kv_cache)
            self.fl_write(key, value, key_cache, value_cache, slots, *scales, may_skip=may_skip)

    def rotate_and_cache(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        interleaved: bool,
        kv_cache: Tensor,
        slot_mapping: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys, and write this step's keys and values, in one call."""
        rotated: tuple[Tensor, Tensor]
        if slot_mapping is None:  # vLLM measures memory before there is a cache
            self.fl_rotation = Rotation(cos.shape[1], cos.stride(0), cos.dtype, positions.dtype, interleaved)
            rotated = self.fl_rotate(query, key, cos, sin, positions, interleaved, False)
        else:
            slots, may_skip = real(slot_mapping)
            *caches, scales = self._of(layer, kv_cache)
            rest = (*caches, slots, interleaved, *scales[:2])
            rotated = self.fl_rotate_and_write(query, key, value, cos, sin, positions, *rest, may_skip=may_skip)
        return rotated

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: AttentionFLMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend, and write the result to ``output`` ``[tokens, heads, head_size_v]``."""
        if attn_metadata is None:  # vLLM measures memory before there is a cache
            return output.zero_()
        tokens = attn_metadata.num_actual_tokens
        out = output[:tokens]
        if self.encoder_only:
            key_cache, value_cache = key[:tokens].unsqueeze(1), value[:tokens].unsqueeze(1)
            scales = NO_SCALES
        else:
            key_cache, value_cache, scales = self._of(layer, kv_cache)
        if self.fl_divided is not None and attn_metadata.part is not None:
            own = (key[:tokens], value[:tokens], key_cache, value_cache)
            self.fl_divided(query[:tokens], *own, attn_metadata.part, out)
            return output
        result = self.fl_attend(
            query[:tokens],
            key_cache,
            value_cache,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.max_query_len,
            attn_metadata.max_seq_len,
            self.scale,
            out,
            attn_metadata.causal,
            self.sliding_window,
            self.softcap,
            self.alibi_slopes,
            self.sinks,
            *scales,
            query_start_loc_host=attn_metadata.query_start_loc_host,
            seq_lens_host=attn_metadata.seq_lens_host,
        )
        if result is not out:
            if result.shape != out.shape:
                raise ValueError(f"'paged_attention' returned {tuple(result.shape)} instead of {tuple(out.shape)}")
            out.copy_(result)
        return output


class AttentionFLBackend(CacheQuestions, AttentionBackend):
    """The attention class that the operator ``attention_backend`` selects unless a vendor's is preferred."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*kv_layout.PLAIN_DTYPES, *kv_layout.QUANTIZED_DTYPES]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks the name up in its own enum; this one is free

    @staticmethod
    def get_impl_cls() -> type[AttentionFLImpl]:
        return AttentionFLImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionFLMetadataBuilder]:
        return AttentionFLMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(kv_layout.block_multiple())]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return int(super().get_preferred_block_size(kv_layout.usual_block(default_block_size)))

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Add room for a scale after each head's key and value in an int8 cache."""
        if spec.dtype is not torch.int8:
            return spec
        return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + 2 * kv_layout.SCALE_BYTES)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in ATTENTION_TYPES

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True  # the core then admits only implementations that declare it
