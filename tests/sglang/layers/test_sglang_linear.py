"""The products of SGLang's linear layers are calls of ``linear``, but where somebody else has a claim to them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_dispatch import SelectionPolicy, get_default_manager, policy_context, weight_forms
from fl_dispatch.hosting.layers.layer_kernels import KERNEL, kernels, weights
from fl_dispatch.settings import reset_settings
from fl_dispatch.weight_forms import ATTRIBUTE

INNER, COLUMNS = 32, 48


class Layers(nn.Module):
    """One of each class, in a model as SGLang makes it."""

    def __init__(self, **options: Any) -> None:
        from sglang.srt.layers.linear import ReplicatedLinear, RowParallelLinear

        super().__init__()
        self.plain = ReplicatedLinear(INNER, COLUMNS, bias=True, **options)
        self.row = RowParallelLinear(INNER, COLUMNS, bias=False, parallel_group="replicated", **options)
        for parameter in self.parameters():
            nn.init.normal_(parameter)


@pytest.fixture
def model(scheduler: None) -> Layers:
    return Layers()


@pytest.fixture
def calls() -> Iterator[dict[str, int]]:
    """How often ``linear`` was called, filled when it is asked."""
    manager = get_default_manager()
    was, before = manager.state.counter.on, sum(_counted().values())
    manager.set_counting(True)

    class Calls(dict[str, int]):
        def __missing__(self, name: str) -> int:
            return sum(_counted().values()) - before

    yield Calls()
    manager.set_counting(was)


def _counted() -> dict[tuple[str, str], int]:
    return {key: n for key, n in get_default_manager().call_counts().items() if key[0] == "linear"}


def _x() -> Tensor:
    return torch.randn(3, INNER, generator=torch.Generator().manual_seed(1))


def _multiplied(layer: Any) -> Tensor:
    """The product that the layer asks its method for, without what it does for several ranks."""
    result: Tensor = layer.quant_method.apply(layer, _x(), layer.bias)
    return result


def _survey(model: nn.Module) -> Any:
    from sglang_fl.layers import classes

    return classes.prepare(model)


def test_a_product_is_one_call_and_what_pytorch_computes(model: Layers, calls: dict[str, int]) -> None:
    survey = _survey(model)
    assert {name: count for name, (operator, count) in survey.ours.items() if operator == "linear"} == {
        "ReplicatedLinear": 1,
        "RowParallelLinear": 1,
    }
    assert survey.native == {}
    x = _x()
    for layer in (model.plain, model.row):
        torch.testing.assert_close(_multiplied(layer), torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert calls["linear"] == 2


def test_its_weight_may_be_prepared_and_its_rules_name_the_layer(model: Layers) -> None:
    _survey(model)
    assert [(prefix, kernel.fl_scope) for prefix, _, kernel in kernels(model)] == [("plain", "plain"), ("row", "row")]
    assert all(hasattr(getattr(layer, name), ATTRIBUTE) for layer, name in weights(model))


@pytest.fixture(params=["linear", "RowParallelLinear"])
def listed(request: pytest.FixtureRequest) -> Iterator[str]:
    """A name in the list of what is left to SGLang."""
    from sglang_fl.environment import PREFIXES

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_FL_OOT_BLACKLIST", request.param)
        reset_settings(prefixes=PREFIXES)
        yield request.param
    reset_settings(prefixes=PREFIXES)


def test_a_list_leaves_products_to_sglang(model: Layers, calls: dict[str, int], listed: str) -> None:
    survey = _survey(model)
    kept = {choice.layer: choice for choice in survey.choices if choice.kept}
    assert survey.native == {}, "a product that stays SGLang's is no gap, as under vLLM"
    assert (kept["RowParallelLinear"].host, KERNEL.find(model.row)) == ("UnquantizedLinearMethod, auto", None)
    assert ("ReplicatedLinear" in kept) == (listed == "linear")
    _multiplied(model.row)
    assert calls["linear"] == 0


def test_weights_that_sglang_packed_for_its_own_kernel_stay_its_own(model: Layers, calls: dict[str, int]) -> None:
    model.row.use_intel_amx_backend = True
    survey = _survey(model)
    assert [choice.kept for choice in survey.choices if choice.kept] == ["its weight is packed for SGLang's own kernel"]
    assert KERNEL.find(model.row) is None


def test_a_method_of_another_class_keeps_its_product(model: Layers, calls: dict[str, int]) -> None:
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    class Other(UnquantizedLinearMethod):
        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return x.new_zeros(x.shape[0], COLUMNS)

    model.row.quant_method = Other()
    _survey(model)
    assert not _multiplied(model.row).any()
    assert calls["linear"] == 0


def test_where_nothing_comes_before_pytorchs_product_it_stays_sglangs(
    model: Layers, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_fl.bridge import linear

    monkeypatch.setattr(linear, "has_kernel", lambda op_name: False)
    survey = _survey(model)
    assert survey.native == {}
    assert {choice.kept for choice in survey.choices} == {linear.PYTORCHS}
    _multiplied(model.row)
    assert calls["linear"] == 0


def test_forms_of_weights_are_there_before_sglang_measures_memory(model: Layers, calls: dict[str, int]) -> None:
    from sglang_fl.graphs import product_warm_up

    _survey(model)
    with policy_context(SelectionPolicy.from_dict(per_op_order={"linear": ["impl:vendor.cpu.onednn"]})):
        product_warm_up.keep_forms(model)
    assert calls["linear"] == 2
    forms = [getattr(layer, name).fl_prepared.made for layer, name in weights(model)]
    assert all(forms)


def test_new_weights_are_used_also_where_an_update_writes_to_an_address(model: Layers) -> None:
    from sglang_fl.quantization import updates

    weight = model.plain.weight
    weight_forms.declare(weight)
    address = weight.data_ptr()

    def form() -> Tensor | None:
        return weight_forms.of(weight, "a", lambda weight, before: weight.clone())

    def original(updater: Any, request: Any) -> str:
        (ctypes.c_float * weight.numel()).from_address(address)[:] = [3.0] * weight.numel()
        return "done"

    form()
    runner = SimpleNamespace(model_config=SimpleNamespace(quantization=None))
    updater = SimpleNamespace(_select_runners=lambda: [("", runner)])
    assert updates.refusing("update_weights_from_tensor")(original, updater, None) == "done"
    found = form()
    assert found is not None
    assert found.eq(3.0).all()


def test_a_rule_for_one_name_of_a_shared_layer_is_refused(model: Layers) -> None:
    model.again = model.row
    rules = {"linear": ["reference"], "linear@again": ["impl:vendor.cpu.onednn"]}
    with policy_context(SelectionPolicy.from_dict(per_op_order=rules)), pytest.raises(ValueError, match="2 in all"):
        _survey(model)


def test_a_choice_of_sglangs_that_has_no_effect_is_said(
    model: Layers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang_fl.bridge import linear

    monkeypatch.setattr(linear, "_backend", lambda: "gemv")
    linear._say_ignored.cache_clear()
    survey = _survey(model)
    assert {choice.host for choice in survey.choices} == {"UnquantizedLinearMethod, gemv"}
    (said,) = [record.getMessage() for record in caplog.records if "has no effect" in record.message]
    assert "'gemv'" in said
