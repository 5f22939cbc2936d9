"""Run batches of every kind before a GPU serves, so that no kernel is compiled during a request.

vLLM's own warm-up has a few of the kinds of batches that :mod:`fl_dispatch.hosting.start.warm_batches` lists. The calls
have hardly any keys, whatever lengths they announce, so they take hardly any device time. They come before the capture
of graphs, in which an implementation's first failure would look like a failed graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fl_dispatch.hosting.layers.bound_layer import Bindable
from fl_dispatch.hosting.start import warm_batches
from fl_dispatch.hosting.start.first_choices import warn_of_waiting

from ..layers.states import StateLayer, Step

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@runtime_checkable
class WarmableAttention(Bindable, Protocol):
    """One layer's attention over several operators."""

    def fl_kind(self) -> tuple[Any, ...]:
        """Return the layer's kind: layers of one kind call the operators with arguments of the same kind."""

    def fl_try(self, kv_cache: Tensor, queries: Sequence[int], longest: int) -> None:
        """Call the operators on a batch of requests with ``queries`` new tokens; the cache keeps its contents.

        Args:
            kv_cache: a layer's cache.
            queries: new tokens of each request; requests have no earlier tokens.
            longest: the announced number of keys.
        """


@torch.inference_mode()
def attention(model: nn.Module, vllm_config: VllmConfig) -> int:
    """Call attention and the cache write for each kind of layer and batch; return the number of calls."""
    kinds: dict[Any, tuple[WarmableAttention, Tensor]] = {}
    for module in model.modules():
        impl = getattr(module, "impl", None)
        cache = getattr(module, "kv_cache", None)
        if isinstance(impl, WarmableAttention) and isinstance(cache, Tensor) and cache.numel():
            kinds.setdefault((impl.fl_kind(), tuple(cache.shape[1:]), cache.dtype), (impl, cache))
    calls = 0
    for impl, cache in kinds.values():
        for queries, longest in _batches(vllm_config):
            impl.fl_try(cache, queries, longest)
            calls += 1
    torch.accelerator.synchronize()
    return calls


@torch.inference_mode()
def states(model: nn.Module, vllm_config: VllmConfig) -> int:
    """Run each kind of layer with a state on each kind of batch, in an unused block; return the number of runs.

    Raises:
        ValueError: some calls of a layer have no kernel, because of the kernels' declared limits.
    """
    from vllm.forward_context import create_forward_context, override_forward_context

    kinds: dict[Any, StateLayer] = {}
    for module in model.modules():
        if isinstance(module, StateLayer) and module.kv_cache[0].numel():
            kinds.setdefault(module.fl_kind(), module)
    config, runs = vllm_config.model_config, 0
    warn_of_waiting(operator for layer in kinds.values() for operator in layer.fl_choices)
    for layer, (single, prompts) in _state_batches(kinds.values(), vllm_config):
        device = layer.kv_cache[0].device
        step = Step.of(single, prompts, device)
        hidden = torch.zeros(step.num_actual_tokens, config.get_hidden_size(), dtype=config.dtype, device=device)
        with (
            override_forward_context(create_forward_context({layer.prefix: step}, vllm_config)),
            layer.fl_asked() as without,
        ):
            layer.fl_try(hidden)
        for operator, why in without.items():
            raise ValueError(
                f"vllm_fl does not support {layer.prefix} here: only the reference takes its calls of '{operator}', "
                f"and that waits for the device in every layer ({why})"
            )
        runs += 1
    torch.accelerator.synchronize()
    return runs


def _state_batches(
    layers: Iterable[StateLayer], vllm_config: VllmConfig
) -> Iterator[tuple[StateLayer, tuple[int, tuple[int, ...]]]]:
    """Yield layers, each with batches that reach all of the implementations that the policy puts first."""
    scheduler = vllm_config.scheduler_config
    limits = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    for layer in layers:
        among = warm_batches.beginnings(layer.fl_operators(), layer.fl_scope(layer.prefix))
        yield from product((layer,), warm_batches.state_batches(*limits, among))


def token_counts(vllm_config: VllmConfig) -> list[int]:
    """Return tokens of the batches to run without a KV cache."""
    return warm_batches.token_counts(vllm_config.scheduler_config.max_num_batched_tokens)


def _batches(vllm_config: VllmConfig) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the new tokens of each request of a batch, and the number of keys that the batch announces."""
    scheduler, length = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
    return warm_batches.attention_batches(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, length)
