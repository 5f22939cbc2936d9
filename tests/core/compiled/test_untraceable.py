"""Compiled code notices by itself which implementations Dynamo cannot trace, and calls their views."""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from builders import impl
from fl_dispatch import (
    NotSupported,
    SelectionPolicy,
    bind_op,
    call_op,
    explain,
    freeze_dispatch,
    get_default_manager,
    policy_context,
    reset_default_manager,
    thaw_dispatch,
)
from fl_dispatch.run import trial

Tensor = torch.Tensor
EXPF = ctypes.CDLL("libm.so.6").expf
EXPF.restype, EXPF.argtypes = ctypes.c_float, [ctypes.c_float]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    thaw_dispatch()


def ones_by_ctypes(x: Tensor) -> Tensor:
    """Wrong on purpose: ones, so that who ran can be seen."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2)).fill_(EXPF(0.0))


def norm_by_ctypes(x: Tensor, residual: Tensor | None = None, weight: Any = None, epsilon: float = 1e-6) -> Any:
    one = torch.full_like(x, EXPF(0.0))
    return one if residual is None else (one, residual.fill_(EXPF(0.0)))


class Library:
    def silu_and_mul(self, x: Tensor) -> Tensor:
        return ones_by_ctypes(x)

    def __call__(self, x: Tensor) -> Tensor:
        return ones_by_ctypes(x)


def register(fn: Callable[..., Any], op: str = "silu_and_mul", impl_id: str = "vendor.nimbus", **fields: Any) -> None:
    get_default_manager().registry.register_impl(impl(impl_id, fn, op=op, priority=999, **fields))


def graph_of(function: Callable[..., Any], *args: Any) -> str:
    codes: list[str] = []

    def keep(graph: Any, inputs: Any) -> Any:
        codes.append(graph.code)
        return graph.forward

    torch.compile(function, fullgraph=True, backend=keep)(*args)
    return codes[0]


WAYS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "by name": lambda: lambda x: call_op("silu_and_mul", x),
    "bound": lambda: bind_op("silu_and_mul"),
    "bound for a layer": lambda: bind_op("silu_and_mul", "layers.0.act"),
}


@pytest.mark.parametrize("proven", ["first call", "proven"])
@pytest.mark.parametrize("way", WAYS)
def test_a_ctypes_kernel_runs_behind_its_view_without_saying_so(way: str, proven: str) -> None:
    register(ones_by_ctypes)
    function, x = WAYS[way](), torch.randn(3, 8)
    if proven == "proven":
        assert function(x).eq(1).all()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    assert compiled(x).eq(1).all()
    assert compiled(torch.randn(5, 8)).eq(1).all()
    assert "fl_dispatch.silu_and_mul" in graph_of(WAYS[way](), x)


@pytest.mark.parametrize("proven", ["first call", "proven"])
def test_a_ctypes_kernel_runs_behind_its_view_in_a_layer_first_call(proven: str) -> None:
    register(norm_by_ctypes, op="rms_norm")
    layer, x = torch.nn.RMSNorm(8, eps=1e-6), torch.randn(3, 8)
    layer.variance_epsilon = 1e-6
    if proven == "proven":
        call_op("rms_norm", layer, x)
    compiled = torch.compile(lambda x: call_op("rms_norm", layer, x), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert compiled(x).eq(1).all()


FORMS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "method": (Library().silu_and_mul, {}),
    "object": (Library(), {"signature": "unchecked"}),
    "partial": (functools.partial(ones_by_ctypes), {}),
    "decorated": (torch.no_grad()(ones_by_ctypes), {}),
    "with a condition": (ones_by_ctypes, {"supports": lambda x: True}),
}


@pytest.mark.parametrize("form", FORMS)
def test_whatever_a_kernel_is_called_through_it_runs_behind_its_view(form: str) -> None:
    fn, fields = FORMS[form]
    register(fn, **fields)
    x = torch.randn(3, 8)
    for _ in range(2):
        assert call_op("silu_and_mul", x).eq(1).all()
    assert "fl_dispatch.silu_and_mul" in graph_of(lambda x: call_op("silu_and_mul", x), x)


def test_inductor_runs_a_ctypes_kernel_beside_its_own_code() -> None:
    register(ones_by_ctypes)
    compiled = torch.compile(lambda x: call_op("silu_and_mul", x * 2) + 1, fullgraph=True)
    assert compiled(torch.randn(3, 8)).eq(2).all()


def test_a_kernel_that_can_be_traced_stays_inline() -> None:
    register(lambda x: x[..., ::2] * 3)
    x = torch.ones(2, 8)
    for _ in range(2):
        code = graph_of(lambda x: call_op("silu_and_mul", x), x)
        assert "fl_dispatch" not in code
        assert "* 3" in code
        call_op("silu_and_mul", x)
        torch._dynamo.reset()


def test_a_kernel_that_only_needs_a_library_in_one_form_of_call_is_found_too() -> None:
    def only_with_residual(x: Tensor, residual: Any = None, weight: Any = None, epsilon: float = 1e-6) -> Any:
        return x * 1 if residual is None else norm_by_ctypes(x, residual)

    register(only_with_residual, op="rms_norm")
    norm = bind_op("rms_norm")
    assert "fl_dispatch.rms_norm" in graph_of(lambda x: norm(x, None, torch.ones(8), 1e-6), torch.randn(3, 8))


def test_a_kernel_that_declines_small_samples_is_tried_with_others() -> None:
    def only_large(x: Tensor) -> Tensor:
        if x.shape[-1] < 1024:
            raise NotSupported("too small")
        return ones_by_ctypes(x)

    register(only_large)
    assert trial.obstacle(get_default_manager().state, the_kernel()).startswith("Dynamo does not know")


def test_what_dynamo_cannot_trace_is_told_once_and_explained(caplog: pytest.LogCaptureFixture) -> None:
    register(ones_by_ctypes)
    assert "opaque" not in str(explain("silu_and_mul"))
    with caplog.at_level(logging.INFO):
        for way in WAYS.values():
            torch.compile(way(), fullgraph=True, backend="eager")(torch.randn(3, 8))
    told = [record.getMessage() for record in caplog.records if "opaque view" in record.getMessage()]
    assert len(told) == 1
    assert "'vendor.nimbus' of op 'silu_and_mul'" in told[0]
    assert "_FuncPtr" in told[0]
    assert "opaque in compiled code: Dynamo does not know" in str(explain("silu_and_mul"))


def test_the_manifest_holds_what_dynamo_cannot_trace() -> None:
    register(ones_by_ctypes)
    register(lambda x: torch.relu(x) * torch.relu(x), op="relu2")
    manifest = freeze_dispatch()
    assert [name for name in manifest.untraceable if "nimbus" in name] == ["silu_and_mul: vendor.nimbus"]
    others = {name: why for name, why in manifest.untraceable.items() if "nimbus" not in name}
    other = replace(manifest, untraceable=others)
    assert manifest.hash != other.hash
    assert manifest.differences(other) == ["silu_and_mul: vendor.nimbus: opaque here, nothing there"]
    assert type(manifest).from_data(manifest.as_data()) == manifest


def test_a_declared_flag_enters_the_hash_because_it_decides_the_operators_in_a_saved_graph() -> None:
    manifests = []
    for opaque in (True, False):
        register(lambda x: x * 1, op="relu2", opaque=opaque)
        manifests.append(freeze_dispatch())
        thaw_dispatch()
        reset_default_manager()
    first, second = manifests
    assert first.differences(second) == ["relu2: vendor.nimbus: opaque here, nothing there"]
    assert first.hash != second.hash


def test_the_schema_of_a_view_enters_the_hash() -> None:
    manifest = freeze_dispatch()
    view = "relu2(Tensor x, str scope) -> Tensor"
    assert manifest.views["relu2"] == f"eager; inline; opaque; {view}"
    other = replace(manifest, views={**manifest.views, "relu2": "eager; inline"})
    assert manifest.hash != other.hash
    assert manifest.differences(other) == [f"relu2: eager; inline; opaque; {view} here, eager; inline there"]


@pytest.mark.parametrize("bound", ["before", "after"])
@pytest.mark.parametrize("compiling", [True, False])
def test_a_ctypes_kernel_runs_behind_its_view_under_frozen_dispatch(bound: str, compiling: bool) -> None:
    register(ones_by_ctypes)
    function = bind_op("silu_and_mul", "layers.0.act") if bound == "before" else None
    freeze_dispatch(compiling)
    function = function or bind_op("silu_and_mul", "layers.0.act")
    compiled = torch.compile(lambda x: function(x) * 1, fullgraph=True, backend="aot_eager")
    assert compiled(torch.randn(3, 8)).eq(1).all()


def test_nothing_is_tried_without_compiled_code_nor_of_what_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(trial, "_tried", lambda state, impl, operator: tried.append(impl.impl_id) or "")
    register(lambda x: x[..., ::2] * 3)
    register(lambda x: x * 1, op="relu2", opaque=False)
    call_op("silu_and_mul", torch.ones(2, 8))
    freeze_dispatch(compiling=False)
    thaw_dispatch()
    assert tried == []
    for op in ("silu_and_mul", "relu2", "quick_gelu"):
        torch.compile(bind_op(op), fullgraph=True, backend="eager")(torch.ones(2, 8))
    assert tried == ["vendor.nimbus"]


def test_a_call_costs_what_it_did_because_callers_get_the_function_itself_or_a_copy() -> None:
    register(ones_by_ctypes)
    call_op("silu_and_mul", torch.ones(2, 8))
    table = get_default_manager().table_keeper.root
    assert table.entries["silu_and_mul"].__code__ is ones_by_ctypes.__code__


def test_another_policy_runs_another_implementation_behind_the_same_names() -> None:
    register(ones_by_ctypes)
    compiled = torch.compile(lambda x: call_op("silu_and_mul", x), fullgraph=True, backend="eager")
    x = torch.zeros(2, 8)
    for _ in range(2):
        assert compiled(x).eq(1).all()
        with policy_context(SelectionPolicy(prefer="reference")):
            assert compiled(x).eq(0).all()


WITHOUT_DYNAMO = """
import sys, torch
from fl_dispatch import BackendImplKind, OpImpl, call_op, get_default_manager
get_default_manager().registry.register_impl(
    OpImpl("relu2", "vendor.nimbus", BackendImplKind.VENDOR, lambda x: x * 1, vendor="nimbus", priority=999))
call_op("relu2", torch.ones(2)); call_op("relu2", torch.ones(2))
print("torch._dynamo" in sys.modules)
"""


def test_a_process_that_never_compiles_does_not_even_import_dynamo() -> None:
    command = [sys.executable, "-c", WITHOUT_DYNAMO]  # a process of ours would be forked from one that has it
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def the_kernel() -> Any:
    return get_default_manager().registry.get_implementation("silu_and_mul", "vendor.nimbus")
