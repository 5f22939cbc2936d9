"""vLLM's linear layers: a product of ours where there is one, and vLLM's own code untouched where there is none.

In engines: ``test_families.py``, and compiled ``test_compiled_models.py``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers import linear as vllm_linear
from vllm.platforms import current_platform

from fl_dispatch import BackendImplKind, OpImpl, OpManager, OpRegistry, SelectionPolicy, policy_context, weight_forms
from fl_dispatch.hosting.start import first_choices
from fl_dispatch.settings import Settings
from vllm_fl.compat import layer_classes
from vllm_fl.layers import classes, linear


def method(**attributes: Any) -> Any:
    """An unquantized method of vLLM's, made without an engine's configuration."""
    made = object.__new__(vllm_linear.UnquantizedLinearMethod)
    vars(made).update(attributes)
    return made


def test_another_method_or_another_product_of_vllms_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import utils

    plain = {"_gemm_impl": utils.default_unquantized_gemm}
    assert layer_classes.multiplies_plainly(method(**plain))
    assert not layer_classes.multiplies_plainly(method(_gemm_impl=utils.rocm_unquantized_gemm))
    assert not layer_classes.multiplies_plainly(SimpleNamespace(**plain))
    assert not layer_classes.multiplies_plainly(method())  # a version that has renamed it
    with monkeypatch.context() as patch:
        patch.delattr(utils, "default_unquantized_gemm")
        assert not layer_classes.multiplies_plainly(method(**plain))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert layer_classes.multiplies_plainly(method(**plain))
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)  # vLLM's own product comes first
    assert not layer_classes.multiplies_plainly(method(**plain))


def test_apply_is_the_operator_on_the_layers_weights() -> None:
    weight, bias, x = torch.randn(3, 4), torch.randn(3), torch.randn(2, 4)
    layer = SimpleNamespace(fl_call=lambda *arguments: arguments, weight=weight)
    assert linear.apply(layer, x, bias) == (x, weight, bias)
    assert linear.apply(layer, x) == (x, weight, None)


def test_the_product_that_makes_logits_is_ours_on_a_cpu_and_where_batches_are_invariant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    class Host:
        def __init__(self) -> None:
            self.quant_method = object.__new__(UnquantizedEmbeddingMethod)

    class Head(linear.HeadLayer, Host):
        pass

    monkeypatch.setattr(utils, "dispatch_unquantized_gemm", lambda: utils.default_unquantized_gemm)
    assert Head().fl_runs()
    monkeypatch.setattr(linear, "detect_device", lambda: SimpleNamespace(accelerator=True))
    assert not Head().fl_runs()
    with policy_context(SelectionPolicy(batch_invariant=True)):
        assert Head().fl_runs()


def test_an_embedding_that_makes_logits_multiplies_by_the_operator_where_batches_are_invariant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    monkeypatch.setattr(utils, "dispatch_unquantized_gemm", lambda: utils.default_unquantized_gemm)
    monkeypatch.setattr(linear, "bind_op", lambda name: lambda *arguments: (name, *arguments))
    tied: Any = torch.nn.Module()
    tied.quant_method, tied.weight = object.__new__(UnquantizedEmbeddingMethod), torch.ones(3, 2)
    linear.multiply_with_embeddings(torch.nn.ModuleList([tied]))
    assert "apply" not in vars(tied.quant_method)
    with policy_context(SelectionPolicy(batch_invariant=True)):
        linear.multiply_with_embeddings(torch.nn.ModuleList([tied]))
    assert tied.quant_method.apply(tied, "x") == ("linear", "x", tied.weight, None)


def test_a_weight_that_a_trainer_replaced_is_followed() -> None:
    layer: Any = object.__new__(type("Layer", (linear.LinearLayer, torch.nn.Module), {}))
    torch.nn.Module.__init__(layer)
    layer.weight = torch.nn.Parameter(torch.ones(4, 8), requires_grad=False)
    layer.quant_method = SimpleNamespace(apply=linear.apply)
    weights = linear.Weights(torch.nn.ModuleList([layer]), compiled=False)
    made: list[float] = []

    def make(weight: torch.Tensor, before: object) -> float:
        made.append(float(weight.sum()))
        return made[-1]

    weight_forms.of(layer.weight, "a", make)
    layer.weight = torch.nn.Parameter(torch.full((4, 8), 2.0), requires_grad=False)
    for _ in range(2):
        with weights.settled():
            assert made == [32.0, 64.0]


def test_a_subclass_of_vllms_is_still_one_for_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks ``isinstance(layer, the class that replaces ReplicatedLinear)``."""
    (row,) = (row for row in classes.LAYER_CLASSES if row.name == "ReplicatedLinear")
    replacement = classes._replacement(row, vllm_linear.ReplicatedLinear)
    derived = type("Router", (vllm_linear.ReplicatedLinear,), {})
    assert isinstance(object.__new__(derived), replacement)
    assert isinstance(object.__new__(replacement), replacement)
    assert not isinstance(object.__new__(vllm_linear.RowParallelLinear), replacement)
    assert not issubclass(derived, replacement)


@pytest.mark.parametrize(
    ("policy", "has"),
    [
        ({"prefer": "reference"}, False),
        ({"prefer": "vendor"}, True),
        ({"prefer": "reference", "per_op_order": {"linear@model.layers.0.*": ["vendor", "reference"]}}, True),
        ({"prefer": "vendor", "per_op_order": {"linear": ["reference"]}}, False),
    ],
)
def test_a_kernel_for_a_single_layer_is_one(policy: dict[str, Any], has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    impls = [
        OpImpl(
            "linear",
            "vendor.products",
            BackendImplKind.VENDOR,
            torch.nn.functional.linear,
            vendor="products",
            signature="unchecked",
        ),
        OpImpl(
            "linear", "reference.torch", BackendImplKind.REFERENCE, torch.nn.functional.linear, signature="unchecked"
        ),
    ]
    registry = OpRegistry()
    registry.register_many(impls)
    manager = OpManager(registry, register_builtins=False)
    monkeypatch.setattr(first_choices, "get_default_manager", lambda: manager)
    with policy_context(SelectionPolicy.from_dict(**policy)):
        assert classes.has_kernel("linear") is has


def test_only_workers_ask_whether_there_is_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor import custom_op

    from fl_dispatch.settings import get_settings

    registered: dict[str, Any] = {}
    monkeypatch.setattr(custom_op, "op_registry_oot", registered)
    monkeypatch.setattr(classes, "has_kernel", lambda op_name: True)
    classes.register(get_settings())
    assert "RowParallelLinear" not in registered
    classes.register(get_settings(), in_worker=True)
    assert registered["RowParallelLinear"].__mro__[1:3] == (linear.LinearLayer, linear.DispatchedLayer)
    monkeypatch.setattr(classes, "has_kernel", lambda op_name: False)
    classes.register(get_settings(), in_worker=True)
    assert "RowParallelLinear" not in registered


@pytest.mark.parametrize(
    ("listed", "has_kernel", "told"),
    [
        ({"linear"}, False, "'linear'"),
        ({"RowParallelLinear", "rms_norm"}, False, "'RowParallelLinear'"),
        ({"linear"}, True, None),
        ({"rms_norm"}, False, None),
        (None, False, None),
    ],
)
def test_a_list_that_asks_for_layers_without_a_kernel_is_told(
    listed: set[str] | None,
    has_kernel: bool,
    told: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from vllm.model_executor import custom_op

    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    monkeypatch.setattr(classes, "has_kernel", lambda op_name: has_kernel)
    settings = Settings(oot_whitelist=None if listed is None else frozenset(listed))
    with caplog.at_level("WARNING", "vllm_fl"):
        classes.register(settings)
        assert "has no effect" not in caplog.text
        classes.register(settings, in_worker=True)
    assert ("has no effect" in caplog.text) is (told is not None)
    assert told is None or f"{told} in the white-list" in caplog.text
