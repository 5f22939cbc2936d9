"""Policies that take turns are told apart beside other work, which adds to some parts of a run or slows all of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from fl_dispatch.evidence.bisect.turns import TURNS, Ratio, alternate, lower_quartile, ratio

PARTS = (0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2)
"""Seconds of the rounds of requests, without other work."""
LIMIT = 1.2
Load = Callable[[random.Random], float]


def spikes(draw: random.Random) -> float:
    """Other work in nine of ten parts, which doubles them in the mean."""
    return 1 + (draw.expovariate(1.0) if draw.random() < 0.9 else 0.0)


def other_thread(draw: random.Random) -> float:
    """Another thread of the same core in every other part."""
    return draw.choice((1.0, 1.74)) * draw.lognormvariate(0.0, 0.05)


LOADS: dict[str, Load] = {"spikes": spikes, "another thread": other_thread}


def measure(share: float, load: Load, seed: int, limit: float = LIMIT) -> Ratio:
    """The ratio of a policy that takes so many times the trusted one's."""
    draw = random.Random(seed)
    return alternate(
        lambda: [share * part * load(draw) for part in PARTS], lambda: [part * load(draw) for part in PARTS], limit
    )


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("share", [1.0, 1.5])
def test_a_slow_policy_is_slower_beside_other_work_and_an_equal_one_is_not(load: str, share: float) -> None:
    found = [measure(share, LOADS[load], seed) for seed in range(20)]
    assert {one.share > LIMIT for one in found} == {share > LIMIT}
    assert all(one.decides(LIMIT) for one in found)


def test_a_machine_that_slows_down_for_good_slows_both() -> None:
    for share in (1.0, 1.5):
        parts = iter(range(10**6))
        found = measure(share, lambda draw, parts=parts: 1.0 if next(parts) < 30 else 3.0, 0)
        assert (found.share > LIMIT, found.decides(LIMIT)) == (share > LIMIT, True)


def test_a_moment_without_other_work_decides_nothing() -> None:
    for seed in range(20):
        found = measure(1.0, lambda draw: 1.0 if draw.random() < 0.06 else 3.0, seed)
        assert found.high <= LIMIT


def test_what_is_undecided_gets_more_turns_and_says_how_far_times_vary() -> None:
    found = measure(1.0, lambda draw: draw.lognormvariate(0.0, 1.0), 3, 1.01)
    assert found.turns == TURNS[-1]
    assert not found.decides(1.01)
    assert found.spread == found.high / found.low > 1.01


def test_the_order_of_turns_gives_both_policies_the_same_place() -> None:
    order: list[str] = []

    def run(name: str) -> Callable[[], Sequence[float]]:
        return lambda: [float(len(order)), order.append(name) or 1.0][1:]

    alternate(run("suspected"), run("trusted"), LIMIT)
    assert order == ["suspected", "trusted", "trusted", "suspected"] * 2


def test_a_time_is_the_sum_of_the_parts_of_a_quiet_machine() -> None:
    assert lower_quartile([[3.0, 1.0], [1.0, 2.0]]) == 2.0
    assert lower_quartile([[3.0, 1.0], [1.0, 2.0], [2.0, 3.0], [4.0, 4.0]]) == 2.0 + 2.0
    assert ratio([[2.0, 4.0]] * 4, [[1.0, 2.0]] * 4) == Ratio(2.0, 2.0, 2.0, 4)
