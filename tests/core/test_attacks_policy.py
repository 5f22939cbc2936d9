"""Attacks on policies: where they come from, which layer they name, how they travel, and where they hold."""

from __future__ import annotations

import pytest
import torch

from builders import impl
from fl_dispatch import SelectionPolicy, bind_op, explain, get_default_manager, set_global_policy

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
