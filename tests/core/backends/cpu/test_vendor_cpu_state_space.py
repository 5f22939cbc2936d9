"""The compiled CPU kernels of state spaces, against the references."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from builders import as_called
from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.backends.vendor.cpu import library
from fl_dispatch.backends.vendor.cpu.impl import limits, state_space
from fl_dispatch.backends.vendor.cpu.register_ops import register_builtins
from fl_dispatch.ops import OPERATORS, Sample
from fl_dispatch.types import OpImpl

MISSING = library.why_unavailable() or library.why_missing(state_space.KERNELS)
NAMES = ("selective_scan", "selective_state_update")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

needs_kernels = pytest.mark.skipif(bool(MISSING), reason=MISSING)
each_operator = pytest.mark.parametrize("name", NAMES)


def implementation(name: str) -> OpImpl:
    return as_called(register_builtins, name, "vendor.cpu")


def samples(name: str, dtype: torch.dtype) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(0)
    for generate in (OPERATORS[name].samples, OPERATORS[name].probes):
        assert generate is not None
        yield from generate(dtype, torch.device("cpu"), generator)


@needs_kernels
@each_operator
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_sample_with_tokens_agrees_with_the_reference_and_so_does_the_state(
    name: str, dtype: torch.dtype
) -> None:
    impl, operator = implementation(name), OPERATORS[name]
    place = list(operator.parameters).index("states")
    for sample, again in zip(samples(name, dtype), samples(name, dtype), strict=True):
        if not sample.args[0].numel() or sample.args[2].dim() == 2:  # see the next test
            continue
        answer = impl.supports(*sample.args)  # type: ignore[misc]
        if name == "selective_state_update" and not limits.rounds(sample.args[place].dtype):
            assert answer == "the build for this processor truncates states to bfloat16"
            continue
        assert answer is True
        tolerance = operator.tolerance(dtype, sample.args)
        wide = [arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in again.args]
        expected = getattr(ReferenceBackend(), name)(*wide)
        actual = impl.fn(*sample.args)
        for got, wanted in ((actual, expected), (sample.args[place], wide[place])):
            torch.testing.assert_close(
                got.double(), wanted, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True,
                msg=lambda text, label=sample.label: f"{label}: {text}",
            )  # fmt: skip


@needs_kernels
@each_operator
def test_what_is_not_supported_says_why(name: str) -> None:
    impl = implementation(name)
    assert impl.supports is not None
    args = next(samples(name, torch.bfloat16)).args
    assert impl.supports(*args) is True
    place = {parameter: index for index, parameter in enumerate(OPERATORS[name].parameters)}

    def answer(parameter: str, value: Tensor) -> object:
        assert impl.supports is not None
        return impl.supports(*(value if index == place[parameter] else arg for index, arg in enumerate(args)))

    assert answer("dt_bias", args[place["dt_bias"]].float()) == "dt_bias is torch.float32, not torch.bfloat16"
    assert "float64" in str(answer("states", args[place["states"]].double()))
    states = args[place["states"]]
    assert answer("states", states.mT.contiguous().mT) == "the elements of a state lie apart"
    empty = [sample.args for sample in samples(name, torch.bfloat16) if not sample.args[0].numel()]
    assert [impl.supports(*one) for one in empty] == ["there are no tokens"]
    assert "float64" in str(impl.supports(*next(samples(name, torch.float64)).args))
    by_column = {impl.supports(*one.args) for one in samples(name, torch.bfloat16) if one.args[2].dim() == 2}
    assert by_column == {"each column of a state has a decay"}


def test_a_library_without_the_kernels_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "why_unavailable", lambda: "")
    monkeypatch.setattr(state_space, "KERNELS", ("no_such_kernel",))
    reason = "the library for this processor has no no_such_kernel"
    found = {implementation(name).availability() for name in NAMES}
    assert found == {(False, reason)}
