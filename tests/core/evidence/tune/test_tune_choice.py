"""Who wins, and which rules say so: the pure part of tuning."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fl_dispatch.evidence.tune.calls import Key
from fl_dispatch.evidence.tune.choice import LEAST_GAIN, Figure, choose, choose_together
from fl_dispatch.evidence.tune.document import platform_file
from fl_dispatch.evidence.tune.race import Outcome
from fl_dispatch.evidence.tune.record import TOGETHER, Record, winners_of
from fl_dispatch.evidence.tune.rules import agreement, merge
from fl_dispatch.ops import Workload
from fl_dispatch.selection.decision import admits
from fl_dispatch.settings import TunedRule, load_config_file

times = st.floats(1e-6, 1e-2)
figures = st.builds(
    lambda name, seconds, problem: Figure(name, tuple(seconds), problem),
    st.sampled_from("abcdef"),
    st.lists(times, min_size=0, max_size=25),
    st.sampled_from(["", "", "", "wrong: somewhere", "after the start it compiles k"]),
)
fields = st.lists(figures, max_size=6, unique_by=lambda figure: figure.impl_id)


@given(fields)
def test_nobody_wins_who_has_a_problem_or_was_not_timed(field: list[Figure]) -> None:
    chosen = choose(field).impl_id
    fit = [figure.impl_id for figure in field if figure.seconds and not figure.problem]
    assert chosen in fit if fit else not chosen


@given(fields)
def test_the_winner_is_the_earliest_that_nobody_can_tell_from_the_fastest(field: list[Figure]) -> None:
    fit = [figure for figure in field if figure.seconds and not figure.problem]
    if fit:
        fastest = min(fit, key=lambda figure: figure.median)
        names = [figure.impl_id for figure in fit]
        winner = fit[names.index(choose(field).impl_id)]
        assert winner is fastest or winner.bounds[0] <= fastest.bounds[1] or winner.median <= 1.011 * fastest.median
        for earlier in fit[: names.index(winner.impl_id)]:
            assert earlier.bounds[0] > fastest.bounds[1]
            assert earlier.median > fastest.median * (1 + LEAST_GAIN)


def test_a_near_tie_keeps_the_earlier_and_a_clear_gain_does_not() -> None:
    def steady(name: str, seconds: float) -> Figure:
        return Figure(name, tuple(seconds * (1 + 0.0001 * turn) for turn in range(20)))

    assert choose([steady("first", 1.005), steady("second", 1.0)]).impl_id == "first"
    assert choose([steady("first", 1.05), steady("second", 1.0)]).impl_id == "second"
    noisy = Figure("second", tuple(0.8 if turn % 2 else 1.3 for turn in range(20)))
    assert choose([steady("first", 1.05), noisy]).impl_id == "first"


names = st.sampled_from(["default.x", "vendor.y", "reference.z", ""])
PHASES = [("rms_norm", None), ("paged_attention", "prefill"), ("paged_attention", "decode")]
keys = st.builds(
    lambda call, dtype, tokens: Key(call[0], dtype, tokens, call[1]),
    st.sampled_from(PHASES),
    st.sampled_from(["bfloat16", "float32"]),
    st.sampled_from([1, 2, 4, 8, 64, 2048]),
)
BASE = {"rms_norm": (TunedRule(order=("vendor",)),), "linear": (TunedRule(order=("reference",)),)}


def first_order(rules: tuple[TunedRule, ...], key: Key, tokens: int) -> tuple[str, ...] | None:
    call = Workload(getattr(torch, key.dtype), tokens, key.phase)
    return next((rule.order for rule in rules if admits(rule, call)), None)


@given(st.dictionaries(keys, names, max_size=20))
def test_the_rules_choose_the_winner_of_every_key_and_the_base_where_nobody_won(winners: dict[Key, str]) -> None:
    rules = merge(winners, BASE)
    assert rules["linear"] == BASE["linear"]
    for key, winner in winners.items():
        order = first_order(rules.get(key.op_name, ()), key, key.tokens)
        if winner:
            assert order == (f"impl:{winner}",)


@given(st.dictionaries(st.sampled_from([1, 2, 4, 8, 64, 2048]), names.filter(bool), min_size=1), st.integers(0, 9000))
def test_a_size_between_belongs_to_the_next_larger_that_was_measured(sizes: dict[int, str], tokens: int) -> None:
    winners = {Key("rms_norm", "bfloat16", size, None): winner for size, winner in sizes.items()}
    nearest = min((size for size in sizes if size >= tokens), default=max(sizes))
    rules = merge(winners, {})["rms_norm"]
    assert first_order(rules, next(iter(winners)), tokens) == (f"impl:{sizes[nearest]}",)
    runs = 1 + sum(sizes[a] != sizes[b] for a, b in zip(sorted(sizes), sorted(sizes)[1:], strict=False))
    assert len(rules) == runs
    assert rules[-1] == TunedRule(order=rules[-1].order)


def test_a_rule_that_the_base_has_too_is_there_once() -> None:
    reads = TunedRule(order=("impl:default.x",), phase="prefill")
    winners = {Key("paged_attention", "bfloat16", 8, "prefill"): "default.x"}
    assert merge(winners, {"paged_attention": (reads,)})["paged_attention"].count(reads) <= 1


def test_one_winner_everywhere_is_a_rule_without_a_condition() -> None:
    winners = {
        Key("paged_attention", "bfloat16", n, phase): "default.x" for n in (1, 8) for phase in ("prefill", "decode")
    }
    assert merge(winners, {})["paged_attention"] == (TunedRule(order=("impl:default.x",)),)


@given(st.dictionaries(keys, names, min_size=1), st.dictionaries(keys, names, min_size=1))
def test_agreement_is_the_share_of_common_keys(one: dict[Key, str], other: dict[Key, str]) -> None:
    share, differ = agreement(one, other)
    both = set(one) & set(other)
    assert set(differ) == {key for key in both if one[key] != other[key]}
    assert share == (1 - len(differ) / len(both) if both else 0)
    assert agreement(one, one)[0] == 1


def record() -> Record:
    rows = {"default.x": [2.0, 2.1, 2.2], "vendor.y": [1.0, 1.1, 1.2], "reference.z": [3.0, 3.1, 3.2]}
    found = Record({"machine": {"device": "a chip"}, "driver": "1"})
    for tokens in (1, 8):
        for label, times_a_step in (("with residual", 4), ("", 1)):
            found.cases[f"{tokens}{label}"] = {
                "key": {"op_name": "rms_norm", "dtype": "bfloat16", "tokens": tokens, "phase": None},
                "times": times_a_step,
                "candidates": {
                    name: Outcome([v * tokens / 1e6 for v in us], "graph").as_data() for name, us in rows.items()
                },
            }
    return found


def test_a_key_is_the_sum_of_its_shapes_each_as_often_as_a_step_calls_it() -> None:
    (one, _) = record().figures().values()
    assert {figure.impl_id: round(figure.median * 1e6, 6) for figure in one} == {
        "default.x": 10.5,
        "vendor.y": 5.5,
        "reference.z": 15.5,
    }


def test_a_problem_with_one_shape_or_a_late_compilation_counts_for_the_key() -> None:
    found = record()
    found.cases["8"]["candidates"]["vendor.y"]["problem"] = "wrong: by far"
    assert [choice.impl_id for choice in found.choices().values()] == ["vendor.y", "default.x"]
    found.late["rms_norm"] = {"vendor.y": "after the start it compiles k", "default.x": "likewise"}
    assert {choice.impl_id for choice in found.choices().values()} == {"reference.z"}


def test_an_operator_of_one_graph_has_one_winner_and_a_rule_without_a_condition() -> None:
    found = record()
    for name in ("8", "8with residual"):
        candidates = found.cases[name]["candidates"]
        candidates["vendor.y"]["us"] = [3 * us for us in candidates["vendor.y"]["us"]]
    assert [choice.impl_id for choice in found.choices().values()] == ["vendor.y", "default.x"]
    found.facts = {**found.facts, TOGETHER: ["rms_norm"]}
    choices = found.choices()
    assert {choice.impl_id for choice in choices.values()} == {"vendor.y"}
    assert all(choice.why == "all sizes together: 1.10 times as fast as default.x" for choice in choices.values())
    rules = merge({key: choice.impl_id for key, choice in choices.items()}, {})
    assert rules == {"rms_norm": (TunedRule(order=("impl:vendor.y",)),)}


def test_the_file_holds_the_rules_and_its_evidence_the_winners(tmp_path: Any) -> None:
    found = record()
    rules = merge({key: choice.impl_id for key, choice in found.choices().items()}, BASE)
    rules["rms_norm"] = (replace(rules["rms_norm"][0], tokens=(0, 8), dtype="bfloat16"), TunedRule(order=("vendor",)))
    file = tmp_path / "chip.yaml"
    file.write_text(platform_file(["Tuned."], {"prefer": "flagos"}, rules, found.figures(), found.choices()))
    assert dict(load_config_file(file).policy.op_tuned) == rules
    assert yaml.safe_load(file.read_text())["prefer"] == "flagos"
    assert "# 1 token: vendor.y 5.5 us [5, 6]; then default.x 10.5 us [10, 11]" in file.read_text()
    data = json.loads(json.dumps(found.as_data(complete=True)))
    assert winners_of(data) == {key: choice.impl_id for key, choice in found.choices().items()}


def figure(impl_id: str, *us: float, problem: str = "") -> Figure:
    return Figure(impl_id, tuple(one / 1e6 for one in us), problem)


def test_one_winner_for_several_keys_is_the_least_far_behind_and_a_tie_keeps_the_earlier() -> None:
    one = [figure("a", 100, 100), figure("b", 80, 80), figure("c", 101, 101)]
    many = [figure("a", 100, 100), figure("b", 300, 300), figure("c", 100, 100)]
    assert choose_together([one, many]).impl_id == "a"
    assert choose_together([one]).impl_id == "b"
    assert choose_together([many, list(reversed(one))]).impl_id == "a"


def test_who_may_not_win_one_key_does_not_win_them_together() -> None:
    good, bad = [figure("a", 100), figure("b", 90)], [figure("a", 100), figure("b", 50, problem="wrong")]
    assert choose_together([good, bad]).impl_id == "a"
    assert choose_together([[figure("a", 100, problem="wrong")], good[:1]]).impl_id == ""
