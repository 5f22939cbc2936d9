"""Quantized rows by the wheel's kernel, and products with quantized weights by PyTorch's, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import as_called
from fl_dispatch import weight_forms
from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.backends.vendor.cpu import library
from fl_dispatch.backends.vendor.cpu.impl import integers, own_integers, quantization
from fl_dispatch.backends.vendor.cpu.register_ops import register_builtins
from fl_dispatch.ops import OPERATORS, Sample
from fl_dispatch.types import OpImpl

MISSING = library.why_unavailable()
NO_INTEGERS = own_integers.why_unavailable()
needs_integers = pytest.mark.skipif(bool(NO_INTEGERS), reason=NO_INTEGERS)
INEXACT = integers.why_unavailable()
FAST = quantization.multiplies_int8()
HALF, DTYPES = [torch.bfloat16], [torch.float32, torch.bfloat16, torch.float16]
KERNELS = [
    pytest.param("quantize", "vendor.cpu", DTYPES, marks=pytest.mark.skipif(bool(MISSING), reason=MISSING)),
    pytest.param("scaled_linear", "vendor.cpu", DTYPES, marks=pytest.mark.skipif(bool(INEXACT), reason=INEXACT)),
    pytest.param("scaled_linear", "vendor.cpu.onednn", DTYPES, marks=pytest.mark.skipif(not FAST, reason="no VNNI")),
    ("weight_only_linear", "vendor.cpu.onednn", HALF),
    pytest.param("scaled_linear", "vendor.cpu.cpp", DTYPES, marks=needs_integers),
    pytest.param("scaled_moe", "vendor.cpu.cpp", DTYPES, marks=needs_integers),
    ("weight_only_linear", "vendor.cpu.cpp", [torch.float32, torch.bfloat16]),
]
each_kernel = pytest.mark.parametrize(("name", "implementation", "dtypes"), KERNELS)


def found(name: str, implementation: str) -> OpImpl:
    return as_called(register_builtins, name, implementation)


def samples(name: str, dtype: torch.dtype) -> Iterator[Sample]:
    made = OPERATORS[name].samples
    assert made is not None
    return made(dtype, torch.device("cpu"), torch.Generator().manual_seed(0))


def tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def double(arg: Any) -> Any:
    return arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() and arg.itemsize > 1 else arg


@each_kernel
def test_every_supported_sample_agrees_with_float64(name: str, implementation: str, dtypes: list[torch.dtype]) -> None:
    impl, operator = found(name, implementation), OPERATORS[name]
    for dtype in dtypes:
        tolerance, ran = operator.tolerances[dtype], 0
        for sample in samples(name, dtype):
            args = operator.bind(sample.args, {})
            if impl.supports(*args) is not True:
                continue
            weight_forms.declare_all(operator.stay(args))
            wanted = tensors(getattr(ReferenceBackend(), name)(*map(double, args)))
            for got, exact in zip(tensors(impl.fn(*args)), wanted, strict=True):
                assert got.shape == exact.shape
                torch.testing.assert_close(
                    got.double(), exact.double(), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True,
                    msg=lambda m: f"{sample.label}, {dtype}: {m}",
                )  # fmt: skip
            ran += sample.serving
        assert ran >= 3


@each_kernel
def test_rows_that_are_a_part_of_wider_ones_give_the_same(
    name: str, implementation: str, dtypes: list[torch.dtype]
) -> None:
    """As latent attention has them, whose latents lie beside their rotary part; else a kernel declines them."""
    impl, operator, ran = found(name, implementation), OPERATORS[name], 0
    for sample in samples(name, dtypes[-1]):
        x, *rest = operator.bind(sample.args, {})
        wide = torch.cat((x, x), -1)[..., : x.shape[-1]]
        if impl.supports(x, *rest) is True:
            weight_forms.declare_all(operator.stay((x, *rest)))
            ran += 1
            if impl.supports(wide, *rest) is True:
                for got, right in zip(tensors(impl.fn(wide, *rest)), tensors(impl.fn(x, *rest)), strict=True):
                    assert torch.equal(got, right), sample.label
    assert ran


@each_kernel
def test_what_is_not_supported_says_why(name: str, implementation: str, dtypes: list[torch.dtype]) -> None:
    impl = found(name, implementation)
    answers = {impl.supports(*OPERATORS[name].bind(s.args, {})) for s in samples(name, torch.float64)}
    assert answers
    assert all(isinstance(answer, str) for answer in answers), "float64 is the references'"


def bytes_of(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.ones(shape, dtype=dtype)


ONES = torch.ones


def experts_of(hidden: int = 64, inner: int = 8, scales: int = 16) -> tuple[Tensor, ...]:
    """Two experts of 64 elements whose first product has 16 columns, and three tokens."""
    first, second = (bytes_of(2, 16, hidden), ONES(2, scales, 1)), (bytes_of(2, 64, inner), ONES(2, 64, 1))
    return ONES(3, 64), *first, *second, ONES(3, 1), torch.zeros(3, 1, dtype=torch.int32)


NOT_TOGETHER = {
    "a weight of shorter rows": ("weight_only_linear", (ONES(1, 64), bytes_of(4, 32), ONES(4, 2))),
    "more scales than columns": ("weight_only_linear", (ONES(1, 64), bytes_of(4, 64), ONES(8, 2))),
    "groups that are not whole": ("weight_only_linear", (ONES(1, 64), bytes_of(4, 64), ONES(4, 7))),
    "zero points of another type": ("weight_only_linear", (ONES(1, 64), bytes_of(4, 64), ONES(4, 2), ONES(4, 2).int())),
    "too few zero points": ("weight_only_linear", (ONES(1, 64), bytes_of(4, 64), ONES(4, 2), bytes_of(4, 1))),
    "a bias of other columns": ("weight_only_linear", (ONES(1, 64), bytes_of(4, 64), ONES(4, 2), None, ONES(3))),
    "whole bytes for 4 bits": (
        "weight_only_linear",
        (ONES(1, 64), bytes_of(4, 64, dtype=torch.uint8), ONES(4, 2)),
    ),
    "int8 of shorter rows": ("scaled_linear", (bytes_of(1, 64), ONES(1, 1), bytes_of(4, 32), ONES(4, 1))),
    "int8 with scales of other columns": ("scaled_linear", (bytes_of(1, 64), ONES(1, 1), bytes_of(4, 64), ONES(3, 1))),
    "int8 with scales of other rows": ("scaled_linear", (bytes_of(2, 64), ONES(1, 1), bytes_of(4, 64), ONES(4, 1))),
    "experts of shorter rows": ("scaled_moe", experts_of(hidden=32)),
    "experts whose second product has other rows": ("scaled_moe", experts_of(inner=16)),
    "experts with scales of other columns": ("scaled_moe", experts_of(scales=8)),
    "experts without a gate that should have one": ("scaled_moe", (*experts_of(), "relu2_no_mul")),
}


@pytest.mark.parametrize("what", NOT_TOGETHER)
def test_tensors_that_do_not_belong_together_are_declined_before_their_memory_is_read(what: str) -> None:
    name, args = NOT_TOGETHER[what]
    assert isinstance(found(name, "vendor.cpu.cpp").supports(*args), str)


SIZES = ((1, 1, 1), (2, 3, 0), (5, 13, 17), (6, 12, 768), (7, 25, 770), (96, 24, 64), (97, 3, 1600), (203, 31, 33))
"""Rows, columns and elements, on both sides of what a thread takes at a time."""


@needs_integers
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("rows", "columns", "inner"), SIZES)
def test_sums_of_integers_are_exact(
    rows: int, columns: int, inner: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest products, too: a sum is rounded once, when it becomes a number of float32."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(rows)
    x, weight = (
        torch.randint(-128, 128, (count, inner), generator=generator, dtype=torch.int8) for count in (rows, columns)
    )
    x[0], weight[0] = -128, -128
    x_scale, scale = torch.rand(rows, 1, generator=generator), torch.rand(columns, 1, generator=generator)
    bias = torch.rand(columns, generator=generator)
    wanted = (x.double() @ weight.double().t()).float() * x_scale * scale.t()
    assert torch.equal(own_integers.scaled_linear(x, x_scale, weight, scale, None, "float32"), wanted)
    assert torch.equal(own_integers.scaled_linear(x, x_scale, weight, scale, bias, "float32"), wanted + bias)
    one = own_integers.scaled_linear(x, x_scale, weight, scale[:1], None, "float32")
    assert torch.equal(one, (x.double() @ weight.double().t()).float() * x_scale * scale[0])


@needs_integers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_integers_give_the_references_results(dtype: torch.dtype) -> None:
    """Bit by bit: sums of so few numbers are exact in the reference too."""
    impl, ran = found("scaled_moe", "vendor.cpu.cpp"), 0
    for sample in samples("scaled_moe", dtype):
        args = OPERATORS["scaled_moe"].bind(sample.args, {})
        if impl.supports(*args) is True:
            ran += 1
            assert torch.equal(impl.fn(*args), ReferenceBackend().scaled_moe(*args)), sample.label
    assert ran >= 5


@needs_integers
def test_a_row_is_as_long_as_its_sum_fits_32_bits() -> None:
    longest = own_integers.LONGEST
    x, one = torch.full((1, longest), -128, dtype=torch.int8), ONES(1, 1)
    assert own_integers.supports_scaled_linear(x, one, x, one) is True
    assert float(own_integers.scaled_linear(x, one, x, one, None, "float32")) == longest * 128 * 128
    longer = torch.cat((x, x[:, :1]), -1)
    assert "32 bits" in str(own_integers.supports_scaled_linear(longer, one, longer, one))


def test_a_processor_without_avx2_has_no_products_of_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "processor_flags", lambda: frozenset({"sse4_2"}))
    assert own_integers.why_unavailable() == "the processor has no AVX2"


def test_the_processor_is_asked_once_whether_it_multiplies_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[frozenset[str]] = []

    def flags() -> frozenset[str]:
        asked.append(frozenset({"avx2"}))
        return asked[-1]

    monkeypatch.setattr(library, "processor_flags", flags)
    quantization.multiplies_int8.cache_clear()
    args = (bytes_of(1, 64), ONES(1, 1), bytes_of(4, 64))
    answers = {quantization.supports_scaled_linear(*args) for _ in range(3)}
    quantization.multiplies_int8.cache_clear()
    assert answers == {"the processor has no instructions for products of int8"}
    assert len(asked) == 1


def test_weights_of_4_bits_are_kept_for_the_kernel() -> None:
    impl, kept = found("weight_only_linear", "vendor.cpu.onednn"), 0
    for sample in samples("weight_only_linear", torch.bfloat16):
        args = OPERATORS["weight_only_linear"].bind(sample.args, {})
        if args[1].dtype is torch.uint8 and impl.supports(*args) is True and args[0].numel():
            forms = [weight_forms.declare(weight) for weight in args[1:3]]
            impl.fn(*args)
            assert all(form.made["vendor.cpu.onednn"] is not None for form in forms)
            kept += 1
    assert kept


@pytest.mark.skipif(bool(INEXACT), reason=INEXACT)
@pytest.mark.parametrize("written", ["the weight", "the scales", "both", "the dtype"])
def test_the_wheels_packed_weight_follows_its_weight_its_scales_and_the_dtype(written: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-128, 128, (rows, 64), generator=generator, dtype=torch.int8) for rows in (3, 32))
    x_scale, scale = torch.rand(3, 1, generator=generator), torch.rand(32, 1, generator=generator)
    weight_forms.declare_all((weight, scale))

    def agree(dtype: str) -> None:
        wanted = (x.double() @ weight.double().t()) * x_scale * scale.t()
        found = integers.scaled_linear(x, x_scale, weight, scale, None, dtype)
        torch.testing.assert_close(found.double(), wanted, rtol=2.0**-7, atol=0.0)

    agree("float32")
    made = weight_forms.declare(weight).made[integers.NAME]
    assert made is not None
    agree("float32")
    assert weight_forms.declare(weight).made[integers.NAME] is made
    if written in ("the weight", "both"):
        weight.data[3].neg_()
    if written in ("the scales", "both"):
        scale.data[5:9].mul_(3.0)
    agree("bfloat16" if written == "the dtype" else "float32")
    assert weight_forms.declare(weight).made[integers.NAME] is not made
