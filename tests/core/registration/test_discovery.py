"""Sources of backends; one that fails leaves nothing behind."""

from __future__ import annotations

import logging
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builders import impl
from fl_dispatch import (
    OpRegistry,
    PluginLoadError,
    RegistrationError,
    clear_discovered_plugins,
    discover_plugins,
    get_default_manager,
    get_discovered_plugins,
    reset_default_manager,
)
from fl_dispatch import discovery as discovery_module
from fl_dispatch.discovery import Target, load_backend

pytestmark = pytest.mark.usefixtures("results_are_names")


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a plugin module and names it in VLLM_FL_PLUGIN_MODULES."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str, name: str = "a_plugin") -> str:
        (tmp_path / f"{name}.py").write_text("from fl_dispatch import BackendImplKind, OpImpl\n" + source)
        monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", name)
        sys.modules.pop(name, None)
        reset_default_manager()
        return name

    return write


REGISTER = """
def {name}(registry):
    registry.register_impl(
        OpImpl("silu_and_mul", "vendor.acme", BackendImplKind.VENDOR, lambda x: "acme", vendor="acme")
    )
"""


@pytest.mark.parametrize("name", ["register_builtins", "register", "vllm_fl_register"])
def test_a_named_module_registers_through_its_function(plugin: Any, name: str) -> None:
    plugin(REGISTER.format(name=name))
    manager = get_default_manager()
    manager.ensure_initialized()
    assert manager.registry.get_implementation("silu_and_mul", "vendor.acme") is not None
    assert ("a_plugin", True) in [(p.name, p.loaded) for p in get_discovered_plugins()]


def test_a_function_of_a_module_may_be_named(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = plugin(REGISTER.format(name="of_this_version"))
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", f"{name}:of_this_version")
    reset_default_manager()
    manager = get_default_manager()
    manager.ensure_initialized()
    assert manager.registry.get_implementation("silu_and_mul", "vendor.acme") is not None


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        ("raise ValueError('at import')", PluginLoadError, "at import"),
        ("raise SystemExit(3)", PluginLoadError, "SystemExit"),
        ("import no_such_library", PluginLoadError, "no_such_library"),
        ("register_builtins = None", PluginLoadError, "has no function register_builtins"),
        ("def register_builtins(registry): 1 / 0", PluginLoadError, "ZeroDivisionError"),
        (
            REGISTER.format(name="register") + "\nfirst = register\ndef register(r): first(r); first(r)",
            RegistrationError,
            "Duplicate impl_id",
        ),
    ],
)
def test_a_named_module_that_fails_is_an_error_that_names_it(plugin: Any, source: str, error: type, text: str) -> None:
    plugin(source)
    with pytest.raises(error, match=text) as caught:
        get_default_manager().ensure_initialized()
    assert "a_plugin" in str(caught.value)


def test_a_named_module_that_does_not_exist_is_an_error(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "no.such.module")
    reset_default_manager()
    with pytest.raises(PluginLoadError, match=re.escape("environment variable VLLM_FL_PLUGIN_MODULES")):
        get_default_manager().ensure_initialized()


def test_a_plugin_that_fails_half_way_leaves_nothing(plugin: Any) -> None:
    plugin(REGISTER.format(name="register_builtins") + "    raise RuntimeError('half-way')\n")
    registry = OpRegistry()
    with pytest.raises(PluginLoadError, match="half-way"):
        discover_plugins(registry)
    assert registry.list_operators() == []


def entry_point(value: Any, name: str = "found") -> Any:
    return SimpleNamespace(name=name, value="found_pkg:register", load=lambda: value, dist=None)


def test_an_entry_point_registers_and_one_that_fails_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def good(registry: Any) -> None:
        registry.register_many([impl("vendor.good")])

    def bad(registry: Any) -> None:
        registry.register_many([impl("vendor.bad")])
        raise SystemExit("it calls sys.exit")

    monkeypatch.setattr(
        discovery_module, "entry_points", lambda group: [entry_point(good, "a_good"), entry_point(bad, "bad")]
    )
    registry = OpRegistry()
    with caplog.at_level(logging.WARNING, logger="fl_dispatch"):
        assert discover_plugins(registry) == 1
    assert [i.impl_id for i in registry.get_implementations("demo")] == ["vendor.good"]
    assert [(p.name, p.loaded) for p in get_discovered_plugins() if p.source.startswith("entry")] == [
        ("a_good", True),
        ("bad", False),
    ]
    assert "it calls sys.exit" in caplog.text


def test_discovery_twice_registers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        discovery_module, "entry_points", lambda group: [entry_point(lambda r: r.register_impl(impl("vendor.once")))]
    )
    registry = OpRegistry()
    assert (discover_plugins(registry), discover_plugins(registry)) == (1, 0)
    assert len(registry.get_implementations("demo")) == 1


def test_the_entry_point_group_is_the_documented_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(discovery_module, "entry_points", lambda group: asked.append(group) or [])
    discover_plugins(OpRegistry())
    assert asked == ["vllm_fl.plugin"]
    assert EntryPoint("x", "a:b", asked[0]).group == discovery_module.PLUGIN_GROUP


def test_the_list_of_discovered_plugins_can_be_cleared() -> None:
    load_backend(OpRegistry(), Target("x", "here", lambda: lambda registry: None, named=False))
    assert [p.name for p in get_discovered_plugins()] == ["x"]
    clear_discovered_plugins()
    assert get_discovered_plugins() == []


def test_the_documented_vendor_template_runs_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend of the specification, with the placeholder names filled in."""
    from fl_dispatch.backends import vendor

    package = tmp_path / "acme"
    (package / "impl").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "impl" / "__init__.py").write_text("")
    (package / "impl" / "activation.py").write_text("def silu_and_mul_acme(x):\n    return 'acme'\n")
    (package / "acme.py").write_text(
        """
from ...base import Backend

class AcmeBackend(Backend):
    _available = None

    @property
    def name(self) -> str:
        return "acme"

    @property
    def vendor(self) -> str:
        return "acme"

    def is_available(self) -> bool:
        if AcmeBackend._available is None:
            try:
                import json
                AcmeBackend._available = True
            except ImportError:
                AcmeBackend._available = False
        return AcmeBackend._available

    def silu_and_mul(self, x):
        from .impl.activation import silu_and_mul_acme
        return silu_and_mul_acme(x)
"""
    )
    (package / "register_ops.py").write_text(
        """
from ....types import OpImpl, BackendImplKind, BackendPriority

def register_builtins(registry):
    from .acme import AcmeBackend
    backend = AcmeBackend()
    impls = [
        OpImpl(
            op_name="silu_and_mul",
            impl_id="vendor.acme",
            kind=BackendImplKind.VENDOR,
            fn=backend.silu_and_mul,
            vendor="acme",
            priority=BackendPriority.VENDOR,
        ),
    ]
    registry.register_many(impls)
"""
    )
    monkeypatch.setattr(vendor, "__path__", [*vendor.__path__, str(tmp_path)])
    manager = get_default_manager()
    manager.ensure_initialized()
    found = [i for impls in manager.registry.snapshot().impls_by_op.values() for i in impls if i.vendor == "acme"]
    assert [(i.op_name, i.impl_id, i.is_available()) for i in found] == [("silu_and_mul", "vendor.acme", True)]
    import torch

    from fl_dispatch import with_preference

    with with_preference("vendor"):
        assert manager.call("silu_and_mul", torch.ones(1, 2)) == "acme"


@pytest.mark.parametrize("again", ["its own registry", "the registry of the process"])
def test_a_plugin_that_discovers_plugins_again_leaves_the_others_as_they_are(
    again: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = OpRegistry()

    def recursing(mine: OpRegistry) -> None:
        assert discover_plugins(mine if again == "its own registry" else registry) == 0
        mine.register_impl(impl("vendor.recursing"))

    def other(mine: OpRegistry) -> None:
        mine.register_impl(impl("vendor.other"))

    points = [entry_point(recursing, "a_recursing"), entry_point(other, "b_other")]
    monkeypatch.setattr(discovery_module, "entry_points", lambda group: points)
    assert discover_plugins(registry) == 2
    assert {found.impl_id for found in registry.get_implementations("demo")} == {"vendor.recursing", "vendor.other"}
    found = {plugin.name: plugin.loaded for plugin in get_discovered_plugins()}
    assert found["a_recursing"]
    assert found["b_other"]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_plugin_that_is_installed_and_named_too_registers_once(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    name = plugin(REGISTER.format(name="register_builtins"))
    module = importlib.import_module(name)
    monkeypatch.setattr(discovery_module, "entry_points", lambda group: [entry_point(module.register_builtins)])
    registry = OpRegistry()
    assert discover_plugins(registry) == 1
    assert len(registry.get_implementations("silu_and_mul")) == 1
