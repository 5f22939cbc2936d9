"""The V2 runner's batches with drafts, for models with a state per request.

Except for delta nets, vLLM distinguishes decoding requests from prompts by their places in a batch. Two kinds of
requests are at wrong places, so that their states would include rejected tokens:

- requests that decode without drafts are among short prompts;
- a prompt of one token, which the scheduler pads with placeholders next to requests with drafts, counts as a prompt.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.abstract import MambaBase

RUNNER = "vllm.v1.worker.gpu.model_runner"
STATES = "vllm.v1.worker.gpu.model_states.mamba_hybrid"


def put_in_order(runner: Any) -> None:
    """Mark the decoding requests in a runner's batches. Idempotent; one runner per process.

    Args:
        runner: vLLM's V2 runner with its model.
    """
    module: Any = importlib.import_module(RUNNER)
    states: Any = importlib.import_module(STATES)
    sort = module.sort_batch_req_ids
    module.sort_batch_req_ids = _prompts_last(getattr(sort, "fl_hosts", sort), runner)
    kind = states.MambaHybridModelState
    if not hasattr(kind.prepare_attn, "__wrapped__"):
        kind.prepare_attn = _filled_up_decode(kind.prepare_attn)


def _prompts_last(sort: Callable[..., list[str]], runner: Any) -> Callable[..., list[str]]:
    """Return vLLM's sort of a batch, followed by one that moves prompts after decoding requests."""

    @wraps(sort)
    def sorted_ids(num_tokens: dict[str, int], drafts: dict[str, list[int]], *rest: Any) -> list[str]:
        requests = runner.req_states  # vLLM makes them anew with the caches
        rows, ordered = requests.req_id_to_index, sort(num_tokens, drafts, *rest)
        if any(name not in rows for name in ordered):  # those of a later engine in this process, which needs no order
            return ordered

        def is_prompt(name: str) -> bool:
            return bool(requests.num_computed_prefill_tokens[rows[name]] < requests.prefill_len.np[rows[name]])

        return sorted(ordered, key=lambda name: not drafts.get(name) and is_prompt(name))

    sorted_ids.fl_hosts = sort  # type: ignore[attr-defined]
    return sorted_ids


def _filled_up_decode(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's method with filled-up prompts, which have drafts, marked as decoding; new ones get empty states."""

    @wraps(prepare)
    def prepared(
        self: Any,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: tuple[Tensor, ...],
        slot_mappings: Tensor,
        attn_groups: Any,
        kv_cache_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        drafts = input_batch.num_draft_tokens_per_req
        if drafts is not None:
            filled = input_batch.is_prefilling_np & (drafts > 0)
            known = input_batch.prefill_runs_as_decode_np
            input_batch.prefill_runs_as_decode_np = filled if known is None else np.logical_or(known, filled)
            (new,) = np.nonzero(filled & (input_batch.num_computed_tokens_np == 0))
            if new.size:
                layers = self.vllm_config.compilation_config.static_forward_context
                _begin(torch.from_numpy(new), layers, block_tables, kv_cache_config.kv_cache_groups)
        rest = (cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config, *args)
        return prepare(self, input_batch, *rest, **kwargs)

    return prepared


def _begin(rows: Tensor, layers: Mapping[str, Any], block_tables: tuple[Tensor, ...], groups: Sequence[Any]) -> None:
    """Set the initial states of requests to zeros, because vLLM leaves the last request's state in a block."""
    for table, group in zip(block_tables, groups, strict=True):
        slots = table[rows.to(table.device), 0].long()
        for name in group.layer_names:
            if isinstance(layers.get(name), MambaBase):
                for state in layers[name].kv_cache:
                    state[slots] = 0
