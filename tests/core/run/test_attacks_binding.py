"""Attacks on readers and writers: who waits for whom, and what a change costs when many layers are bound."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import processes
from builders import impl, manager_of
from fl_dispatch import OpManager, SelectionPolicy, get_policy, policy_context, set_global_policy

pytestmark = pytest.mark.usefixtures("results_are_names")


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
def test_an_interrupted_change_has_happened_in_no_manager(change: str) -> None:
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
        changed_nothing = change == "the global policy" or manager is managers[0]
        as_before = "default.a" if changed_nothing else "vendor.b"
        assert {*answers, manager.explain("demo").chosen.impl_id} == {as_before}
    assert get_policy().prefer == ("flagos" if change == "the global policy" else "vendor")


# ---- backends whose code meets a module that another thread is importing

MEETING = """
import threading
starting, importing = threading.Event(), threading.Event()
"""
STARTS = """
import meeting
meeting.starting.set()

def register_builtins(registry):
    pass
"""
BINDS = """
import meeting
from fl_dispatch import bind_op
meeting.importing.set()
assert meeting.starting.wait(20)
bind_op("silu_and_mul")
done = True

def register_builtins(registry):
    pass
"""
BINDS_IN_A_THREAD = """
import threading
import meeting
from fl_dispatch import bind_op
from fl_dispatch.manager import start
start.WAIT_SECONDS = 0.1
meeting.importing.set()
assert meeting.starting.wait(20)
thread = threading.Thread(target=bind_op, args=("silu_and_mul",))
thread.start()
thread.join()
done = True
"""
NEEDS = """
import meeting
from fl_dispatch import BackendImplKind, OpImpl

def needs():
    meeting.starting.set()
    assert meeting.importing.wait(20)
    from binds import {name}
    return True

def register_builtins(registry):
    {register}
    kind = BackendImplKind.VENDOR
    registry.register_impl(OpImpl("demo", "vendor.lazy", kind, lambda x: "lazy", vendor="lazy", available={check}))
"""
TWO_THREADS = """
import importlib, threading
import meeting, torch
from fl_dispatch import call_op
importer = threading.Thread(target=importlib.import_module, args=("binds",))
importer.start()
assert meeting.importing.wait(20)
shape = call_op("silu_and_mul", torch.ones(1, 2)).shape
importer.join(20)
import binds
print(tuple(shape), binds.done, *(call_op("demo", 1) for _ in {needs}))
"""


def two_threads(folder: Path, modules: dict[str, str], plugins: str) -> processes.Finished:
    """One thread imports ``binds``, whose body dispatches, while another one makes the first call."""
    for name, text in {"meeting": MEETING, **modules}.items():
        (folder / f"{name}.py").write_text(text)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_FL_PLUGIN_MODULES": plugins}
    needs = [name for name in plugins.split(",") if name == "needs"]
    return processes.python("-c", TWO_THREADS.format(needs=needs), environment=environment, timeout=60)


def test_a_plugin_may_dispatch_while_a_thread_imports_it_and_another_makes_the_first_call(tmp_path: Path) -> None:
    ended = two_threads(tmp_path, {"starts": STARTS, "binds": BINDS}, "starts,binds")
    assert (ended.returncode, ended.last_line) == (0, "(1, 1) True")


IN_REGISTRATION = {"register": "needs()", "check": "None"}
IN_ITS_CHECK = {"register": "pass", "check": "needs"}


@pytest.mark.parametrize(
    ("needed", "body"),
    [(IN_REGISTRATION, BINDS), (IN_REGISTRATION, BINDS_IN_A_THREAD), (IN_ITS_CHECK, BINDS)],
    ids=["by its registration", "by its registration, and its body waits for a thread", "by its availability check"],
)
def test_a_module_that_dispatches_may_be_imported_by_a_thread_and_needed_by_a_backend_in_another(
    needed: dict[str, str], body: str, tmp_path: Path
) -> None:
    modules = {"binds": body, "needs": NEEDS.format(name="done", **needed)}
    ended = two_threads(tmp_path, modules, "needs")
    assert (ended.returncode, ended.last_line) == (0, "(1, 1) True lazy"), ended.log


BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "binding_cost.py"


@pytest.fixture
def calls(tmp_path: Path) -> Callable[..., int]:
    """How many functions one part of the benchmark calls, in a process of its own."""

    def counted(part: str, *, layers: int, kept: int) -> int:
        file = tmp_path / "result.json"
        arguments = ("--layers", str(layers), "--kept", str(kept), "--count", "--json", str(file))
        ended = processes.python(str(BENCHMARK), *arguments, environment=os.environ, timeout=120)
        assert ended.returncode == 0, ended.log
        found: int = json.loads(file.read_text())["results"][part]["calls"]
        return found

    return counted


def test_the_cost_of_binding_a_layer_does_not_grow_with_the_layers_that_are_bound(calls: Any) -> None:
    part = "bind ten more layers"
    assert calls(part, layers=240, kept=0) == pytest.approx(calls(part, layers=60, kept=0), rel=0.1)


@pytest.mark.parametrize(("part", "times"), [("change the policy", 1.1), ("bind ten more layers", 4.5)])
def test_the_cost_of_a_change_hardly_grows_with_the_policies_that_are_kept(part: str, times: float, calls: Any) -> None:
    assert calls(part, layers=20, kept=32) < times * calls(part, layers=20, kept=0)
