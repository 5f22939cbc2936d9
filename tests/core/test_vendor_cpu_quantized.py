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
from fl_dispatch.backends.vendor.cpu.impl.quantization import INT8
from fl_dispatch.backends.vendor.cpu.register_ops import register_builtins
from fl_dispatch.ops import OPERATORS, Sample
from fl_dispatch.types import OpImpl

MISSING = library.why_unavailable()
FAST = bool(INT8 & library.processor_flags())
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
def test_what_is_not_supported_says_why(name: str, implementation: str, dtypes: list[torch.dtype]) -> None:
    impl = found(name, implementation)
    answers = {impl.supports(*OPERATORS[name].bind(s.args, {})) for s in samples(name, torch.float64)}
    assert answers
    assert all(isinstance(answer, str) for answer in answers), "float64 is the references'"


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
