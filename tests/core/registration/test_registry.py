from __future__ import annotations

import gc
import inspect
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from builders import impl, manager_of
from fl_dispatch import (
    BackendImplKind,
    OpImpl,
    OpManager,
    OpRegistry,
    RegistrationError,
    SelectionPolicy,
    set_global_policy,
)
from fl_dispatch.ops import OPERATORS

pytestmark = pytest.mark.usefixtures("results_are_names")

Tensor = torch.Tensor


def test_implementations_keep_the_order_of_registration() -> None:
    registry = OpRegistry()
    registry.register_many([impl("default.a"), impl("reference.b"), impl("default.c", op="other")])
    assert [i.impl_id for i in registry.get_implementations("demo")] == ["default.a", "reference.b"]
    assert registry.list_operators() == ["demo", "other"]
    assert registry.get_implementation("demo", "reference.b") is registry.get_implementations("demo")[1]
    assert registry.get_implementation("demo", "nobody") is None
    assert registry.get_implementations("nobody") == []


def test_one_implementation_without_a_later_parameter_is_enough_for_no() -> None:
    """Whatever the policy puts first, which may change."""
    manager = manager_of()
    assert manager.all_take("mla_decode", ["query_rope"])
    manager.registry.register_many([impl("default.new", op="mla_decode", fn=OPERATORS["mla_decode"].reference)])
    assert manager.all_take("mla_decode", ["query_rope"])
    old = impl("vendor.old", op="mla_decode", fn=lambda *args: None, vendor="old", signature="unchecked")
    manager.registry.register_impl(old)
    assert not manager.all_take("mla_decode", ["query_rope"])
    assert manager.all_take("mla_decode", ["out"])


def test_an_id_is_unique_within_its_operator() -> None:
    registry = OpRegistry()
    registry.register_impl(impl("default.a"))
    registry.register_impl(impl("default.a", op="other"))
    with pytest.raises(
        ValueError, match=r"Duplicate impl_id 'default\.a' for op 'demo'.*id, such as 'default\.a\.VARIANT'"
    ):
        registry.register_impl(impl("default.a"))


def test_register_many_is_all_or_nothing() -> None:
    registry = OpRegistry()
    registry.register_impl(impl("default.a"))
    with pytest.raises(RegistrationError):
        registry.register_many([impl("default.new"), impl("default.new", op="other"), impl("default.a")])
    assert [i.impl_id for i in registry.get_implementations("demo")] == ["default.a"]
    assert registry.list_operators() == ["demo"]


def test_a_snapshot_does_not_change() -> None:
    registry = OpRegistry()
    registry.register_impl(impl("default.a"))
    snapshot = registry.snapshot()
    registry.register_impl(impl("default.b"))
    assert len(snapshot.impls_by_op["demo"]) == 1
    with pytest.raises(TypeError):
        snapshot.impls_by_op["demo"] = ()  # type: ignore[index]


def test_a_registry_on_top_of_another_leaves_nothing_there_until_it_is_committed() -> None:
    registry = OpRegistry()
    registry.register_impl(impl("default.base"))
    upper = OpRegistry(registry, "plugin")
    upper.register_impl(impl("default.a"))
    with pytest.raises(RegistrationError, match=r"Duplicate impl_id 'default\.base'"):
        upper.register_impl(impl("default.base"))
    assert [found.impl_id for found in upper.get_implementations("demo")] == ["default.base", "default.a"]
    assert len(registry.get_implementations("demo")) == 1
    assert upper.commit("alias") == 1
    assert [found.impl_id for found in registry.get_implementations("demo")] == ["default.base", "default.a"]
    assert {"plugin", "alias"} <= registry.snapshot().sources


def test_a_registry_that_was_committed_is_the_one_below_it() -> None:
    registry = OpRegistry()
    upper = OpRegistry(registry, "plugin")
    upper.commit()
    upper.register_impl(impl("default.late"))
    assert registry.get_implementation("demo", "default.late") is upper.get_implementation("demo", "default.late")
    assert registry.list_operators() == ["demo"]


def test_clear_forgets_everything() -> None:
    registry = OpRegistry()
    registry.register_impl(impl("default.a"))
    registry.clear()
    assert registry.list_operators() == []


def test_registration_from_many_threads_loses_nothing() -> None:
    registry = OpRegistry()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: registry.register_impl(impl(f"default.{n}", op=f"op{n % 7}")), range(400)))
    assert sum(len(registry.get_implementations(op)) for op in registry.list_operators()) == 400


def test_a_dropped_manager_is_collected_although_it_listened() -> None:
    registry = OpRegistry()
    manager = weakref.ref(OpManager(registry, register_builtins=False))
    gc.collect()
    assert manager() is None
    registry.register_impl(impl("default.a"))


def right(x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, epsilon: float = 1e-6) -> Tensor:
    return x


def no_defaults(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x


def left_out(x: Tensor, weight: Tensor | None = None, epsilon: float = 1e-6) -> Tensor:
    return x


def layer_first(obj: Any, x: Tensor, residual: Tensor | None = None) -> Tensor:
    return x


def extra_with_default(
    x: Tensor, residual: Any = None, weight: Any = None, epsilon: float = 1e-6, fast: bool = True
) -> Tensor:
    return x


@pytest.mark.parametrize("fn", [right, no_defaults, left_out, layer_first, extra_with_default])
def test_a_signature_that_fits_the_declaration_is_accepted(fn: Any) -> None:
    registry = OpRegistry()
    registry.register_impl(impl("default.a", fn, op="rms_norm"))
    convention = registry.convention(registry.get_implementations("rms_norm")[0])
    assert convention is not None
    assert convention.layer_first is (fn is layer_first)
    assert convention.left_out == (("residual",) if fn is left_out else ())
    assert convention.defaults is (fn not in (no_defaults, extra_with_default))


def wrong_name(y: Tensor, residual: Any = None, weight: Any = None, epsilon: float = 1e-6) -> Tensor:
    return y


def wrong_order(x: Tensor, weight: Any = None, residual: Any = None, epsilon: float = 1e-6) -> Tensor:
    return x


def wrong_default(x: Tensor, residual: Any = None, weight: Any = None, epsilon: float = 1e-5) -> Tensor:
    return x


def keyword_only(x: Tensor, residual: Any = None, *, weight: Any = None, epsilon: float = 1e-6) -> Tensor:
    return x


def extra_required(x: Tensor, residual: Any, weight: Any, epsilon: float, stream: int) -> Tensor:
    return x


def says_nothing(*args: Any, **kwargs: Any) -> Any: ...


@pytest.mark.parametrize(
    ("fn", "problem"),
    [
        (wrong_name, "'y' is not declared"),
        (wrong_order, "'residual' is out of order"),
        (wrong_default, r"'epsilon' has the default 1e-05, the declaration has the default 1e-06"),
        (keyword_only, "'weight' is keyword-only"),
        (extra_required, "'stream' is not declared"),
        (lambda x, *rest: x, "signature='unchecked'"),
        (lambda: None, "lacks the required parameter 'x'"),
        (torch.mul, "cannot be read"),
    ],
)
def test_a_signature_that_differs_is_an_error_that_names_both(fn: Any, problem: str) -> None:
    with pytest.raises(RegistrationError, match=problem) as caught:
        OpRegistry().register_impl(impl("default.a", fn, op="rms_norm"))
    assert "default.a" in str(caught.value)
    assert "rms_norm" in str(caught.value)


def test_a_signature_that_says_nothing_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="fl_dispatch"):
        OpRegistry().register_impl(impl("default.a", says_nothing, op="rms_norm"))
    assert "default.a" in caplog.text
    assert "unchecked" in caplog.text


def test_a_signature_that_cannot_be_read_may_be_declared_unchecked() -> None:
    manager = manager_of(impl("default.a", lambda *args: args, op="rms_norm", signature="unchecked"))
    x = torch.ones(1)
    for _ in range(2):
        assert manager.call("rms_norm", x, epsilon=2.0) == (x, None, None, 2.0)


def test_a_torch_operator_is_checked_by_its_schema() -> None:
    with pytest.raises(RegistrationError, match="lacks the required parameter|is not declared"):
        OpRegistry().register_impl(impl("default.a", torch.ops.aten.silu.default, op="silu_and_mul"))
    with pytest.raises(RegistrationError, match="overloads"):
        OpRegistry().register_impl(impl("default.a", torch.ops.aten.add, op="silu_and_mul"))


def test_an_operator_that_nobody_declared_is_not_checked() -> None:
    registry = OpRegistry()
    registry.register_impl(OpImpl("vendors_own", "default.a", BackendImplKind.DEFAULT, says_nothing))
    assert registry.convention(registry.get_implementations("vendors_own")[0]) is None


def test_a_late_registration_is_seen_by_the_next_call() -> None:
    set_global_policy(SelectionPolicy())
    registry = OpRegistry()
    registry.register_impl(impl("reference.torch"))
    manager = OpManager(registry, register_builtins=False)
    assert manager.call("demo", 1) == "reference.torch"
    registry.register_impl(impl("default.late"))
    assert manager.call("demo", 1) == "default.late"


def test_a_predicate_that_cannot_take_the_arguments_is_refused() -> None:
    with pytest.raises(RegistrationError, match="'supports' names the parameters that it looks at"):
        OpRegistry().register_impl(impl("default.a", right, op="rms_norm", supports=lambda rows: True))


def test_an_operator_that_is_almost_a_declared_one_is_a_warning_when_it_is_registered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("WARNING", logger="fl_dispatch"):
        registry = OpRegistry(OpRegistry(), "acme")
        registry.register_many([impl("default.a", op="RMSNorm"), impl("default.a", op="my_own_norm")])
    assert "acme registers 'RMSNorm', which has no declaration; did you mean 'rms_norm'?" in caplog.text
    assert "my_own_norm" not in caplog.text


def test_a_property_that_is_almost_a_known_one_is_a_warning_when_it_is_registered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    misspelt = {"batch_invarant": True, "kv_block": 32, "acme_clusters": 4}
    with caplog.at_level("WARNING", logger="fl_dispatch"):
        registry = OpRegistry()
        registry.register_impl(impl("default.a", properties=misspelt))
    assert registry.get_implementation("demo", "default.a") is not None
    (record,) = caplog.records
    assert record.getMessage() == (
        "'default.a' of op 'demo' has the property 'batch_invarant', which is never read; "
        "did you mean 'batch_invariant'?"
    )


def test_a_predicate_may_lack_the_last_parameters_that_its_implementation_lacks() -> None:
    """So a parameter that a declaration gets later breaks neither; a call that gives it goes elsewhere."""
    asked = []

    def few(x: Tensor, residual: Tensor | None, weight: Tensor) -> Any:
        return right(x, residual, weight)

    def takes(x: Tensor, residual: Tensor | None, weight: Tensor) -> bool:
        asked.append(x.shape)
        return True

    registry = OpRegistry()
    registry.register_impl(impl("default.few", few, op="rms_norm", supports=takes))
    registry.register_impl(impl("reference.all", right, op="rms_norm"))
    manager = OpManager(registry, register_builtins=False)
    manager.set_counting(True)
    x, weight = torch.ones(2, 4), torch.ones(4)
    for epsilon in ({}, {"epsilon": 1e-3}):
        manager.call("rms_norm", x, None, weight, **epsilon)
    counts = manager.call_counts()
    assert {key[1]: count for key, count in counts.items()} == {"default.few": 1, "reference.all": 1}
    assert asked


def test_a_callable_that_nobody_can_look_into_lacks_what_was_declared_later() -> None:
    """A call that gives it goes elsewhere, because nobody knows that the callable would heed it."""
    given = []

    def writes(*args: Any) -> None:
        given.append(len(args))

    registry = OpRegistry()
    registry.register_impl(impl("default.old", writes, op="kv_cache_write", signature="unchecked"))
    manager = OpManager(registry, register_builtins=False)
    tensors = [torch.ones(1, 1, 4), torch.ones(1, 1, 4), torch.ones(2, 2, 1, 4), torch.ones(2, 2, 1, 4)]
    slots = torch.zeros(1, dtype=torch.int64)
    manager.call("kv_cache_write", *tensors, slots)
    assert given == [5]
    assert registry.convention(registry.get_implementations("kv_cache_write")[0]).left_out == (
        "key_scale",
        "value_scale",
        "key_scales",
        "value_scales",
    )


def test_a_predicate_with_names_of_its_own_may_lack_what_was_declared_later() -> None:
    """A package that was written before the declaration grew still registers."""

    def writes(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any) -> None: ...

    def supports(a: Any, b: Any, c: Any, d: Any, e: Any) -> bool:
        return True

    registry = OpRegistry()
    old = impl("default.old", writes, op="kv_cache_write")
    registry.register_impl(replace(old, supports=supports))
    assert registry.convention(registry.get_implementations("kv_cache_write")[0]).operands == tuple(
        inspect.signature(writes).parameters
    )

    def of_too_few(a: Any, b: Any, c: Any, d: Any) -> bool:
        return True

    with pytest.raises(RegistrationError, match="takes all of them in order"):
        OpRegistry().register_impl(replace(old, supports=of_too_few))
