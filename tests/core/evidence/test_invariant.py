"""Batch invariance: whoever declares it gives a row the same bits in whatever batch."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import invariance
from fl_dispatch import SelectionPolicy, Traits
from fl_dispatch.backends.reference.impl import invariant
from fl_dispatch.backends.triton.register_ops import IMPL_ID, INVARIANT_ID, ROWS
from fl_dispatch.backends.vendor.cpu.impl import own_attention
from fl_dispatch.devices.triton import why_unavailable
from fl_dispatch.selection.decision import select
from sampling import drawn

CPU = torch.device("cpu")
REFERENCES = ("reference.torch", "reference.invariant")
TRITON = (IMPL_ID, INVARIANT_ID)
INVARIANT_KERNELS = {
    (row.op_name, row.impl_id) for row in ROWS if isinstance(row.traits, Traits) and row.traits.batch_invariant
}
CPP = "vendor.cpu.cpp"
OF_A_MODEL = {*invariance.CASES} - {"layer_norm"}
"""Operators of dense models and of mixtures."""
HERE = Path(invariance.__file__)

each_dtype = pytest.mark.parametrize("dtype", invariance.DTYPES, ids=str)


def test_whoever_declares_it_is_tested_here() -> None:
    declared = invariance.declared()
    ours = [impl for impl in declared if impl.op_name != "attention_backend"]  # names a class, computes nothing
    assert {impl.op_name for impl in ours} <= {*invariance.CASES}
    assert {impl.impl_id for impl in ours} <= {*REFERENCES, *TRITON, CPP}
    if not why_unavailable():
        kernels = {(impl.op_name, impl.impl_id) for impl in ours} - {(op, one) for op, one in _of(*REFERENCES, CPP)}
        assert kernels == INVARIANT_KERNELS


def _of(*impl_ids: str) -> list[tuple[str, str]]:
    return [(impl.op_name, impl.impl_id) for impl in invariance.declared(*impl_ids)]


def test_every_operator_of_a_dense_model_and_of_a_mixture_has_an_invariant_reference() -> None:
    assert {op for op, _ in _of(*REFERENCES)} == {*invariance.CASES}
    assert {op for op, _ in INVARIANT_KERNELS} == OF_A_MODEL


@each_dtype
@pytest.mark.parametrize(("op_name", "impl_id"), _of(*REFERENCES))
def test_a_references_rows_do_not_depend_on_the_batch(op_name: str, impl_id: str, dtype: torch.dtype) -> None:
    (impl,) = (impl for impl in invariance.implementations(op_name) if impl.impl_id == impl_id)
    assert invariance.differences(impl, dtype, CPU) == []


@pytest.mark.parametrize("dtype", sorted(own_attention.DTYPES, key=str), ids=str)
@pytest.mark.parametrize(("op_name", "impl_id"), _of(CPP))
def test_rows_of_our_own_attention_do_not_depend_on_the_batch(op_name: str, impl_id: str, dtype: torch.dtype) -> None:
    (impl,) = (impl for impl in invariance.implementations(op_name) if impl.impl_id == impl_id)
    assert invariance.differences(impl, dtype, CPU) == []


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_kernels_rows_do_not_depend_on_the_batch() -> None:
    # bfloat16 is left out: the interpreter's matrix product of it is wrong.
    types = drawn(("float32", "float16"), 1, "types of batch-invariant kernels in Triton's interpreter")
    command = [sys.executable, str(HERE), ",".join(TRITON), ",".join(types)]
    helpers = str(HERE.parent), str(HERE.parents[1] / "support")
    path = os.pathsep.join(filter(None, (*helpers, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(ran.stdout.splitlines()[-1])
    assert len(found) == len(types) * len(INVARIANT_KERNELS)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def _of_all_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias) * (1.0 + 1e-6 * len(x))


def _by_all_tokens(function: Callable[..., Any]) -> Callable[..., Any]:
    """Attention that depends on the number of tokens in the batch."""

    def attend(query: Tensor, *rest: Any, **options: Any) -> Any:
        out = function(query, *rest, **options)
        return out * 1.02 if len(query) > 300 else out

    return attend


@pytest.mark.parametrize("op_name", ["linear", "paged_attention"])  # PyTorch's activations differ by threads' shares
def test_a_plain_reference_would_be_found_out(op_name: str) -> None:
    (impl,) = (impl for impl in invariance.implementations(op_name) if impl.impl_id == "reference.torch")
    assert not impl.properties.get("batch_invariant")
    assert invariance.differences(impl, torch.float32, CPU) != []


@each_dtype
def test_a_planted_dependence_on_the_batch_is_found_out(dtype: torch.dtype) -> None:
    (linear,) = (impl for impl in invariance.declared("reference.invariant") if impl.op_name == "linear")
    (attention,) = (impl for impl in invariance.declared("reference.invariant") if impl.op_name == "paged_attention")
    planted = replace(attention, fn=_by_all_tokens(attention.fn))
    assert invariance.differences(planted, dtype, CPU) != []
    if dtype is torch.float32:
        assert invariance.differences(replace(linear, fn=_of_all_rows), dtype, CPU) != []


@pytest.mark.parametrize("op_name", invariance.CASES)
def test_with_the_policy_an_invariant_implementation_is_chosen_and_without_it_never(op_name: str) -> None:
    impls = invariance.implementations(op_name)
    chosen = select(op_name, impls, SelectionPolicy(batch_invariant=True)).candidates
    assert chosen
    assert all(impl.properties.get("batch_invariant") for impl in chosen)
    usual = {impl.impl_id for impl in select(op_name, impls, SelectionPolicy()).candidates}
    assert usual
    assert not usual & {"reference.invariant", INVARIANT_ID}


def test_rows_that_pytorch_may_add_up_in_parts_are_declined() -> None:
    assert invariant.supports_row(torch.empty(1, invariant.LONGEST_ROW)) is True
    assert "may add up in parts" in str(invariant.supports_row(torch.empty(1, invariant.LONGEST_ROW + 1)))
