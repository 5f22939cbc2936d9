"""Attacks on readers and writers: who waits for whom, and what a change costs when many layers are bound."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from builders import impl, manager_of
from fl_dispatch import OpManager, SelectionPolicy, get_policy, policy_context, set_global_policy


def test_a_call_of_any_manager_in_a_context_waits_for_no_writer() -> None:
    manager = manager_of(impl("default.a"), impl("vendor.b"))
    policy = SelectionPolicy(prefer="vendor")
    with policy_context(policy):
        assert manager.call("demo", 1) == "vendor.b"
    writing, go_on = threading.Event(), threading.Event()

    def slow_check() -> bool:
        writing.set()
        return go_on.wait(30)

    late = impl("vendor.late", op="other", available=slow_check)
    writer = threading.Thread(target=manager.registry.register_impl, args=(late,))
    seen: list[str] = []

    def read() -> None:
        with policy_context(policy):
            seen.extend(manager.call("demo", 1) for _ in range(3))

    writer.start()
    assert writing.wait(30)
    reader = threading.Thread(target=read)
    reader.start()
    reader.join(5)
    while_writing = list(seen)
    go_on.set()
    writer.join(30)
    reader.join(30)
    assert while_writing == ["vendor.b"] * 3


INTERRUPTED: dict[str, Callable[[OpManager], object]] = {
    "the global policy": lambda manager: set_global_policy(SelectionPolicy(prefer="vendor")),
    "facts": lambda manager: manager.set_facts(here=True),
}


@pytest.mark.parametrize("change", INTERRUPTED)
def test_an_interrupted_change_leaves_one_truth_in_every_manager(change: str) -> None:
    interrupts: list[BaseException] = []

    def check() -> bool:
        if interrupts:
            raise interrupts.pop()
        return True

    def made() -> OpManager:
        impls = impl("default.a"), impl("vendor.b", available=check, requires={"here": True})
        return manager_of(*impls, policy=SelectionPolicy(allow_vendors=frozenset()))

    managers = [made() for _ in range(3)]
    if change == "facts":
        managers[0].set_facts(here=False)
        set_global_policy(SelectionPolicy(prefer="vendor"))
    assert managers[0].call("demo", 1) == "default.a"
    interrupts.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        INTERRUPTED[change](managers[0])
    for manager in managers:
        answers = {manager.call("demo", 1), manager.bind("demo")(1), manager.get_selected_impl_id("demo")}
        assert {*answers, manager.explain("demo").chosen.impl_id} == {"vendor.b"}
    assert get_policy().prefer == "vendor"
