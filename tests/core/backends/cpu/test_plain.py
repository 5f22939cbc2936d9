"""Products of plain weights in this project's C++, at the edges of its blocks, against sums in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fl_dispatch import weight_forms
from fl_dispatch.backends.vendor.cpu.impl import plain

pytestmark = pytest.mark.skipif(bool(plain.why_unavailable()), reason=plain.why_unavailable())

EDGES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 41, 48)
"""Rows at the edges of what is multiplied together; PyTorch multiplies more than the last."""


def agrees(x: Tensor, weight: Tensor, bias: Tensor | None, ran: bool = True) -> None:
    before = plain.counted()
    found = plain.linear(x, weight, bias)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert (found.shape, found.dtype) == (exact.shape, x.dtype)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert plain.counted() - before == ran


def drawn(columns: int, inner: int) -> tuple[Tensor, Tensor]:
    return torch.randn(columns, inner) * inner**-0.5, torch.randn(columns)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("columns", "inner"), [(64, 64), (160, 96), (77, 1431), (96, 2048), (1, 33), (3, 1)])
def test_products_agree_at_the_edges_of_rows_columns_and_lanes(columns: int, inner: int, threads: int) -> None:
    torch.manual_seed(0)
    weight, bias = drawn(columns, inner)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for rows in EDGES:
            x = torch.randn(rows, inner + rows % 2 * 5)[:, :inner]  # rows apart, at addresses of any alignment
            agrees(x, weight, bias)
            agrees(x[:, :inner], weight, None)
    finally:
        torch.set_num_threads(before)


def test_pytorch_multiplies_many_rows_and_other_layouts() -> None:
    weight, bias = drawn(64, 96)
    for x in (torch.randn(plain.ROWS + 1, 96), torch.randn(96, 3).t(), torch.randn(0, 96)):
        agrees(x, weight, bias, ran=False)
        agrees(x, weight, None, ran=False)
    agrees(torch.randn(3, 96), torch.randn(96, 64).t(), None, ran=False)


@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (1, 1, 64), (2, 0, 64)])
def test_a_vector_and_more_dimensions_keep_their_shape(shape: tuple[int, ...]) -> None:
    weight, bias = drawn(32, 64)
    agrees(torch.randn(shape), weight, bias, ran=0 not in shape)


def test_not_a_number_and_infinity_stay_in_their_row() -> None:
    weight, _ = drawn(64, 64)
    x = torch.ones(20, 64)
    x[3, 5], x[17, 60] = torch.nan, torch.inf
    found = plain.linear(x, weight)
    assert found[3].isnan().all()
    assert found[17].isinf().all()
    assert found[[row for row in range(20) if row not in (3, 17)]].isfinite().all()


def test_a_declared_weight_is_held_once_and_a_write_by_any_code_counts_at_once() -> None:
    weight, _ = drawn(96, 64)
    forms, x = weight_forms.declare(weight), torch.randn(3, 64)
    alias = weight.numpy()
    for _ in range(3):
        agrees(x, weight, None)
        alias[5:9] *= 2.0  # PyTorch does not notice this one
    assert forms.made == {}


def test_a_product_leaves_the_mark_of_a_weight_that_another_implementation_packed() -> None:
    weight, _ = drawn(96, 64)
    weight_forms.declare(weight)
    assert weight_forms.of(weight, "a test", lambda now, before: 1) == 1
    agrees(torch.randn(3, 64), weight, None)
    assert weight_forms.rests(weight)


def test_compiled_code_calls_the_product_for_any_number_of_rows() -> None:
    weight, bias = drawn(96, 64)
    called: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(lambda x: plain.linear(x, weight, bias), fullgraph=True, backend=keep, dynamic=True)
    with torch.inference_mode():
        for rows in (2, 8, 48, 70):
            torch.testing.assert_close(compiled(torch.ones(rows, 64)), torch.ones(rows, 64) @ weight.t() + bias)
    assert called.count("fl_dispatch_cpu.sum") == 1
    assert not any("linear" in name for name in called)


def test_compiled_code_of_another_dtype_has_its_packed_product() -> None:
    weight, x = (one.bfloat16() for one in (drawn(96, 64)[0], torch.randn(3, 64)))
    weight_forms.declare(weight)
    compiled, before = torch.compile(plain.linear, fullgraph=True, backend="eager"), plain.counted()
    with torch.inference_mode():
        plain.linear(x, weight)
        torch.testing.assert_close(compiled(x, weight).float(), x.float() @ weight.float().t(), rtol=0.02, atol=0.02)
    assert plain.counted() == before


def test_what_the_kernels_do_not_take_is_another_products() -> None:
    weight, bias = drawn(32, 64)
    x = torch.randn(3, 64)
    before = plain.counted()
    agrees(x.double(), weight.double(), None, ran=False)
    found = plain.linear(x, torch.nn.Parameter(weight), bias)
    assert found.requires_grad
    for wrong in ((x[:, :32], weight, None), (x.double(), weight, None), (x, weight, bias[:5])):
        with pytest.raises(RuntimeError):
            plain.linear(*wrong)
    assert plain.counted() == before


def test_a_bias_gets_its_gradient_and_sparse_and_empty_weights_their_product() -> None:
    weight, bias = drawn(32, 64)
    x, bias = torch.randn(3, 64), bias.requires_grad_()
    plain.linear(x, weight, bias).sum().backward()
    assert bias.grad is not None
    assert (bias.grad == 3).all()
    agrees(x, weight.to_sparse_csr(), None, ran=False)
    assert plain.linear(torch.randn(2, 3, 0), torch.randn(4, 0)).shape == (2, 3, 4)


@pytest.mark.parametrize("shapes", [((2, 64), (3, 8)), ((2, 8), (3, 64)), ((64,), (3, 64)), ((2, 64), (64,))])
def test_the_operator_itself_refuses_sizes_that_do_not_agree(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    x, weight = (torch.randn(shape) for shape in shapes)
    with pytest.raises(RuntimeError, match="plain weight"):
        torch.ops.fl_dispatch_cpu.product(x, weight)
    with pytest.raises(RuntimeError):
        torch.ops.fl_dispatch_cpu.sum(torch.randn(2, 64), torch.randn(3, 64), torch.randn(2))


def test_a_weight_without_data_is_an_error() -> None:
    weight, _ = drawn(32, 64)
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="no data"):
        plain.linear(torch.randn(3, 64), weight)
