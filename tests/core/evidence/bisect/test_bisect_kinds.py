"""What planted faults in PyTorch's own operators have in common is told, call by call against PyTorch's own kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from fl_dispatch import aten_replacement
from fl_dispatch.aten_replacement import apply_blacklist, kept_operators, register_replacement, replaced_operators
from fl_dispatch.devices import CPU
from fl_dispatch.evidence.bisect import kinds, planted_aten
from fl_dispatch.settings import Settings

ROWS = torch.rand(40, 64, generator=torch.Generator().manual_seed(1)) + 0.5
TABLE = torch.rand(512, 32, generator=torch.Generator().manual_seed(2))


def rotate(tokens: int) -> None:
    heads = torch.ones(tokens, 2, 64)
    planted_aten.rotary(heads, heads.clone(), TABLE, TABLE, torch.arange(tokens))


CALLS: dict[str, tuple[str, Callable[[], object], list[str]]] = {
    "aten_comparison": (
        "ge.Tensor",
        lambda: (rotate(20), rotate(150)),
        ["int64", "elements from 150", "values from 128", "1 of 2 calls"],
    ),
    "aten_cumsum_out": (
        "cumsum.out",
        lambda: (rotate(20), rotate(150)),
        ["int64", "out=", "elements from 150", "1 of 2 calls"],
    ),
    "aten_log_": (
        "log_",
        lambda: (planted_aten.silu(ROWS[:, :32].repeat(16, 4)), planted_aten.silu(ROWS[:3])),
        ["float32", "in place", "elements up to 96", "1 of 2 calls"],
    ),
    "aten_uniform_": ("uniform_", lambda: planted_aten.norm(ROWS), ["float32", "in place", "1 of 1 calls"]),
    "aten_rsqrt": (
        "rsqrt",
        lambda: (planted_aten.norm(ROWS * 4), planted_aten.norm(ROWS * 1e-3)),
        ["float32", "values up to 1.85e-12", "1 of 2 calls"],
    ),
}


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Replace operators in this process, one of them wrongly, until the test ends."""
    monkeypatch.setattr(aten_replacement, "_registered", {})
    monkeypatch.setattr(aten_replacement, "_kept", {})
    monkeypatch.setattr(planted_aten, "_kernels", {})

    def planted(fault: str) -> None:
        monkeypatch.setenv(planted_aten.FAULT, fault)
        register_replacement(sys.modules[planted_aten.__name__])
        planted_aten.replace(Settings(), CPU)

    yield planted
    apply_blacklist({"*"})


@pytest.mark.parametrize("fault", CALLS)
def test_dtype_size_and_values_of_the_wrong_calls_are_told(fault: str, plant: Callable[[str], None]) -> None:
    key, call, expected = CALLS[fault]
    plant(fault)
    running = dict(replaced_operators())
    kinds.watch(f"aten::{key}")
    call()
    found = kinds.end_watch()
    assert [kind for kind in found if not kind.startswith("values")] == [
        kind for kind in expected if not kind.startswith("values")
    ]
    assert any(kind.startswith("values") for kind in expected) == any(kind.startswith("values") for kind in found)
    assert replaced_operators() == running
    assert kept_operators() == ()


@pytest.mark.parametrize("fault", CALLS)
def test_a_right_operator_is_wrong_for_nothing(fault: str, plant: Callable[[str], None]) -> None:
    _, call, _ = CALLS[fault]
    plant(fault)
    for key in ("mul.Tensor", "where.self", "mean.dim"):
        kinds.watch(f"aten::{key}")
        call()
        assert kinds.end_watch() == []


def test_every_replaced_operator_exists_and_each_fault_is_one_of_them(plant: Callable[[str], None]) -> None:
    plant("")
    assert len(replaced_operators()) == len(planted_aten.KEYS)
    assert {key for fault in planted_aten.FAULTS.values() for key in fault} <= set(planted_aten.KEYS)
