"""The compiled CPU kernels of vLLM's CPU build, against the references."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import as_called
from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.backends.vendor.cpu import library
from fl_dispatch.backends.vendor.cpu.impl import activation
from fl_dispatch.backends.vendor.cpu.register_ops import register_builtins
from fl_dispatch.ops import OPERATORS, Sample
from fl_dispatch.types import OpImpl

MISSING = library.why_unavailable()
NAMES = ["silu_and_mul", "gelu_and_mul", "rms_norm", "rotary_embedding"]
AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

needs_kernels = pytest.mark.skipif(bool(MISSING), reason=MISSING)
each_operator = pytest.mark.parametrize("name", NAMES)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def implementation(name: str) -> OpImpl:
    return as_called(register_builtins, name, "vendor.cpu")


def samples(name: str, dtype: torch.dtype) -> Iterator[Sample]:
    return OPERATORS[name].samples(dtype, torch.device("cpu"), torch.Generator().manual_seed(0))


def answer(impl: OpImpl, args: tuple[Any, ...]) -> bool | str:
    assert impl.supports is not None
    return impl.supports(*args)


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [tensor for tensor in result if tensor is not None]


@needs_kernels
@each_dtype
@each_operator
def test_every_supported_sample_agrees_with_the_reference(name: str, dtype: torch.dtype) -> None:
    impl, tolerance, ran = implementation(name), OPERATORS[name].tolerances[dtype], 0
    for sample, again in zip(samples(name, dtype), samples(name, dtype), strict=True):
        if answer(impl, sample.args) is not True:
            continue
        wide = [arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in again.args]
        expected = tensors(getattr(ReferenceBackend(), name)(*wide))
        for actual, wanted in zip(tensors(impl.fn(*sample.args)), expected, strict=True):
            assert actual.dtype is dtype
            error = (actual - wanted).abs() - tolerance.atol - tolerance.rtol * wanted.abs()
            assert not (error > 0).any(), f"{sample.label}: {error.max()} beyond the tolerance"
        ran += sample.serving
    assert ran >= 4


@needs_kernels
@each_operator
def test_only_what_the_declaration_allows_is_overwritten(name: str) -> None:
    impl = implementation(name)
    for sample, again in zip(samples(name, torch.float32), samples(name, torch.float32), strict=True):
        if answer(impl, sample.args) is not True:
            continue
        args = OPERATORS[name].bind(sample.args, {})
        written = OPERATORS[name].written(args)
        impl.fn(*args)
        for parameter, arg, old in zip(OPERATORS[name].parameters, args, again.args, strict=False):
            assert parameter in written or not isinstance(arg, Tensor) or torch.equal(arg, old), sample.label


@needs_kernels
@each_operator
def test_what_is_not_supported_says_why(name: str) -> None:
    impl = implementation(name)
    reasons = {answer(impl, s.args) for dtype in (torch.float64, torch.float32) for s in samples(name, dtype)} - {True}
    assert any("is torch.float64, not float32" in str(reason) for reason in reasons)
    assert any("multiple of" in str(reason) for reason in reasons)
    assert all(isinstance(reason, str) for reason in reasons)


@needs_kernels
@each_dtype
def test_a_part_of_a_product_is_normalized_and_an_overwritten_one_is_declined(dtype: torch.dtype) -> None:
    product, weight = torch.randn(3, 1280).to(dtype), torch.randn(64).to(dtype)
    heads = product[:, :768].unflatten(-1, (12, 64))
    impl, tolerance = implementation("rms_norm"), OPERATORS["rms_norm"].tolerances[dtype]
    assert answer(impl, (heads, None, weight, 1e-6)) is True
    found = impl.fn(heads, None, weight, 1e-6)
    wanted = ReferenceBackend().rms_norm(heads.double(), None, weight.double(), 1e-6)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance.rtol, atol=tolerance.atol)
    assert answer(impl, (heads, heads.clone(), weight, 1e-6)) == "x is not contiguous"


@needs_kernels
@pytest.mark.parametrize("rows", [1, 2, 3, activation.ROWS, 2 * activation.ROWS + 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_a_gated_activation_of_a_half_type_is_rounded_once(name: str, dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(rows, 2 * 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, wide = implementation(name).fn(x), getattr(ReferenceBackend(), name)(x.double())
    assert (found.shape, found.dtype, found.is_contiguous()) == ((rows, 512), dtype, True)
    errors = (found.double() - wide).abs() / wide.abs().clamp(min=1e-3)
    assert errors.mean() <= 0.21 * torch.finfo(dtype).eps, "rounding once gives 0.18, twice 0.25"


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        (AVX2, "_C_AVX2.abi3.so"),
        (AVX512, "_C_AVX512.abi3.so"),
        (AVX512 | {"avx512_bf16"}, "_C_AVX512.abi3.so"),
        (AVX512 | {"avx512_bf16", "avx512_vnni", "amx_tile"}, "_C.abi3.so"),
        (AVX512 - {"avx512dq"}, "_C_AVX2.abi3.so"),
    ],
)
def test_the_library_is_the_best_whose_every_instruction_exists(
    tmp_path: Path, flags: frozenset[str], chosen: str
) -> None:
    for name, _ in library.LIBRARIES:
        (tmp_path / name).touch()
    assert library.choose(tmp_path, flags) == (tmp_path / chosen, "")


def test_a_processor_without_the_least_instructions_gets_none(tmp_path: Path) -> None:
    for name, _ in library.LIBRARIES:
        (tmp_path / name).touch()
    path, why = library.choose(tmp_path, frozenset({"avx", "f16c"}))
    assert path is None
    assert "no avx2, fma" in why


def test_a_build_for_gpus_is_not_taken_for_the_cpu_build(tmp_path: Path) -> None:
    (tmp_path / "_C.abi3.so").touch()
    path, why = library.choose(tmp_path, AVX512 | {"avx512_bf16", "avx512_vnni"})
    assert path is None
    assert "not the CPU build" in why


def test_only_flags_that_all_processors_have_count(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : avx2 fma\n\nprocessor : 1\nflags : avx2\n")
    assert library.processor_flags(tmp_path / "cpuinfo") == {"avx2"}
    assert library.processor_flags(tmp_path / "missing") == frozenset()


@pytest.mark.skipif(not MISSING, reason="the CPU build is installed")
def test_without_the_cpu_build_the_backend_is_unavailable_and_says_why() -> None:
    available, why = implementation("rms_norm").availability()
    assert not available
    expected = "not the CPU build" if importlib.util.find_spec("vllm") else "vLLM is not installed"
    assert expected in why


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_question_does_not_import_vllm() -> None:
    code = (
        "import sys; from fl_dispatch.backends.vendor.cpu import library; library.why_unavailable();"
        "sys.exit('vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@needs_kernels
@pytest.mark.parametrize("ours_first", [True, False])
def test_the_library_may_be_loaded_by_both_in_any_order(ours_first: bool) -> None:
    path, _ = library.locate()
    ours = "from fl_dispatch.backends.vendor.cpu import library; assert library.why_unavailable() == ''"
    theirs = f"import torch; torch.ops.load_library({str(path)!r})"
    code = "\n".join((ours, theirs) if ours_first else (theirs, ours))
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
