"""Damaged requests under SGLang: only these end, or are computed again, and nothing of them stays cached.

The rows of logits are reduced before SGLang samples, because sampling overwrites NaN. Each rank's scheduler sees the
same rows, so all decide alike. A request is retracted, as when memory is short, and everything that no other request
holds leaves the radix cache. The step that reads it again runs with each call checked, which shows where the damage
began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_ABORT, retract_all
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from fl_dispatch import get_default_manager
from fl_dispatch.devices import detect_device
from fl_dispatch.hosting.damage.rows import damaged_rows
from fl_dispatch.hosting.damage.verdicts import KEPT, Verdict, Verdicts, Wrong, of_numbers, of_wrong
from fl_dispatch.hosting.layers.attribute import Attached
from fl_dispatch.hosting.ranks.agreement import together
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings
from fl_dispatch.shadow.origin import Origin, reads_cache, watching

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = get_logger(__name__)

EVERYTHING = 1 << 40
"""More tokens than a cache has."""
SEPARATE = "|fl-damage-"
"""What stands before a number at the end of a request's key in the radix cache, so that it shares nothing older."""


class Damaged(NamedTuple):
    """The damage of a batch.

    Args:
        rows: 1 for each damaged request, in main memory once :attr:`copied` is reached.
        copied: the device's event after the copy; ``None`` on a CPU.
    """

    rows: Tensor
    copied: Any = None


class Damage:
    """The damaged requests of one scheduler.

    Attributes:
        origins: watched request → the calls where its numbers stopped being finite.
        suspects: requests with prompts partly read by a wrong implementation, and why they are damaged.
        leaving: retracted requests that a batch may still contain.
        ended: requests that are to end, and hold parts of the radix cache until SGLang finishes or retracts them.
        purges: how often damage has been found in the radix cache.
    """

    def __init__(self) -> None:
        self.verdicts = Verdicts(get_settings().damaged_requests)
        self.wrong = Wrong(get_default_manager().shadow.findings)
        self.origins: dict[str, list[Origin]] = {}
        self.suspects: dict[Req, str] = {}
        self.leaving: list[Req] = []
        self.ended: list[Req] = []
        self.purges = 0

    def watches(self, batch: ScheduleBatch) -> bool:
        """Whether a batch reads a request again."""
        watched = self.verdicts.watched
        if not (watched and any(request.rid in watched for request in batch.reqs)):
            return False
        mode = batch.forward_mode  # a step of its answer, also one that verifies drafts, reads damage from the cache
        return bool(mode.is_extend() and not mode.is_target_verify())

    def unexplained(self, batch: ScheduleBatch, found: Mapping[int, Origin]) -> list[tuple[str, Origin]]:
        """Return a step's origins by request, without readers of a cache that an earlier part of a prompt damaged."""
        named = ((batch.reqs[place].rid, origin) for place, origin in found.items())
        return [(rid, origin) for rid, origin in named if not self.origins.get(rid) or not reads_cache(origin.operator)]

    def add(self, origins: Iterable[tuple[str, Origin]]) -> None:
        """Store origins of requests that a watched step found."""
        for rid, origin in origins:
            if rid in self.verdicts.watched and origin not in (known := self.origins.setdefault(rid, [])):
                known.append(origin)

    def known(self) -> list[tuple[str, Origin]]:
        """Return all origins with their requests."""
        return [(rid, origin) for rid, found in self.origins.items() for origin in found]

    def judge(self, scheduler: Scheduler, batch: ScheduleBatch, rows: Sequence[int], watched: bool) -> list[Req]:
        """End damaged requests, and return those to be read again."""
        again = []
        for one in [one for one in self.suspects if one.finished() or one.to_finish is not None or not one.kv.holds_kv]:
            del self.suspects[one]
            self.forget(one)
        calm = not (self.verdicts.watched or self.suspects or any(rows))
        for request, damaged in () if calm else zip(batch.reqs, rows, strict=False):
            if request.finished() or request.to_finish is not None:
                self.verdicts.watched.discard(request.rid)
                continue
            if request.is_retracted or request.inflight_middle_chunks > 0:  # the last chunk shows the damage too
                continue
            if why := self.suspects.pop(request, ""):
                again += self.retry_or_end(scheduler, batch, request, why)
                continue
            verdict = self.verdicts.of(request.rid, bool(damaged), watched, sampled=True)
            if verdict is Verdict.AGAIN and (why := _why_not_again(scheduler, request)):
                self.verdicts.watched.discard(request.rid)
                logger.warning("request %s is not computed again, because %s", request.rid, why)
                self.end(request, of_numbers(True, None), batch)
            elif verdict is Verdict.AGAIN:
                logger.warning("request %s has logits with NaN or infinity: it is read again, watched", request.rid)
                again.append(request)
            elif verdict is Verdict.ENDS:
                self.end(request, of_numbers(bool(damaged), self.origins.get(request.rid, [])), batch)
        if self.origins:
            self.origins = {rid: found for rid, found in self.origins.items() if rid in self.verdicts.watched}
        return again

    def touched(self, scheduler: Scheduler, batch: ScheduleBatch, why: str, known: set[Req]) -> list[Req]:
        """End requests with keys and values of a wrong implementation, and return those to be read again.

        ``known`` are those that are read again anyway.
        """
        everyone, chunked = _everyone(scheduler, batch), [scheduler.chunked_req]
        gone = [one for one in everyone if one.finished() or one.to_finish is not None or one.is_retracted]
        found = [one for one in everyone if one not in gone and one not in known]
        names = ", ".join(one.rid for one in found) or "none"
        logger.warning("requests with keys and values of an implementation that was wrong: %s", names)
        parts = [one for one in found if one in chunked or one.inflight_middle_chunks > 0]
        self.suspects.update(dict.fromkeys(parts, why))
        for one in gone:
            if not (one.finished() or one.is_retracted):  # its client left, and it stays for one more step
                self.forget(one)
        self.purges += 1
        return [one for each in found if each not in parts for one in self.retry_or_end(scheduler, batch, each, why)]

    def retry_or_end(self, scheduler: Scheduler, batch: ScheduleBatch, request: Req, why: str) -> list[Req]:
        """Return the request if it is to be read again; otherwise end it."""
        if self.verdicts.action == "end" or _why_not_again(scheduler, request):
            self.end(request, why, batch)
            return []
        return [request]

    def end(self, request: Req, why: str, batch: ScheduleBatch) -> None:
        """End a request with an error after this step."""
        logger.error("request %s is ended: %s", request.rid, why)
        reason = FINISH_ABORT(why, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
        if batch.forward_mode.is_extend() and request in batch.reqs:
            request.discard_output_reason = reason
        else:
            request.to_finish = reason
        self.forget(request)

    def forget(self, request: Req) -> None:
        """Store nothing more of a request, and remove what it stored once it holds nothing."""
        request.skip_radix_cache_insert = True
        if request not in self.ended:
            self.ended.append(request)
        self.purges += 1

    def purge(self, scheduler: Scheduler) -> None:
        """Remove from the radix cache what damaged requests stored there, except what a request still holds."""
        if scheduler.tree_cache.supports_prefix_sharing():
            scheduler.tree_cache.evict(EvictParams(EVERYTHING, EVERYTHING, EVERYTHING))
        self.ended = [one for one in self.ended if one.kv.holds_kv and not one.finished()]

    def separate(self, requests: Iterable[Req]) -> None:
        """Let requests that have read nothing yet find nothing in the radix cache that is there now."""
        name = f"{SEPARATE}{self.purges}"
        for one in requests:
            if not (one.extra_key or "").endswith(name):
                one.extra_key = f"{one.extra_key or ''}{name}"

    def retract(self, scheduler: Scheduler, requests: list[Req]) -> None:
        """Release everything that requests hold and no other request does."""
        retract_all(
            reqs=requests,
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=None,
        )
        self.leaving += requests
        self.purges += 1

    def requeue(self, scheduler: Scheduler, *batches: ScheduleBatch | None) -> None:
        """Remove retracted requests from their batches; they wait to be read once none of their steps is under way."""
        for batch in filter(None, batches):
            batch.filter_batch(reqs_to_exclude=self.leaving)
            batch.batch_is_full = False
        under_way = _under_way(scheduler)
        for request in [one for one in self.leaving if one not in under_way]:
            self.leaving.remove(request)
            self.separate([request])
            scheduler._add_request_to_queue(request, is_retracted=True)


DAMAGED = Attached[tuple[Damaged, ...]]("fl_damaged")
"""The damage in a batch's logits, one entry for each step of the model."""
DAMAGE = Attached[Damage]("fl_damage")
"""The state of a scheduler, from its first batch on."""
WATCHED = Attached[bool]("fl_watched")
"""The mark of a step's result if each call was checked."""
ROWS = "fl_damaged_rows"
"""The key of damaged rows among the tensors that a pipeline's last stage sends, because only it has logits."""
ORIGINS = "fl_origins"
"""The key of origins among the tensors that stages of a pipeline send."""


def sample(
    original: Callable[..., Any], runner: ModelRunner, logits_output: LogitsProcessorOutput, batch: ForwardBatch
) -> Any:
    """Check the rows of logits, and let SGLang sample."""
    logits = logits_output.next_token_logits
    if logits is not None and not _is_off():
        _give(logits_output, damaged_rows(logits))  # an output may be from an earlier batch
    return original(runner, logits_output, batch)


def eagle_sample(
    original: Callable[..., Any],
    verify_input: Any,
    batch: ScheduleBatch,
    logits_output: LogitsProcessorOutput,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Check the rows of logits that verify drafts; a request has the rows from which its tokens were chosen.

    A row after a rejected draft does not count.
    """
    if _is_off() or batch.forward_mode.is_idle():
        return original(verify_input, batch, logits_output, *args, **kwargs)
    rows = damaged_rows(logits_output.next_token_logits)
    tokens, lengths, places = original(verify_input, batch, logits_output, *args, **kwargs)
    _give(logits_output, (rows[places.clamp(min=0).long()] * (places >= 0)).amax(-1))
    return tokens, lengths, places


def without_damaged_drafts(runner: ModelRunner, output: Any) -> Any:
    """Return the output of a pass; for NaN or infinity a draft model proposes all tokens equally.

    That lowers acceptance but changes no answer. SGLang's verification treats NaN probabilities as 0, but its draws do
    not: ``torch.multinomial`` raises, and ``row_argmax`` on GPUs chooses a token outside the vocabulary.
    """
    if runner.is_draft_worker and not _is_off() and output.logits_output.next_token_logits is not None:
        damaged_rows(output.logits_output.next_token_logits)
    return output


def join(outputs: Sequence[LogitsProcessorOutput]) -> None:
    """Leave the damage of all steps of a batch on the last one's logits."""
    DAMAGED.give(outputs[-1], tuple(each for output in outputs for each in DAMAGED.find(output) or ()))


def get_next_batch_to_run(
    original: Callable[..., Any],
    scheduler: Scheduler,
    running_batch: ScheduleBatch,
    last_batch: ScheduleBatch | None,
) -> Any:
    """Let SGLang choose a batch without retracted requests."""
    damage = DAMAGE.find(scheduler)
    if damage is not None and damage.leaving:
        damage.requeue(scheduler, running_batch, last_batch)
    if damage is not None and (damage.suspects or damage.ended):
        damage.separate(scheduler.waiting_queue)
    return original(scheduler, running_batch=running_batch, last_batch=last_batch)


def run_batch(
    original: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch, pp_proxy_tensors: Any = None
) -> Any:
    """Run a batch; if it reads a request again, run it without graphs and check each call."""
    damage = DAMAGE.find(scheduler)
    before = None if pp_proxy_tensors is None else pp_proxy_tensors.tensors.pop(ORIGINS, None)
    if damage is None or not damage.watches(batch):
        return original(scheduler, batch, pp_proxy_tensors)
    damage.add(before or ())
    manager, here = get_default_manager(), get_parallel()
    with watching(manager.state, batch.extend_lens) as found:
        result = original(scheduler, batch, pp_proxy_tensors)
    named = damage.unexplained(batch, found)
    manager.shadow.findings.begun(dict.fromkeys(origin for _, origin in named))
    damage.add(together(here.tp_group.cpu_group, named) if here.tp_size > 1 else named)
    WATCHED.give(result, True)
    if (behind := getattr(result, "pp_hidden_states_proxy_tensors", None)) is not None:
        behind.tensors[ORIGINS] = damage.known()
    return result


def to_other_stages(original: Callable[..., Any], scheduler: Scheduler, result: Any, batch: ScheduleBatch) -> Any:
    """Return the last pipeline stage's message to the others, with the damage that it found."""
    tensors = original(scheduler, result, batch)
    if (output := result.logits_output) is not None and (found := DAMAGED.find(output)) is not None:
        tensors[ROWS] = found[0].rows
    if WATCHED.find(result):
        tensors[ORIGINS] = DAMAGE.of(scheduler).known()
    return tensors


def from_last_stage(
    original: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch, metadata: Any, outputs: Any
) -> Any:
    """Return a step's result as a stage makes it from the last stage's message."""
    rows, result = outputs.tensors.get(ROWS), original(scheduler, batch, metadata, outputs)
    if rows is not None:
        DAMAGED.give(result, (Damaged(rows.to("cpu", non_blocking=True)),))  # SGLang waits for its own copies next
    if ORIGINS in outputs.tensors:
        WATCHED.give(result, True)
        DAMAGE.of(scheduler).add(outputs.tensors[ORIGINS])
    return result


def process_batch_result(original: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch, result: Any) -> Any:
    """Restart or end damaged requests, and let SGLang give the others their tokens."""
    if _is_off():
        return original(scheduler, batch, result)
    if (damage := DAMAGE.find(scheduler)) is None:
        DAMAGE.give(scheduler, damage := Damage())
    again = damage.judge(scheduler, batch, _rows(result), WATCHED.find(result) is not None)
    if wrong := damage.wrong.new():
        again += damage.touched(scheduler, batch, of_wrong(wrong), set(again))
    if kept := damage.wrong.kept():
        logger.warning(KEPT, " and ".join(kept), ", ".join(one.rid for one in _everyone(scheduler, batch)))
    if not again:
        answer = original(scheduler, batch, result)
        if wrong or damage.ended:
            damage.purge(scheduler)
        return answer
    for request in again:
        request.is_retracted = True  # so that it gets no token
    processor = scheduler.batch_result_processor
    if not scheduler.enable_overlap:  # only with overlap SGLang has such requests in a step
        scheduler.batch_result_processor = replace(processor, enable_overlap=True)
    answer = original(scheduler, batch, result)
    scheduler.batch_result_processor = processor
    damage.retract(scheduler, again)
    damage.purge(scheduler)
    return answer


def _rows(result: Any) -> list[int]:
    found = DAMAGED.find(result)
    if found is None and (output := getattr(result, "logits_output", None)) is not None:
        found = DAMAGED.find(output)
    if not found:
        return []
    for each in found:
        if each.copied is not None:
            each.copied.synchronize()
    rows = [each.rows for each in found]
    return (rows[0] if len(rows) == 1 else torch.stack(rows).amax(0)).tolist()


def _everyone(scheduler: Scheduler, batch: ScheduleBatch) -> list[Req]:
    """Return the requests of a batch, and others with keys and values in the cache."""
    chunked = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    return [*dict.fromkeys((*batch.reqs, *scheduler.running_batch.reqs, *_under_way(scheduler), *chunked))]


def _under_way(scheduler: Scheduler) -> list[Req]:
    """Return requests of steps with unprocessed results."""
    return [request for batch, _ in scheduler.result_queue for request in batch.reqs]


def _is_off() -> bool:
    """Whether the search for damage is off."""
    settings = get_settings()
    return settings.damaged_requests == "ignore" or not settings.policy.enabled


def _why_not_again(scheduler: Scheduler, request: Req) -> str:
    """Return why a request cannot be read again; empty if it can."""
    reasons = {
        "its ranks of data-parallel attention run batches of their own": get_parallel().attn_dp_size > 1,
        "generation is paused": scheduler._engine_paused,
        "prompts are read by another engine": scheduler.disaggregation_mode != DisaggregationMode.NULL,
        "hierarchical sparse attention keeps more of it": scheduler.enable_hisparse,
        "SGLang retracts no group of beams": request.beam_group is not None,
        "its answer would begin anew beside embeddings": request.input_embeds is not None,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _give(logits_output: LogitsProcessorOutput, rows: Tensor) -> None:
    """Attach the damage of a batch to its logits; an event marks the end of a device's copy.

    A pipeline's last stage sends the rows from the device.
    """
    copied = None
    if detect_device().accelerator and get_parallel().pp_size == 1:
        copied = torch.get_device_module(rows.device).Event()
        rows = rows.to("cpu", non_blocking=True)
        copied.record()
    DAMAGED.give(logits_output, (Damaged(rows, copied),))
