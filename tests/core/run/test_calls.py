"""How a call reaches an implementation: conventions, adapters, bound operators, counting."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from builders import impl, manager_of
from fl_dispatch import (
    NoImplementationError,
    NotSupported,
    SelectionPolicy,
    bind_op,
    call_op,
    explain,
    get_default_manager,
    policy_context,
    reset_default_manager,
    resolve_op,
    with_preference,
)
from fl_dispatch.ops import OPERATORS

pytestmark = pytest.mark.usefixtures("results_are_names")

Tensor = torch.Tensor
ones = torch.ones


def rms(x: Tensor, residual: Any = None, weight: Any = None, epsilon: float = 1e-6) -> Any:
    return ("rms", x, residual, weight, epsilon)


def test_call_resolve_and_bound_run_the_same_implementation() -> None:
    manager = manager_of(impl("default.a", lambda x: x + 1), impl("reference.b", lambda x: x))
    for _ in range(3):
        assert manager.call("demo", 1) == manager.resolve("demo")(1) == manager.bind("demo")(1) == 2
    assert manager.get_selected_impl_id("demo") == "default.a"


def test_the_settled_entry_is_the_bare_implementation() -> None:
    manager = manager_of(impl("default.a", rms, op="rms_norm"))
    bound = manager.bind("rms_norm")
    manager.call("rms_norm", ones(1), ones(1))
    bound(ones(1))
    assert manager.table_keeper.root.entries["rms_norm"] is rms
    assert manager.table_keeper.root.entries["rms_norm@"] is rms
    assert manager.resolve("rms_norm") is rms


def test_a_bound_operator_has_the_operators_signature_and_docstring() -> None:
    bound = bind_op("rms_norm")
    assert list(inspect.signature(bound).parameters) == list(OPERATORS["rms_norm"].parameters)
    assert bound.__doc__ == OPERATORS["rms_norm"].doc
    assert bound.__name__ == "rms_norm"


def test_a_bound_operator_follows_the_policy() -> None:
    manager = manager_of(
        impl("default.a", rms, op="rms_norm"), impl("vendor.b", lambda x, residual, weight, epsilon: "b", op="rms_norm")
    )
    bound = manager.bind("rms_norm")
    assert bound(ones(1))[0] == "rms"
    with with_preference("vendor"):
        assert bound(ones(1)) == "b"
    assert bound(ones(1))[0] == "rms"


def test_defaults_that_an_implementation_lacks_are_filled_in() -> None:
    manager = manager_of(impl("default.a", lambda x, residual, weight, epsilon: epsilon, op="rms_norm"))
    for _ in range(2):
        assert manager.call("rms_norm", ones(1)) == 1e-6
        assert manager.call("rms_norm", ones(1), epsilon=0.5) == 0.5
        assert manager.resolve("rms_norm")(ones(1)) == 1e-6


def test_a_call_that_gives_a_left_out_parameter_goes_to_the_next_candidate() -> None:
    manager = manager_of(
        impl("default.a", lambda x, weight=None, epsilon=1e-6: "no residual", op="rms_norm"),
        impl("reference.b", rms, op="rms_norm"),
    )
    bound = manager.bind("rms_norm")
    for call in (lambda *args: manager.call("rms_norm", *args), bound):
        for _ in range(2):
            assert call(ones(1), None, ones(1)) == "no residual"
            assert call(ones(1), ones(1))[0] == "rms"
    assert "does not take 'residual'" in str(manager.explain("rms_norm", ones(1), ones(1)))


def test_keywords_reach_the_implementation() -> None:
    manager = manager_of(impl("default.a", rms, op="rms_norm"))
    for _ in range(2):
        assert manager.call("rms_norm", ones(1), weight="w", epsilon=2.0)[3:] == ("w", 2.0)


LAYER = SimpleNamespace(weight="the weight", variance_epsilon=0.25, extra="seen")


def test_a_layer_first_call_takes_the_layers_attributes() -> None:
    manager = manager_of(impl("default.a", rms, op="rms_norm"))
    x = ones(1)
    for _ in range(2):
        assert manager.call("rms_norm", LAYER, x) == ("rms", x, None, "the weight", 0.25)
        assert manager.call("rms_norm", LAYER, x, residual="r") == ("rms", x, "r", "the weight", 0.25)
        assert manager.call("rms_norm", LAYER, x, "r") == ("rms", x, "r", "the weight", 0.25)


def test_an_attribute_that_the_layer_lacks_leaves_the_default() -> None:
    manager = manager_of(impl("default.a", rms, op="rms_norm"))
    for _ in range(2):
        assert manager.call("rms_norm", SimpleNamespace(variance_epsilon=0.5), ones(1))[3:] == (None, 0.5)
        assert manager.call("rms_norm", SimpleNamespace(weight="w"), ones(1))[3:] == ("w", 1e-6)


def test_an_implementation_that_takes_a_layer_gets_the_callers_or_a_stand_in() -> None:
    def layer_first(obj: Any, x: Tensor, residual: Any = None) -> Any:
        return (obj.weight, obj.variance_epsilon, getattr(obj, "extra", None), residual)

    manager = manager_of(impl("default.a", layer_first, op="rms_norm"))
    bound = manager.bind("rms_norm")
    for _ in range(2):
        assert manager.call("rms_norm", LAYER, ones(1), "r") == ("the weight", 0.25, "seen", "r")
        assert manager.call("rms_norm", ones(1), "r", "w", 0.5) == ("w", 0.5, None, "r")
        assert bound(ones(1), None, "w") == ("w", 1e-6, None, None)
        assert manager.resolve("rms_norm")(ones(1), None, "w") == ("w", 1e-6, None, None)


def test_a_layer_works_through_call_op_with_a_real_module() -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.full((4,), 2.0))
    module.variance_epsilon = 1e-6
    x = torch.randn(3, 4)
    with torch.inference_mode():
        torch.testing.assert_close(call_op("rms_norm", module, x), call_op("rms_norm", x, None, module.weight))


def test_a_wrong_layer_call_is_a_type_error() -> None:
    manager = manager_of(impl("default.a", rms, op="rms_norm"))
    for _ in range(2):
        with pytest.raises(TypeError):
            manager.call("rms_norm", LAYER, ones(1), "r", "one too many")
        with pytest.raises(TypeError):
            manager.call("rms_norm", LAYER, ones(1), x=ones(1))


def test_a_parameter_as_first_argument_is_a_tensor_not_a_layer() -> None:
    manager = get_default_manager()
    with (
        policy_context(SelectionPolicy.from_dict(per_op_order={"silu_and_mul": ["reference"]})),
        torch.inference_mode(),
    ):
        assert call_op("silu_and_mul", torch.nn.Parameter(ones(1, 4))).shape == (1, 2)
        assert manager.call("silu_and_mul", torch.nn.Parameter(ones(1, 4))).shape == (1, 2)


def test_supports_decides_by_the_arguments_and_its_reason_is_told() -> None:
    only_wide = impl("default.a", rms, op="rms_norm", supports=lambda x, *_: x.shape[-1] > 2 or "too narrow")
    manager = manager_of(only_wide, impl("reference.b", lambda x, residual, weight, epsilon: "b", op="rms_norm"))
    bound = manager.bind("rms_norm")
    for _ in range(3):
        for call in (lambda *a: manager.call("rms_norm", *a), bound):
            assert call(ones(1, 4))[0] == "rms"
            assert call(ones(1, 2)) == "b"
    decision = manager.explain("rms_norm", ones(1, 2))
    assert decision.chosen.impl_id == "reference.b" == manager.get_selected_impl_id("rms_norm", ones(1, 2))
    assert "too narrow" in str(decision)
    assert manager.resolve("rms_norm", ones(1, 4)) is rms


@pytest.mark.parametrize("strict", [False, True])
def test_an_implementation_is_not_chosen_for_tensors_of_a_device_that_it_does_not_take(strict: bool) -> None:
    def elsewhere(x: Tensor, residual: Any = None, weight: Any = None, epsilon: float = 1e-6) -> str:
        if x.is_cpu:
            raise NotSupported("on the CPU")
        return "a"

    first = impl("default.a", elsewhere, op="rms_norm", device_types=("meta",))
    manager = manager_of(first, impl("reference.b", lambda x, residual, weight, epsilon: "b", op="rms_norm"))
    manager.set_counting()
    bound = manager.bind("rms_norm")
    decision = manager.explain("rms_norm", ones(1))
    assert decision.chosen.impl_id == "reference.b" == manager.get_selected_impl_id("rms_norm", ones(1))
    assert "default.a: skipped, it takes tensors on meta, not on cpu" in str(decision)
    with policy_context(SelectionPolicy(strict=strict)):
        assert [bound(ones(1)), manager.call_counts()] == ["b", {("rms_norm", "reference.b"): 1}]
        for _ in range(3):  # also once it is proven, and nobody looks beforehand
            assert bound(ones(1, device="meta")) == "a"
            assert bound(ones(1)) == "b"
    assert manager.get_failed_impls() == {}


def test_a_predicate_that_raises_is_a_no_with_its_error() -> None:
    def broken(*args: Any) -> bool:
        raise ZeroDivisionError("in supports")

    manager = manager_of(
        impl("default.a", rms, op="rms_norm", supports=broken),
        impl("reference.b", lambda x, *, residual=None: "b", op="demo"),
    )
    with pytest.raises(NoImplementationError, match="ZeroDivisionError: in supports"):
        manager.call("rms_norm", ones(1))


def test_a_per_op_order_can_name_one_layer() -> None:
    policy = SelectionPolicy.from_dict(per_op_order={"rms_norm@layers.3.*": ["reference"]})
    manager = manager_of(
        impl("default.a", rms, op="rms_norm"),
        impl("reference.b", lambda x, residual, weight, epsilon: "b", op="rms_norm"),
        policy=policy,
    )
    assert manager.bind("rms_norm", "layers.3.norm")(ones(1)) == "b"
    assert manager.bind("rms_norm", "layers.4.norm")(ones(1))[0] == "rms"
    assert manager.bind("rms_norm")(ones(1))[0] == "rms"
    assert manager.explain("rms_norm", scope="layers.3.norm").chosen.impl_id == "reference.b"


def test_calls_are_counted_by_implementation_while_counting_is_on() -> None:
    manager = manager_of(
        impl("default.a", rms, op="rms_norm"), impl("vendor.b", lambda x, residual, weight, epsilon: "b", op="rms_norm")
    )
    bound = manager.bind("rms_norm")
    bound(ones(1))
    manager.set_counting(True)
    for _ in range(3):
        bound(ones(1))
        manager.call("rms_norm", ones(1))
    with with_preference("vendor"):
        bound(ones(1))
    manager.set_counting(False)
    bound(ones(1))
    assert manager.call_counts() == {("rms_norm", "default.a"): 6, ("rms_norm", "vendor.b"): 1}
    manager.reset_counts()
    assert sum(manager.call_counts().values()) == 0


def test_the_first_use_is_logged_once_in_the_documented_form(caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_of(impl("vendor.x"))
    with caplog.at_level(logging.INFO, logger="fl_dispatch"):
        manager.call("demo", 1)
        manager.call("demo", 1)
    assert [record.message for record in caplog.records] == ["Op 'demo' using 'vendor.x' (kind=vendor, vendor=x)"]


def test_an_unknown_operator_is_named() -> None:
    for call in (call_op, get_default_manager().call, resolve_op, explain):
        with pytest.raises(NoImplementationError, match="No available implementation for op='nobody'"):
            call("nobody", 1)


def test_every_reference_runs_through_call_op_on_its_own_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    manager = get_default_manager()
    manager.set_counting(True)
    for name, operator in OPERATORS.items():
        if operator.samples is None:
            continue
        for sample in operator.samples(torch.float32, torch.device("cpu"), generator):
            call_op(name, *sample.args)
        assert sum(calls for (op, _), calls in manager.call_counts().items() if op == name) > 0


def test_an_override_beside_a_layer_is_a_type_error_not_a_failure() -> None:
    manager = manager_of(impl("default.a", rms, op="rms_norm"), impl("reference.b", lambda x, *, residual=None: "b"))
    for _ in range(2):
        with pytest.raises(TypeError):
            manager.call("rms_norm", LAYER, ones(1), epsilon=1.0)
    assert manager.get_failed_impls() == {}


def test_a_resolved_implementation_refuses_what_it_does_not_take() -> None:
    manager = manager_of(impl("default.a", lambda x, weight=None, epsilon=1e-6: "no residual", op="rms_norm"))
    resolved = manager.resolve("rms_norm")
    assert resolved(ones(1), None, ones(1)) == "no residual"
    with pytest.raises(NotSupported, match=r"default\.a"):
        resolved(ones(1), ones(1))


def test_a_cache_write_settles_like_any_other_operator() -> None:
    def write(
        key: Any,
        value: Any,
        key_cache: Any,
        value_cache: Any,
        slot_mapping: Any,
        key_scale: Any = None,
        value_scale: Any = None,
        key_scales: Any = None,
        value_scales: Any = None,
        may_skip: Any = None,
    ) -> None: ...

    manager = manager_of(impl("default.a", write, op="kv_cache_write"))
    t = ones(1, 1, 1)
    manager.call("kv_cache_write", t, t, t, t, t)
    assert manager.table_keeper.root.entries["kv_cache_write"] is write


def test_an_undeclared_operator_settles_too() -> None:
    def fn(x: int) -> int:
        return x

    manager = manager_of(impl("default.a", fn))
    manager.call("demo", 1)
    assert manager.table_keeper.root.entries["demo"] is fn


def positional_only(x: Tensor, residual: Any, weight: Any, epsilon: float, /) -> Any:
    return epsilon


def test_names_and_own_parameters_of_an_implementation_do_not_change_what_a_call_means() -> None:
    manager = manager_of(impl("default.a", positional_only, op="rms_norm"))
    for _ in range(3):
        assert manager.call("rms_norm", x=ones(1), epsilon=2.0) == 2.0
    own = manager_of(impl("default.a", lambda x, fast=True: fast, op="silu_and_mul"))
    for _ in range(3):
        assert own.call("silu_and_mul", ones(1)) is True
        with pytest.raises(TypeError):
            own.call("silu_and_mul", ones(1), fast=False)


def test_a_predicate_may_answer_with_any_truth_value() -> None:
    manager = manager_of(impl("default.a", lambda x: "yes", op="silu_and_mul", supports=lambda x: np.bool_(True)))
    for _ in range(2):
        assert manager.call("silu_and_mul", ones(1)) == "yes"


def test_a_callable_object_that_cannot_be_hashed_is_an_implementation() -> None:
    class Kernel:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: Tensor) -> str:
            return "called"

    assert manager_of(impl("default.a", Kernel(), op="silu_and_mul")).call("silu_and_mul", ones(1)) == "called"


def test_bound_operators_follow_a_reset_and_name_an_operator_that_is_gone() -> None:
    bound = bind_op("silu_and_mul", "layers.0")
    for _ in range(2):
        assert bound(ones(1, 4)).shape == (1, 2)
        reset_default_manager()
    get_default_manager().ensure_initialized()
    get_default_manager().registry.clear()
    with pytest.raises(NoImplementationError, match="silu_and_mul"):
        bound(ones(1, 4))
    with pytest.raises(NoImplementationError, match="attention_backend"):
        bind_op("attention_backend")()


COMPILED = ["silu_and_mul", "gelu_and_mul", "rms_norm", "gemma_rms_norm", "rotary_embedding"]


@pytest.mark.parametrize("op", COMPILED)
def test_a_first_call_may_be_a_compiled_one(op: str) -> None:
    samples = OPERATORS[op].samples
    assert samples is not None
    args = next(iter(samples(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0)))).args
    torch._dynamo.reset()
    bound = bind_op(op)
    by_name = torch.compile(lambda *args: call_op(op, *args), fullgraph=True, backend="eager")
    by_binding = torch.compile(bound, fullgraph=True, backend="eager")
    results = [function(*map(clone, args)) for function in (by_name, by_binding, resolve_op(op, *args))]
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[2])


def clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def test_a_policy_change_reaches_compiled_code() -> None:
    get_default_manager().registry.register_many(
        [impl("default.a", lambda x: x + 1, op="mul_and_silu"), impl("vendor.b", lambda x: x + 2, op="mul_and_silu")]
    )
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: call_op("mul_and_silu", x), fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)).item() == 1
    with with_preference("vendor"):
        assert compiled(torch.zeros(1)).item() == 2
    assert compiled(torch.zeros(1)).item() == 1


def test_an_implementation_that_declines_is_not_counted_as_run() -> None:
    def declines(x: Tensor) -> Any:
        raise NotSupported("odd size")

    manager = manager_of(
        impl("default.a", declines, op="silu_and_mul"), impl("reference.b", lambda x: "b", op="silu_and_mul")
    )
    manager.set_counting(True)
    for _ in range(3):
        manager.call("silu_and_mul", ones(1))
    assert {key: calls for key, calls in manager.call_counts().items() if calls} == {("silu_and_mul", "reference.b"): 3}


def test_a_predicate_that_raises_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_of(
        impl("default.a", lambda x: "a", op="silu_and_mul", supports=lambda x: {}["no"]),
        impl("reference.b", lambda x: "b", op="silu_and_mul"),
    )
    with caplog.at_level(logging.WARNING, logger="fl_dispatch"):
        for _ in range(3):
            assert manager.call("silu_and_mul", ones(1)) == "b"
    assert [record.message for record in caplog.records] == [
        "Implementation 'default.a' is left out of op 'silu_and_mul': its 'supports' raised KeyError: 'no'"
    ]


def test_a_layer_pattern_that_fits_nothing_in_any_process_is_told(caplog: pytest.LogCaptureFixture) -> None:
    policy = SelectionPolicy.from_dict(
        per_op_order={"rms_norm@layers.9.*": ["flagos"], "rms_norm@layers.1": ["flagos"]}
    )
    manager = manager_of(impl("default.a", rms, op="rms_norm"), policy=policy)
    manager.bind("rms_norm", "layers.1")
    mine = manager.unmatched_scopes()
    assert mine == {"rms_norm@layers.9.*": ["layers.1"]}
    with caplog.at_level(logging.WARNING, logger="fl_dispatch"):
        manager.warn_of_unmatched_scopes({"rms_norm@layers.1": ["layers.9.a"]})
        assert caplog.records == []
        manager.warn_of_unmatched_scopes()
        manager.warn_of_unmatched_scopes({"rms_norm@layers.9.*": ["layers.2"]})
    text = "'rms_norm@layers.9.*' fits no layer; layers of 'rms_norm' are, for example: layers.1"
    assert [record.message for record in caplog.records] == [text, f"{text}, layers.2"]


@pytest.mark.parametrize(("name", "meant"), [("rmsnorm", "rms_norm"), ("flash_attn", "paged_attention")])
def test_an_unknown_name_that_is_near_a_known_one_is_suggested(name: str, meant: str) -> None:
    with pytest.raises(NoImplementationError, match=f"did you mean '{meant}'"):
        call_op(name, ones(1))


def test_a_name_that_only_resembles_another_projects_is_not_suggested() -> None:
    with pytest.raises(NoImplementationError, match="'nonsense'") as caught:
        call_op("nonsense", ones(1))
    assert "did you mean" not in str(caught.value)


def test_debug_mode_logs_every_decision_with_its_trace_and_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_FL_DISPATCH_DEBUG", "1")
    reset_default_manager()
    with caplog.at_level(logging.INFO, logger="fl_dispatch"):
        call_op("silu_and_mul", ones(1, 4))
    assert "rms_norm: order flagos, vendor, reference" in caplog.text
    assert "reference.torch: chosen" in caplog.text
    assert get_default_manager().call_counts() == {("silu_and_mul", "reference.torch"): 1}


def test_switched_off_every_operator_runs_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER_ENABLED", "false")
    reset_default_manager()
    get_default_manager().registry.register_impl(impl("default.a", lambda x: "a", op="silu_and_mul"))
    assert call_op("silu_and_mul", ones(1, 4)).shape == (1, 2)
    assert "switched off" in str(explain("silu_and_mul"))


@pytest.mark.parametrize("proven", [False, True])
def test_a_call_without_an_argument_names_the_operator(proven: bool) -> None:
    manager = manager_of(impl("reference.a", lambda x, residual, weight, epsilon: x, op="rms_norm"))
    if proven:
        manager.call("rms_norm", torch.ones(1, 2))
    with pytest.raises(TypeError) as raised:
        manager.call("rms_norm")
    text = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "rms_norm(x, residual, weight, epsilon): missing a required argument: 'x'" in text


@pytest.mark.parametrize("proven", [False, True])
def test_a_layer_that_holds_none_of_the_arguments_is_refused_by_name(proven: bool) -> None:
    manager = manager_of(impl("reference.a", lambda x, residual, weight, epsilon: x, op="rms_norm"))
    if proven:
        manager.call("rms_norm", SimpleNamespace(weight=None, variance_epsilon=1e-6), torch.ones(1, 2))
    with pytest.raises(TypeError, match=r"rms_norm: .*weight.* of the class ReLU, has none"):
        manager.call("rms_norm", torch.nn.ReLU(), torch.ones(1, 2))
