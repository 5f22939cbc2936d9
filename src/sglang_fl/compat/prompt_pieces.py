"""Calls between the pieces of a graph of prompts.

A piece keeps the numbers and the tensors of the batch that was captured. So a call that needs the batch ends a piece,
as SGLang's attention does: it runs at each replay, for the batch of the step, and without its padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor


def run(call: Callable[..., None], batch: Any, *rows: Tensor) -> None:
    """Run ``call(slots, *rows)``: between two pieces if the batch is read in pieces, otherwise at once.

    Args:
        call: receives the slots of the tokens and a part of each of ``rows``; its result is ignored.
        batch: SGLang's batch.
        rows: tensors with one row for each token, padding included.
    """
    from sglang.srt.model_executor.runner_utils.prefill_graph import is_in_prefill_graph_scope

    if is_in_prefill_graph_scope() and batch.forward_mode.is_extend():
        _between()(call, *rows)
    else:
        call(batch.out_cache_loc, *rows)


@cache
def _between() -> Callable[..., None]:
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph import (
        eager_on_graph,
    )
    from sglang.srt.model_executor.runner_utils.forward_batch import get_forward_batch

    def between(call: Callable[..., None], *rows: Tensor) -> None:
        batch = get_forward_batch()
        tokens = batch.global_num_token_non_padded_cpu
        call(batch.out_cache_loc[:tokens], *(one[:tokens] for one in rows))

    ends_a_piece: Callable[..., None] = eager_on_graph(between)
    return ends_a_piece
