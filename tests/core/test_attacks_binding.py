"""Attacks on readers and writers: who waits for whom, and what a change costs when many layers are bound."""

from __future__ import annotations

import threading

from builders import impl, manager_of
from fl_dispatch import SelectionPolicy, policy_context


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
