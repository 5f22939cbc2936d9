"""LoRA in plain PyTorch: vLLM's own wrapper for the CPU, with two mistakes mended.

vLLM marks tokens of requests without an adapter with the index -1, and its PyTorch functions use that index as it is,
so such a token would get the last adapter's product (github.com/vllm-project/vllm/pull/48421). A product with zeros is
zero whatever the adapter. And it takes the logits of a prompt, a row for each token, for those of a batch, a row for
each request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from vllm.lora.ops.torch_ops import bgmv_expand, bgmv_shrink
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

_prompt_start: ContextVar[int | None] = ContextVar("prompt_start", default=None)


@contextmanager
def prompt_logits(start: int) -> Iterator[None]:
    """Inside, logits are those of a prompt whose first token is number ``start`` of the batch."""
    token = _prompt_start.set(start)
    try:
        yield
    finally:
        _prompt_start.reset(token)


def _without_base_rows(x: Tensor, indices: Tensor) -> Tensor:
    """``x`` with zeros in the rows whose adapter index is negative."""
    return x.view(-1, x.shape[-1]).masked_fill((indices < 0)[:, None], 0.0)


class PunicaWrapperFL(PunicaWrapperCPU):
    """The entry points whose ``x`` is read for the adapters only; arguments as in the base class.

    ``add_lora_linear`` calls ``add_shrink``; layers with fully sharded adapters call ``add_shrink`` themselves, and
    then ``add_expand`` with what it wrote.
    """

    def add_shrink(self, y: tuple[Tensor, ...] | Tensor, x: Tensor, *args: Any, **kwargs: Any) -> None:
        super().add_shrink(y, _without_base_rows(x, self.token_lora_indices), *args, **kwargs)

    def add_lora_embedding(self, y: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> None:
        super().add_lora_embedding(y, _without_base_rows(x, self.token_lora_indices), *args, **kwargs)

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **kwargs: Any
    ) -> None:
        """Add to the logits ``y`` ``[rows, vocabulary]``, in place, the adapters' part of ``x`` ``[rows, hidden]``.

        Raises:
            RuntimeError: the rows are neither one a request nor those of a prompt that :func:`prompt_logits` names.
        """
        start = _prompt_start.get()
        indices = self.sampler_indices if start is None else self.token_lora_indices[start : start + len(x)]
        if len(indices) != len(x):
            raise RuntimeError(f"{len(x)} rows of logits, but the adapters of {len(indices)} are known")
        product = torch.zeros((len(x), lora_b_stacked.shape[-1]), dtype=torch.float32, device=x.device)
        bgmv_shrink(_without_base_rows(x, indices), lora_a_stacked, product, indices, scale)
        bgmv_expand(product, lora_b_stacked, y, indices, add_inputs=True)


def tell_prompts(runner: Any) -> None:
    """Have vLLM's V2 runner, whose model is loaded, say where in the batch the prompts' logits are that it asks for."""
    if (worker := runner.prompt_logprobs_worker) is not None:  # only where tokens are chosen
        worker.compute_prompt_logprobs = _located(worker.compute_prompt_logprobs)
        worker.compute_prompt_token_id_logprobs = _located(worker.compute_prompt_token_id_logprobs)


def _located(method: Callable[..., Any]) -> Callable[..., Any]:
    def computed(logits_of: Callable[[Tensor], Tensor], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        def logits(rows: Tensor) -> Tensor:  # a slice of the batch's hidden states
            start = (rows.storage_offset() - hidden_states.storage_offset()) // hidden_states.stride(0)
            with prompt_logits(start):
                return logits_of(rows)

        return method(logits, hidden_states, *args, **kwargs)

    return computed


class LoRAModelRunner(CPUModelRunner):
    """vLLM's V1 runner, which asks for the logits of one prompt after the other without saying whose they are."""

    def _get_prompt_logprobs_dict(self, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for request in [name for name in self.num_prompt_logprobs if name in num_scheduled_tokens]:
            start = self.query_start_loc.np[self.input_batch.req_id_to_index[request]].item()
            with prompt_logits(start):
                found |= super()._get_prompt_logprobs_dict(hidden_states, {request: num_scheduled_tokens[request]})
        return found
