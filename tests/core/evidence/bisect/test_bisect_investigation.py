"""An investigation over synthetic engines: real policies and real selection, arithmetic in place of a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from builders import impl
from fl_dispatch.errors import DispatchError
from fl_dispatch.evidence.bisect.choices import Choices, Site
from fl_dispatch.evidence.bisect.documents import Document, avoiding, of_choices, of_settings, text
from fl_dispatch.evidence.bisect.findings import Result
from fl_dispatch.evidence.bisect.inside import moved_id
from fl_dispatch.evidence.bisect.investigation import Investigation
from fl_dispatch.evidence.bisect.journal import Journal
from fl_dispatch.evidence.bisect.probes import EngineDiedError, Outcome, Probes
from fl_dispatch.evidence.bisect.prompts import generated, rounds
from fl_dispatch.evidence.bisect.scores import Scores
from fl_dispatch.evidence.bisect.turns import TURNS
from fl_dispatch.selection.decision import Decision, condition_of, select
from fl_dispatch.settings import load_config_file
from fl_dispatch.settings.selection_policy import SelectionPolicy
from fl_dispatch.types import OpImpl

OPERATORS = ("rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention")
LAYERS = 16
IDS = ("reference.torch", "vendor.a", "vendor.b")
UNARY = (
    "abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh digamma erf erfc erfinv exp exp2 expm1 floor frac "
    "lgamma log log10 log1p log2 logit neg reciprocal rsqrt sigmoid sign signbit silu sin sinc sinh sqrt tan tanh trunc"
)
ATEN = tuple(f"aten::{name}{kind}" for name in UNARY.split() for kind in ("", ".out"))
NEVER_CALLED = "aten::cos.out"
GOOD: Document = {"prefer": "reference"}
BAD: Document = {"prefer": "vendor"}

Wrong = Callable[[Mapping[tuple[str, str], str], int], float]
"""(operator, layer) → who runs there, and the rank → how far that moves the result; infinite ends the engine."""


@cache
def implementations(op: str) -> tuple[OpImpl, ...]:
    """One operator's, with the copies whose results are moved."""
    own = [impl(one, op=op) for one in IDS]
    return *own, *(replace(one, impl_id=moved_id(one.impl_id), kind=own[1].kind, vendor="moved") for one in own)


@cache
def decision(policy: SelectionPolicy, op: str, scope: str | None) -> Decision:
    return select(op, implementations(op), policy, scope=scope)


class SyntheticEngine:
    """One engine of :class:`SyntheticEngines`."""

    def __init__(self, world: SyntheticEngines, document: Document) -> None:
        self.world, self.ranks = world, world.ranks
        self.policies = [world.policy(document)] * self.ranks
        self.replaced = world.replaced(document)
        self.in_place = world.replaced({**document, "aten_blacklist": ()})
        self.noise, self.watched = 0, ""

    def switch(self, document: Document, seed: int | None, ranks: Collection[int] | None) -> str:
        if self.world.frozen:
            return "frozen"
        self.noise = seed or 0
        for rank in range(self.ranks) if ranks is None else ranks:
            self.policies[rank] = self.world.policy(document)
        self.replaced = self.in_place & self.world.replaced({**document, "aten_replacement": True})
        return ""

    def score(self) -> Scores:
        self.world.scored += 1
        moved = 0.01 * self.noise
        seconds = 1.0
        for rank, policy in enumerate(self.policies):
            who = self.world.who(policy) | {(key, ""): "chip" for key in self.replaced}
            fault = self.world.wrong(who, rank)
            seconds += self.world.late(who)
            if fault == float("inf"):
                raise EngineDiedError("the engine's process ended with 7")
            moved += fault
        if moved > 1 and self.world.tainted:
            self.world.left_behind = 5.0
        moved += self.world.left_behind
        return Scores({"batch 0": [{"1": -1.0, "2": -2.0 - moved, "3": -3.0}]}, (seconds,))

    def watch(self, operator: str) -> None:
        self.watched = operator

    def answers(self) -> list[dict[str, Any]]:
        running = {key: f"chip.{key}" for key in sorted(self.replaced)}
        kinds = [f"kinds of {self.watched}"] if self.watched else []
        self.watched = ""
        called, kept = [key for key in running if key != NEVER_CALLED], sorted(self.in_place - self.replaced)
        aten = {"replaced": running, "called": called, "kept": kept, "kinds": kinds}
        return [{**self.world.answer(policy), "aten": aten} for policy in self.policies]

    def stop(self) -> None:
        self.world.left_behind = 0.0


class SyntheticEngines:
    """Engines of a model in which each of some operators is called in each layer."""

    def __init__(
        self,
        wrong: Wrong,
        ranks: int = 1,
        frozen: bool = False,
        tainted: bool = False,
        late: Callable[[Mapping[tuple[str, str], str]], float] = lambda who: 0.0,
    ) -> None:
        self.late = late
        self.wrong, self.ranks, self.frozen, self.tainted = wrong, ranks, frozen, tainted
        self.started = self.scored = 0
        self.left_behind = 0.0
        self.folder = Path()

    def start(self, document: Document, eager: bool = False) -> SyntheticEngine:
        self.started += 1
        if eager:
            return SyntheticEngine(replaced(self), document)
        return SyntheticEngine(self, document)

    def replaced(self, document: Document) -> frozenset[str]:
        listed = set(document.get("aten_blacklist", ()))
        return frozenset(set(ATEN) - listed if document.get("aten_replacement") and "*" not in listed else ())

    def policy(self, document: Document) -> SelectionPolicy:
        file = self.folder / "policy.yaml"
        file.write_text(text(document))
        return load_config_file(file).policy

    def who(self, policy: SelectionPolicy) -> dict[tuple[str, str], str]:
        found = {}
        for op in OPERATORS:
            for layer in range(LAYERS):
                scope = f"layers.{layer}.{op}"
                chosen = decision(policy, op, scope).candidates[0].impl_id
                found[op, scope] = chosen.removeprefix("vendor.moved.")
        return found

    def answer(self, policy: SelectionPolicy) -> dict[str, Any]:
        sites = []
        for op in OPERATORS:
            for scope in (None, *(f"layers.{layer}.{op}" for layer in range(LAYERS))):
                branches = [
                    (None if one.rule is None else condition_of(one.rule), [impl.impl_id for impl in one.candidates])
                    for one in decision(policy, op, scope).branches
                ]
                sites.append({"op": op, "scope": scope, "also": [], "branches": branches})
        counts = [[op, one, 3] for op, one in sorted({(op, one) for (op, _), one in self.who(policy).items()})]
        return {"sites": sites, "frozen": self.frozen, "counts": counts, "failed": {}}


def replaced(world: SyntheticEngines) -> SyntheticEngines:
    """The same engines, not frozen."""
    other = SyntheticEngines(world.wrong, world.ranks, late=world.late)
    other.folder = world.folder
    return other


def investigate(
    engines: SyntheticEngines,
    folder: Path,
    bad: Document = BAD,
    good: Document = GOOD,
    journal: Journal | None = None,
    told: list[tuple[str, Outcome, bool]] | None = None,
    slower_than: float = 0.0,
) -> Result:
    engines.folder = folder
    seen = [] if told is None else told
    probes = Probes(engines, journal or Journal(None, {}), lambda *one: seen.append(one), slower_than=slower_than)
    return Investigation(probes, good, bad, engines.frozen, lambda line: None).run()


def chosen(op: str, layer: int, impl_id: str, by: float = 5.0) -> Wrong:
    return lambda who, rank: by if who[op, f"layers.{layer}.{op}"] == impl_id else 0.0


def test_one_implementation_in_one_layer_is_found_and_avoided_there_alone(tmp_path: Path) -> None:
    engines = SyntheticEngines(chosen("silu_and_mul", 11, "vendor.a"))
    told: list[tuple[str, Outcome, bool]] = []
    result = investigate(engines, tmp_path, told=told)
    (one,) = result.blamed
    assert (one.op, [site.scope for site in one.sites]) == ("silu_and_mul", ["layers.11.silu_and_mul"])
    assert one.implementations == ("vendor.a",)
    assert result.agrees
    assert (
        result.policy
        == {
            "prefer": "vendor",
            "op_backends": {"silu_and_mul@layers.11.silu_and_mul": ["impl:vendor.b", "impl:reference.torch"]},
        }
        or result.policy["op_backends"]["silu_and_mul@layers.11.silu_and_mul"][0] == "impl:vendor.b"
    )  # type: ignore[index]
    assert engines.started == 3  # the good policy, the bad one, the one that avoids it
    searched = [what for what, _, _ in told if ":" in what and not what.startswith("control")]
    assert len(searched) <= 13  # 2 log2 of 80 sites


def test_a_fault_in_every_layer_is_avoided_by_one_rule(tmp_path: Path) -> None:
    engines = SyntheticEngines(
        lambda who, rank: 2.0 * sum(one == "vendor.a" for (op, _), one in who.items() if op == "rms_norm")
    )
    result = investigate(engines, tmp_path)
    (one,) = result.blamed
    assert one.everywhere
    assert len(one.sites) == LAYERS
    assert result.policy is not None
    assert list(result.policy["op_backends"]) == ["rms_norm"]
    assert result.agrees


def test_two_operators_at_once_are_both_found(tmp_path: Path) -> None:
    first, second = chosen("rms_norm", 0, "vendor.a"), chosen("paged_attention", 15, "vendor.a")
    result = investigate(SyntheticEngines(lambda who, rank: first(who, rank) + second(who, rank)), tmp_path)
    assert {(one.op, one.sites[0].scope) for one in result.blamed} == {
        ("rms_norm", "layers.0.rms_norm"),
        ("paged_attention", "layers.15.paged_attention"),
    }
    assert result.agrees


def test_operators_that_are_wrong_together_only_are_named_together(tmp_path: Path) -> None:
    def wrong(who: Mapping[tuple[str, str], str], rank: int) -> float:
        write, read = (who[op, f"layers.3.{op}"] for op in ("kv_cache_write", "paged_attention"))
        return 5.0 if (write, read) == ("vendor.a", "vendor.a") else 0.0

    (one,) = investigate(SyntheticEngines(wrong), tmp_path).blamed
    assert {one.op, *one.partners} == {"kv_cache_write", "paged_attention"}
    assert [site.scope for site in one.sites] == [f"layers.3.{one.op}"]


def test_the_one_that_a_condition_chooses_is_blamed_alone(tmp_path: Path) -> None:
    """Two implementations run in turns; only the one for large batches is wrong."""
    rules = [
        {"when": {"tokens": [257, None]}, "order": ["impl:vendor.b"]},
        {"order": ["impl:vendor.a", "reference"]},
    ]

    class Engines(SyntheticEngines):
        def who(self, policy: SelectionPolicy) -> dict[tuple[str, str], str]:
            found = {}
            for op in OPERATORS:
                for layer in range(LAYERS):
                    scope = f"layers.{layer}.{op}"
                    large, *rest = decision(policy, op, scope).branches
                    small = rest[-1] if rest else large
                    found[op, scope] = f"{large.candidates[0].impl_id} {small.candidates[0].impl_id}"
            return found

        def answer(self, policy: SelectionPolicy) -> dict[str, Any]:
            data = super().answer(policy)
            data["counts"] = [[op, one, 1] for op, both, _ in data["counts"] for one in both.split()]
            return data

    def wrong(who: Mapping[tuple[str, str], str], rank: int) -> float:
        return 5.0 * sum("vendor.b" in one for one in who.values())

    result = investigate(Engines(wrong), tmp_path, {"prefer": "reference", "op_tuned": {"silu_and_mul": rules}})
    assert [(one.op, one.implementations) for one in result.blamed] == [("silu_and_mul", ("vendor.b",))]
    assert result.agrees


def test_a_difference_within_rounding_blames_nobody(tmp_path: Path) -> None:
    result = investigate(SyntheticEngines(chosen("rms_norm", 4, "vendor.a", by=0.05)), tmp_path)
    assert not result.differs
    assert result.blamed == []


def test_frozen_engines_are_started_for_each_question_and_the_same_is_found(tmp_path: Path) -> None:
    engines = SyntheticEngines(chosen("rotary_embedding", 9, "vendor.a"), frozen=True)
    told: list[tuple[str, Outcome, bool]] = []
    (one,) = investigate(engines, tmp_path, told=told).blamed
    assert [site.scope for site in one.sites] == ["layers.9.rotary_embedding"]
    assert all(outcome.started for _, outcome, _ in told)


def test_an_engine_that_stays_wrong_is_noticed_and_each_question_gets_its_own(tmp_path: Path) -> None:
    engines = SyntheticEngines(chosen("silu_and_mul", 2, "vendor.a"), tainted=True)
    result = investigate(engines, tmp_path)
    assert [site.scope for site in result.blamed[0].sites] == ["layers.2.silu_and_mul"]
    assert any("under the good policy too" in note for note in result.notes)
    assert engines.started > 10


def test_what_ends_the_engine_is_found_too(tmp_path: Path) -> None:
    result = investigate(SyntheticEngines(chosen("kv_cache_write", 7, "vendor.a", by=float("inf"))), tmp_path)
    assert [site.scope for site in result.blamed[0].sites] == ["layers.7.kv_cache_write"]
    assert result.agrees


def test_a_fault_at_one_rank_names_the_rank(tmp_path: Path) -> None:
    fault = chosen("silu_and_mul", 5, "vendor.a")
    engines = SyntheticEngines(lambda who, rank: fault(who, rank) if rank == 1 else 0.0, ranks=4)
    (one,) = investigate(engines, tmp_path).blamed
    assert (one.ranks, [site.scope for site in one.sites]) == ((1,), ["layers.5.silu_and_mul"])


def test_an_interrupted_search_goes_on_where_it_was(tmp_path: Path) -> None:
    fault, record = chosen("paged_attention", 13, "vendor.a"), tmp_path / "record"
    whole = SyntheticEngines(fault)
    expected = investigate(whole, tmp_path)

    class Interrupted(SyntheticEngines):
        def who(self, policy: SelectionPolicy) -> dict[tuple[str, str], str]:
            if self.scored == whole.scored // 2 + 3:
                raise KeyboardInterrupt
            return super().who(policy)

    first, second = Interrupted(fault), SyntheticEngines(fault)
    with pytest.raises(KeyboardInterrupt):
        investigate(first, tmp_path, journal=Journal(record, {"model": "m"}))
    told: list[tuple[str, Outcome, bool]] = []
    result = investigate(second, tmp_path, journal=Journal(record, {"model": "m"}), told=told)
    assert result.blamed == expected.blamed
    assert result.policy == expected.policy
    assert any(kept for _, _, kept in told)
    assert second.scored < whole.scored


def test_a_record_of_another_investigation_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path, {"model": "one", "ranks": 1})
    with pytest.raises(DispatchError, match="another investigation: model differ"):
        Journal(tmp_path, {"model": "two", "ranks": 1})


def test_an_answer_that_was_cut_off_is_asked_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {})
    journal.put("question", {"share": 1.0})
    for file in tmp_path.glob("*.json"):
        if "question" in file.read_text():
            file.write_text(file.read_text()[:-9])
    assert Journal(tmp_path, {}).get("question") is None


def test_a_good_policy_that_gives_no_numbers_is_an_error(tmp_path: Path) -> None:
    engines = SyntheticEngines(lambda who, rank: float("nan"))
    with pytest.raises(DispatchError, match="gives no numbers"):
        investigate(engines, tmp_path)


def test_a_document_of_settings_gives_the_same_settings(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(
        "prefer: vendor\nstrict: true\nallow_vendors: [cuda]\ndeny_vendors: [ascend]\n"
        "op_backends: {rms_norm@model.layers.3.*: [reference], silu_and_mul: ['vendor:cuda', flagos]}\n"
        "op_tuned: {paged_attention: [{when: {phase: decode, tokens: [1, 8]}, order: [flagos]}, {order: [vendor]}]}\n"
        "flagos_blacklist: [mm]\nchip_features: false\naten_replacement: true\noot_blacklist: [gelu_and_mul]\n"
    )
    settings = load_config_file(file)
    copy = tmp_path / "copy.yaml"
    copy.write_text(text(of_settings(settings), "why"))
    assert load_config_file(copy) == settings


def test_choices_as_a_document_are_the_same_choices(tmp_path: Path) -> None:
    engines = SyntheticEngines(lambda who, rank: 0.0)
    engines.folder = tmp_path
    rules = [{"when": {"tokens": [257, None]}, "order": ["impl:vendor.b"]}, {"order": ["impl:vendor.a"]}]
    document: Document = {
        "prefer": "vendor",
        "op_backends": {"rms_norm@layers.3.rms_norm": ["reference"]},
        "op_tuned": {"silu_and_mul": rules},
    }
    before = Choices.of(engines.answer(engines.policy(document)))
    after = Choices.of(engines.answer(engines.policy(of_choices(before.at, {}))))
    for site, branches in before.at.items():
        for (when, ids), (other, given) in zip(branches, after.at[site], strict=True):
            assert (when, ids) == (other, given[: len(ids)])


def test_prompts_cover_a_batch_of_more_than_256_tokens_and_repeat_it() -> None:
    prompts = generated(512, 500)
    assert sum(map(len, prompts)) > 256
    assert max(map(len, prompts)) > 256 + 8
    assert all(0 <= token < 512 for prompt in prompts for token in prompt)
    made = rounds(prompts)
    assert len(made[0]) == len(prompts)
    every = [request for requests in made for request in requests]
    for number, prompt in enumerate(prompts):
        again = [one for one in every if one.label.endswith(f" {number}")]
        assert len(again) == (3 if len(prompt) > 1 else 2)
        assert all([*one.prompt, *one.forced] == prompt for one in again)
    assert generated(512, 100)[3] == prompts[3][:100]


def test_a_setting_that_is_no_choice_is_found_by_starts(tmp_path: Path) -> None:
    class Engines(SyntheticEngines):
        features = True

        def start(self, document: Document, eager: bool = False) -> SyntheticEngine:
            self.features = document.get("chip_features", True)
            return super().start(document, eager)

    engines = Engines(lambda who, rank: 0.0 if engines.features else 5.0)
    result = investigate(engines, tmp_path, {"prefer": "vendor", "oot_blacklist": ["gelu"], "chip_features": False})
    assert [one.op for one in result.blamed] == ["setting chip_features"]
    assert result.policy == {"prefer": "vendor", "oot_blacklist": ["gelu"]}
    assert result.agrees


REPLACED: Document = {"prefer": "reference", "aten_replacement": True}


def together(*units: tuple[str, str]) -> Wrong:
    """Wrong where all of these run a bad choice."""
    return lambda who, rank: 5.0 if all(who.get(unit) in ("chip", "vendor.a") for unit in units) else 0.0


@pytest.mark.parametrize("frozen", [False, True])
def test_one_overload_of_pytorchs_operators_is_found_and_taken_out_alone(frozen: bool, tmp_path: Path) -> None:
    engines = SyntheticEngines(together((ATEN[33], "")), frozen=frozen)
    told: list[tuple[str, Outcome, bool]] = []
    result = investigate(engines, tmp_path, REPLACED, told=told)
    (one,) = result.blamed
    assert (one.op, one.implementations, one.kinds) == (ATEN[33], (f"chip.{ATEN[33]}",), (f"kinds of {ATEN[33]}",))
    assert result.policy == {**REPLACED, "aten_blacklist": [ATEN[33]]}
    assert result.agrees
    assert result.candidates == (len(ATEN) - 1, len(ATEN) - 1)  # one was never called
    assert len([what for what, _, _ in told if what.startswith("operators")]) <= 10  # log2 of 79, and three that check
    assert frozen or engines.started == 3


def test_a_policys_own_list_stays_and_what_it_names_is_no_candidate(tmp_path: Path) -> None:
    bad = {**REPLACED, "aten_blacklist": [ATEN[2], ATEN[4]]}
    result = investigate(SyntheticEngines(together((ATEN[3], ""))), tmp_path, bad)
    assert result.policy == {**REPLACED, "aten_blacklist": sorted([ATEN[2], ATEN[3], ATEN[4]])}
    assert result.candidates[0] == len(ATEN) - 3
    assert result.agrees


@pytest.mark.parametrize(
    "units",
    [
        ((ATEN[5], ""), (ATEN[61], "")),
        ((ATEN[0], ""), (ATEN[40], ""), (ATEN[79], "")),
        (("rms_norm", "layers.3.rms_norm"), (ATEN[20], "")),
        tuple((op, f"layers.9.{op}") for op in ("rms_norm", "kv_cache_write", "paged_attention")),
    ],
)
def test_a_set_that_is_wrong_only_together_is_named_whole_and_broken_up(
    units: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    result = investigate(SyntheticEngines(together(*units)), tmp_path, {**REPLACED, **BAD})
    (one,) = result.blamed
    assert {one.op, *one.partners} == {op for op, _ in units}
    assert result.agrees


def test_two_sets_and_one_by_itself_are_all_found(tmp_path: Path) -> None:
    sets = ({ATEN[1], ATEN[30]}, {ATEN[50], ATEN[51], ATEN[70]}, {ATEN[10]})
    faults = [together(*((key, "") for key in one)) for one in sets]
    result = investigate(
        SyntheticEngines(lambda who, rank: max(fault(who, rank) for fault in faults)), tmp_path, REPLACED
    )
    found = [{one.op, *one.partners} for one in result.blamed]
    assert sorted(map(sorted, found)) == sorted(map(sorted, sets))
    assert result.agrees


def test_an_operator_of_pytorchs_that_ends_the_engine_is_found(tmp_path: Path) -> None:
    def ends(who: Mapping[tuple[str, str], str], rank: int) -> float:
        return float("inf") if (ATEN[12], "") in who else 0.0

    result = investigate(SyntheticEngines(ends), tmp_path, REPLACED)
    assert [one.op for one in result.blamed] == [ATEN[12]]
    assert result.agrees


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_slower_is_found_by_the_engines_own_time_and_nothing_that_is_wrong(
    frozen: bool, tmp_path: Path
) -> None:
    def late(who: Mapping[tuple[str, str], str]) -> float:
        slow_layer = who["silu_and_mul", "layers.4.silu_and_mul"] == "vendor.a"
        return 0.5 * slow_layer + 0.4 * ((ATEN[8], "") in who)

    engines = SyntheticEngines(chosen("rms_norm", 2, "vendor.a"), frozen=frozen, late=late)
    told: list[tuple[str, Outcome, bool]] = []
    result = investigate(engines, tmp_path, {**REPLACED, **BAD}, slower_than=1.2, told=told)
    assert {(one.op, len(one.sites)) for one in result.blamed} == {("silu_and_mul", LAYERS), (ATEN[8], 0)}
    assert result.share == pytest.approx(1.9)
    assert result.agrees
    assert all(("first engine's" in outcome.note) == frozen for _, outcome, _ in told)
    same = investigate(SyntheticEngines(chosen("rms_norm", 2, "vendor.a")), tmp_path, BAD, slower_than=1.2)
    assert not same.differs


def test_a_machine_that_slows_down_for_some_runs_or_for_good_changes_nothing_that_is_found(tmp_path: Path) -> None:
    """A policy takes turns with the trusted one in the same engine, so both have the machine's load."""

    def late(who: Mapping[tuple[str, str], str]) -> float:
        load = 3.0 if (engines.scored > 20 and engines.scored % 17) or engines.scored % 11 == 0 else 1.0
        return load * (1.0 + 0.6 * ((ATEN[8], "") in who)) - 1.0

    engines = SyntheticEngines(lambda who, rank: 0.0, late=late)
    result = investigate(engines, tmp_path, REPLACED, slower_than=1.3)
    assert [one.op for one in result.blamed] == [ATEN[8]]
    assert result.agrees


def test_times_that_vary_more_than_the_threshold_tell_a_difference_that_is_larger(tmp_path: Path) -> None:
    """More turns decide, however far single ones are apart."""
    load = random.Random(1)

    def late(who: Mapping[tuple[str, str], str]) -> float:
        return load.lognormvariate(0.0, 0.2) * (2.5 if (ATEN[8], "") in who else 1.0) - 1.0

    told: list[tuple[str, Outcome, bool]] = []
    engines = SyntheticEngines(lambda who, rank: 0.0, late=late)
    result = investigate(engines, tmp_path, REPLACED, slower_than=1.3, told=told)
    assert [one.op for one in result.blamed] == [ATEN[8]]
    assert result.agrees
    assert max(int(outcome.note.split(" turns")[0]) for _, outcome, _ in told) > TURNS[0]


def test_an_engine_that_avoids_a_slow_operator_is_compared_with_one_that_never_had_it(tmp_path: Path) -> None:
    told: list[tuple[str, Outcome, bool]] = []
    engines = SyntheticEngines(lambda who, rank: 0.0, late=lambda who: 1.5 * ((ATEN[8], "") in who))
    assert investigate(engines, tmp_path, REPLACED, slower_than=1.3, told=told).agrees
    what, outcome, _ = told[-1]
    assert (what, outcome.share) == ("the policy that avoids it", 1.0)


def test_times_that_vary_by_themselves_blame_nobody(tmp_path: Path) -> None:
    load = random.Random(0)

    def late(who: Mapping[tuple[str, str], str]) -> float:
        return load.lognormvariate(0.0, 0.5) * (1.2 if who["rms_norm", "layers.0.rms_norm"] == "vendor.a" else 1.0)

    engines = SyntheticEngines(lambda who, rank: 0.0, late=late)
    with pytest.raises(DispatchError, match="undecided: times vary by"):
        investigate(engines, tmp_path, BAD, slower_than=1.2)


def test_lists_of_denied_vendors_stay_while_somebody_else_can_run(tmp_path: Path) -> None:
    good: Document = {"prefer": "vendor", "deny_vendors": ["b", "moved"]}
    bad: Document = {"prefer": "vendor", "deny_vendors": ["a", "moved"]}
    result = investigate(SyntheticEngines(chosen("rms_norm", 3, "vendor.b")), tmp_path, bad, good)
    assert result.policy is not None
    assert result.policy["deny_vendors"] == ["a", "moved"]
    assert result.policy["op_backends"]["rms_norm@layers.3.rms_norm"][0] == "impl:reference.torch"
    assert result.agrees


def test_a_vendor_that_alone_can_run_is_denied_no_more() -> None:
    site = Site("rms_norm", "layers.3")
    document: Document = {"deny_vendors": ["A", "b"], "allow_vendors": ["c"]}
    found = avoiding(document, Choices({site: (((), ("vendor.c",)),)}), {site: (((), ("vendor.a",)),)}, {"a"})
    assert (found["deny_vendors"], found["allow_vendors"]) == (["b"], ["a", "c"])


def test_layers_that_share_a_module_get_a_rule_each() -> None:
    shared = Site("rotary_embedding", "layers.0.rotary", ("layers.1.rotary",))
    other = Site("rotary_embedding", "layers.2.rotary")
    both = (((), ("vendor.a", "reference.torch")),)
    found = avoiding(BAD, Choices({shared: both, other: both}), {shared: (((), ("reference.torch",)),)}, ())
    assert found["op_backends"] == {
        "rotary_embedding@layers.0.rotary": ["impl:reference.torch"],
        "rotary_embedding@layers.1.rotary": ["impl:reference.torch"],
    }
