"""Which arguments of an opaque view share memory: exactly those that have a byte in common."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import impl
from fl_dispatch import SelectionPolicy, get_default_manager, set_global_policy
from fl_dispatch.compiled.overlap import overlap
from fl_dispatch.compiled.results import promised
from fl_dispatch.compiled.views import view
from fl_dispatch.manager.process import ROOT
from fl_dispatch.ops import OPERATORS

Tensor = torch.Tensor
MEMORY = torch.zeros(1024, dtype=torch.int8)
"""Room for the farthest of :func:`tensors`: 4 bytes at element 40 + 3 * 3 * 16."""


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A tensor in :data:`MEMORY`, of any dtype, sizes and strides."""
    typed = MEMORY.view(draw(st.sampled_from([torch.int8, torch.int16, torch.float32])))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = draw(st.lists(st.integers(0, 16), min_size=len(shape), max_size=len(shape)))
    return typed.as_strided(shape, strides, draw(st.integers(0, 40)))


def bytes_of(tensor: Tensor) -> set[int]:
    places = itertools.product(*map(range, tensor.shape))
    firsts = [sum(map(int.__mul__, place, tensor.stride()), tensor.storage_offset()) for place in places]
    size = tensor.element_size()
    return {first * size + byte for first in firsts for byte in range(size)}


@settings(max_examples=500, deadline=None)
@given(tensors(), tensors())
def test_tensors_overlap_where_they_have_a_byte_in_common(one: Tensor, other: Tensor) -> None:
    assert overlap(one, other) == bool(bytes_of(one) & bytes_of(other))


def written_by_a_view(x: Tensor, residual: Tensor) -> None:
    def not_in_place(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Any:
        return x * 2, x + residual

    made = impl("vendor.a", not_in_place, op="rms_norm", signature="unchecked")
    get_default_manager().registry.register_impl(made)
    set_global_policy(SelectionPolicy(prefer="vendor"))
    view(ROOT, OPERATORS["rms_norm"])(x, residual, torch.ones(x.shape[-1]), 1e-6)


@pytest.mark.parametrize(
    "columns", [slice(0, 8), slice(4, 12), slice(0, 16, 2)], ids=["equal", "partly", "each second"]
)
def test_a_view_refuses_to_write_different_results_into_arguments_that_overlap(columns: slice) -> None:
    both = torch.ones(3, 16)
    with pytest.raises(ValueError, match="share memory"):
        written_by_a_view(both[:, :8], both[:, columns])
    assert both.eq(1).all()


@pytest.mark.parametrize("halves", [(slice(0, 8), slice(8, 16)), (slice(0, 16, 2), slice(1, 16, 2))], ids=str)
def test_a_view_writes_into_arguments_that_lie_between_each_other(halves: tuple[slice, slice]) -> None:
    both = torch.ones(3, 16)
    x, residual = (both[:, half] for half in halves)
    residual += 2
    written_by_a_view(x, residual)
    assert (x.unique().tolist(), residual.unique().tolist()) == ([2.0], [4.0])


def test_the_promise_of_a_view_is_made_without_memory_of_the_device() -> None:
    operator, devices = OPERATORS["rms_norm"], set()

    def watched(*args: Any) -> Any:
        devices.update(arg.device.type for arg in args if isinstance(arg, Tensor))
        assert operator.fake is not None
        return operator.fake(*args)

    x = torch.ones(2, 8)
    promise = promised(replace(operator, fake=watched), (x, x, x[0], 1e-6), ("kind",), {})
    assert (promise, devices) == (((x.shape, x.dtype),) * 2, {"meta"})
