"""A call that the first candidate declines goes to the next one at once, with everything that recovery promises."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from builders import impl, manager_of
from fl_dispatch import (
    NoImplementationError,
    NotSupported,
    OpManager,
    SelectionPolicy,
    bind_op,
    get_default_manager,
)
from fl_dispatch.errors import BrokenPromiseError
from fl_dispatch.run import recovery
from fl_dispatch.settings.selection_policy import TunedRule

pytestmark = pytest.mark.usefixtures("results_are_names")

OP = "silu_and_mul"
CARE = SelectionPolicy()
BY_TOKENS = SelectionPolicy(
    op_tuned=((OP, (TunedRule(order=("impl:reference.b",), tokens=(1, 1)), TunedRule(order=("impl:default.a",)))),)
)


def x(rows: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(rows, 4, dtype=dtype)


def says(text: str, error: Exception | None = None) -> Callable[[Tensor], Any]:
    def run(x: Tensor) -> Any:
        if error is not None:
            raise error
        return text

    return run


def halves_only(x: Tensor) -> bool | str:
    return x.dtype is torch.float16 or "float16 only"


def three(second: Callable[[Tensor], Any], policy: SelectionPolicy = CARE, **first: Any) -> OpManager:
    """Three candidates, the first of which takes float16 alone."""
    first.setdefault("supports", halves_only)
    return manager_of(
        impl("default.a", says("a"), op=OP, priority=30, **first),
        impl("reference.b", second, op=OP, priority=20),
        impl("reference.c", says("c"), op=OP, priority=10),
        policy=policy,
    )


@pytest.fixture
def careful(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls that took the careful path."""
    seen: list[str] = []
    original = recovery.run

    def run(state: Any, policy: Any, decision: Any, call: Any) -> Any:
        seen.append(decision.op_name)
        return original(state, policy, decision, call)

    monkeypatch.setattr(recovery, "run", run)
    return seen


@pytest.mark.parametrize("policy", [CARE, BY_TOKENS], ids=["always", "by tokens"])
@pytest.mark.parametrize("frozen", [False, True], ids=["free", "frozen"])
def test_only_the_first_of_them_takes_the_careful_path(
    policy: SelectionPolicy, frozen: bool, careful: list[str], request: pytest.FixtureRequest
) -> None:
    manager = three(says("b"), policy)
    bound = manager.bind(OP, "layers.3")
    assert bound(x()) == "b"
    if frozen:
        request.addfinalizer(manager.freezer.thaw)
        manager.freezer.freeze()
        bound = manager.bind(OP, "layers.3")
    careful.clear()
    assert [bound(x()), manager.call(OP, x()), bound(x(3))] == ["b", "b", "b"]
    assert careful == []


def test_what_the_first_takes_is_still_its_own(careful: list[str]) -> None:
    manager = three(says("b"))
    assert [manager.call(OP, x()), manager.call(OP, x())] == ["b", "b"]
    careful.clear()
    assert manager.call(OP, x(dtype=torch.float16)) == "a"
    assert careful == [OP]  # it is not proven yet
    assert [manager.call(OP, x(dtype=torch.float16)), manager.call(OP, x())] == ["a", "b"]
    assert careful == [OP]


def test_a_failure_is_the_one_of_who_failed() -> None:
    broken = False

    def second(x: Tensor) -> str:
        if broken:
            raise RuntimeError("boom")
        return "b"

    manager = three(second)
    assert [manager.call(OP, x()), manager.call(OP, x())] == ["b", "b"]
    broken = True
    assert manager.call(OP, x()) == "c"
    assert manager.get_failed_impls() == {OP: {"reference.b"}}
    assert manager.call(OP, x(dtype=torch.float16)) == "a"
    assert manager.get_selected_impl_id(OP, x()) == "reference.c"


def test_a_failure_behind_two_that_decline_is_the_one_of_who_failed() -> None:
    broken: list[int] = []
    manager = manager_of(
        impl("default.a", says("a"), op=OP, priority=30, supports=halves_only),
        impl("default.b", says("b"), op=OP, priority=25, supports=halves_only),
        impl("reference.c", lambda x: _raise(RuntimeError("boom")) if broken else "c", op=OP, priority=20),
        impl("reference.d", says("d"), op=OP, priority=10),
    )
    for _ in range(3):
        assert manager.call(OP, x()) == "c"
    broken.append(1)
    assert manager.call(OP, x()) == "d"
    assert manager.get_failed_impls() == {OP: {"reference.c"}}


@pytest.mark.parametrize("strict", [False, True])
def test_a_failure_keeps_no_argument_alive(strict: bool) -> None:
    broken: list[int] = []

    def second(x: Tensor) -> str:
        if broken:
            raise RuntimeError("boom")
        return "b"

    manager = three(second, SelectionPolicy(strict=strict))
    assert [manager.call(OP, x()), manager.call(OP, x())] == ["b", "b"]
    broken.append(1)
    argument = x()
    kept = weakref.ref(argument)
    gc.disable()
    try:
        with contextlib.suppress(RuntimeError):
            manager.call(OP, argument)
        del argument
        assert kept() is None
    finally:
        gc.enable()


def test_one_that_never_succeeded_is_compared_with_its_declaration_also_while_frozen(
    request: pytest.FixtureRequest,
) -> None:
    manager = manager_of(
        impl("default.a", says("a"), op=OP, priority=30, supports=halves_only),
        impl("reference.b", lambda x: x.double(), op=OP, priority=20),
    )
    bound = manager.bind(OP, "layers.3")
    request.addfinalizer(manager.freezer.thaw)
    manager.freezer.freeze()
    found = mock.patch.object(recovery, "broken_promise", return_value="it returns what was not declared")
    with found, pytest.raises(BrokenPromiseError, match="not declared"):
        bound(x())


def test_one_that_raises_not_supported_is_passed_over_and_not_banned() -> None:
    manager = three(lambda x: "b" if len(x) < 3 else _raise(NotSupported("short ones only")))
    assert [manager.call(OP, x()), manager.call(OP, x()), manager.call(OP, x(3))] == ["b", "b", "c"]
    assert manager.get_failed_impls() == {}


def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("way", ["strict", "frozen"])
def test_where_nobody_may_take_over_the_error_is_raised_unchanged(way: str, request: pytest.FixtureRequest) -> None:
    broken: list[Exception] = []
    manager = three(lambda x: _raise(broken[0]) if broken else "b", SelectionPolicy(strict=way == "strict"))
    bound = manager.bind(OP, "")
    assert [bound(x()), bound(x())] == ["b", "b"]
    if way == "frozen":
        request.addfinalizer(manager.freezer.thaw)
        manager.freezer.freeze()
    broken.append(RuntimeError("boom"))
    for call in (bound, lambda x: manager.call(OP, x)):
        with pytest.raises(RuntimeError, match="boom") as raised:
            call(x())
        assert raised.value is broken[0]


def test_a_predicate_that_begins_to_raise_is_logged_once_and_its_implementation_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[int] = []

    def supports(x: Tensor) -> bool | str:
        asked.append(len(x))
        if len(x) == 3:
            raise ValueError("no idea")
        return "not yet"

    manager = three(says("b"), supports=supports)
    with caplog.at_level(logging.WARNING):
        assert [manager.call(OP, x(rows)) for rows in (2, 2, 3, 3, 2)] == ["b"] * 5
    assert len(asked) >= 5
    assert [record.levelname for record in caplog.records if "no idea" in record.getMessage()] == ["WARNING"]


def test_a_trace_goes_on_with_the_one_after_next_if_the_next_declines_by_an_error() -> None:
    def second(x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise NotSupported("three rows")
        return x[:, :2] + 2

    impls = (
        impl("default.a", says("a"), op=OP, priority=930, supports=halves_only, opaque=False),
        impl("default.b", second, op=OP, priority=920, opaque=False),
        impl("default.c", lambda x: x[:, :2] + 3, op=OP, priority=910, opaque=False),
    )
    get_default_manager().registry.register_many(impls)
    bound = bind_op(OP, "layers.3")
    for _ in range(2):
        assert bound(x())[0, 0] == 3
    compiled = torch.compile(bound, fullgraph=True, backend="eager")
    assert compiled(x())[0, 0] == 3
    torch._dynamo.reset()
    assert compiled(x(3))[0, 0] == 4


def test_tensors_on_another_device_go_to_who_takes_them() -> None:
    manager = manager_of(
        impl("default.a", says("a"), op=OP, priority=30, supports=halves_only),
        impl("reference.b", says("b"), op=OP, priority=20, device_types=("cpu",)),
        impl("reference.c", says("c"), op=OP, priority=10),
    )
    assert [manager.call(OP, x()), manager.call(OP, x())] == ["b", "b"]
    assert manager.call(OP, x().to("meta")) == "c"


def test_when_all_decline_each_reason_is_told() -> None:
    manager = manager_of(
        impl("default.a", says("a"), op=OP, priority=30, supports=halves_only),
        impl("reference.b", says("b"), op=OP, priority=20, supports=lambda x: len(x) < 3 or "at most two rows"),
    )
    assert [manager.call(OP, x()), manager.call(OP, x())] == ["b", "b"]
    with pytest.raises(NoImplementationError, match=r"(?s)float16 only.*at most two rows"):
        manager.call(OP, x(3))


def test_the_next_one_is_banned_like_any_other() -> None:
    manager = three(lambda x: _raise(RuntimeError("boom")) if len(x) == 3 else "b")
    assert [manager.call(OP, x()), manager.call(OP, x()), manager.call(OP, x(3))] == ["b", "b", "c"]
    assert manager.call(OP, x()) == "c"  # the ban is for this kind of arguments, whatever their number of rows
    manager.clear_failed_impls()
    assert manager.call(OP, x()) == "b"
