"""vLLM's V2 model runner, which makes several steps per scheduler call."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from fl_dispatch.devices import detect_device
from fl_dispatch.logger_manager import get_logger

from ..attention.metadata import AttentionFLMetadataBuilder
from ..compat import arrivals

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

logger = get_logger(__name__)

AHEAD = 3
"""Steps that may wait on the device when an arriving request ends the others. They run before its prompt is read, and
the host has their time for the next scheduler call."""


class StepsRunner(GPUModelRunner):
    """vLLM's V2 runner with several steps per scheduler call."""

    fl_steps = 1
    """Number of steps of this scheduler call."""
    fl_is_posted = False
    """Whether the requests' states have the sampled tokens of this scheduler call."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        alone = vllm_config.parallel_config.world_size == 1  # ranks would have to agree on the end
        self.fl_made: Counter[int] = Counter()
        """Steps of a scheduler call → the number of scheduler calls with that many steps."""
        self.fl_queue = Queue(device, detect_device().accelerator) if alone else None

    def fl_take(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Remove the placeholders from a scheduler call; the rest is its first step.

        A model class with a state of its own may prepare something between steps, so it makes only the first.
        """
        placeholders = scheduler_output.scheduled_spec_decode_tokens
        self.fl_steps = 1
        if not placeholders:
            return scheduler_output
        scheduled = scheduler_output.num_scheduled_tokens
        if self._is_plain:
            self.fl_steps += min(len(placeholders.get(name, ())) for name in scheduled)
        counts = {name: count - len(placeholders.get(name, ())) for name, count in scheduled.items()}
        return replace(
            scheduler_output,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
        )

    @cached_property
    def _is_plain(self) -> bool:
        """Whether nothing of the model's own happens between steps; otherwise the log says so once."""
        if (kind := type(self.model_state)) is DefaultModelState:
            return True
        logger.info("a scheduler call makes one step, because the model has a state of its own (%s)", kind.__name__)
        return False

    # -- the first step is vLLM's -------------------------------------------------------------------------------------

    def prepare_inputs(
        self, scheduler_output: SchedulerOutput, batch_req_state: Any, batch_desc: Any, *args: Any
    ) -> InputBatch:
        self.fl_desc = batch_desc
        return super().prepare_inputs(scheduler_output, batch_req_state, batch_desc, *args)

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[Tensor, ...], Tensor]:
        self.fl_block_tables, slot_mappings = super().prepare_attn(input_batch)
        return self.fl_block_tables, slot_mappings

    def sample(
        self, hidden_states: Tensor, input_batch: InputBatch, grammar_output: Any
    ) -> tuple[SamplerOutput, Tensor, Tensor]:
        """Sample the step's tokens, and make the other steps of the call: ``[requests, steps]`` tokens."""
        steps, self.fl_steps = self.fl_steps, 1
        output, *_ = super().sample(hidden_states, input_batch, grammar_output)
        if steps == 1:
            self.fl_made[1] += 1
            return output, output.num_sampled, output.num_rejected
        outputs = [output]
        self._post(input_batch, output)
        while len(outputs) < steps and not self._is_wanted():
            hidden_states = self._step(input_batch, outputs[-1].sampled_token_ids)
            output, *_ = super().sample(hidden_states, input_batch, None)
            self._post(input_batch, output)
            outputs.append(output)
        self.fl_is_posted = True
        self.fl_made[len(outputs)] += 1
        output = joined(outputs)
        return output, output.num_sampled, output.num_rejected

    def postprocess_sampled(self, *args: Any, **kwargs: Any) -> None:
        """Store the sampled tokens, unless each step has stored its own."""
        if not self.fl_is_posted:
            super().postprocess_sampled(*args, **kwargs)
        self.fl_is_posted = False

    @cached_property
    def fl_reads_tensors(self) -> bool:
        """Whether captured attention reads only the batch's tensors, so that metadata needs no update."""
        groups = (group for groups in self.attn_groups for group in groups)
        return all(group.backend.get_builder_cls() is AttentionFLMetadataBuilder for group in groups)

    # -- the others ---------------------------------------------------------------------------------------------------

    def _post(self, batch: InputBatch, output: SamplerOutput) -> None:
        super().postprocess_sampled(
            batch.idx_mapping, output.sampled_token_ids, output.num_sampled, output.num_rejected, batch.query_start_loc
        )

    def _is_wanted(self) -> bool:
        """Wait for room on the device; return whether a request has arrived meanwhile, which must not wait."""
        if self.fl_queue is None:
            return False
        self.fl_queue.wait()
        return arrivals.has_come()

    def _step(self, batch: InputBatch, tokens: Tensor) -> Tensor:
        """Run the model on the tokens ``[requests, 1]`` that were just sampled; every position increases by one.

        The batch's tensors are written in place, where a captured graph reads them.
        """
        rows = batch.num_reqs
        batch.input_ids[:rows] = tokens.view(-1)
        for numbers in (batch.positions, batch.seq_lens, batch.seq_lens_cpu_upper_bound):
            numbers[:rows] += 1
        slot_mappings = self.block_tables.compute_slot_mappings(
            batch.idx_mapping, batch.query_start_loc, batch.positions, num_tokens_padded=batch.num_tokens_after_padding
        )
        mode, metadata = self.fl_desc.cg_mode, None
        if mode != CUDAGraphMode.FULL or not self.fl_reads_tensors:
            where = (self.attn_groups, self.kv_cache_config)
            metadata = self.model_state.prepare_attn(batch, mode, self.fl_block_tables, slot_mappings, *where)
        if mode == CUDAGraphMode.FULL:
            hidden_states: Tensor = self.cudagraph_manager.run_fullgraph(self.fl_desc)
            return hidden_states
        inputs = {
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "inputs_embeds": None,
            "intermediate_tensors": None,
            **self.model_state.prepare_inputs(batch, self.req_states),
        }
        descriptor = BatchDescriptor(
            num_tokens=batch.num_tokens_after_padding,
            has_lora=self.lora_config is not None,
            num_active_loras=self.fl_desc.num_active_loras,
        )
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=batch.num_tokens_after_padding,
            cudagraph_runtime_mode=mode,
            batch_descriptor=descriptor,
            slot_mapping=build_slot_mappings_by_layer(slot_mappings, self.kv_cache_config),
            is_padding=batch.is_padding,
        ):
            if mode == CUDAGraphMode.PIECEWISE:
                hidden_states = self.cudagraph_manager.run_pw_graph(self.model, inputs)
            else:
                hidden_states = self.model(**inputs)
        return hidden_states


def joined(outputs: list[SamplerOutput]) -> SamplerOutput:
    """Join the outputs of several steps into one, request by request."""
    first, steps = outputs[0], len(outputs)
    if steps == 1:
        return first
    requests = first.num_sampled.shape[0]
    scores = None
    if first.logprobs_tensors is not None:
        fields = ("logprob_token_ids", "logprobs", "selected_token_ranks")
        each = ([getattr(output.logprobs_tensors, field) for output in outputs] for field in fields)
        parts = (torch.stack(steps_of_field, 1).flatten(0, 1) for steps_of_field in each)
        scores = LogprobsTensors(*parts, cu_num_generated_tokens=list(range(0, steps * requests + 1, steps)))
    counts = [output.num_nans for output in outputs if output.num_nans is not None]
    nans = torch.stack(counts).sum(0) if counts else None
    return replace(
        first,
        sampled_token_ids=torch.cat([output.sampled_token_ids for output in outputs], 1),
        num_sampled=first.num_sampled * steps,
        logprobs_tensors=scores,
        num_nans=nans,
    )


class Queue:
    """The steps that the host has queued on a device and that are not finished, at most :data:`AHEAD`.

    Args:
        device: the device of the steps.
        waits: whether steps run while the host goes on.
    """

    def __init__(self, device: torch.device, waits: bool) -> None:
        self.begun: deque[torch.Event] = deque()
        self.idle = [torch.Event(device) for _ in range(AHEAD)] if waits else []

    def wait(self) -> None:
        """Wait until the device has room for another step."""
        if not self.idle:
            if not self.begun:
                return
            oldest = self.begun.popleft()
            oldest.synchronize()
            self.idle.append(oldest)
        event = self.idle.pop()
        event.record()
        self.begun.append(event)
