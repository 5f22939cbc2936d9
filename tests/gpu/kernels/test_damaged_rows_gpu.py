"""A GPU writes the marks of damaged rows to host memory itself, where the host reads them without a copy."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from fl_dispatch.hosting.damage import rows

pytestmark = pytest.mark.gpu
ROWS, WIDTH = 5, 50_257
CASES = {"contiguous": WIDTH, "padded": 50_304}
"""Distances of the rows: a vocabulary is padded to a multiple of 64."""


@pytest.mark.parametrize("stride", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_marks_are_those_of_the_step_while_their_memory_is_taken_again(dtype: torch.dtype, stride: int) -> None:
    memory = rows.host_marks(ROWS)
    assert memory is not None
    healthy = torch.randn(ROWS, stride, device="cuda").to(dtype)
    for step in range(2 * rows.KEPT + 1):
        given, damaged = healthy.clone()[:, :WIDTH], step % (ROWS + 1)  # the last number is of no row
        for row in range(damaged, min(damaged + 1, ROWS)):
            given[row, step * 100] = float("nan")
        slot = memory.mark(given)
        assert slot is not None
        torch.cuda.synchronize()
        assert slot.damaged() == [int(row == damaged) for row in range(ROWS)]
        assert slot.found() == (damaged < ROWS)
        assert [bool((row == 0).all()) for row in given] == [row == damaged for row in range(ROWS)]
    assert not rows.FAILED
    assert len(memory._launches) == 1, "steps of one layout are launched the short way"


def test_marks_of_steps_under_way_are_read_in_their_order() -> None:
    memory = rows.host_marks(ROWS)
    assert memory is not None
    steps = [torch.zeros(ROWS, WIDTH, device="cuda") for _ in range(rows.KEPT)]
    for number, given in enumerate(steps):
        given[number % ROWS, 7] = float("inf")
    slots = [memory.mark(given) for given in steps]
    torch.cuda.synchronize()
    found = [slot.damaged() for slot in slots if slot is not None]
    assert found == [[int(row == number % ROWS) for row in range(ROWS)] for number in range(rows.KEPT)]


def test_a_later_step_of_a_scheduling_adds_its_marks() -> None:
    memory = rows.host_marks(ROWS)
    assert memory is not None
    first, second = torch.zeros(2, ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    first[1, 0] = second[3, WIDTH - 1] = float("nan")
    slot = memory.mark(first)
    assert slot is not None
    assert memory.mark(second, slot) is slot
    torch.cuda.synchronize()
    assert slot.damaged() == [0, 1, 0, 1, 0]
