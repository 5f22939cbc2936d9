"""Attention of image and audio encoders over the operator ``paged_attention``, in blocks of one token."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from ..attention.token_blocks import token_blocks
from .forwards import DispatchedLayer


class EncoderAttentionLayer(DispatchedLayer):
    """``MMEncoderAttention`` and Whisper's subclass: the tokens of an image, or of a window, attend to each other."""

    fl_operator = "paged_attention"
    fl_traced: ClassVar[bool] = False
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float

    def forward_oot(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Tensor | None = None,
        sequence_lengths: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[batch, tokens, heads * head_size]`` or ``[batch, tokens, heads, head_size]``.
            key, value: ``[batch, tokens, kv_heads * head_size]`` or ``[batch, tokens, kv_heads, head_size]``.
            cu_seqlens: ``[sequences + 1]``, int32: first token of each sequence, if a batch of one has several
                sequences.
            max_seqlen, sequence_lengths: arguments for vLLM's own kernels.

        Returns:
            A tensor like ``query``.
        """
        batch, length = query.shape[:2]
        cut = cu_seqlens is not None
        if torch.compiler.is_compiling() or key.shape[1] != length or (cut and batch > 1):
            return self.forward_native(query, key, value, cu_seqlens, max_seqlen, sequence_lengths)
        host = list(range(0, (batch + 1) * length, length)) if cu_seqlens is None else cu_seqlens.tolist()
        starts = torch.tensor(host, dtype=torch.int32, device=query.device)
        lengths = [end - begin for begin, end in pairwise(host)]
        longest, tokens = max(lengths), batch * length
        attended = self.fl_call(
            query.reshape(tokens, self.num_heads, self.head_size),
            *(each.reshape(tokens, 1, self.num_kv_heads, self.head_size) for each in (key, value)),
            token_blocks(starts, longest, tokens),
            starts,
            starts.diff(),
            longest,
            longest,
            self.scale,
            causal=False,
            query_start_loc_host=host,
            seq_lens_host=lengths,
        )
        return attended.reshape(query.shape)
