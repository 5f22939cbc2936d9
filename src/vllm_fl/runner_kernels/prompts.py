"""The method that writes a request's own embeddings, replacing vLLM's, which launches a kernel.

The kernel takes embeddings by address; the method has the tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def overlay(self: Any, input_batch: Any, num_computed_tokens: Tensor, inputs_embeds: Tensor) -> None:
    """Write requests' own embeddings over ``inputs_embeds`` ``[tokens, hidden]``, except at positions of tokens."""
    starts, computed = input_batch.query_start_loc_np.tolist(), input_batch.num_computed_tokens_np.tolist()
    for place, name in enumerate(input_batch.req_ids):
        if name not in self.gpu_tensors:
            continue
        embeddings, is_token = self.gpu_tensors[name]
        first = computed[place]  # exact while a prompt is read, and never too small
        rows = min(starts[place + 1] - starts[place], len(embeddings) - first)
        if rows <= 0:
            continue
        target, source = inputs_embeds[starts[place] : starts[place] + rows], embeddings[first : first + rows]
        if is_token is not None:
            source = torch.where(is_token[first : first + rows, None].bool(), target, source)
        target.copy_(source)
