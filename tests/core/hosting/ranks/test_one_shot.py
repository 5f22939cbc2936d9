"""Sums in one kernel: which tensors it takes, and up to which size. ``test_two_gpus.py`` has the sums."""

from __future__ import annotations

import json

import pytest
import torch

from fl_dispatch import SelectionPolicy, policy_context, reset_global_policy
from fl_dispatch.devices.cpu import CPU
from fl_dispatch.devices.cuda import CUDA
from fl_dispatch.hosting.ranks import one_shot_kernel
from fl_dispatch.hosting.ranks.one_shot import DTYPES, RANKS, SIZES, VECTOR, OneShotSums, _refusal, largest_faster
from interpreting import run

FAST, SLOW = [1.0] * len(SIZES), [2.0] * len(SIZES)


def test_only_devices_that_say_so_share_memory() -> None:
    assert CUDA.shares_memory is not None
    assert CPU.shares_memory is None


def test_more_ranks_than_were_tried_and_batches_that_must_not_vary_are_the_librarys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _refusal(RANKS + 2) == "4 ranks were never tried"
    policy = SelectionPolicy(batch_invariant=True)
    with policy_context(policy):
        assert _refusal(RANKS) == "a kernel for small sums alone is not batch-invariant"
    monkeypatch.setenv("VLLM_FL_CHIP_FEATURES", "0")
    reset_global_policy()
    assert _refusal(RANKS) == "VLLM_FL_CHIP_FEATURES is off"


SUMS = OneShotSums(lambda tensor, out: None, 1024)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_takes_what_its_memory_holds_and_no_more(dtype: torch.dtype) -> None:
    assert SUMS.takes(torch.empty(1024 // dtype.itemsize, dtype=dtype))
    assert not SUMS.takes(torch.empty(1024 // dtype.itemsize + 8, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_types_that_the_kernel_does_not_add_are_the_librarys(dtype: torch.dtype) -> None:
    assert not SUMS.takes(torch.empty(16, dtype=dtype))


def test_sums_without_elements_or_of_broken_vectors_are_the_librarys() -> None:
    assert not SUMS.takes(torch.empty(0, 4096))
    assert not SUMS.takes(torch.empty(12))
    assert SUMS.takes(torch.empty(3, 8))


def test_where_a_tensor_lies_does_not_matter_because_it_may_lie_elsewhere_on_the_other_rank() -> None:
    memory = torch.empty(17)
    assert memory[:16].data_ptr() % 16 != memory[1:].data_ptr() % 16
    assert SUMS.takes(memory[:16])
    assert SUMS.takes(memory[1:])


def test_the_kernel_has_the_same_vectors() -> None:
    assert one_shot_kernel.VECTOR.value == VECTOR


def test_the_bound_is_the_largest_size_below_which_it_is_faster_throughout() -> None:
    assert largest_faster(FAST, SLOW) == SIZES[-1]
    assert largest_faster(SLOW, FAST) == 0
    assert largest_faster(FAST, FAST) == 0, "a tie is the library's"
    assert largest_faster([*FAST[:3], 3.0, *FAST[4:]], SLOW) == SIZES[2]


KERNEL = """
import json, torch
from fl_dispatch.hosting.ranks import one_shot_kernel as kernel
from fl_dispatch.hosting.ranks.one_shot import DTYPES

found = []
for dtype in DTYPES:
    elements = kernel.BLOCKS * kernel.TILE + 8  # two turns of the first program, the second one nearly empty
    place = elements * dtype.itemsize
    ours, theirs = (torch.zeros(2 * place + 8 * kernel.BLOCKS * 2, dtype=torch.uint8) for _ in range(2))
    flags = [memory[2 * place :].view(torch.int64).view(kernel.BLOCKS, 2) for memory in (ours, theirs)]
    flags[0][:, 1] = 2  # the other rank has made both calls
    calls, memories = torch.zeros(kernel.BLOCKS, dtype=torch.int64), torch.tensor([ours.data_ptr(), theirs.data_ptr()])
    for call in (1, 2):
        part = (call % 2) * place
        mine, other = (torch.randint(-99, 99, (elements,)).to(dtype) for _ in range(2))
        theirs[part : part + place].view(dtype).copy_(other)
        x = mine.clone()
        out = x if call == 1 else torch.empty_like(x)
        kernel.add(x, out, memories, calls, place, 0)
        found += [
            torch.equal(out.float(), mine.float() + other.float()),
            torch.equal(ours[part : part + place].view(dtype), mine),
            flags[1][:, 0].eq(call).all().item() and calls.eq(call).all().item(),
        ]
    calls.fill_(kernel.NO_WAIT)
    flags[0].zero_()
    x = torch.zeros(8, dtype=dtype)
    kernel.add(x, x, memories, calls, place, 0)  # would wait for ever
    found.append(flags[1][:, 0].lt(0).all().item())
print(json.dumps(found))
"""


def test_programs_add_whole_tensors_in_turns_and_use_the_places_in_turn() -> None:
    found = json.loads(run(KERNEL).splitlines()[-1])
    assert found == [True] * len(DTYPES) * 7
