"""Attacks on policies: where they come from, which layer they name, how they travel, and where they hold."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from builders import impl, manager_of
from fl_dispatch import (
    SelectionPolicy,
    bind_op,
    call_op,
    explain,
    get_default_manager,
    get_policy,
    policy_context,
    policy_from_config,
    set_global_policy,
)
from fl_dispatch.settings import TunedRule

OP = "silu_and_mul"


@pytest.mark.parametrize("scope", ["layers[0].norm", "layers.*", "[a]*?", "layers.[!0]"])
def test_an_exact_scope_names_its_layer_whatever_characters_it_holds(scope: str) -> None:
    orders = {f"{OP}@{scope}": ["impl:default.a"], f"{OP}@*": ["reference"], OP: ["reference"]}
    policy = SelectionPolicy.from_dict(per_op_order=orders)
    assert policy.get_per_op_order(OP, scope) == ["impl:default.a"]
    get_default_manager().registry.register_impl(impl("default.a", lambda x: "exact", op=OP))
    set_global_policy(policy)
    assert bind_op(OP, scope)(torch.ones(1, 2)) == "exact"
    assert explain(OP, scope=scope).source == f"order of {OP}@{scope}"
    assert get_default_manager().unmatched_scopes() == {}


@pytest.mark.parametrize("travel", [copy.copy, copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
def test_a_policy_travels_as_a_value_with_its_origins(travel: Callable[[SelectionPolicy], SelectionPolicy]) -> None:
    rule = TunedRule(order=("vendor",), dtype="bfloat16", tokens=(1, None), phase="decode")
    policy = SelectionPolicy(deny_vendors=frozenset({"y"}), allow_vendors=frozenset(), op_tuned=((OP, (rule,)),))
    for original in (policy, SelectionPolicy(), get_policy()):
        arrived = travel(original)
        assert (arrived, hash(arrived), arrived.origins) == (original, hash(original), original.origins)


def test_an_explanation_names_the_file_that_is_in_force_also_if_another_says_the_same(tmp_path: Path) -> None:
    private = manager_of(impl("default.a"), impl("vendor.b"))
    get_default_manager().registry.register_many([impl("default.a"), impl("vendor.b")])
    for name in ("a.yaml", "b.yaml", "a.yaml"):
        (tmp_path / name).write_text("prefer: vendor\n")
        with policy_context(policy_from_config(tmp_path / name)):
            assert call_op("demo") == private.call("demo") == "vendor.b"
            for origin in (get_policy().origin("prefer"), explain("demo").origin, private.explain("demo").origin):
                assert str(origin) == f"{tmp_path / name}, line 1"
    with policy_context(SelectionPolicy(prefer="vendor")):
        assert str(explain("demo").origin) == str(private.explain("demo").origin) == "code"
