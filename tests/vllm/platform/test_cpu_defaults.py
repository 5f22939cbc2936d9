"""The start on a CPU where the user chose nothing: compiled if Inductor can build C++, and then fused references."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode

from fl_dispatch import BackendImplKind, OpImpl, SelectionPolicy, get_default_manager, get_policy, set_global_policy
from fl_dispatch.devices import CPU
from fl_dispatch.hosting.compilation import inductor
from fl_dispatch.manager import reset_default_manager
from fl_dispatch.settings.origins import DEFAULT, Origin
from vllm_fl.compilation import compile


def configured(mode: CompilationMode | None = None, **given: Any) -> Any:
    compilation = SimpleNamespace(mode=mode, backend="inductor")
    return SimpleNamespace(**{"compilation_config": compilation, "lora_config": None, "model_config": None, **given})


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with a C++ compiler; called, one that lacks something."""
    lacks: list[str | None] = [None]
    monkeypatch.setattr(inductor, "missing_for_cpp", lambda: lacks[0])
    return lambda what: lacks.__setitem__(0, what)


def test_a_model_is_compiled_as_one_graph(compiler: Any) -> None:
    assert compile.default_mode(configured(), CPU) == CompilationMode.DYNAMO_TRACE_ONCE


def test_without_a_compiler_it_runs_eagerly_and_the_log_says_what_is_missing(
    compiler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    compiler("a C++ compiler")
    with caplog.at_level("INFO", "vllm_fl"):
        assert compile.default_mode(configured(), CPU) == CompilationMode.NONE
    assert "eagerly, because compilation needs a C++ compiler" in caplog.text


def test_a_model_with_adapters_is_compiled(compiler: Any) -> None:
    assert compile.default_mode(configured(lora_config=object()), CPU) == CompilationMode.DYNAMO_TRACE_ONCE


def test_a_model_on_a_device_without_cpp_runs_eagerly(compiler: Any) -> None:
    assert compile.default_mode(configured(), replace(CPU, inductor=None)) == CompilationMode.NONE


@pytest.fixture
def kernels() -> Iterator[None]:
    """Two kernels that come before their references; Inductor is faster than one of them."""
    manager, policy = get_default_manager(), get_policy()
    manager.ensure_initialized()
    for op, properties in (("relu2", {"inductor": False}), ("quick_gelu", {})):
        manager.registry.register_impl(
            OpImpl(op, "vendor.quick", BackendImplKind.VENDOR, lambda x: x, vendor="quick", properties=properties)
        )
    yield
    set_global_policy(policy)
    reset_default_manager()  # what is registered stays registered


def orders() -> dict[str, list[str]]:
    return get_policy().per_op_order_dict


@pytest.mark.usefixtures("kernels")
def test_the_reference_runs_where_inductor_fuses_it_faster() -> None:
    set_global_policy(SelectionPolicy(origins={"prefer": DEFAULT}))
    assert inductor.fused(["relu2", "quick_gelu"]) == ["relu2"]
    compile.leave_to_inductor(configured(CompilationMode.NONE), CPU)
    assert orders() == {}
    compile.leave_to_inductor(configured(CompilationMode.DYNAMO_TRACE_ONCE), CPU)
    assert orders()["relu2"] == ["reference", "vendor", "flagos"]
    assert "quick_gelu" not in orders()
    assert "Inductor" in str(get_policy().origin("per_op_order.relu2"))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("prefer", "wish"), [("flagos", False), ("vendor", True)])
def test_a_tuned_file_that_repeats_the_default_preference_is_no_wish(prefer: str, wish: bool) -> None:
    origin = Origin("/home/me/.config/fl_dispatch/platforms/cpu-x.yaml (platform, your own), line 1")
    set_global_policy(SelectionPolicy(prefer=prefer, origins={"prefer": origin}))
    compile.leave_to_inductor(configured(CompilationMode.DYNAMO_TRACE_ONCE), CPU)
    assert ("relu2" in orders()) is not wish


@pytest.mark.usefixtures("kernels")
def test_an_order_and_a_preference_of_the_users_stay() -> None:
    compiled = configured(CompilationMode.DYNAMO_TRACE_ONCE)
    set_global_policy(SelectionPolicy(prefer="vendor", origins={"prefer": Origin("environment variable")}))
    compile.leave_to_inductor(compiled, CPU)
    assert orders() == {}
    own = (("relu2", ("vendor:quick",)),)
    set_global_policy(SelectionPolicy(per_op_order=own, origins={"prefer": DEFAULT}))
    compile.leave_to_inductor(compiled, CPU)
    assert orders()["relu2"] == ["vendor:quick"]
