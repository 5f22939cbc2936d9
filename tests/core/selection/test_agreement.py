"""Whatever happened before, ``resolve``, ``call``, ``get_selected_impl_id`` and ``explain`` name one implementation."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import sampling
from builders import impl, manager_of
from fl_dispatch import (
    NoImplementationError,
    NotSupported,
    OpManager,
    SelectionPolicy,
    set_global_policy,
    with_allowed_vendors,
    with_preference,
    with_strict_mode,
)

pytestmark = pytest.mark.usefixtures("results_are_names")

Tensor = torch.Tensor
IDS = ["default.a", "vendor.b", "vendor.c", "reference.d"]
DTYPES = {"half": torch.float16, "single": torch.float32}
OPS = ["silu_and_mul", "rms_norm"]

ids, ops, dtypes, prefers = (st.sampled_from(x) for x in (IDS, OPS, list(DTYPES), ["flagos", "vendor", "reference"]))
contexts = st.sampled_from(["none", "flagos", "vendor", "reference", "strict", "vendor b only"])
steps = st.one_of(
    st.tuples(st.just("call"), ops, dtypes, st.booleans(), contexts),
    st.tuples(st.just("call"), ops, dtypes, st.booleans(), contexts),
    st.tuples(st.just("behave"), ids, dtypes, st.sampled_from(["work", "fail", "decline", "decline in time"])),
    st.tuples(st.just("support"), ids, st.sampled_from([True, False, "not today", ZeroDivisionError()])),
    st.tuples(st.just("policy"), prefers, st.booleans()),
    st.tuples(st.just("be available"), ids, st.booleans()),
    st.tuples(st.just("register"), st.sampled_from([("vendor.new", 120), ("default.new", 10)])),
    st.tuples(st.just("clear")),
    st.tuples(st.just("count"), st.booleans()),
)


class World:
    """A manager whose implementations behave as they are told, and a record of which ran."""

    def __init__(self) -> None:
        self.behaviour: dict[tuple[str, str], str] = {}
        self.supported: dict[str, Any] = {}
        self.available: dict[str, bool] = {}
        self.ran: list[str] = []
        self.manager: OpManager = manager_of(*(self.make(op, name) for op in OPS for name in IDS))

    def make(self, op: str, name: str, **fields: Any) -> Any:
        def body(x: Tensor, residual: Tensor | None) -> Any:
            self.ran.append(name)
            match self.behaviour.get((name, "half" if x.dtype is torch.float16 else "single"), "work"):
                case "decline in time":
                    raise NotSupported(name)
                case "work":
                    return name, x.clone(), None if residual is None else residual.clone()
                case behaviour:
                    if residual is not None:
                        residual.fill_(-1)
                        x.fill_(-1)
                    raise NotImplementedError(name) if behaviour == "decline" else RuntimeError(name)

        def supports(*args: Any) -> Any:
            answer = self.supported.get(name, True)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def silu_and_mul(x: Tensor) -> Any:
            return body(x, None)

        def rms_norm(x: Tensor, residual: Any = None, weight: Any = None, epsilon: float = 1e-6) -> Any:
            return body(x, residual)

        fn = silu_and_mul if op == "silu_and_mul" else rms_norm
        fields.setdefault("supports", supports if name == "vendor.b" else None)
        return impl(name, fn, op=op, available=lambda: self.available.get(name, True), **fields)

    def call(self, op: str, dtype: str, contiguous: bool) -> None:
        def arguments() -> tuple[Any, ...]:
            x = torch.ones(4, 4, dtype=DTYPES[dtype])
            x = x if contiguous else torch.ones(4, 8, dtype=DTYPES[dtype])[:, :4]
            return (x,) if op == "silu_and_mul" else (x, torch.ones(4, 4, dtype=DTYPES[dtype]), None, 1e-6)

        named = self.names(op, arguments)
        self.ran.clear()
        try:
            ran, *values = self.manager.call(op, *arguments())
        except (RuntimeError, NotImplementedError):
            pass  # allowed: strict, all failed, or an argument may be half overwritten; what ran first is checked below
        else:
            assert self.ran[-1] == ran
            assert all(value is None or value.eq(1).all() for value in values), "a wrong answer"
        assert self.ran[:1] == ([] if named is None else [named])

    def names(self, op: str, arguments: Any) -> str | None:
        """The implementation that all ways of asking name."""
        chosen = self.manager.explain(op, *arguments()).chosen
        if chosen is None:
            for ask in (self.manager.get_selected_impl_id, self.manager.resolve):
                with pytest.raises(NoImplementationError):
                    ask(op, *arguments())
            return None
        assert self.manager.get_selected_impl_id(op, *arguments()) == chosen.impl_id
        self.ran.clear()
        with contextlib.suppress(RuntimeError, NotImplementedError):
            self.manager.resolve(op, *arguments())(*arguments())
        assert self.ran == [chosen.impl_id]
        return chosen.impl_id


def inside(context: str) -> Any:
    if context == "strict":
        return with_strict_mode()
    if context == "vendor b only":
        return with_allowed_vendors("b")
    return contextlib.nullcontext() if context == "none" else with_preference(context)


@sampling.fuzz(100, 240, suppress_health_check=list(HealthCheck))
@given(script=st.lists(steps, min_size=5, max_size=25))
def test_all_ways_of_asking_agree_at_every_step(script: list[tuple[Any, ...]]) -> None:
    logging.getLogger("fl_dispatch").setLevel(logging.ERROR)
    world = World()
    for step in script:
        match step:
            case "call", op, dtype, contiguous, context:
                with inside(context):
                    world.call(op, dtype, contiguous)
            case "behave", name, dtype, behaviour:
                world.behaviour[name, dtype] = behaviour
            case "support", name, answer:
                world.supported[name] = answer
            case "policy", prefer, strict:
                set_global_policy(SelectionPolicy(prefer=prefer, strict=strict))
            case "be available", name, available:
                world.available[name] = available
                world.manager.ask_again()
            case "register", (name, priority):
                if world.manager.registry.get_implementation(OPS[0], name) is None:
                    world.manager.registry.register_many([world.make(op, name, priority=priority) for op in OPS])
            case ("clear",):
                world.manager.clear_failed_impls()
            case "count", on:
                world.manager.set_counting(on)
