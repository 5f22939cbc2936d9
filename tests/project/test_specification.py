"""``docs/evidence/specification.md`` is true: its paths import, its tests exist, and each deviation says why."""

from __future__ import annotations

import ast
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fl_dispatch import BackendImplKind, OpRegistry, call_op, get_default_manager, resolve_op
from fl_dispatch.backends.base import Backend
from fresh_interpreter import fresh

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/evidence/specification.md").read_text(encoding="utf-8")
HEADS = ("specified", "variable", "function")
ROWS = [
    [cell.strip() for cell in line[1:-1].split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(tuple(f"| {head} |" for head in HEADS))
]
VARIABLES = """VLLM_FL_PREFER_ENABLED VLLM_FL_CONFIG VLLM_FL_PLATFORM VLLM_FL_PREFER VLLM_FL_STRICT VLLM_FL_PER_OP
    VLLM_FL_ALLOW_VENDORS VLLM_FL_DENY_VENDORS USE_FLAGGEMS VLLM_FL_FLAGOS_WHITELIST VLLM_FL_FLAGOS_BLACKLIST
    VLLM_FL_OOT_ENABLED VLLM_FL_OOT_WHITELIST VLLM_FL_OOT_BLACKLIST VLLM_FL_LOG_LEVEL VLLM_FL_DISPATCH_DEBUG
    VLLM_FL_PLUGIN_MODULES VLLM_FL_OP_CONFIG FLAGCX_PATH FLAGGEMS_ENABLE_OPLIST_PATH"""
"""Those of the document."""


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("path", sorted({path for _, here, _, _ in ROWS for path in named(here)}))
def test_every_path_is_there(path: str) -> None:
    if "/" in path or path.endswith(".toml"):
        assert (ROOT / path).exists()
    else:
        pkgutil.resolve_name(path)


@pytest.mark.parametrize("test", sorted({test for *_, cell in ROWS for test in named(cell)}))
def test_every_test_that_the_page_names_exists(test: str) -> None:
    file, _, name = test.partition("::")
    (found,) = (ROOT / "tests").rglob(file)
    functions = {node.name for node in ast.parse(found.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert not name or name in functions


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_works_or_differs_has_a_place_and_a_test_and_the_rest_has_a_reason(row: list[str]) -> None:
    _, here, state, test = row
    word, note = re.fullmatch(r"(works|differs|missing)(\[\^\w+\])?", state).groups()  # type: ignore[union-attr]
    assert (note is None) == (word == "works")
    assert note is None or f"\n{note}: " in PAGE
    assert bool(named(here)) == bool(named(test)) == (word != "missing")


def test_every_variable_of_the_document_has_a_row() -> None:
    assert {name for row in ROWS for name in named(row[0])} >= set(VARIABLES.split())


def test_the_attention_class_resolves_outside_an_engine() -> None:
    assert call_op("attention_backend") == "vllm_fl.attention.dense.AttentionFLBackend"
    assert resolve_op("attention_backend")(use_mla=True) == "vllm_fl.attention.mla.MLAFLBackend"
    available = get_default_manager().registry.get_implementations("attention_backend")
    assert [impl.impl_id for impl in available if impl.is_available()] == ["default.fl"]


def test_a_class_of_a_host_is_imported_when_it_is_asked_for_and_not_before() -> None:
    fresh(
        """
import sys
from vllm_fl.dispatch.backends.flaggems.impl import attention, mla
import fl_dispatch
fl_dispatch.call_op("attention_backend")
assert "vllm" not in sys.modules
import vllm_fl.attention.dense, vllm_fl.attention.mla
assert attention.AttentionFLBackend is vllm_fl.attention.dense.AttentionFLBackend
assert attention.AttentionFLImpl is vllm_fl.attention.dense.AttentionFLImpl
assert mla.MLAFLBackend is vllm_fl.attention.mla.MLAFLBackend
assert mla.MLAFLImpl is vllm_fl.attention.mla.MLAFLImpl
assert not hasattr(attention, "MLAFLImpl")
""",
        cold=True,
    )


@pytest.mark.parametrize("vendor", ["cuda", "ascend", "cpu", "template"])
def test_a_built_in_vendor_registers_rows_or_a_class(vendor: str) -> None:
    registry = OpRegistry()
    pkgutil.resolve_name(f"vllm_fl.dispatch.backends.vendor.{vendor}.register_ops:register_builtins")(registry)
    impls = [impl for found in registry.snapshot().impls_by_op.values() for impl in found]
    assert impls
    assert {(impl.kind, impl.vendor) for impl in impls} == {(BackendImplKind.VENDOR, vendor)}
    by_class = {isinstance(getattr(impl.fn, "__self__", None), Backend) for impl in impls}
    assert by_class == {vendor == "template"}


def test_the_bridge_function_adds_the_addition_to_the_residual() -> None:
    from sglang_fl.bridge.rms_norm import rms_norm_bridge

    x, residual, addition = torch.randn(3, 2, 8).unbind()
    weight = torch.randn(8)
    layer = SimpleNamespace(
        weight=weight,
        variance_epsilon=1e-5,
        variance_size_override=None,
        has_weight=True,
        cast_x_before_out_mul=False,
        fp32_residual=False,
        override_orig_dtype=None,
        forward_native=lambda *given: given,
    )
    expected = call_op("rms_norm", x.clone(), residual + addition, weight, 1e-5)
    result = rms_norm_bridge(layer, x.clone(), residual.clone(), addition)
    torch.testing.assert_close(result, expected)
    layer.variance_size_override = 4
    assert rms_norm_bridge(layer, x, residual, addition) == (x, residual, addition)
