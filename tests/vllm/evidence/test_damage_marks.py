"""Marks of damaged logits in host memory become vLLM's counts, of every request and of every step.

Until the first damage, schedulers have vLLM's own ``schedule``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_dispatch.hosting.damage.rows import KEPT, HostMarks
from vllm_fl.damage import detection, scheduler
from vllm_fl.damage.messages import WATCH


def new_marking() -> detection.Marking:
    return detection.Marking(HostMarks(most_rows=4))


def logits(*damaged: int) -> Tensor:
    rows = torch.zeros(3, 8)
    rows[list(damaged)] = float("nan")
    return rows


def sampled(count: Any, marking: detection.Marking, *steps: Tensor) -> SimpleNamespace:
    """What a runner returns that samples these steps, with vLLM's function that counts."""

    def sample(*_: Any) -> tuple[SimpleNamespace]:
        counts = [found for step in steps if (found := count(step)) is not None]
        return (SimpleNamespace(num_nans=sum(counts) if counts else None),)

    found: SimpleNamespace = marking.around(sample)(None, None)[0]
    return found


class Output:
    """vLLM's output of a step."""

    def __init__(self, sampler_output: SimpleNamespace) -> None:
        self.sampler_output = sampler_output

    def get_output(self) -> SimpleNamespace:
        names, counts = ["a", "b", "c"], self.sampler_output.num_nans
        given = None if counts is None else dict(zip(names, counts.tolist(), strict=True))
        return SimpleNamespace(req_ids=names, num_nans_in_logits=given)


def test_without_damage_there_are_no_counts_and_afterwards_all_have_one() -> None:
    marking = new_marking()
    read = detection._with_marks(Output.get_output)
    steps = ([logits()], [logits(), logits(1)], [logits()])
    told = [read(Output(sampled(marking, marking, *step))).num_nans_in_logits for step in steps]
    assert told == [None, {"a": 0, "b": 1, "c": 0}, {"a": 0, "b": 0, "c": 0}]


def test_counts_of_steps_whose_kernel_failed_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    marking = new_marking()
    mark = marking.memory.mark
    monkeypatch.setattr(marking.memory, "mark", lambda rows, slot: mark(rows) if slot is None else None)
    output = Output(sampled(marking, marking, logits(0), logits(2)))
    assert detection._with_marks(Output.get_output)(output).num_nans_in_logits == {"a": 1, "b": 0, "c": 1}


def test_an_engine_is_told_of_its_damage_after_another_one_started_in_its_process() -> None:
    first, second = new_marking(), new_marking()
    output = Output(sampled(second, first, logits(1)))  # the sampler's module has the second engine's function
    assert detection._with_marks(Output.get_output)(output).num_nans_in_logits == {"a": 0, "b": 1, "c": 0}
    assert second.slot is None


def test_a_rank_whose_output_nobody_reads_keeps_the_memory_that_its_device_may_still_write() -> None:
    marking = new_marking()
    places = [detection.MARKS.of(sampled(marking, marking, logits(1))).address for _ in range(KEPT + 1)]
    assert len(set(places)) == KEPT
    assert places[0] == places[KEPT]


def test_a_scheduling_does_not_get_the_marks_of_the_one_that_had_its_memory() -> None:
    marking = new_marking()
    read = detection._with_marks(Output.get_output)
    for _ in range(KEPT):
        sampled(marking, marking, logits(0, 1, 2))  # dropped
    assert read(Output(sampled(marking, marking, logits()))).num_nans_in_logits is None


def test_a_sampler_that_raises_leaves_no_marks_to_the_next_scheduling() -> None:
    marking = new_marking()

    def sample(*_: Any) -> None:
        marking(logits(1))
        raise RuntimeError

    with pytest.raises(RuntimeError):
        marking.around(sample)(None, None)
    assert not marking.samples
    assert not detection.MARKS.of(sampled(marking, marking, logits())).found()


@pytest.mark.parametrize(("words", "strides"), [(128_256, {128_256}), (50_257, {50_257, 50_304})])
def test_the_start_compiles_for_logits_of_a_padded_vocabulary_too(
    words: int, strides: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, marked, counted = HostMarks(1), set(), set()
    monkeypatch.setattr(detection, "_is_on", lambda: True)
    monkeypatch.setattr(detection, "host_marks", lambda rows: memory)
    monkeypatch.setattr(memory, "mark", lambda rows: marked.add((rows.stride(0), *rows.shape)))
    monkeypatch.setattr(detection, "damaged_rows", lambda rows: counted.add((rows.stride(0), *rows.shape)))
    model = SimpleNamespace(get_vocab_size=lambda: words, dtype=torch.bfloat16)
    detection.warm_up(model, torch.device("cpu"))  # type: ignore[arg-type]
    assert marked == counted == {(stride, 1, words) for stride in strides}


def test_the_start_compiles_the_choice_of_tokens_for_vllms_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for another type of the requests' places would compile while the first request waits."""
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    device, chosen = torch.device("cpu"), []
    batch = InputBatch.make_dummy(1, 1, InputBuffers(max_num_reqs=1, max_num_tokens=1, device=device))
    monkeypatch.setattr(detection, "_is_on", lambda: True)
    monkeypatch.setattr(detection, "host_marks", HostMarks)
    both = SimpleNamespace(choose=lambda logits, requests, positions, slot: chosen.append((requests, positions)))
    model = SimpleNamespace(get_vocab_size=lambda: 8, dtype=torch.bfloat16)
    detection.warm_up(model, device, both)  # type: ignore[arg-type]
    wanted = batch.expanded_idx_mapping.dtype, batch.positions.dtype
    assert {(requests.dtype, positions.dtype) for requests, positions in chosen} == {wanted}


class Scheduler:
    """vLLM's scheduler of two requests, of which the step reads the last token of each again."""

    connector = None

    def __init__(self) -> None:
        names = ("a", "b")
        self.requests = {one: SimpleNamespace(request_id=one, num_computed_tokens=8, num_tokens=8) for one in names}

    def schedule(self) -> SimpleNamespace:
        return SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 1})

    @scheduler._judging
    def update_from_output(self, step: Any, output: Any) -> dict[int, Any]:
        return {}


def test_vllms_scheduling_is_not_wrapped_until_the_first_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler as Original

    scheduler.contain()
    assert not hasattr(Original.schedule, "__wrapped__")
    monkeypatch.setattr(scheduler.Damage, "judge", lambda *_: [])
    one, watched = Scheduler(), []
    for counts in (None, {"a": 0, "b": 0}, {"a": 0, "b": 1}, None, {"a": 1, "b": 0}):
        step = one.schedule()
        watched.append(WATCH.find(step) is not None)
        before = dict(vars(one))
        one.update_from_output(step, SimpleNamespace(num_nans_in_logits=counts, kv_connector_output=None))
        if not (counts and any(counts.values())):
            assert vars(one) == before
        elif "schedule" not in before:
            scheduler.DAMAGE.of(one).verdicts.watched.add("b")
    assert watched == [False, False, False, True, True]
    one.requests["b"].num_computed_tokens = 9
    assert WATCH.find(one.schedule()) is None, "a step of its answer reads damage from the cache"
    assert one.schedule.__wrapped__.__func__ is Scheduler.schedule, "it is wrapped once"  # type: ignore[attr-defined]
