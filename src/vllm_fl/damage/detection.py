"""Count damaged logits in vLLM's runners; the counts go to the host with the sampled tokens.

If each request has one row of logits in the V2 runner, the device writes the marks to host memory itself, so nothing is
copied. With damage they become vLLM's counts. Where kernels are prepared and no request of a step needs its logits
processed, the kernels that choose its tokens find the damage too (see :mod:`.one_pass`).

With drafts a request has several rows of logits, which vLLM treats as rows of several requests. Here a request has the
rows from which its tokens were chosen. A draft from damaged logits is never accepted, and the target's own token
replaces it: vLLM would draw from the target's excess over the draft, which is undefined for NaN.
"""

from __future__ import annotations

import importlib
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fl_dispatch.hosting.damage.rows import HostMarks, Slot, damaged_rows, damaged_tokens, host_marks
from fl_dispatch.hosting.layers.attribute import Attached

from . import choice, one_pass

if TYPE_CHECKING:
    from vllm.config import ModelConfig

REJECTION = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
"""The module that verifies drafts in the V2 runner."""
SAMPLER = "vllm.v1.worker.gpu.sample.sampler"
"""The module that samples in the V2 runner."""
OUTPUT = "vllm.v1.worker.gpu.async_utils"
"""The module that copies a step's tokens to the host in the V2 runner."""
PLACES = {
    False: (("vllm.v1.worker.gpu_model_runner", "count_nans_per_row"),),
    True: ((SAMPLER, "get_num_nans"), (REJECTION, "get_num_nans")),
}
"""Whether the runner is V2 → vLLM's counting functions: the modules that call them, and their names there."""
COPIED_AT_ONCE = 1 << 25
"""Elements of drafts' logits that are copied at a time."""
PADDING = 64
"""vLLM pads a vocabulary to a multiple of it; the padded size is the stride of logits' rows in most models."""
COUNTS = Attached[Tensor]("fl_damaged_tokens")
"""The count of each request in the V1 runner, from the logits of a step with drafts."""
ONE_PASS = Attached[one_pass.OnePass]("fl_one_pass")
"""A V2 runner's choice of tokens that finds damage."""
MARKS = Attached[Slot]("fl_marks")
"""The marks of a V2 sampler's requests in host memory, valid once vLLM has waited for the step's tokens."""


def install(runner: Any, v2: bool, drafts: bool) -> None:
    """Make a model runner count damaged rows, and with drafts each request's damaged tokens, if counting is on."""
    if not _is_on():
        return
    for module, name in PLACES[v2]:
        users: Any = importlib.import_module(module)
        setattr(users, name, _counted)
    if drafts and v2:
        runner.sample = _sampled(runner.sample)
        users = importlib.import_module(REJECTION)
        if not hasattr(users.RejectionSampler.__call__, "__wrapped__"):
            users.RejectionSampler.__call__ = _without_damaged_drafts(users.RejectionSampler.__call__)
    elif drafts:
        runner._sample = _verified(runner._sample)
    elif v2 and runner.batch_sharder is None and not _raises() and (memory := host_marks(runner.max_num_reqs)):
        marking = Marking(memory, None if memory.on_host else one_pass.of(runner))
        if marking.both is not None:
            ONE_PASS.give(runner, marking.both)
            runner.sampler.sample = marking.choosing(runner.sampler.sample)
        importlib.import_module(SAMPLER).get_num_nans = marking  # type: ignore[attr-defined]
        runner.sample = marking.around(runner.sample)
        copies: Any = importlib.import_module(OUTPUT)
        if not hasattr(copies.AsyncOutput.get_output, "__wrapped__"):
            copies.AsyncOutput.get_output = _with_marks(copies.AsyncOutput.get_output)


def warm_up(model_config: ModelConfig, device: torch.device, both: one_pass.OnePass | None = None) -> None:
    """Check rows of logits in the model's dtype, so that no request waits for a kernel to compile."""
    if _is_on():
        memory, width = host_marks(1), model_config.get_vocab_size()
        row = torch.zeros(1, dtype=torch.int64, device=device)
        for padded in {width, width + -width % PADDING}:
            logits = torch.zeros(1, padded, dtype=model_config.dtype, device=device)[:, :width]
            damaged_rows(logits)
            if memory and (slot := memory.mark(logits)) and both:
                both.choose(logits, row, row, slot)  # places of requests are int64, too


def _is_on() -> bool:
    from vllm import envs

    return not choice.is_off() and bool(envs.VLLM_COMPUTE_NANS_IN_LOGITS)


def _raises() -> bool:
    """Whether vLLM ends the engine at the first damage, for which it reads the counts itself."""
    from vllm import envs

    return bool(envs.VLLM_RAISE_ON_LOGIT_NANS)


class Marking:
    """Replacement of vLLM's count of each row's NaN: it marks rows in host memory and returns no counts, if possible.

    Args:
        memory: the memory of marks.
        both: chooses the tokens of requests without processing, and marks their rows; ``None`` if vLLM chooses.
    """

    def __init__(self, memory: HostMarks, both: one_pass.OnePass | None = None) -> None:
        self.memory, self.both = memory, both
        self.samples = False
        """Whether its runner samples; others are vLLM's warm-up, and another engine of the process."""
        self.chooses = False
        """Whether the choice of this scheduler call's tokens marks its rows."""
        self.slot: Slot | None = None
        """The marks of the step that is being sampled, and of the steps before it in one scheduler call."""
        self.waits = False
        """Whether a step's rows have no marks until their tokens are chosen."""
        self.late: list[Tensor] = []
        """Counts of steps that no kernel marked, and that vLLM did not get."""

    def __call__(self, logits: Tensor) -> Tensor | None:
        if not self.samples:
            return damaged_rows(logits)
        if self.chooses and len(logits):
            self.waits = True
            return None
        return self._mark(logits)

    def _mark(self, logits: Tensor) -> Tensor | None:
        if (slot := self.memory.mark(logits, self.slot)) is None:
            return damaged_rows(logits)
        self.slot = slot
        return None

    def choosing(self, sample: Any) -> Any:
        """Wrap the sampler's ``sample``, which marks the rows that wait for it."""

        @wraps(sample)
        def chosen(
            logits: Tensor,
            expanded_idx_mapping: Tensor,
            idx_mapping: Tensor,
            of_host: Any,
            pos: Tensor,
            *args: Any,
            **more: Any,
        ) -> Any:
            waits, self.waits = self.waits, False
            if waits:
                assert self.both is not None
                slot = self.memory.slot_of(len(logits), self.slot)
                if slot and (tokens := self.both.choose(logits, expanded_idx_mapping, pos, slot)) is not None:
                    self.slot = slot
                    return tokens, logits
                if (counts := self._mark(logits)) is not None:
                    self.late.append(counts)
            return sample(logits, expanded_idx_mapping, idx_mapping, of_host, pos, *args, **more)

        return chosen

    def around(self, sample: Any) -> Any:
        """Wrap the runner's ``sample``, which may sample several steps: all their marks are on what it returns."""

        @wraps(sample)
        def sampled(hidden_states: Tensor, input_batch: Any, *args: Any) -> Any:
            self.samples = True
            self.chooses = self.both is not None and self.both.takes(input_batch.idx_mapping_np)
            try:
                found = sample(hidden_states, input_batch, *args)
            finally:
                slot, late = self.slot, self.late
                self.slot, self.waits, self.samples, self.late = None, False, False, []
            if slot is not None:
                MARKS.give(found[0], slot)
            for counts in late:
                found[0].num_nans = counts if found[0].num_nans is None else found[0].num_nans + counts
            return found

        return sampled


def _with_marks(get_output: Any) -> Any:
    """Wrap ``AsyncOutput.get_output``, which waits for the step: with damage its output gets the counts."""
    seen = False

    @wraps(get_output)
    def got(self: Any) -> Any:
        nonlocal seen
        output = get_output(self)
        slot = MARKS.find(self.sampler_output)
        if slot is not None and (seen or slot.found()):
            seen = True  # from now on all outputs get counts, because a request keeps its count until the next
            counts = output.num_nans_in_logits or {}  # of later steps, which the kernel did not mark
            named = zip(output.req_ids, slot.damaged(), strict=False)
            output.num_nans_in_logits = {name: mark + counts.get(name, 0) for name, mark in named}
        return output

    return got


def _counted(logits: Tensor) -> Tensor:
    found = COUNTS.find(logits)
    return damaged_rows(logits) if found is None else found


def _verified(sample: Any) -> Any:
    """Wrap the V1 runner's ``_sample``; the runner counts afterwards."""

    @wraps(sample)
    def verified(logits: Tensor | None, drafts: Any) -> Any:
        if logits is None or drafts is None:
            return sample(logits, drafts)
        rows = damaged_rows(logits)
        output = sample(logits, drafts)
        tokens = output.sampled_token_ids.ge(0).sum(-1)
        COUNTS.give(logits, damaged_tokens(rows, drafts.cu_num_sampled_tokens, tokens))
        return output

    return verified


def _sampled(sample: Any) -> Any:
    """Wrap the V2 runner's ``sample``, which has counted by row; ranks that sample for each other already have sums."""

    @wraps(sample)
    def sampled(hidden_states: Tensor, input_batch: Any, *args: Any) -> Any:
        found = sample(hidden_states, input_batch, *args)
        output = found[0]
        if output.num_nans is not None and len(output.num_nans) != len(output.num_sampled):
            output.num_nans = damaged_tokens(output.num_nans, input_batch.cu_num_logits[1:], output.num_sampled)
        return found

    return sampled


def _without_damaged_drafts(verify: Any) -> Any:
    """Mark drafts from damaged logits as invalid, like those that a grammar forbids."""

    @wraps(verify)
    def verified(
        self: Any, logits: Tensor, input_batch: Any, draft_logits: Tensor | None = None, invalid: Tensor | None = None
    ) -> Any:
        if draft_logits is not None:  # random choices, with which vLLM compares the target's
            step = input_batch.expanded_local_pos.long() - 1  # a request's own token comes before its drafts
            places = torch.stack((input_batch.expanded_idx_mapping.long(), step.clamp(min=0)))
            parts = places.split(max(1, COPIED_AT_ONCE // draft_logits.shape[-1]), dim=1)
            damaged = torch.cat([damaged_rows(draft_logits[tuple(part)]) for part in parts]).bool() & (step >= 0)
            invalid = damaged if invalid is None else damaged | invalid
        return verify(self, logits, input_batch, draft_logits, invalid)

    return verified
