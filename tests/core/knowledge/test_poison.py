"""A backend that goes wrong is left out: it poisons neither the process nor anybody else's operators."""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from builders import impl, manager_of
from fl_dispatch import (
    OpImpl,
    OpRegistry,
    RegistrationError,
    SelectionPolicy,
    call_op,
    get_default_manager,
    reset_default_manager,
    set_global_policy,
)
from fl_dispatch.discovery import Target, load_backend

pytestmark = pytest.mark.usefixtures("results_are_names")

X = torch.ones(2, 4)


class Panic(BaseException):
    """A panic in a Rust extension, which is no ``Exception``."""


class SilentError(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


WRONG = (
    ("priority", "high"),
    ("requires", None),
    ("requires", {"kv_layout": ["NHD"]}),
    ("properties", None),
    ("kind", "vendor"),
    ("vendor", 3),
    ("supports", "yes"),
    ("available", True),
)


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_an_implementation_with_a_wrong_field_is_refused_and_poisons_nothing(field: str, value: Any) -> None:
    manager = manager_of(impl("reference.b"))
    assert manager.call("demo", 1) == "reference.b"
    bad = impl("vendor.bad")
    fields = {name: getattr(bad, name) for name in OpImpl.__dataclass_fields__} | {field: value}
    with pytest.raises(ValueError, match=field):
        manager.registry.register_impl(OpImpl(**fields))
    for batch_invariant in (True, False):
        set_global_policy(SelectionPolicy(prefer="reference", batch_invariant=batch_invariant))
    assert manager.registry.list_operators() == ["demo"]
    assert manager.call("demo", 1) == "reference.b"


def test_a_registration_whose_check_is_interrupted_is_taken_back() -> None:
    answers = iter([KeyboardInterrupt(), None, None])

    def check() -> bool:
        error = next(answers)
        if error:
            raise error
        return True

    manager = manager_of(impl("reference.b"))
    assert manager.call("demo", 1) == "reference.b"
    new = impl("default.a", available=check)
    with pytest.raises(KeyboardInterrupt):
        manager.registry.register_impl(new)
    assert manager.registry.get_implementation("demo", "default.a") is None
    manager.registry.register_impl(new)
    assert manager.call("demo", 1) == "default.a"


class Chip:
    """A backend whose availability goes wrong in one of several ways."""

    def __init__(self, check: Callable[[], Any], why: Callable[[], Any] = lambda: "no chip") -> None:
        self.is_available, self.why_unavailable = check, why

    def run(self, x: Any = None) -> str:
        return "chip"


def raising(error: BaseException) -> Callable[[], Any]:
    def check() -> Any:
        raise error

    return check


class NoTruth:
    def __bool__(self) -> bool:
        raise RuntimeError("neither")


@pytest.mark.parametrize(
    "check",
    [
        raising(RuntimeError("boom")),
        raising(SystemExit(3)),
        raising(Panic("panicked")),
        raising(SilentError()),
        NoTruth,
        lambda x: True,
    ],
    ids=["error", "exit", "panic", "error without text", "no truth value", "wrong signature"],
)
def test_an_availability_check_that_goes_wrong_is_a_no(check: Callable[..., Any]) -> None:
    manager = manager_of(impl("default.a", Chip(check).run), impl("reference.b"))
    assert manager.call("demo", 1) == "reference.b"
    assert "default.a: skipped, its availability check raised" in str(manager.explain("demo"))


@pytest.mark.parametrize("why", [raising(RuntimeError("boom")), raising(SilentError()), lambda: None, lambda: ""])
def test_a_backend_that_cannot_say_why_it_is_unavailable_is_unavailable(why: Callable[[], Any]) -> None:
    manager = manager_of(impl("default.a", Chip(lambda: False, why).run), impl("reference.b"))
    assert manager.call("demo", 1) == "reference.b"
    assert "default.a: skipped, " in str(manager.explain("demo"))


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(0), Panic("panicked"), SilentError()])
@pytest.mark.parametrize("where", ["import", "registration"])
def test_a_plugin_that_was_only_found_and_raises_anything_is_a_warning(
    where: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def register(registry: Any) -> None:
        registry.register_impl(impl("vendor.half"))
        raise error

    registry = OpRegistry()
    load = raising(error) if where == "import" else lambda: register
    with caplog.at_level(logging.WARNING, logger="fl_dispatch"):
        assert load_backend(registry, Target("acme", "entry point acme", load, named=False)) is False
    assert registry.list_operators() == []
    (record,) = caplog.records
    assert type(error).__name__ in record.getMessage()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit()])
def test_a_users_interrupt_while_a_plugin_loads_is_the_users(error: BaseException) -> None:
    registry = OpRegistry()
    with pytest.raises(type(error)):
        load_backend(registry, Target("acme", "entry point acme", raising(error), named=False))
    assert registry.list_operators() == []


def test_a_backend_with_one_wrong_implementation_registers_none() -> None:
    def register(registry: Any) -> None:
        registry.register_impl(impl("vendor.good", op="fine"))
        registry.register_impl(impl("vendor.bad", lambda y: y, op="silu_and_mul"))

    manager = manager_of(impl("reference.b"))
    manager.call("demo", 1)
    with pytest.raises(RegistrationError, match=r"vendor\.bad"):
        load_backend(manager.registry, Target("acme", "named", lambda: register, named=True))
    assert manager.registry.list_operators() == ["demo"]
    assert manager.call("demo", 1) == "reference.b"


def test_a_plugin_that_commits_its_registry_itself_has_registered() -> None:
    def register(registry: Any) -> None:
        registry.register_impl(impl("default.a"))
        registry.commit()
        registry.register_impl(impl("vendor.b"))

    registry = OpRegistry()
    assert load_backend(registry, Target("acme", "here", lambda: register, named=True))
    assert [one.impl_id for one in registry.get_implementations("demo")] == ["default.a", "vendor.b"]


def test_what_is_no_implementation_is_refused_by_name() -> None:
    with pytest.raises(RegistrationError, match="an OpImpl is needed, not 'vendor.a'"):
        OpRegistry().register_many(["vendor.a"])  # type: ignore[list-item]


def test_a_plugin_that_registers_later_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    module = types.ModuleType("late_plugin")
    module.register = kept.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "late_plugin", module)
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "late_plugin")
    reset_default_manager()
    get_default_manager().ensure_initialized()
    kept[0].register_impl(impl("default.late"))
    assert call_op("demo", 1) == "default.late"
    kept[0].register_many([impl("vendor.later"), impl("reference.later")])
    assert len(get_default_manager().registry.get_implementations("demo")) == 3


def test_a_predicate_whose_answer_has_no_truth_value_is_a_no() -> None:
    manager = manager_of(
        impl("default.a", lambda x: "a", op="silu_and_mul", supports=lambda x: x > 0),
        impl("reference.b", lambda x: "ok", op="silu_and_mul"),
    )
    for _ in range(2):
        assert manager.call("silu_and_mul", X) == "ok"
    assert "its 'supports' raised RuntimeError" in str(manager.explain("silu_and_mul", X))


@pytest.mark.parametrize("op", ["silu_and_mul", "rms_norm"])
def test_a_predicate_that_raises_once_bans_nobody(op: str) -> None:
    asked: list[int] = []

    def supports(*args: Any) -> bool:
        asked.append(1)
        if len(asked) == 3:
            raise RuntimeError("once")
        return True

    manager = manager_of(
        impl("default.a", lambda *args: "a", op=op, supports=supports, signature="unchecked"),
        impl("reference.b", lambda *args: "b", op=op, signature="unchecked"),
    )
    args = (X,) if op == "silu_and_mul" else (X, X.clone(), None, 1e-6)
    results = [manager.call(op, *args) for _ in range(6)]
    assert results[:2] == results[3:5] == ["a", "a"]
    assert manager.get_failed_impls() == {}


def test_an_operator_that_always_fails_leaves_other_operators_alone() -> None:
    def fail(x: Any) -> Any:
        raise RuntimeError("boom")

    manager = manager_of(impl("default.a", fail), impl("default.a", lambda x: "fine", op="other"))
    for _ in range(3):
        with contextlib.suppress(RuntimeError):
            manager.call("demo", X)
        assert manager.call("other", X) == "fine"
    assert manager.get_failed_impls() == {}
