"""The kernels that choose tokens and find damage in one pass: vLLM's tokens, and the marks of the check alone."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_dispatch.hosting.damage.rows import HostMarks, Slot
from interpreting import run
from vllm_fl.damage import detection, one_pass

NAN = float("nan")
KERNELS = """
import json, sys, torch, triton, vllm.triton_utils
from triton.runtime import interpreter
vllm.triton_utils.triton, vllm.triton_utils.tl, vllm.triton_utils.HAS_TRITON = triton, triton.language, True
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from fl_dispatch.hosting.damage.rows import Slot
from vllm_fl.damage import one_pass_kernel as kernels

def with_bool_mask(access, place):  # some of the interpreter's masks are integers, which it refuses
    def run(*arguments):
        arguments[place].data = arguments[place].data.astype(bool)
        return access(*arguments)
    return run

builder = interpreter.InterpreterBuilder
builder.create_masked_load = with_bool_mask(builder.create_masked_load, 2)
builder.create_masked_store = with_bool_mask(builder.create_masked_store, 3)
NAN, INF, WIDTH, ROWS = float("nan"), float("inf"), 2500, 9
generator = torch.Generator().manual_seed(0)
heat = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0])
seeds = torch.randint(-(1 << 62), 1 << 62, (ROWS,), generator=generator)
found = []
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    logits = torch.randn(ROWS, WIDTH + 60, generator=generator).to(dtype)[:, :WIDTH]
    logits[0, [7, 1030, 2400]] = 9.0  # the first of equals
    logits[1, 3:] = -INF
    logits[2, 2499] = NAN
    logits[3, 0] = INF
    logits[4] = -INF
    logits[5, [5, 1500]] = torch.tensor([NAN, -INF], dtype=dtype)
    logits[6, :1024] = -INF
    requests = torch.randperm(ROWS, generator=generator).int()
    requests[8] = -1
    positions = torch.randint(0, 1 << 40, (ROWS,), generator=generator)
    expected = gumbel_sample(logits, requests, heat, seeds, positions, False, False)
    before, behind = logits.clone(), logits._base[:, WIDTH:].clone()
    parts = kernels.parts_of(WIDTH)
    values, columns = torch.empty(ROWS, parts), torch.empty(ROWS, parts, dtype=torch.int32)
    tokens, slot = torch.full((ROWS,), -1), Slot(torch.zeros(1 + ROWS, dtype=torch.int32))
    slot.begin(ROWS)
    again = kernels.choose_first(logits, requests, heat, seeds, positions, values, columns, tokens, slot)
    damaged = torch.tensor(slot.damaged()).bool()
    assert again is None, "the interpreter repeats nothing"
    assert slot.found()
    assert torch.equal(logits[~damaged], before[~damaged]) and not logits[damaged].any()
    assert torch.equal(logits._base[:, WIDTH:], behind)
    assert torch.equal(tokens[~damaged], expected[~damaged]), (tokens, expected)
    assert not tokens[damaged].any()
    healthy = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
    kept = slot.marks.clone()
    slot.begin(ROWS)
    kernels.choose_first(healthy, requests, heat, seeds, positions, values, columns, tokens, slot)
    assert torch.equal(tokens, gumbel_sample(healthy, requests, heat, seeds, positions, False, False))
    assert torch.equal(slot.marks, kept) and not slot.found()
    found.append(damaged.int().tolist())
print(json.dumps(found))
"""


def test_tokens_are_vllms_and_marks_are_those_of_the_check_in_the_interpreter() -> None:
    assert json.loads(run(KERNELS).splitlines()[-1]) == [[0, 0, 1, 1, 1, 1, 0, 0, 0]] * 3


ROWS, WIDTH = 3, 64
SAMPLER = SimpleNamespace(
    needs_logits_processing=np.array([False, False, True, False]),
    sampling_states=SimpleNamespace(
        temperature=SimpleNamespace(gpu=torch.zeros(4)), seeds=SimpleNamespace(gpu=torch.zeros(4).long())
    ),
)


class Kernels:
    """What launches the kernels, without a device."""

    def __init__(self) -> None:
        self.first: list[Any] = []
        self.again: list[Any] = []
        self.error: Exception | None = None
        self.prepares = True

    def parts_of(self, width: int) -> int:
        return -(-width // 32)

    def choose_first(self, *arguments: Any) -> Any:
        self.first.append(arguments)
        return (self.repeat, self.repeat) if self.prepares else None

    def repeat(self, grid: Any, arguments: Any) -> None:
        if self.error:
            raise self.error
        self.again.append((grid, arguments))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    found = Kernels()
    monkeypatch.setattr(one_pass, "_kernels", lambda: found)
    return found


def new_pass() -> one_pass.OnePass:
    return one_pass.OnePass(SAMPLER, 4, WIDTH, torch.device("cpu"))


def step(rows: int = ROWS, stride: int = WIDTH) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(rows, stride)[:, :WIDTH], torch.arange(rows).int(), torch.zeros(rows).long()


def slot_of(rows: int = ROWS) -> Slot:
    found = HostMarks(4).slot_of(rows)
    assert found is not None
    return found


def test_from_the_second_step_on_both_kernels_are_launched_with_addresses(kernels: Kernels) -> None:
    both, slot = new_pass(), slot_of()
    steps = [step() for _ in range(2)]
    tokens = [both.choose(*one, slot) for one in steps]
    assert len(kernels.first) == 1
    logits, requests, positions = steps[1]
    states = both.states.temperature.gpu.data_ptr(), both.states.seeds.gpu.data_ptr()
    between = both.values.data_ptr(), both.columns.data_ptr()
    read = (logits.data_ptr(), requests.data_ptr(), *states, positions.data_ptr())
    written = (tokens[1].data_ptr(), logits.data_ptr(), slot.address, slot.number)  # type: ignore[union-attr]
    assert kernels.again == [((3, 2, 1), (*read, *between, WIDTH)), ((3, 1, 1), (*between, *written, WIDTH))]
    assert both.choose(*step(2), slot_of(2)).shape == (2,)  # type: ignore[union-attr]
    assert both.choose(*step(stride=WIDTH + 16), slot_of()) is not None
    assert (len(kernels.first), len(kernels.again)) == (2, 4), "another distance of the rows is another kernel"


def test_other_arguments_are_vllms(kernels: Kernels) -> None:
    both, (logits, requests, positions) = new_pass(), step()
    for other in (
        (logits[:, :63], requests, positions),
        (logits, requests[:2], positions),
        (logits, requests, positions[:2]),
        (torch.zeros(WIDTH, ROWS).T, requests, positions),
        (logits, torch.zeros(6).int()[::2], positions),
        (torch.zeros(ROWS * WIDTH + 1)[1:].view(ROWS, WIDTH), requests, positions),
    ):
        assert both.choose(*other, slot_of()) is None
    assert not kernels.first


@pytest.mark.parametrize(
    ("error", "goes_on"), [(RuntimeError("illegal"), False), (torch.OutOfMemoryError("CUDA out of memory."), True)]
)
def test_kernels_that_fail_are_launched_no_more_unless_they_lacked_memory(
    error: Exception, goes_on: bool, kernels: Kernels
) -> None:
    both = new_pass()
    both.choose(*step(), slot_of())
    kernels.error = error
    assert both.choose(*step(), slot_of()) is None
    assert both.takes([0, 1]) == goes_on


def test_without_prepared_launches_each_step_is_launched_as_the_first(kernels: Kernels) -> None:
    kernels.prepares, both = False, new_pass()
    assert [both.choose(*step(), slot_of()) is not None for _ in range(2)] == [True, True]
    assert len(kernels.first) == 2


class Both(one_pass.OnePass):
    """The choice in PyTorch's operators, on a CPU."""

    works = True

    def choose(self, logits: Tensor, requests: Tensor, positions: Tensor, slot: Slot) -> Tensor | None:
        if not self.works:
            return None
        for row, values in enumerate(logits):
            if not values.isfinite().all():
                slot.marks[0] = slot.marks[1 + row] = slot.number
                values.zero_()
        return logits.argmax(-1)


class Runner:
    """vLLM's runner and its sampler, which samples each of some steps."""

    def __init__(self, marking: detection.Marking) -> None:
        self.marking, self.sampled_by_vllm = marking, 0
        self.sample_one = marking.choosing(self._sample_one)
        self.sample = marking.around(self._sample)

    def _sample_one(self, logits: Tensor, *_: Any, return_logprobs: bool) -> tuple[Tensor, Tensor]:
        assert not logits.isnan().any(), "vLLM gets no damaged row"
        self.sampled_by_vllm += 1
        return logits.argmax(-1), logits

    def _sample(self, steps: list[Tensor], batch: Any, grammar: Any) -> Any:
        counts, tokens = [], []
        for logits in steps:
            if (count := self.marking(logits)) is not None:
                counts.append(count)
            places = torch.from_numpy(batch.idx_mapping_np).int()
            pos = torch.zeros(len(logits)).long()
            tokens.append(
                self.sample_one(logits, places, places, batch.idx_mapping_np, pos, None, return_logprobs=False)[0]
            )
        output = SimpleNamespace(num_nans=sum(counts) if counts else None, tokens=torch.stack(tokens).tolist())
        return output, None, None


def sampled(runner: Runner, places: list[int], *damaged: int) -> SimpleNamespace:
    """The output of a step for each number, in which this row is damaged; -1: none."""
    steps = [torch.eye(len(places), 8) for _ in damaged]
    for logits, row in zip(steps, damaged, strict=True):
        if row >= 0:
            logits[row, 5] = NAN
    found: SimpleNamespace = runner.sample(steps, SimpleNamespace(idx_mapping_np=np.array(places)), None)[0]
    return found


def test_requests_without_processing_are_sampled_and_marked_in_one_pass(kernels: Kernels) -> None:
    runner = Runner(detection.Marking(HostMarks(4), Both(SAMPLER, 4, 8, torch.device("cpu"))))
    plain = sampled(runner, [0, 1, 3], -1, 1, 2)
    assert plain.tokens == [[0, 1, 2], [0, 0, 2], [0, 1, 0]]
    assert (plain.num_nans, detection.MARKS.of(plain).damaged()) == (None, [0, 1, 1])
    assert not detection.MARKS.of(sampled(runner, [0, 1, 3], -1)).found()
    assert runner.sampled_by_vllm == 0


def test_a_request_with_processing_has_its_rows_marked_before(kernels: Kernels) -> None:
    runner = Runner(detection.Marking(HostMarks(4), Both(SAMPLER, 4, 8, torch.device("cpu"))))
    processed = sampled(runner, [0, 1, 2], 1)
    assert (processed.num_nans, detection.MARKS.of(processed).damaged()) == (None, [0, 1, 0])
    assert runner.sampled_by_vllm == 1
    assert detection.MARKS.of(sampled(runner, [0, 1], 0)).damaged() == [1, 0]
    assert runner.sampled_by_vllm == 1


@pytest.mark.parametrize("marks", [True, False], ids=["the check alone marks", "nothing marks"])
def test_damage_is_found_where_the_pass_fails(marks: bool, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, both = HostMarks(4), Both(SAMPLER, 4, 8, torch.device("cpu"))
    runner = Runner(detection.Marking(memory, both))
    both.works = False
    if not marks:
        monkeypatch.setattr(memory, "mark", lambda logits, slot: None)
    found = sampled(runner, [0, 1, 3], 1, -1, 2)
    assert runner.sampled_by_vllm == 3
    if marks:
        assert (found.num_nans, detection.MARKS.of(found).damaged()) == (None, [0, 1, 1])
    else:
        assert (found.num_nans.tolist(), detection.MARKS.find(found)) == ([0, 1, 1], None)
    both.works = True
    assert sampled(runner, [0, 1, 3], -1).num_nans is None, "counts are of one scheduling"
