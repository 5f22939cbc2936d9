"""The table of activations that both plugins read."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fl_dispatch.hosting.layers.activations import ACTIVATIONS
from fl_dispatch.ops import OPERATORS

OTHER_NAMES = {"swiglu_limit": "limit"}
"""Attribute of a layer → the operator's parameter, where the names differ."""


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_attribute_of_a_layer_is_the_parameter_of_its_name(name: str) -> None:
    given = ACTIVATIONS[name]
    bound = OPERATORS[given.operator].signature.bind("x", *given.attributes, *given.constants)
    _, *parameters = bound.arguments
    named = [OTHER_NAMES.get(attribute, attribute) for attribute in given.attributes]
    assert parameters[: len(named)] == named
    assert not {"tanh", "none"} & set(given.constants) or parameters[-1] == "approximate"


def test_every_activation_is_a_layer_of_a_plugin() -> None:
    code = """
from fl_dispatch.hosting.layers.activations import ACTIVATIONS
from sglang_fl.bridge import BRIDGES
from vllm_fl.layers.classes import LAYER_CLASSES
named = {row.name for row in LAYER_CLASSES if row.module.endswith("activation")}
named |= {row.name for row in BRIDGES if row.module.endswith("activation")}
assert named - {"XIELU"} == set(ACTIVATIONS), named ^ set(ACTIVATIONS)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
