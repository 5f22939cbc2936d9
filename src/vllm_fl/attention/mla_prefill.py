"""Prefill of multi-head latent attention in parts: the merge of parts, and vLLM's prefill backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from fl_dispatch import call_op

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge attention over more keys into the attention so far (Ye et al., arXiv 2501.01005, section 2.2).

    Args:
        out: ``[tokens, heads, dim]``; overwritten.
        lse: its log-sum-exp, ``[heads, tokens]``, minus infinity if no key was seen; overwritten.
        other: like ``out``, of the other keys.
        other_lse: like ``lse``, of the other keys.
    """
    total = torch.logaddexp(lse, other_lse)
    # If neither part saw a key, the total is -inf, too, and both weights are zero.
    shift = total.clamp_min(torch.finfo(total.dtype).min)
    first, second = (torch.exp(part - shift).transpose(0, 1).unsqueeze(-1) for part in (lse, other_lse))
    out.copy_(out * first + other * second)
    lse.copy_(total)


class MLAFLPrefillBackend(MLAPrefillBackend):
    """The prefill backend that vLLM requires in addition to an attention class.

    ``MLAFLImpl`` calls the operator itself, bound for its layer; this backend serves vendors' classes that leave
    prefill to vLLM's common code.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        return "FL_DISPATCH"

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend causally over the new tokens."""
        metadata = self._prefill_metadata
        starts, longest = metadata.query_start_loc, metadata.max_query_len
        result = call_op("mla_prefill", q, k, v, starts, starts, longest, longest, self.scale, out, True)
        return result if return_softmax_lse else result[0]

    def run_prefill_context_chunk(
        self,
        chunk: MLACommonPrefillMetadata.ContextChunk,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend with a chunk's new tokens over its context."""
        starts, key_starts = chunk.query_start_loc, chunk.cu_seq_lens
        longest = (chunk.max_query_len, chunk.max_seq_len)
        result: tuple[Tensor, Tensor] = call_op(
            "mla_prefill", q, k, v, starts, key_starts, *longest, self.scale, out, False
        )
        return result
