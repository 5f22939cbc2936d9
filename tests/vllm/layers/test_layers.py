"""Which of vLLM's layer classes are replaced."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor import custom_op
from vllm.model_executor.hw_agnostic import custom_op as hw_agnostic

from fl_dispatch import SelectionPolicy
from fl_dispatch.settings import Settings, get_settings
from vllm import forward_context
from vllm_fl.layers import classes
from vllm_fl.layers.drafted import Drafted
from vllm_fl.layers.mamba1 import Mamba1Layer
from vllm_fl.layers.states import StateLayer

ALWAYS = [
    row
    for row in classes.LAYER_CLASSES
    if row.custom_op and not row.own_kernel and not row.transformers and not row.creates_context
]
"""Rows that every process registers, for every model."""


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """vLLM's registry of replaced classes, empty."""
    empty: dict[str, Any] = {}
    monkeypatch.setattr(custom_op, "op_registry_oot", empty)
    monkeypatch.setattr(hw_agnostic, "op_registry_oot", {})
    return empty


def settings(**changes: Any) -> Settings:
    return replace(get_settings(), **changes)


def test_every_class_of_the_table_exists_and_runs_its_base_forward() -> None:
    for row in classes.LAYER_CLASSES:
        base = row.in_tree()
        assert base is not None, row.name
        ancestors = [other.in_tree() for other in classes.LAYER_CLASSES if other.mixin is row.mixin]
        defining = next((cls for cls in base.__mro__ if {"forward", "forward_native"} & vars(cls).keys()), base)
        if not row.transformers:  # its forward gathers what ranks hold, and calls its base's
            assert defining in ancestors, f"{row.name} has a forward of its own"


def test_registering_twice_changes_nothing(registered: dict[str, Any]) -> None:
    classes.register(settings())
    first = dict(registered)
    classes.register(settings())
    assert registered == first
    assert set(first) == {row.name for row in ALWAYS}


def test_layers_of_the_transformers_backend_are_registered_for_its_models_only(registered: dict[str, Any]) -> None:
    classes.register(settings())
    others = set(registered)
    classes.register(settings(), transformers=True)
    assert set(registered) - others == {"TPAwareRMSNorm", "TPAwareGemmaRMSNorm"}


def test_a_class_goes_into_the_registry_that_it_asks(registered: dict[str, Any]) -> None:
    classes.register(settings())
    assert {"RMSNorm", "SiluAndMul"} <= set(hw_agnostic.op_registry_oot)
    assert not set(map(id, hw_agnostic.op_registry_oot.values())) & set(map(id, registered.values()))


def test_a_class_that_another_plugin_registered_stays(registered: dict[str, Any]) -> None:
    theirs = registered["RMSNorm"] = type("RMSNormOfSomebody", (torch.nn.Module,), {})
    classes.register(settings())
    assert registered["RMSNorm"] is theirs


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"oot_enabled": False}, set()),
        ({"policy": SelectionPolicy(enabled=False)}, set()),
        ({"oot_whitelist": frozenset({"rms_norm"})}, {"RMSNorm"}),
        ({"oot_whitelist": frozenset({"SiluAndMul", "GeluAndMul"})}, {"SiluAndMul", "GeluAndMul"}),
    ],
)
def test_the_lists_decide(changes: dict[str, Any], expected: set[str], registered: dict[str, Any]) -> None:
    classes.register(settings())
    classes.register(settings(**changes))
    assert set(registered) == expected


def test_a_blacklist_leaves_out_what_it_names_and_nothing_else(registered: dict[str, Any]) -> None:
    classes.register(settings(oot_blacklist=frozenset({"rotary_embedding", "RMSNorm"})))
    kept = {row.name for row in ALWAYS if "rotary_embedding" not in row.operators}
    assert set(registered) == kept - {"RMSNorm"}


def test_a_class_of_the_same_name_elsewhere_is_not_counted() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(4))
    assert classes.survey(model) == classes.Survey("vLLM", ours={}, native={}, attention={})


def test_a_survey_without_a_layer_of_ours_is_refused_unless_that_is_meant() -> None:
    survey = classes.Survey("vLLM", ours={}, native={"RMSNorm": 3}, attention={})
    with pytest.raises(RuntimeError, match="RMSNorm"):
        survey.refuse_native_run(settings())
    survey.refuse_native_run(settings(oot_enabled=False))
    classes.Survey("vLLM", ours={}, native={}, attention={}).refuse_native_run(settings())


@pytest.mark.parametrize(
    "mixin", sorted({row.mixin for row in classes.LAYER_CLASSES if issubclass(row.mixin, StateLayer)}, key=str)
)
def test_a_layer_that_keeps_no_state_for_each_token_refuses_a_batch_with_drafts(
    mixin: type[StateLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with Mamba 1 is refused beside drafts at start; this is what holds if that were missed."""
    layer = mixin.__new__(mixin)
    object.__setattr__(layer, "prefix", "model.layers.0")
    context = SimpleNamespace(attn_metadata={layer.prefix: SimpleNamespace(num_accepted_tokens=torch.ones(1))})
    monkeypatch.setattr(forward_context, "get_forward_context", lambda: context)
    if mixin is Mamba1Layer:
        with pytest.raises(ValueError, match=r"model\.layers\.0 got a batch with drafts"):
            layer.fl_step()
    else:
        assert Drafted in vars(sys.modules[mixin.__module__]).values()
        assert layer.fl_step() is context.attn_metadata[layer.prefix]
    context.attn_metadata[layer.prefix].num_accepted_tokens = None
    assert layer.fl_step() is context.attn_metadata[layer.prefix]


CONTEXTS = """
import sys
from triton.backends.nvidia import driver

driver.CudaDriver.is_active = staticmethod(lambda: True)
import triton

made = []

def create():
    made.append(True)
    raise RuntimeError("a context")

sys.modules["triton.runtime.driver"]._create_driver = create
from fl_dispatch.settings import get_settings
from vllm_fl.layers import classes as layers

layers.register(get_settings())
before = len(made)
layers.register(get_settings(), in_worker=True)
print(before, len(made) > 0)
"""


def test_a_process_that_may_be_forked_gets_no_context_from_registering_layers() -> None:
    """Triton's driver is that of a GPU which is not there; a process that runs models makes it."""
    ended = subprocess.run([sys.executable, "-c", CONTEXTS], capture_output=True, text=True, check=False, timeout=300)
    assert ended.stdout.split()[-2:] == ["0", "True"], ended.stderr
