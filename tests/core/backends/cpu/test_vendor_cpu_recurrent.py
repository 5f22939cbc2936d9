"""The compiled CPU kernels of layers with a state, against the references."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from builders import as_called
from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.backends.vendor.cpu import library
from fl_dispatch.backends.vendor.cpu.impl import recurrent
from fl_dispatch.backends.vendor.cpu.register_ops import register_builtins
from fl_dispatch.ops import OPERATORS, Sample
from fl_dispatch.types import OpImpl

MISSING = library.why_unavailable() or library.why_missing(recurrent.KERNELS)
NAMES = ("causal_conv1d", "causal_conv1d_update", "gated_delta_rule", "gated_delta_rule_update")

needs_kernels = pytest.mark.skipif(bool(MISSING), reason=MISSING)
each_operator = pytest.mark.parametrize("name", NAMES)


def implementation(name: str) -> OpImpl:
    return as_called(register_builtins, name, "vendor.cpu")


def samples(name: str, dtype: torch.dtype = torch.bfloat16) -> Iterator[Sample]:
    generate = OPERATORS[name].samples
    assert generate is not None
    return generate(dtype, torch.device("cpu"), torch.Generator().manual_seed(0))


@needs_kernels
@each_operator
def test_every_supported_sample_agrees_with_the_reference_and_so_does_the_state(name: str) -> None:
    impl, tolerance = implementation(name), OPERATORS[name].tolerances[torch.bfloat16]
    place, ran = list(OPERATORS[name].parameters).index("states"), 0
    for sample, again in zip(samples(name), samples(name), strict=True):
        if impl.supports(*sample.args) is not True:  # type: ignore[misc]
            continue
        wide = [arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in again.args]
        expected = getattr(ReferenceBackend(), name)(*wide)
        actual = impl.fn(*sample.args)
        pairs = [(actual, expected), (sample.args[place], wide[place])]
        for got, wanted in pairs:
            torch.testing.assert_close(
                got.double(), wanted, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True,
                msg=lambda text, label=sample.label: f"{label}: {text}",
            )  # fmt: skip
        ran += sample.serving
    assert ran >= 2


@needs_kernels
@each_operator
def test_what_is_not_supported_says_why(name: str) -> None:
    impl = implementation(name)
    answers = [impl.supports(*sample.args) for sample in samples(name, torch.float32)]  # type: ignore[misc]
    assert any("is torch.float32, not torch.bfloat16" in str(answer) for answer in answers)
    assert True not in answers
    reasons = {impl.supports(*sample.args) for sample in samples(name)} - {True}  # type: ignore[misc]
    assert any("multiple of 32" in str(reason) for reason in reasons) == name.startswith("causal")
    assert any("not both 64 or 128" in str(reason) for reason in reasons) == (name == "gated_delta_rule")
    assert ("there are no tokens" in reasons) == (name != "gated_delta_rule")  # its empty sample has small heads


def test_a_library_without_the_kernels_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "why_unavailable", lambda: "")
    monkeypatch.setattr(recurrent, "KERNELS", ("no_such_kernel",))
    reason = "the library for this processor has no no_such_kernel"
    found = {implementation(name).availability() for name in NAMES}
    assert found == {(False, reason)}
