"""The search of ``fl bisect``: it finds every planted set, with few questions, in noise too."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_dispatch.evidence.bisect.scores import CLIPPED, Difference, Scores, difference, distance
from fl_dispatch.evidence.bisect.search import Found, culprits, estimate, first_flip
from fl_dispatch.evidence.bisect.yardstick import FACTOR, Verdict, Yardstick, is_close, verdict
from sampling import fuzz


class Question:
    """Differs when a whole planted group is bad; remembers its answers, and counts what it had to find out."""

    def __init__(self, *groups: frozenset[int]) -> None:
        self.groups, self.answers = groups, dict[frozenset[int], bool]()

    def __call__(self, bad: frozenset[int]) -> bool:
        if bad not in self.answers:
            self.answers[bad] = any(group <= bad for group in self.groups)
        return self.answers[bad]

    @property
    def asked(self) -> int:
        return len(self.answers)


sizes = st.integers(1, 200)


@fuzz(150, 3000)
@given(sizes, st.data())
def test_one_culprit_is_found_in_two_log2_questions(count: int, data: st.DataObject) -> None:
    planted = data.draw(st.integers(0, count - 1))
    question = Question(frozenset({planted}))
    found = culprits(range(count), question)
    assert [one.unit for one in found.culprits] == [planted]
    assert found.culprits[0].partners == ()
    assert question.asked <= math.ceil(math.log2(count)) + 3
    if count > 16:
        assert question.asked <= 2 * math.log2(count)


@fuzz(150, 3000)
@given(sizes, st.data())
def test_every_one_of_several_culprits_is_found(count: int, data: st.DataObject) -> None:
    planted = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=4))
    question = Question(*(frozenset({one}) for one in planted))
    found = culprits(range(count), question)
    assert {one.unit for one in found.culprits} == planted
    assert question.asked <= len(planted) * (math.ceil(math.log2(count)) + 3)


@fuzz(150, 3000)
@given(sizes, st.data())
def test_units_that_only_harm_together_are_found_with_their_partners(count: int, data: st.DataObject) -> None:
    group = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=4))
    found = culprits(range(count), Question(frozenset(group)))
    assert [one.unit for one in found.culprits] == [max(group)]
    assert set(found.culprits[0].partners) == group - {max(group)}


@fuzz(100, 1000)
@given(st.integers(2, 60), st.data())
def test_without_what_is_found_the_rest_agrees_whatever_the_answers(count: int, data: st.DataObject) -> None:
    """Groups may overlap, so that no answer follows from others."""
    group = st.frozensets(st.integers(0, count - 1), min_size=1, max_size=4)
    question = Question(*data.draw(st.lists(group, min_size=1, max_size=5)))
    found = culprits(range(count), question)
    assert not question(frozenset(range(count)) - {one.unit for one in found.culprits})


def test_a_fault_of_all_units_is_not_searched_one_by_one() -> None:
    question = Question(*(frozenset({one}) for one in range(64)))
    found = culprits(range(64), question, sampled=True)
    assert found.everywhere
    assert {one.unit for one in found.culprits} == set(range(64))
    assert question.asked <= 12


def test_a_fault_of_some_units_is_not_taken_for_one_of_all() -> None:
    planted = {0, 1, 2, 40, 63}
    found = culprits(range(64), Question(*(frozenset({one}) for one in planted)), sampled=True)
    assert not found.everywhere
    assert {one.unit for one in found.culprits} == planted


def test_units_that_do_not_differ_together_have_no_culprit() -> None:
    assert culprits(range(9), lambda bad: False) == Found(())


def test_contradicting_answers_end() -> None:
    dice = random.Random(1)
    assert isinstance(culprits(range(50), lambda bad: dice.random() < 0.5), Found)


def test_there_has_to_be_something_to_search_in() -> None:
    with pytest.raises(ValueError, match="nothing to search"):
        first_flip((), lambda bad: True)


def test_the_estimate_is_what_one_culprit_takes() -> None:
    question = Question(frozenset({17}))
    culprits(range(33), question)
    assert question.asked <= estimate([33]) + 2


# -- the verdict

YARD = Yardstick(0.5, 0.1)


@fuzz(150, 2000)
@given(st.integers(0, 2**32), st.integers(2, 64), st.data())
def test_noise_around_the_yardstick_misleads_no_search(seed: int, count: int, data: st.DataObject) -> None:
    """Rounding of up to one yardstick, faults of 12 and more: each run anew, close ones three times."""
    planted = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=3))
    dice = random.Random(seed)

    def differs(bad: frozenset[int]) -> bool:
        def share() -> float:
            fault = 12.0 * dice.uniform(1, 20) if planted & bad else 0.0
            return YARD.share(Difference(YARD.largest * (dice.uniform(0, 1.5) + fault), YARD.mean * dice.random()))

        shares = [share()]
        while is_close(shares[0]) and len(shares) < 3:
            shares.append(share())
        return verdict(shares) is Verdict.DIFFERS

    assert {one.unit for one in culprits(range(count), differs).culprits} == planted


def test_a_difference_that_rounding_explains_is_no_fault() -> None:
    assert verdict([YARD.share(Difference(0.5 * FACTOR, 0.1))]) is Verdict.ROUNDING
    assert verdict([YARD.share(Difference(0.5 * FACTOR * 1.01, 0.1))]) is Verdict.DIFFERS


def test_many_small_differences_are_a_fault_though_none_is_large() -> None:
    assert verdict([YARD.share(Difference(0.5, 0.1 * FACTOR * 1.01))]) is Verdict.DIFFERS


def test_the_median_of_close_runs_decides() -> None:
    assert verdict([FACTOR + 1, 1.0, 1.0]) is Verdict.ROUNDING
    assert verdict([1.0, FACTOR + 1, FACTOR + 1]) is Verdict.DIFFERS


def test_the_yardstick_is_the_largest_harmless_change() -> None:
    assert Yardstick.of([Difference(0.1, 0.02), Difference(0.3, 0.01)]) == Yardstick(0.3, 0.02)
    assert Yardstick.of([]).largest > 0


# -- the scores

row = st.dictionaries(st.integers(0, 40).map(str), st.floats(-50, 0), min_size=8, max_size=20)


@fuzz(150, 2000)
@given(row, st.floats(-20, 20))
def test_a_common_shift_is_no_difference(values: dict[str, float], shift: float) -> None:
    assert distance(values, {token: value + shift for token, value in values.items()}) < 1e-9


@fuzz(150, 2000)
@given(row, row)
def test_the_distance_has_no_direction(first: dict[str, float], second: dict[str, float]) -> None:
    assert distance(first, second) == pytest.approx(distance(second, first))


@fuzz(100, 1000)
@given(row, st.data(), st.floats(1, 30))
def test_one_moved_logit_is_seen(values: dict[str, float], data: st.DataObject, by: float) -> None:
    moved = data.draw(st.sampled_from(sorted(values)))
    apart = distance(values, {**values, moved: values[moved] + by})
    assert by / 2 <= apart <= by


def test_a_token_that_left_the_likeliest_is_seen() -> None:
    first = {str(token): -float(token) for token in range(10)}
    second = {**{token: value for token, value in first.items() if token != "0"}, "10": -10.0}
    assert distance(first, second) >= 9


def test_a_further_token_far_below_the_likeliest_changes_nothing() -> None:
    """vLLM adds the prompt's own token to the likeliest."""
    likeliest = {str(token): -float(token) for token in range(64)}
    first, second = dict(likeliest), dict(likeliest)
    del first["63"], second["62"]
    first |= {"100": -64.0, "500": -9999.0}
    second |= {"101": -64.0, "500": -9999.0}
    assert distance(first, second) < 3


@pytest.mark.parametrize("broken", [{"1": math.nan, "2": -1.0}, {"1": -math.inf, "2": -1.0}, {"7": -1.0, "8": -2.0}])
def test_a_row_without_numbers_or_common_tokens_is_as_far_as_can_be(broken: dict[str, float]) -> None:
    assert distance({"1": -1.0, "2": -2.0}, broken) == CLIPPED


def test_a_missing_request_or_row_is_as_far_as_can_be() -> None:
    good = Scores({"batch 0": [{"1": -1.0, "2": -2.0}] * 2})
    assert difference(good, Scores({})).largest == CLIPPED
    found = difference(good, Scores({"batch 0": good.rows["batch 0"][:1]}))
    assert (found.largest, found.where) == (CLIPPED, "batch 0, position 1")
    assert difference(good, good).largest == 0
