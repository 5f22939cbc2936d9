"""LoRA over the operators ``lora_shrink`` and ``lora_expand``: vLLM's wrapper of adapters, and the requests of logits.

Before each step vLLM gives each token's adapter. The wrapper keeps this mapping in tensors at fixed addresses, so that
compiled code and captured graphs read the current step's mapping. A prompt's logits have a row for each token, but vLLM
treats them as a batch's, with a row for each request. So its runners are patched to report which logits they ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from fl_dispatch import bind_op
from fl_dispatch.devices import detect_device
from fl_dispatch.ops.lora import FEW, PARTS

NONE = -1
"""The slot of rows without an adapter."""
_prompt_start: ContextVar[int | None] = ContextVar("prompt_start", default=None)
_rows: ContextVar[NDArray[np.int32] | None] = ContextVar("rows", default=None)


@contextmanager
def _within(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


prompt_logits = partial(_within, _prompt_start)
"""Context in which logits are a prompt's; the argument is the index of its first token in the batch."""
draft_logits = partial(_within, _rows)
"""Context in which logits are a batch's; the argument has the rows of each request, one more than its drafts."""


class Mapping:
    """The adapter of each row in the operators' form; every tensor keeps its address.

    Args:
        rows: the largest number of rows of a batch.
        slots: number of slots of each layer.
        device: the layers' device.
    """

    def __init__(self, rows: int, slots: int, device: torch.device | str) -> None:
        self.adapters = torch.full((rows,), NONE, dtype=torch.int32, device=device)
        self.order = torch.arange(rows, dtype=torch.int32, device=device)
        self.starts = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.active = torch.zeros(1, dtype=torch.int32)
        self.host = np.empty(0, dtype=np.int32)
        """The slots of the batch's rows, on the host."""
        self._filled = 0

    def update(self, host: NDArray[np.int32]) -> None:
        """Take another batch; rows after its end have no adapter."""
        self.host = host
        active = len(np.unique(host[host >= 0]))
        if not active and not self._filled:
            return
        slots, longest = len(self.starts) - 1, max(len(host), self._filled)
        adapters = np.full(longest, NONE, dtype=np.int32)
        adapters[: len(host)] = host
        last = np.where(adapters < 0, slots, adapters)
        order = np.argsort(last, kind="stable")
        _upload(self.adapters, adapters)
        _upload(self.order, order.astype(np.int32))
        _upload(self.starts, np.searchsorted(last[order], np.arange(slots + 1)).astype(np.int32))
        self.active[0] = active
        self._filled = len(host) if active else 0

    def of(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the operators' arguments for a batch of ``rows`` rows, including padding."""
        return self.adapters[:rows], self.order[:rows], self.starts, self.active


def _upload(target: Tensor, values: NDArray[Any]) -> None:
    """Write the first elements of a tensor, without waiting for the device if possible."""
    source = torch.from_numpy(values)
    device = detect_device()
    if device.accelerator and device.pin_memory:
        source = source.pin_memory()
    target[: len(values)].copy_(source, non_blocking=True)


class PunicaWrapperFL(PunicaWrapperCPU):
    """vLLM's entry points over our operators; arguments as in the base class. A model's layers share one instance.

    Args:
        max_num_batched_tokens: the largest number of rows of a batch.
        max_batches: the largest number of requests.
        device: the layers' device.
        kwargs: vLLM's ``lora_config``.
    """

    fl_shrink: Callable[..., Tensor]
    fl_expand: Callable[..., Tensor]

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        slots = kwargs["lora_config"].max_loras
        self.tokens, self.requests, self.some = (Mapping(max_num_batched_tokens, slots, device) for _ in range(3))
        self._embeddings_indices.zero_()
        self.fl_bind(None)

    def fl_bind(self, scope: str | None) -> None:
        """Bind the operators; policies cannot name them by a layer."""
        self.fl_shrink, self.fl_expand = bind_op("lora_shrink"), bind_op("lora_expand")

    # -- the batch ----------------------------------------------------------------------------------------------------

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        """Take the batch of the next step.

        Args:
            mapping: vLLM's mapping: the adapter's number for each token, and for each row of logits; 0 for none.
            lora_index_to_id: the number of the adapter in each slot.
            max_loras: slots.
            vocab_size: rows of an adapter of the embedding.
            kwargs: arguments that versions of vLLM add.
        """
        slots = {number: slot for slot, number in enumerate(lora_index_to_id) if number is not None}
        had = self.tokens.active.item()
        self.tokens.update(_slots_of(mapping.index_mapping, slots))
        self.requests.update(_slots_of(mapping.prompt_mapping, slots))
        self.indices_len[:2] = len(self.tokens.host), len(self.requests.host)
        if had or self.tokens.active.item():
            self._embeddings_indices.zero_()
            _upload(self._embeddings_indices, np.maximum(self.tokens.host, 0).astype(np.int64) * vocab_size)

    @property
    def token_lora_indices(self) -> Tensor:
        """Return ``[tokens]``, int32: the slot of each token's adapter, -1 for none."""
        return self.tokens.adapters[: self.indices_len[0]]

    @property
    def sampler_indices(self) -> Tensor:
        """Return the adapters of the rows of logits."""
        return self.requests.adapters[: self.indices_len[1]]

    # -- products -----------------------------------------------------------------------------------------------------

    def _shrink(self, mapping: Mapping, out: Tensor, x: Tensor, downs: Sequence[Tensor], scale: float) -> None:
        mapped = mapping.of(x.shape[0])
        x = x.to(downs[0].dtype)
        for first in range(0, len(downs), PARTS):
            down, *others = [down[:, 0] for down in downs[first : first + PARTS]]
            part = out if len(downs) <= PARTS else out[first : first + PARTS]
            self.fl_shrink(x, part, down, *mapped, scale, *(*others, None, None)[: PARTS - 1])

    def _expand(self, mapping: Mapping, y: Tensor, products: Tensor, ups: Sequence[Tensor], offset: int) -> None:
        mapped = mapping.of(y.shape[0])
        for first in range(0, len(ups), PARTS):
            some = [up[:, 0] for up in ups[first : first + PARTS]]
            part = products if len(ups) <= PARTS else products[first : first + PARTS]
            self.fl_expand(y, part, some[0], *mapped, offset, *(*some[1:], None, None)[: PARTS - 1])
            offset += sum(up.shape[1] for up in some)

    def add_shrink(self, y: Any, x: Tensor, lora_a_stacked: tuple[Tensor, ...], scale: float, **kwargs: Any) -> None:
        self._shrink(self.tokens, y, x.view(-1, x.shape[-1]), lora_a_stacked, scale)

    def add_expand(
        self,
        y: Tensor,
        x: Any,
        lora_b_stacked: tuple[Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Expand as in the base class; without ``add_inputs`` vLLM passes zeros in ``y``, so adding is right."""
        self._expand(self.tokens, y.view(-1, y.shape[-1]), x, lora_b_stacked, offset_start)

    def add_lora_embedding(self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, *args: Any, **kwargs: Any) -> None:
        self._expand(self.tokens, y, x[None], (lora_b_stacked,), 0)

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        self._add_product(self.tokens, y, x, lora_a_stacked, lora_b_stacked, scale)

    def _add_product(
        self, mapping: Mapping, y: Tensor, x: Tensor, downs: Sequence[Tensor], ups: Sequence[Tensor], scale: float
    ) -> None:
        shape = (len(downs), x.shape[0], downs[0].shape[2])
        products = torch.empty(shape, dtype=torch.float32, device=x.device)
        self._shrink(mapping, products, x, downs, scale)
        self._expand(mapping, y, products, ups, 0)

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **kwargs: Any
    ) -> None:
        """Add to the logits ``y`` ``[rows, vocabulary]``, in place, the adapters' part of ``x`` ``[rows, hidden]``.

        Raises:
            RuntimeError: the rows are neither one per request, nor a prompt's that :func:`prompt_logits` names, nor
                drafts' that :func:`draft_logits` counts.
        """
        mapping, start, rows = self.requests, _prompt_start.get(), _rows.get()
        if start is not None:
            mapping = self.some
            mapping.update(self.tokens.host[start : start + len(x)])
        elif rows is not None:
            mapping = self.some
            mapping.update(self.requests.host.repeat(rows))
        if len(mapping.host) != len(x) and self.tokens.active.item():
            raise RuntimeError(f"{len(x)} rows of logits, but adapters for {len(mapping.host)}")
        if mapping.active.item():
            columns = min(y.shape[-1], lora_b_stacked.shape[2])  # both may be padded, each differently
            self._add_product(mapping, y, x, (lora_a_stacked,), (lora_b_stacked[:, :, :columns],), scale)


def _slots_of(numbers: Sequence[int], slots: dict[int, int]) -> NDArray[np.int32]:
    """Return the slots of adapters by their numbers; number 0 is no adapter."""
    given = np.asarray(numbers, dtype=np.int64)
    found = np.full(len(given), NONE, dtype=np.int32)
    for number in np.unique(given[given > 0]):
        found[given == number] = slots[int(number)]
    return found


# -- requests of logits ------------------------------------------------------------------------------------------------


def track_logits(runner: Any, v2: bool) -> None:
    """Make the runner, with its model loaded, report the request of each row of logits."""
    if not v2:
        runner._get_prompt_logprobs_dict = _one_by_one(runner, runner._get_prompt_logprobs_dict)
        return
    runner.sample = _counted(runner.sample)
    if (worker := runner.prompt_logprobs_worker) is not None:  # only on ranks where tokens are chosen
        worker.compute_prompt_logprobs = _located(worker.compute_prompt_logprobs)
        worker.compute_prompt_token_id_logprobs = _located(worker.compute_prompt_token_id_logprobs)


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the V2 runner's method, which names each request's adapter and also asks for logits of drafts to verify."""

    def sampled(hidden_states: Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not input_batch.num_draft_tokens:
            return method(hidden_states, input_batch, *args, **kwargs)
        with draft_logits(np.diff(input_batch.cu_num_logits_np)):
            return method(hidden_states, input_batch, *args, **kwargs)

    return sampled


def _located(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the V2 runner's method so that logits of a prompt know their place in the batch."""

    def computed(logits_of: Callable[[Tensor], Tensor], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        def logits(rows: Tensor) -> Tensor:  # a slice of the batch's hidden states
            start = (rows.storage_offset() - hidden_states.storage_offset()) // hidden_states.stride(0)
            with prompt_logits(start):
                return logits_of(rows)

        return method(logits, hidden_states, *args, **kwargs)

    return computed


def _one_by_one(runner: Any, method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Split the V1 runner's call for several prompts' logits into one call per prompt."""

    def found(hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        together: dict[str, Any] = {}
        for request in [name for name in runner.num_prompt_logprobs if name in num_scheduled_tokens]:
            start = runner.query_start_loc.np[runner.input_batch.req_id_to_index[request]].item()
            with prompt_logits(start):
                together |= method(hidden_states, {request: num_scheduled_tokens[request]})
        return together

    return found


def warm_up_logits(model: nn.Module, width: int, dtype: torch.dtype) -> None:
    """Compute logits of few and of many rows with an adapter, which no dummy batch does.

    Args:
        model: the loaded model.
        width: width of its hidden states.
        dtype: dtype of the hidden states.
    """
    logits_of: Any = model.compute_logits
    found = (getattr(module, "punica_wrapper", None) for module in model.modules())
    for wrapper in {one for one in found if isinstance(one, PunicaWrapperFL)}:
        before = wrapper.tokens.host
        for rows in {1, min(FEW + 1, len(wrapper.some.adapters))}:
            wrapper.tokens.host = np.zeros(rows, dtype=np.int32)
            with prompt_logits(0):
                logits_of(torch.zeros(rows, width, dtype=dtype, device=wrapper.device))
        wrapper.tokens.host = before


def forget_batch(runner: Any, rows: int) -> None:
    """Report to vLLM's runner that ``rows`` rows have no adapters, before logits that belong to no batch."""
    runner._set_active_loras((0,) * rows, (0,) * rows, set())
