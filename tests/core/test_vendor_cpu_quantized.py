"""Quantized rows by the wheel's kernel, and products with quantized weights by PyTorch's, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import as_called
from fl_dispatch import prepared
from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.backends.vendor.cpu import library
from fl_dispatch.backends.vendor.cpu.impl import quantization
from fl_dispatch.backends.vendor.cpu.register_ops import register_builtins
from fl_dispatch.ops import OPERATORS, Sample
from fl_dispatch.types import OpImpl

MISSING = library.why_unavailable()
FAST = quantization._multiplies_int8()
HALF, DTYPES = [torch.bfloat16], [torch.float32, torch.bfloat16, torch.float16]
KERNELS = [
    pytest.param("quantize", "vendor.cpu", DTYPES, marks=pytest.mark.skipif(bool(MISSING), reason=MISSING)),
    pytest.param("scaled_linear", "vendor.cpu.onednn", DTYPES, marks=pytest.mark.skipif(not FAST, reason="no VNNI")),
    ("weight_only_linear", "vendor.cpu.onednn", HALF),
    ("scaled_linear", "vendor.cpu.cpp", DTYPES),
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
            prepared.declare_all(operator.stay(args))
            wanted = tensors(getattr(ReferenceBackend(), name)(*map(double, args)))
            for got, exact in zip(tensors(impl.fn(*args)), wanted, strict=True):
                assert got.shape == exact.shape
                error = (got.double() - exact.double()).abs()
                bound = tolerance.atol + tolerance.rtol * exact.double().abs()
                assert (error <= bound).all(), f"{sample.label}, {dtype}: {error.max()}"
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
            prepared.declare_all(operator.stay((x, *rest)))
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
}


@pytest.mark.parametrize("what", NOT_TOGETHER)
def test_tensors_that_do_not_belong_together_are_declined_before_their_memory_is_read(what: str) -> None:
    name, args = NOT_TOGETHER[what]
    assert isinstance(found(name, "vendor.cpu.cpp").supports(*args), str)


def test_the_processor_is_asked_once_whether_it_multiplies_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[frozenset[str]] = []

    def flags() -> frozenset[str]:
        asked.append(frozenset({"avx2"}))
        return asked[-1]

    monkeypatch.setattr(library, "processor_flags", flags)
    quantization._multiplies_int8.cache_clear()
    args = (bytes_of(1, 64), ONES(1, 1), bytes_of(4, 64), ONES(4, 1))
    answers = {quantization.supports_scaled_linear(*args) for _ in range(3)}
    quantization._multiplies_int8.cache_clear()
    assert answers == {"the processor has no instructions for products of int8"}
    assert len(asked) == 1


def test_weights_of_4_bits_are_kept_for_the_kernel() -> None:
    impl, kept = found("weight_only_linear", "vendor.cpu.onednn"), 0
    for sample in samples("weight_only_linear", torch.bfloat16):
        args = OPERATORS["weight_only_linear"].bind(sample.args, {})
        if args[1].dtype is torch.uint8 and impl.supports(*args) is True and args[0].numel():
            forms = [prepared.declare(weight) for weight in args[1:3]]
            impl.fn(*args)
            assert all(form.made["vendor.cpu.onednn"] is not None for form in forms)
            kept += 1
    assert kept
