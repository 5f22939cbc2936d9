"""A plugin's attribute on a host's object is no part of the host's own; what it replaces for a time comes back."""

from __future__ import annotations

import pytest
from torch import nn

from fl_dispatch.hosting.layers.attribute import Attached, replaced

NORM = Attached[nn.Module]("fl_norm")


def test_a_module_does_not_take_what_it_keeps_for_a_submodule() -> None:
    layer, kept = nn.Linear(2, 2), nn.LayerNorm(2)
    NORM.give(layer, kept)
    assert NORM.of(layer) is kept
    assert kept not in set(layer.modules())
    assert not any(name.startswith("fl_") for name in layer.state_dict())


def test_what_was_not_given_is_said_with_its_name() -> None:
    layer = nn.Linear(2, 2)
    assert NORM.find(layer) is None
    with pytest.raises(AttributeError, match="Linear was given no fl_norm"):
        NORM.of(layer)


class Host:
    rounding = "int8"


def test_what_a_block_replaces_comes_back_after_an_error_too() -> None:
    host = Host()
    host.own = "before"  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError), replaced(host, rounding="", own="meanwhile"):
        assert vars(host) == {"rounding": "", "own": "meanwhile"}
        raise RuntimeError
    assert vars(host) == {"own": "before"}
    assert host.rounding == "int8"
