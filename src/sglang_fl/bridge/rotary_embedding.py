"""``RotaryEmbedding`` and its subclasses over the operator ``rotary_embedding``.

SGLang's compiled kernels rotate in place, so its models treat query and key as consumed. Llama 4 even relies on it, and
reads the rotated parts from the projection of which they are views. So the operator is called in place. SGLang's table
is passed unchanged; it may be in float32 when query and key are half types.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from fl_dispatch.hosting.positions import multimodal_rotary

from .base import Bridge

FUSED_WRITE = "a rotation that also writes the key-value cache"


class RotatingBridge(Bridge):
    """The base of the bridges of all rotary classes."""

    fl_operator = "rotary_embedding"
    table_name: ClassVar[str] = "cos_sin_cache"
    halves: tuple[Tensor | None, Tensor, Tensor] = (None, torch.empty(0), torch.empty(0))

    def table(self) -> tuple[Tensor, Tensor]:
        """Return both halves of the layer's table ``[positions, cos | sin]``, which SGLang replaces to grow it."""
        cache = getattr(self.layer, self.table_name)
        if cache is not self.halves[0]:
            self.halves = (cache, *cache.chunk(2, dim=-1))
        return self.halves[1], self.halves[2]

    def rotate(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        """Call the operator on heads, which SGLang may have flattened, and return SGLang's shapes."""
        if not rows.shape[0]:
            return query, key
        heads = (rows.shape[0], -1, self.layer.head_size)
        if key is query:  # models pass the same tensor if they need only one; in place it would be rotated twice
            rotated, _ = self.fl_call(query.reshape(heads), None, cos, sin, rows, interleaved)
            return (result := rotated.reshape(query.shape)), result
        rotated, rotated_key = self.fl_call(query.reshape(heads), key.reshape(heads), cos, sin, rows, interleaved)
        return rotated.reshape(query.shape), rotated_key.reshape(key.shape)


class RotaryBridge(RotatingBridge):
    """``forward(positions, query, key, offsets=None, fused_set_kv_buffer_arg=None)``."""

    def forward(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        offsets: Tensor | None = None,
        fused_set_kv_buffer_arg: Any = None,
    ) -> tuple[Tensor, Tensor]:
        if fused_set_kv_buffer_arg is not None:
            return self.fall_through(FUSED_WRITE, positions, query, key, offsets, fused_set_kv_buffer_arg)
        rows = positions if offsets is None else positions + offsets
        return self.rotate(query, key, *self.table(), rows.flatten(), not self.layer.is_neox_style)


class LongRopeBridge(RotatingBridge):
    """``Phi3LongRoPEScaledRotaryEmbedding``: ``forward(positions, query, key, offsets=None)``.

    The table for short texts comes before the one for long texts. If each request has its own table
    (:mod:`sglang_fl.layers.rotations`), positions are rows; otherwise the first position beyond the short table moves a
    whole step to the long one.
    """

    table_name = "long_short_cos_sin_cache"
    by_request = False

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        rows = positions
        if not self.by_request:
            short = self.layer.original_max_position_embeddings
            rows = positions + (positions >= short).any() * short
        return self.rotate(query, key, *self.table(), rows if offsets is None else rows + offsets, False)


class MRotaryBridge(RotatingBridge):
    """``MRotaryEmbedding``: ``forward(positions, query, key, fused_set_kv_buffer_arg=None)``.

    Positions are ``[tokens]``, or ``[3, tokens]`` on the axes time, height, width.
    """

    def axes(self) -> Tensor | None:
        """Return the axis of each frequency, ``[frequencies]``, int64; ``None`` if the model gives no sections."""
        return self.layer.axis_map

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor, fused_set_kv_buffer_arg: Any = None
    ) -> tuple[Tensor, Tensor]:
        if fused_set_kv_buffer_arg is not None:
            return self.fall_through(FUSED_WRITE, positions, query, key, fused_set_kv_buffer_arg)
        cos, sin, rows = *self.table(), positions
        if positions.ndim == 2:
            axes = self.axes()
            if axes is None:
                return self.fall_through("positions on several axes without sections", positions, query, key)
            cos, sin, rows = multimodal_rotary.step_tables(cos, sin, positions, axes)
        return self.rotate(query, key, cos, sin, rows, not self.layer.is_neox_style)


class ErnieRotaryBridge(MRotaryBridge):
    """``Ernie4_5_VLRotaryEmbedding``; its sections are height, width, time."""

    alternating: Tensor | None = None

    def axes(self) -> Tensor | None:
        sections = self.layer.mrope_section
        if self.alternating is None and sections:
            axes = multimodal_rotary.alternating_axes(sum(sections[:2]), sum(sections))
            self.alternating = torch.tensor(axes, device=self.layer.cos_sin_cache.device)
        return self.alternating


class BailingRotaryBridge(ErnieRotaryBridge):
    """``BailingMRotaryEmbedding``; its positions start below zero."""

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor, fused_set_kv_buffer_arg: Any = None
    ) -> tuple[Tensor, Tensor]:
        if fused_set_kv_buffer_arg is not None:
            return self.fall_through(FUSED_WRITE, positions, query, key, fused_set_kv_buffer_arg)
        shifted = positions - self.layer.position_start
        return super().forward(shifted, query, key)
