"""vLLM's schedulers, extended to give a batch that only decodes room for several steps.

The room is placeholders for drafts, as in vLLM's own asynchronous scheduling: the host handles blocks, limits, aborted
and preempted requests, and steps that were not made after all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from fl_dispatch.hosting.pace import Pace
from fl_dispatch.settings import get_settings
from vllm import envs

from ..compat import arrivals
from .choice import most_steps

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

MANY_LOGPROBS = 128
"""Log-probabilities of a token from which the steps of one scheduler call would need too much memory for them."""


class StepsScheduler(Scheduler):
    """vLLM's scheduler with several steps per scheduler call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fl_most_steps = most_steps()
        in_time = envs.VLLM_ENABLE_V1_MULTIPROCESSING  # in one process, vLLM's scheduling does not depend on time
        self.fl_pace = Pace(get_settings().steps_ms / 1e3 if in_time else None)
        arrivals.listen()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        arrivals.forget(len(self.running) < self.max_num_running_reqs)
        most = self._most_steps()
        steps = self.fl_pace.fitting(most) if most else 1
        placeholders = [-1] * (steps - 1)
        for request in self.running:
            request.spec_token_ids = placeholders  # vLLM reads the list, and replaces it by another one
        self.fl_pace.begin(steps if most else 0)
        return super().schedule(throttle_prefills)

    def make_spec_decoding_stats(self, spec_decoding_stats: SpecDecodingStats | None, **_: Any) -> None:
        """Return ``None``, because placeholders are not drafts."""

    def _most_steps(self) -> int:
        """The steps that requests, blocks and limits allow; 0 if a request waits, reads a prompt or is single."""
        running, config = self.running, self.scheduler_config
        waiting = self.get_request_counts()[1]
        if not running or (waiting and len(running) < self.max_num_running_reqs):
            return 0
        room = [self.fl_most_steps, min(self.max_num_scheduled_tokens, config.max_num_batched_tokens) // len(running)]
        if config.long_prefill_token_threshold > 0:
            room.append(config.long_prefill_token_threshold)
        wanted = []
        for request in running:
            if request.is_prefill_chunk or not request.num_output_tokens or _is_single(request):
                return 0
            left = request.max_tokens - request.num_output_tokens - request.num_output_placeholders
            if left > 0:
                wanted.append(left)
                room.append(self.max_model_len - 1 - request.num_computed_tokens)
            elif request.num_output_placeholders:  # its last tokens are being computed: vLLM skips it until they come
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, self.current_step + 2)
        # A waiting request gets the place of the one that ends first.
        steps = min(*room, min(wanted) if waiting else max(wanted)) if wanted else 0
        return steps if steps <= 1 or self._has_blocks(steps) else 1

    def _has_blocks(self, steps: int) -> bool:
        """Whether there are blocks for the steps without preempting a request."""
        pool, groups = self.kv_cache_manager.block_pool, self.kv_cache_config.kv_cache_groups
        blocks = sum(-(-steps // group.kv_cache_spec.block_size) + 1 for group in groups)
        return bool(len(self.running) * blocks <= pool.get_num_free_blocks())


class AsyncStepsScheduler(StepsScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler with several steps per scheduler call."""


def _is_single(request: Request) -> bool:
    """Whether a request keeps single steps.

    The host must see each token for grammars, stop strings, tools and prompts in chunks. Log-probabilities of the whole
    vocabulary (-1) or of much of it would take the memory of several steps.
    """
    sampling = request.sampling_params
    if request.use_structured_output or request.resumable or sampling is None:
        return True
    logprobs = sampling.num_logprobs or 0
    return bool(sampling.stop) or arrivals.streams_tools(sampling) or not 0 <= logprobs < MANY_LOGPROBS
