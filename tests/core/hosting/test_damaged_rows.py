"""Rows of logits with NaN or infinity are marked and overwritten; all others stay as they were."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_dispatch.hosting.damage import rows
from interpreting import run

NAN, INF = float("nan"), float("inf")
WIDTH = 20_000
"""Elements of a row: several tiles of a program, of which the last one is not full."""
CHANGES: list[tuple[dict[int, float], bool]] = [
    ({}, False),
    ({19_999: NAN}, True),
    ({0: INF}, True),
    ({8192: -INF, 3: -INF}, False),
    (dict.fromkeys(range(WIDTH), -INF), True),
    ({**dict.fromkeys(range(WIDTH), -INF), 7: 1.0}, False),
    ({5: NAN, 6: INF, 7: -INF}, True),
]
"""Elements of rows that a fault or a mask has changed, and whether it was a fault."""


def logits(dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(len(CHANGES), WIDTH + 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    for row, (changes, _) in zip(made, CHANGES, strict=True):
        for column, value in changes.items():
            row[column] = value
    return made[:, :WIDTH]


def on_an_accelerator(monkeypatch: pytest.MonkeyPatch, most_rows: int) -> rows.HostMarks:
    """Return memory for marks, which kernels write although this machine has no accelerator."""
    memory = rows.HostMarks(most_rows)
    memory.on_host = False
    device = SimpleNamespace(accelerator=True, writes_pinned_memory=True, torch_type="cpu")
    monkeypatch.setattr(rows, "FAILED", {})
    monkeypatch.setattr(rows, "detect_device", lambda: device)
    monkeypatch.setattr(rows, "why_unavailable", lambda: "")
    return memory


def check(found: Any, before: torch.Tensor, after: torch.Tensor) -> None:
    faults = [fault for _, fault in CHANGES]
    assert [bool(mark) for mark in found] == faults
    assert [bool((row == 0).all()) for row in after] == faults
    kept = ~torch.tensor(faults)
    torch.testing.assert_close(after[kept], before[kept], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pytorchs_operators_mark_and_overwrite_damaged_rows(dtype: torch.dtype) -> None:
    given = logits(dtype)
    before = given.clone()
    check(rows.damaged_rows(given).tolist(), before, given)


def test_large_numbers_with_a_sum_that_overflows_are_no_damage() -> None:
    given = torch.full((2, 8), 1e38)
    before = given.clone()
    assert rows.damaged_rows(given).tolist() == [0, 0]
    assert not rows.HostMarks(2).mark(given).found()  # type: ignore[union-attr]
    assert torch.equal(given, before)


def test_marks_in_host_memory_keep_those_of_earlier_steps() -> None:
    first, second = logits(torch.float32), logits(torch.float32).flip(0)
    memory = rows.HostMarks(len(CHANGES))
    slot = memory.mark(first)
    assert slot is not None
    assert memory.mark(second, slot) is slot
    faults = [fault for _, fault in CHANGES]
    expected = [one or other for one, other in zip(faults, reversed(faults), strict=True)]
    assert (slot.found(), slot.damaged()) == (True, expected)
    memory = rows.HostMarks(len(CHANGES))
    assert memory.mark(torch.ones(2, 8)).damaged() == [0, 0]  # type: ignore[union-attr]


def test_a_clean_scheduling_writes_nothing_to_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "KEPT", 1)
    memory = rows.HostMarks(len(CHANGES))
    slot = memory.mark(logits(torch.float32))
    assert slot is not None
    before = slot.marks.clone()
    assert memory.mark(torch.ones(3, 8)) is slot
    assert torch.equal(slot.marks, before), "nothing is cleared"
    assert not slot.found()


def test_a_slot_that_is_taken_again_shows_nothing_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "KEPT", 1)
    monkeypatch.setattr(rows, "MOST_NUMBER", 2)
    memory = rows.HostMarks(len(CHANGES))
    found = []
    for given in (logits(torch.float32), torch.ones(3, 8)):
        slot = memory.mark(given)
        assert slot is not None
        found.append((slot.number, slot.found(), sum(slot.damaged())))
    assert found == [(1, True, sum(fault for _, fault in CHANGES)), (2, False, 0)]
    slot = memory.mark(torch.full((3, 8), NAN))
    assert slot is not None
    assert (slot.number, slot.damaged()) == (1, [1, 1, 1])


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "not aligned"])
def test_from_the_second_step_on_logits_of_one_layout_are_launched_again(
    offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = [], []

    def mark_in_slot(logits: torch.Tensor, slot: rows.Slot) -> Any:
        first.append((logits.data_ptr(), slot.address, slot.number))
        return lambda grid, arguments: again.append((grid, arguments))

    memory = on_an_accelerator(monkeypatch, 4)
    monkeypatch.setattr("fl_dispatch.hosting.damage.rows_kernel.mark_in_slot", mark_in_slot)
    steps = [torch.zeros(3 * 64 + 1)[offset : offset + 3 * 64].view(3, 64) for _ in range(3)]
    slots = [memory.mark(step) for step in steps]
    assert first == [(steps[0].data_ptr(), slots[0].address, 1)]  # type: ignore[union-attr]
    assert (
        again
        == [
            ((3, 1, 1), (step.data_ptr(), slot.address, slot.number, 64))  # type: ignore[union-attr]
            for step, slot in zip(steps[1:], slots[1:], strict=True)
        ]
    )
    assert memory.mark(steps[0][:2, :63]) is not None, "a padded vocabulary"
    assert again[2][0] == (2, 1, 1)
    assert again[2][1][-1] == 63
    for other in (torch.zeros(3, 63), steps[0].double(), torch.zeros(193)[1 - offset :][:192].view(3, 64)):
        assert memory.mark(other) is not None
    assert (len(first), len(again)) == (4, 3)


def test_a_launch_that_fails_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def again(grid: Any, arguments: Any) -> None:
        calls.append(arguments)
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    memory = on_an_accelerator(monkeypatch, 4)
    monkeypatch.setattr("fl_dispatch.hosting.damage.rows_kernel.mark_in_slot", lambda logits, slot: again)
    found = [memory.mark(torch.zeros(3, 64)) is not None for _ in range(4)]
    assert (found, len(calls), list(rows.FAILED)) == ([True, False, False, False], 1, [True])


@pytest.mark.parametrize("device", [{"writes_pinned_memory": False}, {"writes_pinned_memory": True, "triton": False}])
def test_a_device_that_cannot_write_host_memory_marks_nothing_there(
    device: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "detect_device", lambda: SimpleNamespace(accelerator=True, **device))
    monkeypatch.setattr(rows, "why_unavailable", lambda: "" if device.get("triton", True) else "no driver")
    assert rows.host_marks(8) is None


@pytest.mark.parametrize("case", ["other rows", "more rows"])
def test_marks_never_lie_past_the_end_of_their_memory(case: str) -> None:
    memory, given = rows.HostMarks(4), logits(torch.float32)
    slot = memory.mark(given[:3].clone()) if case == "other rows" else None
    before = None if slot is None else slot.marks.clone()
    assert memory.mark(given, slot) is None
    assert slot is None or torch.equal(slot.marks, before)
    assert bool(given[1].isnan().any()), "these rows are not marked, so they keep their damage"


@pytest.mark.parametrize("most", [len(CHANGES), len(CHANGES) - 4], ids=["of these rows", "of fewer rows"])
def test_a_kernel_that_refuses_host_memory_still_marks_on_the_device(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []

    def in_slot(logits: torch.Tensor, slot: rows.Slot) -> None:
        launched.append("in slot")
        raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

    def on_device(logits: torch.Tensor) -> torch.Tensor:
        launched.append("on device")
        return torch.ones(len(logits), dtype=torch.int32)

    memory = on_an_accelerator(monkeypatch, most)
    monkeypatch.setattr("fl_dispatch.hosting.damage.rows_kernel.mark_in_slot", in_slot)
    monkeypatch.setattr("fl_dispatch.hosting.damage.rows_kernel.damaged_rows_in_one_launch", on_device)
    given = logits(torch.float32)
    for _ in range(2):
        assert memory.mark(given) is None
        assert rows.damaged_rows(given).all()
    assert launched == (["in slot"] if most == len(CHANGES) else []) + ["on device"] * 2


KERNEL = """
import json, sys, torch
sys.path[:0] = {folders!r}
from test_damaged_rows import check, logits
from fl_dispatch.hosting.damage import rows, rows_kernel
launch, launched = rows_kernel.damaged_rows_in_one_launch, []
def counted(logits):
    launched.append(logits.dtype)
    return launch(logits)
rows_kernel.damaged_rows_in_one_launch = counted
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    given = logits(dtype)
    before, behind = given.clone(), given._base[:, -8:].clone()
    check(rows.damaged_rows(given).tolist(), before, given)
    assert torch.equal(given._base[:, -8:], behind)
    again, slot = before.clone(), rows.Slot(torch.full((1 + len(before),), 6, dtype=torch.int32))
    for number in (6, 7):
        slot.number, slot.rows = number, len(before)
        assert rows_kernel.mark_in_slot(again, slot) is None, "the interpreter repeats nothing"
        assert slot.found() == (number == 6), "an overwritten row is damaged no more"
    again = before.clone()
    rows_kernel.mark_in_slot(again, slot)
    assert slot.found()
    check(slot.damaged(), before, again)
assert rows.damaged_rows(given[:0]).tolist() == []
print(json.dumps([len(launched), list(rows.FAILED)]))
"""


def test_the_kernel_does_the_same_in_the_interpreter() -> None:
    here = Path(__file__).parent
    folders = [str(here), str(here.parents[1] / "support")]
    assert json.loads(run(KERNEL.format(folders=folders)).splitlines()[-1]) == [4, []]


def test_where_the_kernel_fails_pytorchs_operators_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "FAILED", {})
    monkeypatch.setattr(rows, "why_unavailable", lambda: "")
    given = logits(torch.float32)  # on a CPU, for which Triton has no compiler
    before = given.clone()
    check(rows.damaged_rows(given).tolist(), before, given)
    assert list(rows.FAILED) == [False]


@pytest.mark.parametrize(
    ("error", "launches"),
    [
        (RuntimeError("PassManager::run failed"), 1),
        (torch.OutOfMemoryError("CUDA out of memory."), 3),
        (RuntimeError("Triton Error [CUDA]: out of memory"), 3),
    ],
    ids=["of the compiler", "of PyTorch's memory", "of the memory for a kernel's code"],
)
def test_a_kernel_that_found_no_memory_is_tried_again(
    error: Exception, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []

    def launch(logits: torch.Tensor) -> torch.Tensor:
        launched.append(logits)
        raise error

    monkeypatch.setattr(rows, "FAILED", {})
    monkeypatch.setattr(rows, "why_unavailable", lambda: "")
    monkeypatch.setattr("fl_dispatch.hosting.damage.rows_kernel.damaged_rows_in_one_launch", launch)
    for _ in range(3):
        given = logits(torch.float32)
        check(rows.damaged_rows(given).tolist(), logits(torch.float32), given)
    assert len(launched) == launches
