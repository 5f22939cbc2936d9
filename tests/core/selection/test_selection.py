"""The algebra of policy: what may run, and in what order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders import impl, manager_of
from fl_dispatch import (
    BackendImplKind,
    ConfigError,
    NoImplementationError,
    OpImpl,
    SelectionPolicy,
    get_default_manager,
    match_token,
    policy_from_config,
    reset_default_manager,
    reset_global_policy,
)
from fl_dispatch.selection.decision import CHOSEN, SKIPPED, select
from fl_dispatch.settings import TunedRule

pytestmark = pytest.mark.usefixtures("results_are_names")

VENDORS = ["a", "b", "c"]
IDS = ["default.flagos", "default.triton", "vendor.a", "vendor.a.fast", "vendor.b", "vendor.c", "reference.torch"]
TOKENS = ["flagos", "vendor", "reference", *(f"vendor:{v}" for v in VENDORS), *(f"impl:{i}" for i in IDS)]


def ids(decision: Any) -> list[str]:
    return [candidate.impl_id for candidate in decision.candidates]


impl_sets = st.lists(
    st.tuples(st.sampled_from(IDS), st.integers(0, 200), st.booleans()), unique_by=lambda t: t[0], max_size=7
).map(lambda rows: [impl(i, priority=p, available=lambda yes=yes: yes) for i, p, yes in rows])
policies = st.builds(
    SelectionPolicy.from_dict,
    prefer=st.sampled_from(["flagos", "vendor", "reference"]),
    per_op_order=st.one_of(
        st.none(), st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4).map(lambda order: {"demo": order})
    ),
    deny_vendors=st.sets(st.sampled_from(VENDORS)),
    allow_vendors=st.one_of(st.none(), st.sets(st.sampled_from(VENDORS))),
)


@given(impl_sets, policies)
def test_every_implementation_is_accounted_for_once_with_a_reason(impls: list[OpImpl], policy: SelectionPolicy) -> None:
    decision = select("demo", impls, policy)
    assert sorted(entry.impl.impl_id for entry in decision.considered) == sorted(i.impl_id for i in impls)
    assert all(entry.reason for entry in decision.considered)
    assert [entry.impl for entry in decision.considered if entry.status != SKIPPED] == list(decision.candidates)


@given(impl_sets, policies)
def test_what_may_not_run_is_never_a_candidate(impls: list[OpImpl], policy: SelectionPolicy) -> None:
    order = policy.get_per_op_order("demo")
    for candidate in select("demo", impls, policy).candidates:
        assert candidate.is_available()
        assert candidate.vendor is None or policy.is_vendor_allowed(candidate.vendor)
        assert order is None or any(match_token(candidate, token) for token in order)


@given(impl_sets, policies)
def test_without_an_own_order_nothing_that_may_run_is_excluded(impls: list[OpImpl], policy: SelectionPolicy) -> None:
    if policy.get_per_op_order("demo") is not None:
        return
    may_run = {
        i.impl_id for i in impls if i.is_available() and (i.vendor is None or policy.is_vendor_allowed(i.vendor))
    }
    assert set(ids(select("demo", impls, policy))) == may_run


@given(impl_sets, policies, st.randoms())
def test_the_order_of_registration_does_not_matter(impls: list[OpImpl], policy: SelectionPolicy, random: Any) -> None:
    shuffled = list(impls)
    random.shuffle(shuffled)
    assert ids(select("demo", shuffled, policy)) == ids(select("demo", impls, policy))


@given(impl_sets, policies)
def test_earlier_tokens_come_first_and_priority_ranks_inside_one(impls: list[OpImpl], policy: SelectionPolicy) -> None:
    decision = select("demo", impls, policy)

    def place(i: OpImpl) -> tuple[int, int, str]:
        token = next(n for n, token in enumerate(decision.order) if match_token(i, token))
        return token, -i.effective_priority, i.impl_id

    assert [place(i) for i in decision.candidates] == sorted(place(i) for i in decision.candidates)


@given(impl_sets, policies, st.sampled_from(VENDORS))
def test_denying_a_vendor_removes_just_its_implementations(
    impls: list[OpImpl], policy: SelectionPolicy, vendor: str
) -> None:
    import dataclasses

    denied = dataclasses.replace(policy, deny_vendors=policy.deny_vendors | {vendor})
    before = select("demo", impls, policy).candidates
    assert list(select("demo", impls, denied).candidates) == [i for i in before if i.vendor != vendor]


def test_deny_beats_an_impl_token() -> None:
    policy = SelectionPolicy.from_dict(per_op_order={"demo": ["impl:vendor.a", "reference"]}, deny_vendors={"a"})
    assert ids(select("demo", [impl("vendor.a"), impl("reference.torch")], policy)) == ["reference.torch"]


def test_an_implementation_that_requires_another_fact_is_skipped() -> None:
    decision = select(
        "demo", [impl("vendor.a", requires={"kv_layout": "NZ"})], SelectionPolicy(), facts={"kv_layout": "NHD"}
    )
    assert decision.chosen is None
    assert "kv_layout" in decision.considered[0].reason


def test_switched_off_means_the_reference_where_there_is_one() -> None:
    policy = SelectionPolicy(enabled=False)
    assert ids(select("demo", [impl("vendor.a"), impl("reference.torch")], policy)) == ["reference.torch"]
    assert ids(select("demo", [impl("vendor.a")], policy)) == ["vendor.a"]


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({}, True),
        ({"use_flaggems": False}, False),
        ({"flagos_blacklist": frozenset({"demo"})}, False),
        ({"flagos_whitelist": frozenset({"demo"}), "flagos_blacklist": frozenset({"demo"})}, True),
        ({"flagos_whitelist": frozenset({"other"})}, False),
    ],
)
def test_the_flaggems_switches_bind_flaggems_only(fields: dict[str, Any], allowed: bool) -> None:
    decision = select("demo", [impl("default.flagos"), impl("default.triton")], SelectionPolicy(**fields))
    assert ("default.flagos" in ids(decision)) is allowed
    assert "default.triton" in ids(decision)


@pytest.mark.parametrize("condition", [{"tokens": (1, 1)}, {"phase": "prefill"}])
def test_batch_invariance_leaves_out_rules_for_some_batches(condition: dict[str, Any]) -> None:
    declared = {"batch_invariant": True}
    impls = [impl("vendor.a", properties=declared), impl("vendor.b", properties=declared)]
    rules = (TunedRule(order=("impl:vendor.b",), **condition), TunedRule(order=("impl:vendor.a",)))
    policy = SelectionPolicy(batch_invariant=True, op_tuned=(("demo", rules),))
    assert [branch.rule for branch in select("demo", impls, policy).branches] == [None]
    assert len(select("demo", impls, replace(policy, batch_invariant=False)).branches) == 2


def test_batch_invariance_admits_only_what_declares_it() -> None:
    impls = [impl("vendor.a"), impl("reference.torch", properties={"batch_invariant": True})]
    assert ids(select("demo", impls, SelectionPolicy(batch_invariant=True))) == ["reference.torch"]


def tuned(*rules: TunedRule) -> SelectionPolicy:
    return SelectionPolicy(op_tuned=(("silu_and_mul", rules),))


def test_who_is_taken_by_its_name_alone_comes_nowhere_else() -> None:
    alone = replace(impl("vendor.a", priority=200), properties={"only_by_name": True})
    others = [impl("vendor.b"), impl("reference.torch")]
    for prefer in ("vendor", "flagos", "reference"):
        decision = select("demo", [alone, *others], SelectionPolicy(prefer=prefer))
        assert "vendor.a" not in ids(decision)
        assert "vendor.a: skipped, not named in the order" in str(decision)
    for order in (["vendor:a", "reference"], ["vendor", "reference"]):
        assert "vendor.a" not in ids(
            select("demo", [alone, *others], SelectionPolicy.from_dict(per_op_order={"demo": order}))
        )
    named = SelectionPolicy.from_dict(per_op_order={"demo": ["impl:vendor.a", "vendor"]})
    assert ids(select("demo", [alone, *others], named)) == ["vendor.a", "vendor.b"]
    rule = TunedRule(order=("impl:vendor.a",), tokens=(65, 8192))
    tuned = select("demo", [alone, *others], SelectionPolicy(op_tuned=(("demo", (rule,)),)))
    assert tuned.branches[0].candidates[0].impl_id == "vendor.a"
    assert alone not in tuned.branches[-1].candidates


def test_a_conditional_choice_looks_at_dtype_and_tokens() -> None:
    few = TunedRule(order=("impl:vendor.few",), dtype="float32", tokens=(1, 4))
    seen: list[str] = []

    def named(name: str) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            seen.append(name)
            return x[..., ::2].contiguous()

        return run

    impls = [impl(i, named(i), op="silu_and_mul") for i in ("default.many", "vendor.few")]
    manager = manager_of(*impls, policy=tuned(few))
    bound = manager.bind("silu_and_mul")
    for x in (torch.ones(4, 2), torch.ones(5, 2), torch.ones(4, 2, dtype=torch.float16)):
        for _ in range(2):  # before and after the first success
            manager.call("silu_and_mul", x)
            bound(x)
            assert seen[-2:] == [manager.get_selected_impl_id("silu_and_mul", x)] * 2
            assert manager.explain("silu_and_mul", x).chosen.impl_id == seen[-1]
    assert seen == ["vendor.few"] * 4 + ["default.many"] * 8


def test_a_tuned_order_never_excludes_and_an_own_order_beats_it() -> None:
    impls = [
        impl("vendor.a", op="silu_and_mul", fn=lambda x: x),
        impl("reference.torch", op="silu_and_mul", fn=lambda x: x),
    ]
    policy = tuned(TunedRule(order=("reference",)))
    assert ids(select("silu_and_mul", impls, policy)) == ["reference.torch", "vendor.a"]
    own = SelectionPolicy(op_tuned=policy.op_tuned, per_op_order=(("silu_and_mul", ("vendor",)),))
    assert ids(select("silu_and_mul", impls, own)) == ["vendor.a"]


def test_a_decision_prints_its_reasons_and_its_origin() -> None:
    text = str(
        select(
            "demo",
            [impl("vendor.a", available=lambda: False), impl("reference.torch")],
            SelectionPolicy(prefer="vendor"),
        )
    )
    assert "reference.torch: chosen" in text
    assert "vendor.a: skipped, not available" in text
    assert "prefer=vendor" in text


def test_no_implementation_says_why_for_each() -> None:
    manager = manager_of(impl("vendor.a", available=lambda: False), policy=SelectionPolicy())
    with pytest.raises(NoImplementationError, match="No available implementation for op='demo'") as caught:
        manager.call("demo", 1)
    assert "vendor.a" in str(caught.value)
    assert "`fl explain demo` says which settings decide" in str(caught.value)
    with pytest.raises(RuntimeError, match="No available implementation"):
        manager.resolve("nobody")


def test_an_unknown_kind_of_token_names_nothing() -> None:
    assert not match_token(OpImpl("demo", "default.x", BackendImplKind.DEFAULT, print), "default")
    assert CHOSEN == "chosen"


def test_a_tuned_order_can_name_one_layer_and_the_explanation_names_the_rule() -> None:
    rule = TunedRule(order=("reference",), dtype="float32")
    policy = SelectionPolicy(op_tuned=(("silu_and_mul@layers.3.*", (rule,)),))
    impls = [impl("default.a", lambda x: "a", op="silu_and_mul"), impl("reference.b", lambda x: "b", op="silu_and_mul")]
    manager = manager_of(*impls, policy=policy)
    assert manager.bind("silu_and_mul", "layers.3.mlp")(torch.ones(1, 2)) == "b"
    assert manager.bind("silu_and_mul", "layers.4.mlp")(torch.ones(1, 2)) == "a"
    text = str(manager.explain("silu_and_mul", torch.ones(1, 2), scope="layers.3.mlp"))
    assert "reference.b: chosen, first in the order reference, flagos, vendor" in text
    assert "op_tuned" in text


ORDERS = """prefer: reference
op_tuned:
  silu_and_mul:
    - order: [reference]
  silu_and_mul@model.layers.3.*:
    - when: {tokens: [1, 4]}
      order: [vendor]
    - order: [reference]
  gelu_and_mul@model.layers.3.*:
    - order: [reference]
op_backends:
  rms_norm: [flagos]
  rms_norm@model.layers.3.*: [reference]
"""
LINES = {
    ("silu_and_mul", None): 3,
    ("silu_and_mul", "model.layers.4.mlp"): 3,
    ("silu_and_mul", "model.layers.3.mlp"): 5,
    ("gelu_and_mul", None): 1,
    ("gelu_and_mul", "model.layers.3.mlp"): 9,
    ("rms_norm", None): 12,
    ("rms_norm", "model.layers.3.norm"): 13,
    ("rms_norm", "model.layers.4.norm"): 12,
    ("rotary_embedding", "model.layers.3.norm"): 1,
}


@pytest.mark.parametrize(("op_name", "scope"), LINES)
def test_an_explanation_names_the_line_that_decides_for_a_layer_too(
    op_name: str, scope: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(ORDERS)
    line = LINES[op_name, scope]
    impls = [impl(name, lambda x: x, op=op_name) for name in ("default.a", "reference.b")]
    decision = select(op_name, impls, policy_from_config(file), scope=scope)
    assert {branch.origin.source for branch in decision.branches} == {f"{file}, line {line}"}
    key = ORDERS.splitlines()[line - 1].strip().partition(":")[0]
    assert key == "prefer" or decision.source.endswith(f" of {key}")


def test_a_set_of_vendors_is_taken_and_a_string_is_refused() -> None:
    assert SelectionPolicy(deny_vendors={"a"}) == SelectionPolicy(deny_vendors=frozenset({"a"}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not the string"):
        SelectionPolicy.from_dict(deny_vendors="ascend")


@pytest.mark.parametrize(
    "wrong",
    [
        {"per_op_order": {"silu_and_mul": "vendor"}},
        {"per_op_order": {"silu_and_mul": ["vendor", 3]}},
        {"prefer": ["vendor"]},
    ],
    ids=str,
)
def test_an_order_that_is_no_sequence_of_tokens_is_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="vendor"):
        SelectionPolicy.from_dict(**wrong)


def test_tuned_rules_of_another_type_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="op_tuned of 'silu_and_mul' is a sequence of TunedRule"):
        SelectionPolicy(op_tuned=(("silu_and_mul", ("vendor",)),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("yaml", "text"),
    [
        ("op_tuned: {silu_and_mul: [{when: {phase: decode}, order: [vendor]}]}", "cannot tell prefill from decode"),
        ("op_backends: {'silu_and_mul@l.[0-3].*': ['vendor:nobody']}", "leaves nothing to run"),
    ],
)
def test_a_rule_that_can_never_hold_is_refused_at_start(
    yaml: str, text: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fl.yaml").write_text(yaml)
    monkeypatch.setenv("VLLM_FL_CONFIG", str(tmp_path / "fl.yaml"))
    reset_global_policy()
    reset_default_manager()
    with pytest.raises(ConfigError, match=text):
        get_default_manager().ensure_initialized()
