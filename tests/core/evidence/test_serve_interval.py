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


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A benchmark as a module; what it imports of its folder is forgotten after the test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for other in BENCHMARKS.glob("*.py"):
        monkeypatch.delitem(sys.modules, other.stem, raising=False)
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def serve_vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    return loaded("serve_vllm", monkeypatch)


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


def test_drafts_are_compared_with_the_same_round_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"decode": {"vanilla_drafts": [1.0, 1.0], "drafts": [30.0, 22.0], "plain": [10.0, 11.0]}}
    (row,) = loaded("serve_drafts", monkeypatch).over_plain(rates).values()
    assert (row["ratio"], row["low"], row["high"]) == pytest.approx((2.5, 2.0, 3.0))


@pytest.mark.parametrize(("steps", "accepted", "expected"), [(10, 18, 2.8), (0, 0, None)])
def test_a_step_gives_its_own_token_and_the_accepted_ones(
    steps: int, accepted: int, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = {"vllm:spec_decode_num_drafts": steps, "vllm:spec_decode_num_accepted_tokens": accepted}
    assert loaded("serve_drafts", monkeypatch).tokens_a_step(counters) == expected
