"""Damaged requests in vLLM's scheduler, which decides for all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from fl_dispatch.hosting.damage.verdicts import KEPT, StepReport, Verdict, Verdicts, of_numbers, of_wrong
from fl_dispatch.hosting.layers.attribute import Attached
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings

from . import choice
from .messages import STEP_REPORT, WATCH

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)

NOTHING = StepReport()
SPOILED = "the engine that sent it found NaN or infinity in the logits that it computed from it"


def contain() -> None:
    """Make vLLM's schedulers contain damage. Idempotent."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if not hasattr(Scheduler.update_from_output, "__wrapped__"):
        Scheduler.update_from_output = _judging(Scheduler.update_from_output)


def _judging(update: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(update)
    def judged(self: Scheduler, step: SchedulerOutput, output: ModelRunnerOutput) -> Any:
        report, damage = STEP_REPORT.find(output), DAMAGE.find(self)
        counts, heard = output.num_nans_in_logits, output.kv_connector_output
        spoiled = {} if heard is None else _spoiled(self, heard)
        watched = damage is not None and WATCH.find(step) is not None
        if not (report or watched or spoiled or (counts and any(counts.values()))) or choice.is_off():
            return update(self, step, output)
        if damage is None:
            DAMAGE.give(self, damage := Damage(self))
            self.schedule = damage.ordering(self.schedule)
        ended = damage.judge(step, output, watched, report or NOTHING, spoiled)
        result = update(self, step, output)
        for request, why in ended:
            _answer(result, request, why)
        return result

    return judged


class Damage:
    """The damaged requests of one scheduler, and their handling."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.verdicts = Verdicts(get_settings().damaged_requests)

    def ordering(self, schedule: Callable[..., SchedulerOutput]) -> Callable[..., SchedulerOutput]:
        """Wrap the scheduler's ``schedule``: it marks steps to be watched. Before the first damage, no step is.

        A step of a watched request's answer is not: scheduled before the verdict, it reads damage from the cache.
        """

        @wraps(schedule)
        def ordered(*args: Any, **kwargs: Any) -> SchedulerOutput:
            step = schedule(*args, **kwargs)
            tokens, requests = step.num_scheduled_tokens, self.scheduler.requests
            for one in map(requests.get, self.verdicts.watched & tokens.keys()):
                if one is not None and one.num_computed_tokens - tokens[one.request_id] < one.num_tokens:
                    WATCH.give(step, True)
            return step

        return ordered

    def judge(
        self,
        step: SchedulerOutput,
        output: ModelRunnerOutput,
        watched: bool,
        report: StepReport,
        spoiled: Mapping[int, str],
    ) -> list[tuple[Request, str]]:
        """Restart damaged requests, or end them; return those that ended, and why.

        Call it before vLLM reads the step's tokens, which restarted requests must not get. ``spoiled`` maps blocks with
        another engine's wrong keys and values to the reason.
        """
        again: list[Request] = []
        ended: list[tuple[Request, str]] = []
        counts = output.num_nans_in_logits or {}
        for name in step.num_scheduled_tokens:
            request = self.scheduler.requests.get(name)
            if request is None or request.is_finished():
                self.verdicts.watched.discard(name)
                continue
            if request.num_stale_output_tokens > 0 and request.drop_stale_output:
                continue  # from a step before it was restarted
            tokens = output.sampled_token_ids[output.req_id_to_index[name]] if output.sampled_token_ids else ()
            damaged = counts.get(name, 0) > 0
            verdict = self.verdicts.of(name, damaged, watched, bool(tokens))
            if verdict is Verdict.AGAIN and self._would_lose_scores(name, output):
                self.verdicts.watched.discard(name)
                ended.append((request, of_numbers(damaged, None)))
            elif verdict is Verdict.AGAIN:
                logger.warning("request %s has logits with NaN or infinity: it is computed again and watched", name)
                again.append(request)
            elif verdict is Verdict.ENDS:
                ended.append((request, of_numbers(damaged, report.origins)))
        self._take_back([one.request_id for one in (*again, *dict(ended))], SPOILED)
        if report.kept:
            names = ", ".join(one.request_id for one in self.scheduler.running)
            logger.warning(KEPT, " and ".join(report.kept), names)
        touched = self._having(spoiled)
        if report.wrong:
            touched = dict.fromkeys(self.scheduler.running, of_wrong(report.wrong))
            self._take_back(None, of_wrong(report.wrong))
        for one in (*again, *dict(ended)):
            touched.pop(one, None)
        if report.wrong or spoiled:
            self._evict_all()
            names = ", ".join(one.request_id for one in touched) or "none"
            of = "an implementation that was wrong" if report.wrong else "another engine, which takes them back"
            logger.warning("requests with keys and values of %s: %s", of, names)
            if self.verdicts.action == "end":
                ended += touched.items()
            else:
                again += touched
        for request in again:
            self._again(request)
        self._end(ended)
        return ended

    def _would_lose_scores(self, name: str, output: ModelRunnerOutput) -> bool:
        """Whether a step has a prompt's log-probabilities, which vLLM's V1 runner computes only once."""
        v1 = not self.scheduler.vllm_config.use_v2_model_runner
        return v1 and output.prompt_logprobs_dict.get(name) is not None

    def _having(self, blocks: Mapping[int, str]) -> dict[Request, str]:
        """Return running requests with one of these blocks, and the block's reason."""
        ids = self.scheduler.kv_cache_manager.get_block_ids
        running = self.scheduler.running if blocks else ()
        groups = ((one, group) for one in running for group in ids(one.request_id))
        return {one: blocks[block] for one, group in groups for block in group if block in blocks}

    def _take_back(self, requests: list[str] | None, why: str) -> None:
        """Make engines discard the keys and values that they were sent of requests; ``None`` for all."""
        tell = getattr(self.scheduler.connector, "fl_take_back", None)
        if tell is not None and requests != []:
            tell(requests, why)

    def _again(self, request: Request) -> None:
        """Preempt a request; its tokens become its prompt, and tokens of steps under way are dropped."""
        scheduler = self.scheduler
        self._forget(request)
        if request in scheduler.running:
            scheduler.running.remove(request)
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        else:  # preempted meanwhile for lack of memory
            request.drop_stale_output = True
            self._evict_all()  # its blocks have other owners by now
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def _end(self, ended: Iterable[tuple[Request, str]]) -> None:
        from vllm.v1.request import RequestStatus

        for request, why in ended:
            logger.error("request %s is ended: %s", request.request_id, why)
            self._forget(request)
            self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)

    def _forget(self, request: Request) -> None:
        """Remove a request's blocks from the prefix cache."""
        groups = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        self._evict(block for group in groups for block in group)

    def _evict_all(self) -> None:
        self._evict(range(len(self.scheduler.kv_cache_manager.block_pool.blocks)))

    def _evict(self, blocks: Iterable[int]) -> None:
        self.scheduler.kv_cache_manager.evict_blocks(set(blocks))


def _spoiled(scheduler: Scheduler, heard: Any) -> Mapping[int, str]:
    """Return blocks with another engine's wrong keys and values, and why they are wrong, as a connector heard."""
    ask = getattr(scheduler.connector, "fl_spoiled", None)
    return {} if ask is None else ask(heard)


def _answer(result: Any, request: Request, why: str) -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    if request.client_index not in result:
        result[request.client_index] = EngineCoreOutputs(outputs=[])
    result[request.client_index].outputs.append(
        EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            stop_reason=why,
            events=request.take_events(),
            trace_headers=request.trace_headers,
            num_nans_in_logits=1,
        )
    )


DAMAGE = Attached[Damage]("fl_damage")
"""The state of a scheduler, from its first damage on."""
