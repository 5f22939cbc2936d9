"""Hints: parameters that a caller may add, and that an implementation may lack without being skipped."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import failing, impl, manager_of
from fl_dispatch import (
    OpManager,
    RegistrationError,
    SelectionPolicy,
    bind_op,
    freeze_dispatch,
    get_default_manager,
    policy_context,
    set_global_policy,
    thaw_dispatch,
    with_preference,
)
from fl_dispatch.compiled import views
from fl_dispatch.manager.process import ROOT
from fl_dispatch.ops import OPERATORS, Access, LayerForm, Mode, Operator, Workload, Write
from fl_dispatch.run import keys, recovery
from fl_dispatch.settings import TunedRule

pytestmark = pytest.mark.usefixtures("results_are_names")

OP = "hinted"
MODES = frozenset({Mode.INLINE, Mode.OPAQUE, Mode.EAGER})
X, R = torch.ones(2, 4), torch.zeros(2, 4)


def hinted(x: Tensor, residual: Tensor | None = None, lengths: Any = None) -> Tensor:
    """Adds, and may know the lengths."""
    raise NotImplementedError


def takes(x: Any, residual: Any = None, lengths: Any = None) -> Any:
    return ("takes", lengths)


def lacks(x: Any, residual: Any = None) -> Any:
    return "lacks"


def adds(x: Tensor, residual: Tensor | None = None) -> Tensor:
    return x + 1


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operator]:
    """An operator with a hint, known to the core for one test."""
    operator = Operator(
        name=OP,
        reference=hinted,
        hints=("lengths",),
        layer=LayerForm({"residual": "kept"}),
        modes=MODES,
        fake=lambda x, residual: torch.empty_like(x),
        workload=lambda x, residual: Workload(x.dtype, len(x)),
    )
    monkeypatch.setitem(gc.get_referents(OPERATORS)[0], OP, operator)  # the dictionary behind the catalogue
    monkeypatch.setitem(keys.LAYER_KEYS, OP, f"{OP}:layer")
    torch._dynamo.reset()
    yield operator
    thaw_dispatch()


def ways(manager: OpManager) -> list[Callable[..., Any]]:
    """Every way to call the operator."""
    return [lambda *args, **given: manager.call(OP, *args, **given), manager.bind(OP), manager.resolve(OP)]


def test_an_implementation_that_lacks_a_hint_runs_without_it() -> None:
    manager = manager_of(impl("default.a", lacks, op=OP), impl("reference.b", takes, op=OP))
    for call in ways(manager):
        for _ in range(3):  # the first call, and those after it
            assert call(X) == call(X, lengths=[1]) == call(X, R, [1]) == call(X, residual=R, lengths=[1]) == "lacks"
    assert manager.explain(OP, X, lengths=[1]).chosen is manager.registry.get_implementation(OP, "default.a")


def test_an_implementation_that_takes_a_hint_gets_it_and_stays_bare() -> None:
    manager = manager_of(impl("default.a", takes, op=OP))
    for call in ways(manager):
        for _ in range(3):
            assert call(X, lengths=[1]) == call(X, R, [1]) == ("takes", [1])
            assert call(X) == ("takes", None)
    entries = manager.table_keeper.root.entries
    assert entries[OP] is entries[f"{OP}@"] is manager.resolve(OP) is takes


def test_a_later_policy_may_pick_an_implementation_that_lacks_the_hint() -> None:
    manager = manager_of(impl("default.a", takes, op=OP), impl("vendor.b", lacks, op=OP))
    for call in (lambda *args: manager.call(OP, *args), manager.bind(OP)):
        assert call(X, None, [1]) == ("takes", [1])
        with with_preference("vendor"):
            assert [call(X, None, [1]) for _ in range(3)] == ["lacks"] * 3
        assert call(X, None, [1]) == ("takes", [1])
    set_global_policy(SelectionPolicy(prefer="vendor"))
    assert call(X, None, [1]) == "lacks"


def test_other_parameters_still_decide() -> None:
    manager = manager_of(
        impl("default.a", lambda x, lengths=None: "no residual", op=OP), impl("vendor.b", lacks, op=OP)
    )
    for call in (lambda *args: manager.call(OP, *args), manager.bind(OP)):
        for _ in range(3):
            assert call(X, None, [1]) == "no residual"
            assert call(X, R, [1]) == "lacks"


@pytest.mark.parametrize("fn", [takes, lacks, lambda obj, x: "lacks", lambda obj, x, lengths=None: ("takes", lengths)])
def test_a_call_with_a_layer_first_may_carry_a_hint(fn: Any) -> None:
    manager = manager_of(impl("default.a", fn, op=OP))
    expected = ("takes", [1]) if "lengths" in inspect.signature(fn).parameters else "lacks"
    layer = SimpleNamespace(kept=R)
    for _ in range(3):
        assert manager.call(OP, layer, X, [1]) == manager.call(OP, layer, X, lengths=[1]) == expected
        assert manager.call(OP, X, R, [1]) == expected  # an implementation that takes a layer gets a stand-in


@pytest.mark.parametrize("other", [takes, lacks])
def test_after_a_failure_the_next_one_gets_the_hint_if_it_takes_it(other: Any) -> None:
    manager = manager_of(impl("default.a", failing(RuntimeError("broken")), op=OP), impl("vendor.b", other, op=OP))
    expected = ("takes", [1]) if other is takes else "lacks"
    assert manager.call(OP, X, None, [1]) == manager.call(OP, X, lengths=[1]) == expected
    assert manager.get_failed_impls() == {OP: {"default.a"}}


def test_one_that_fails_once_it_is_proven_is_followed_by_one_that_lacks_the_hint() -> None:
    def fails_for_two(x: Any, residual: Any = None, lengths: Any = None) -> Any:
        if lengths == [2]:
            raise RuntimeError("two")
        return lengths

    manager = manager_of(impl("default.a", fails_for_two, op=OP), impl("vendor.b", lacks, op=OP))
    bound = manager.bind(OP)
    assert (bound(X, None, [1]), bound(X, None, [2])) == ([1], "lacks")


def test_a_hint_does_not_enter_the_kind_of_arguments() -> None:
    manager = manager_of(impl("default.a", failing(RuntimeError("broken")), op=OP), impl("vendor.b", lacks, op=OP))
    manager.call(OP, None, lengths=torch.ones(3, dtype=torch.int32))
    (kinds,) = manager.state.failures.failures().values()
    assert [(kind.dtype, kind.rank) for kind in kinds] == [(None, 0)]


def test_supports_gets_the_hints_that_it_names() -> None:
    seen = []

    def asks(x: Any, residual: Any, *, lengths: Any) -> bool:
        seen.append(lengths)
        return lengths != [2]

    manager = manager_of(
        impl("default.a", takes, op=OP, supports=asks),
        impl("vendor.b", lacks, op=OP, supports=lambda x, residual: True),
    )
    for call in (lambda *args, **given: manager.call(OP, *args, **given), manager.bind(OP)):
        for _ in range(3):
            assert call(X, lengths=[1]) == ("takes", [1])
            assert call(X, lengths=[2]) == "lacks"
    assert {str(lengths) for lengths in seen} == {"[1]", "[2]"}


def test_supports_gets_a_hint_without_the_path_of_a_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = manager_of(impl("default.a", takes, op=OP, supports=lambda x, residual, *, lengths: lengths == [1]))
    calls = [lambda *args: manager.call(OP, *args), manager.bind(OP)]
    for call in calls:
        call(X, R, [1])
    monkeypatch.setattr(recovery, "run", failing(AssertionError("a first call")))
    assert [call(X, R, [1]) for call in calls] == [("takes", [1])] * 2


def test_a_conditional_choice_looks_at_no_hint() -> None:
    rule = TunedRule(order=("vendor",), tokens=(2, 2))
    policy = SelectionPolicy(op_tuned=((OP, (rule,)),))
    manager = manager_of(impl("default.a", takes, op=OP), impl("vendor.b", lacks, op=OP), policy=policy)
    for call in (lambda *args: manager.call(OP, *args), manager.bind(OP)):
        for _ in range(3):
            assert call(X, None, [1]) == "lacks"
            assert call(X[:1], None, [1]) == ("takes", [1])


def test_counting_sees_calls_that_drop_a_hint() -> None:
    manager = manager_of(impl("default.a", lacks, op=OP))
    manager.set_counting()
    assert [manager.call(OP, X, lengths=[1]) for _ in range(3)] == ["lacks"] * 3
    assert manager.call_counts() == {(OP, "default.a"): 3}


@pytest.mark.parametrize(("fn", "bare"), [(takes, True), (lacks, False)])
def test_a_frozen_operator_is_the_implementation_itself_if_that_takes_the_hint(fn: Any, bare: bool) -> None:
    get_default_manager().registry.register_impl(impl("default.a", fn, op=OP))
    freeze_dispatch()
    bound = bind_op(OP)
    assert (bound is fn) is bare
    assert bound(X, lengths=[1]) == (("takes", [1]) if bare else "lacks")


@pytest.mark.parametrize("opaque", [False, True])
def test_compiled_code_passes_a_hint_where_it_is_traced_and_drops_it_at_a_view(opaque: bool) -> None:
    def scaled(x: Tensor, residual: Tensor | None = None, lengths: Any = None) -> Tensor:
        return x * (1 if lengths is None else lengths[0])

    manager = get_default_manager()
    manager.registry.register_many(
        [impl("default.a", scaled, op=OP, opaque=opaque), impl("vendor.b", adds, op=OP, opaque=opaque)]
    )
    compiled = torch.compile(bind_op(OP), fullgraph=True, backend="aot_eager")
    assert compiled(X, None, [3]).tolist() == (X if opaque else X * 3).tolist()
    with policy_context(SelectionPolicy(prefer="vendor")):
        assert compiled(X, None, [3]).tolist() == (X + 1).tolist()


def test_a_view_has_no_hint_in_its_schema_and_takes_a_full_call(declared: Operator) -> None:
    get_default_manager().registry.register_impl(impl("default.a", adds, op=OP))
    (variant,) = views.variants(declared)
    assert views.schema(declared, variant) == "(Tensor x, Tensor? residual, str scope) -> Tensor"
    assert views.view(ROOT, declared)(X, None, [1]).tolist() == (X + 1).tolist()


def test_a_hint_of_an_implementation_is_checked_like_any_parameter() -> None:
    with pytest.raises(RegistrationError, match="'lengths' has the default 3, the declaration has the default None"):
        manager_of(impl("default.a", lambda x, residual=None, lengths=3: x, op=OP))
    with pytest.raises(RegistrationError, match="'lengths' is keyword-only"):
        manager_of(impl("default.a", lambda x, residual=None, *, lengths=None: x, op=OP))
    with pytest.raises(RegistrationError, match="'length' is no parameter of the declaration; did you mean 'lengths'"):
        manager_of(impl("default.a", takes, op=OP, supports=lambda x, residual, length: True))


def test_a_callable_that_cannot_be_inspected_gets_no_hint() -> None:
    def wraps(*args: Any, **kwargs: Any) -> Any:
        return lacks(*args, **kwargs)

    for fn, signature in ((lacks, "unchecked"), (wraps, "checked")):
        manager = manager_of(impl("default.a", fn, op=OP, signature=signature))
        for call in ways(manager):
            assert [call(X, None, [1]) for _ in range(3)] == ["lacks"] * 3


def test_hints_are_the_last_parameters_default_to_none_and_are_nothing_else() -> None:
    def wrong(lengths: Any, x: Any, count: Any = 0, out: Any = None) -> None: ...

    for hints, fields, message in (
        (("lengths",), {}, "must be the last parameters"),
        (("count", "out"), {}, "the hint count must have the default None"),
        (("out",), {"writes": {"out": Write(Access.OUTPUT)}}, "out is a hint"),
        (("out",), {"layer": LayerForm({"out": "out"})}, "out is a hint"),
    ):
        with pytest.raises(ValueError, match=message):
            Operator(name="wrong", reference=wrong, hints=hints, **fields)
