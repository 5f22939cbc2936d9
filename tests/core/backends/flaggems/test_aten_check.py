"""The check of a replaced operator: how results may differ, and what is copied for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fl_dispatch.backends.flaggems.aten import check


def shifted(x: Tensor, by: float) -> Tensor:
    x = x.clone()
    x.view(-1)[0] += by
    return x


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x.clone(), ""),
        (lambda x: shifted(x, 1e-6), ""),
        (lambda x: shifted(x, 0.01), "0.01 off"),
        (lambda x: x.double(), "torch.float64"),
        (lambda x: x[:1], "(1, 4)"),
        (lambda x: x.T.contiguous().T, "strides"),
        (lambda x: x / 0, "infinite"),
        (lambda x: x * float("nan"), "infinite or no number"),
        (lambda x: [x, x], "2 results, not 1"),
    ],
)
def test_how_results_may_differ(change: Callable[[Tensor], Any], says: str) -> None:
    x = torch.ones(3, 4) + torch.arange(4) / 4
    found = check.differs(change(x), x)
    assert says in found if says else found == ""


def test_equal_infinities_and_no_numbers_are_equal() -> None:
    x = torch.tensor([1.0, float("inf"), float("-inf"), float("nan")])
    assert check.differs(x.clone(), x) == ""
    assert check.differs(-x, x) != ""


@pytest.mark.parametrize("shape", [(), (1, 3000), (60, 50), (3, 20, 50)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_large_results_are_compared_in_pieces(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            made.extend(t.numel() for t in check.leaves(result) if isinstance(t, Tensor) and not t._is_view())
            return result

    monkeypatch.setattr(check, "CHUNK", 200)
    x = torch.arange(math.prod(shape)).view(shape).remainder(100).to(dtype)
    other = x.clone()
    other.view(-1)[-1] += 8
    with Watch():
        assert check.differs(x.clone(memory_format=torch.preserve_format), x) == ""
        made.remove(x.numel())  # the copy
        found = check.differs(other, x)
    assert found == (f"1 of {x.numel()} elements differ" if dtype is torch.int32 else found)
    assert found != ""
    assert max(made) <= 200


def test_integers_must_be_equal() -> None:
    assert check.differs(torch.tensor([1, 2]), torch.tensor([1, 3])) == "1 of 2 elements differ"


def test_copies_keep_shape_strides_alignment_and_integers() -> None:
    base = torch.zeros(64)
    odd = base[1:25].view(4, 6).T
    wide = torch.zeros(3, 1).expand(3, 5)
    indices = torch.arange(4)
    (found, spread, same, number), _ = check.randomized((odd, [wide], indices, 2.5), {}, 1)
    assert (found.shape, found.stride(), found.data_ptr() % 16) == (odd.shape, odd.stride(), odd.data_ptr() % 16)
    assert spread[0].stride() == wide.stride()
    assert found.unique().numel() == 24
    assert torch.equal(same, indices)
    assert number == 2.5
    assert not base.any()
