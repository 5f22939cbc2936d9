"""The interval that the engine benchmark gives with a median."""

from __future__ import annotations

import importlib.util
import sys
from math import comb
from pathlib import Path
from typing import Any

import pytest

from fl_dispatch.evidence.intervals import interval

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def serve_vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("serve_vllm", BENCHMARKS / "serve_vllm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "serve_vllm", module)
    spec.loader.exec_module(module)
    return module


def surely(rank: int, rounds: int) -> float:
    """How surely the true median lies between the values of this rank (0 is the least) from below and from above."""
    return 1 - 2 * sum(comb(rounds, count) for count in range(rank + 1)) / 2**rounds


@pytest.mark.parametrize("rounds", range(1, 41))
def test_the_interval_is_the_shortest_that_holds_the_median_surely_enough(rounds: int) -> None:
    values = [float(value) for value in range(rounds)]
    low, high = interval(values[::-1])
    assert high == rounds - 1 - low
    assert low == 0 or surely(int(low), rounds) >= 0.9
    assert surely(int(low) + 1, rounds) < 0.9 or low + 1 > rounds - 2 - low


def test_a_ratio_is_of_the_better_vanilla_of_its_round(serve_vllm: Any) -> None:
    rates = {"decode": {"vanilla_a": [10.0, 20.0], "vanilla_b": [20.0, 10.0], "plugin": [30.0, 22.0]}}
    row = serve_vllm.compare(rates)["decode"]["plugin"]
    assert (row["ratio"], row["low"], row["high"]) == pytest.approx((1.3, 1.1, 1.5))
