"""A helper of a declaration, and a ``supports``, name the parameters that they look at."""
# ruff: noqa: PLW0108  a lambda's parameters are the subject here

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from builders import impl, manager_of
from fl_dispatch import RegistrationError
from fl_dispatch.ops import Operator, Workload
from fl_dispatch.ops.declaration import SmallState

X, WEIGHT = torch.ones(3, 4), torch.full((4,), 2.0)
NORM = "rms_norm"


def declared(**helpers: Callable[..., Any]) -> Operator:
    def scaled(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: float = 3.0, note: Any = None) -> Tensor:
        """Scale rows."""
        raise NotImplementedError

    return Operator(name="scaled", reference=scaled, hints=("note",), **helpers)


@pytest.mark.parametrize(
    ("supports", "seen"),
    [
        pytest.param(lambda weight: seen_by(weight), (WEIGHT,), id="one"),
        pytest.param(lambda epsilon, x: seen_by(epsilon, x), (0.5, X), id="in an order of its own"),
        pytest.param(
            lambda epsilon, weight, residual, x: seen_by(epsilon, weight, residual, x),
            (0.5, WEIGHT, None, X),
            id="all, in an order of its own",
        ),
        pytest.param(
            lambda x, other, weight, limit: seen_by(x, other, weight, limit),
            (X, None, WEIGHT, 0.5),
            id="some by other names, so in order",
        ),
        pytest.param(lambda x, *, epsilon: seen_by(x, epsilon), (X, 0.5), id="by keyword alone"),
        pytest.param(lambda x, limit=7: seen_by(x, limit), (X, 7), id="beside a default of its own"),
        pytest.param(lambda: seen_by(), (), id="none"),
        pytest.param(lambda *args: seen_by(*args), (X, None, WEIGHT, 0.5), id="all, uncounted"),
        pytest.param(lambda a, b, c, d: seen_by(a, b, c, d), (X, None, WEIGHT, 0.5), id="all, by other names"),
    ],
)
def test_supports_gets_what_it_names(supports: Callable[..., bool], seen: tuple[Any, ...]) -> None:
    SEEN.clear()
    manager = manager_of(impl("vendor.a", normed, op=NORM, supports=supports))
    for _ in range(3):  # the first call goes another way than those behind it
        manager.call(NORM, X, None, WEIGHT, 0.5)
    assert SEEN
    assert all(list(map(id, call)) == list(map(id, seen)) for call in SEEN)


def test_a_misspelt_name_is_refused_with_the_nearest_one() -> None:
    for supports in (
        lambda wieght: True,
        lambda x, wieght=None: True,
        lambda wieght, x, residual, epsilon: True,  # as many as all, so that each would get another's argument
    ):
        with pytest.raises(
            RegistrationError, match="'wieght' is no parameter of the declaration; did you mean 'weight'"
        ):
            manager_of(impl("vendor.a", normed, op=NORM, supports=supports))
    with pytest.raises(RegistrationError, match=re.escape("which has x, residual, weight, epsilon")):
        manager_of(impl("vendor.a", normed, op=NORM, supports=lambda rows_per_program: True))
    with pytest.raises(ValueError, match="operator scaled: its 'fake' does not fit: 'wieght' is no parameter"):
        declared(fake=lambda wieght: wieght)
    with pytest.raises(ValueError, match="operator scaled: its 'small_state' does not fit: 'wieght' is no parameter"):
        declared(small_state=SmallState(lambda wieght: {"weight": wieght}, lambda weight: (weight,)))


def test_a_declared_name_at_the_place_of_another_is_refused_where_all_come_in_order() -> None:
    for supports, why in (
        (lambda weight, x, residual, other: True, "'other' is no parameter of the declaration"),
        (lambda weight, *others: True, "it takes all that come"),
    ):
        with pytest.raises(RegistrationError, match=f"{why}, so they come in order, and 'weight' would get 'x'"):
            manager_of(impl("vendor.a", normed, op=NORM, supports=supports))
    with pytest.raises(ValueError, match="its 'work' does not fit: .* and 'scale' would get 'bias'"):
        declared(work=lambda x, rows, scale, other: 1)


def test_a_helper_of_a_declaration_may_name_parameters_by_keyword_alone() -> None:
    assert declared(fake=lambda x, *, scale, bias: (x, scale, bias)).fake(X, WEIGHT, None, 5.0) == (X, 5.0, None)
    assert declared(fake=lambda *, scale: scale).fake(X, WEIGHT) == 3.0
    assert declared(fake=lambda x, weight, bias, *, scale: scale).fake(X, WEIGHT) == 3.0


def test_a_helper_that_fits_no_call_is_refused_when_it_is_declared() -> None:
    for fake in (lambda *args, scale: scale, lambda x, **others: x):
        with pytest.raises(ValueError, match="operator scaled: its 'fake' does not fit: it takes .* neither by name"):
            declared(fake=fake)


def test_a_helper_of_a_declaration_gets_what_it_names() -> None:
    for fake in (
        lambda scale, x: (scale, x),
        lambda x, weight, bias, scale: (scale, x),
        lambda *args: (args[3], args[0]),
    ):
        assert declared(fake=fake).fake(X, WEIGHT, None, 5.0, "a hint") == (5.0, X)
    workload = declared(workload=lambda x: Workload(x.dtype, len(x))).workload
    assert workload(X, WEIGHT, None, 5.0, "a hint") == Workload(torch.float32, 3)
    for helper in ("terms", "narrow_terms", "work"):
        assert getattr(declared(**{helper: lambda: 9}), helper)(X, WEIGHT) == 9


def test_an_argument_that_a_call_leaves_out_is_at_its_default() -> None:
    assert declared(fake=lambda bias, scale: (bias, scale)).fake(X, WEIGHT) == (None, 3.0)


SEEN: list[tuple[Any, ...]] = []


def seen_by(*args: Any) -> bool:
    SEEN.append(args)
    return True


def normed(x: Any, residual: Any, weight: Any, epsilon: float = 1e-6) -> Any:
    return x
