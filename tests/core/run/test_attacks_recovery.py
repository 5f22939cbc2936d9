"""Attacks on failing and falling back, each of which once went wrong."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy
import pytest
import torch

from builders import failing, impl, manager_of
from fl_dispatch import call_op

pytestmark = pytest.mark.usefixtures("results_are_names")

Tensor = torch.Tensor

SPARSE = {
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
    "coo": Tensor.to_sparse,
}


@pytest.mark.filterwarnings("ignore:Sparse .* beta state")
@pytest.mark.parametrize("layout", SPARSE)
def test_a_sparse_tensor_is_an_argument_like_any_other(layout: str) -> None:
    x = SPARSE[layout](torch.eye(4))
    manager = manager_of(impl("default.a", failing(RuntimeError("boom"))), impl("reference.b", lambda x: x.to_dense()))
    for _ in range(2):
        assert torch.equal(manager.call("demo", x), torch.eye(4))
    assert manager.explain("demo", x).chosen.impl_id == "reference.b"
    assert manager.explain("demo", torch.eye(4)).chosen.impl_id == "default.a"


@pytest.mark.filterwarnings("ignore:Sparse .* beta state")
@pytest.mark.parametrize("layout", SPARSE)
def test_a_sparse_tensor_has_its_values_back_after_a_failure(layout: str) -> None:
    def breaks(x: Any) -> Any:
        x.mul_(7)
        raise RuntimeError("half-way")

    manager = manager_of(impl("default.a", breaks), impl("reference.b", lambda x: x.to_dense()))
    assert torch.equal(manager.call("demo", SPARSE[layout](torch.eye(4))), torch.eye(4))


def test_a_predicate_that_raises_in_every_call_is_told_once_for_each_kind_of_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def supports(x: Tensor) -> bool:
        raise (KeyError if x.shape[0] % 2 else ValueError)(f"{x.shape[0]} rows")

    manager = manager_of(impl("default.a", supports=supports), impl("reference.b"))
    for rows in range(1, 101):
        assert manager.call("demo", torch.ones(rows, 1)) == "reference.b"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ["1 rows" in warnings[0], "2 rows" in warnings[1], len(warnings)] == [True, True, 2]


@pytest.mark.parametrize("layer", [(), (torch.nn.Identity(),)], ids=["tensors first", "layer first"])
@pytest.mark.parametrize("whose", ["the process's manager", "another manager"])
def test_a_callers_type_error_keeps_no_argument_alive(whose: str, layer: tuple[Any, ...]) -> None:
    other = manager_of(impl("default.a", lambda x, residual=None, weight=None, epsilon=1e-6: x, op="rms_norm"))
    call = call_op if whose == "the process's manager" else other.call
    kept: list[weakref.ref[Tensor]] = []

    def misuse() -> None:
        x = torch.ones(2, 4)
        kept.append(weakref.ref(x))
        with pytest.raises(TypeError):
            call("rms_norm", *layer, x, None, None, 1e-6, "one too many")

    misuse()
    gc.collect()
    gc.disable()
    try:
        misuse()
        assert kept[-1]() is None
    finally:
        gc.enable()


def test_a_failure_is_that_of_the_one_that_ran_also_if_another_has_the_same_function() -> None:
    outcomes = iter(["first", RuntimeError("boom"), "second"])

    def shared(x: Tensor) -> Any:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    op = "silu_and_mul"
    manager = manager_of(impl("vendor.a.plain", shared, op=op), impl("vendor.a.tuned", shared, op=op, priority=999))
    assert [manager.call(op, torch.ones(2, 4)) for _ in range(2)] == ["first", "second"]
    assert manager.get_failed_impls() == {op: {"vendor.a.tuned"}}
    assert manager.get_selected_impl_id(op, torch.ones(2, 4)) == "vendor.a.plain"


def numpy_views(size: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
    base = numpy.ones(size, numpy.float32)
    return torch.from_numpy(base), torch.from_numpy(base[begin:end])


def dlpack_views(size: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
    base = torch.ones(size)
    return base, torch.from_dlpack(base[begin:end])


@pytest.mark.parametrize("views", [numpy_views, dlpack_views])
@pytest.mark.parametrize("offset", [0, 8, 20])
def test_an_output_whose_own_storage_is_an_inputs_memory_is_restored(views: Any, offset: int) -> None:
    def breaks(x: Tensor, out: Any = None) -> Any:
        out.fill_(1e6)
        raise RuntimeError("half-way")

    whole, part = views(40, offset, offset + 16)
    x, out = whole[8:24].view(2, 1, 8), part.view(2, 8)
    manager = manager_of(
        impl("default.a", breaks, op="moe_sum"), impl("reference.b", lambda x, out=None: x.sum(1), op="moe_sum")
    )
    assert manager.call("moe_sum", x, out).eq(1).all()
