"""A host's code that pins memory without asking runs where no memory can be pinned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fl_dispatch.hosting.memory.pinning import unpinned


def pins(value: int, *, times: int = 1) -> list[Tensor]:
    """Does what a host does, in each way that asks for pinned memory."""
    ways = [torch.tensor([value], pin_memory=True), torch.full((1,), value).pin_memory()]
    ways.append(torch.empty(1, dtype=torch.int64, pin_memory=True).fill_(value))
    return ways * times


def test_nothing_is_pinned_and_the_values_are_right() -> None:
    found = unpinned(pins)(3, times=2)
    assert [tensor.tolist() for tensor in found] == [[3]] * 6
    assert not any(tensor.is_pinned() for tensor in found)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator can pin memory")
def test_without_it_such_code_fails_where_there_is_no_accelerator() -> None:
    with pytest.raises(RuntimeError, match="accelerator"):
        pins(3)
    assert unpinned(pins).__doc__ == pins.__doc__
