"""Sums in one kernel: which tensors it takes, and up to which size. ``tests/gpu/test_two_gpus.py`` has the sums."""

from __future__ import annotations

import pytest
import torch

from fl_dispatch.devices.cpu import CPU
from fl_dispatch.devices.cuda import CUDA
from fl_dispatch.hosting.one_shot import SIZES, OneShotSums, largest_faster

FAST, SLOW = [1.0] * len(SIZES), [2.0] * len(SIZES)


def test_only_devices_that_say_so_share_memory() -> None:
    assert CUDA.shares_memory
    assert not CPU.shares_memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_takes_what_its_buffer_holds_and_no_more(dtype: torch.dtype) -> None:
    sums = OneShotSums(torch.empty(1024, dtype=torch.uint8), "0")
    assert sums.takes(torch.empty(1024 // dtype.itemsize, dtype=dtype))
    assert not sums.takes(torch.empty(1040 // dtype.itemsize, dtype=dtype))
    sums.most = 512
    assert not sums.takes(torch.empty(1024 // dtype.itemsize, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32])
def test_types_that_the_kernel_does_not_add_are_the_librarys(dtype: torch.dtype) -> None:
    assert not OneShotSums(torch.empty(1024, dtype=torch.uint8), "0").takes(torch.empty(16, dtype=dtype))


def test_sums_without_elements_or_of_broken_vectors_are_the_librarys() -> None:
    sums = OneShotSums(torch.empty(1024, dtype=torch.uint8), "0")
    assert not sums.takes(torch.empty(0, 4096))
    assert not sums.takes(torch.empty(5))
    assert sums.takes(torch.empty(3, 4))


def test_the_bound_is_the_largest_size_below_which_it_is_faster_throughout() -> None:
    assert largest_faster(FAST, SLOW) == SIZES[-1]
    assert largest_faster(SLOW, FAST) == 0
    assert largest_faster(FAST, FAST) == 0, "a tie is the library's"
    assert largest_faster([*FAST[:3], 3.0, *FAST[4:]], SLOW) == SIZES[2]
