"""Sums in one kernel: which tensors it takes, and up to which size. ``tests/gpu/test_two_gpus.py`` has the sums."""

from __future__ import annotations

import pytest
import torch

from fl_dispatch.devices.cpu import CPU
from fl_dispatch.devices.cuda import CUDA
from fl_dispatch.hosting import one_shot_kernel
from fl_dispatch.hosting.one_shot import SIZES, VECTOR, OneShotSums, largest_faster

FAST, SLOW = [1.0] * len(SIZES), [2.0] * len(SIZES)


def test_only_devices_that_say_so_share_memory() -> None:
    assert CUDA.shares_memory
    assert not CPU.shares_memory


SUMS = OneShotSums(lambda tensor: None, 1024)


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


def test_the_kernel_has_the_same_vectors() -> None:
    assert one_shot_kernel.VECTOR.value == VECTOR


def test_the_bound_is_the_largest_size_below_which_it_is_faster_throughout() -> None:
    assert largest_faster(FAST, SLOW) == SIZES[-1]
    assert largest_faster(SLOW, FAST) == 0
    assert largest_faster(FAST, FAST) == 0, "a tie is the library's"
    assert largest_faster([*FAST[:3], 3.0, *FAST[4:]], SLOW) == SIZES[2]
