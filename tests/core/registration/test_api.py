"""A package that was built for another core is refused in one sentence with both numbers, and is not imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builders import impl
from fl_dispatch import (
    OpRegistry,
    PluginLoadError,
    clear_discovered_plugins,
    discover_plugins,
    get_discovered_plugins,
)
from fl_dispatch.devices import detect
from fl_dispatch.settings import reset_settings
from fl_dispatch.version import __version__

Install = Callable[..., None]
SERVES = f"the API for backends, fl-dispatch {__version__} serves 1"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package ``acme_api_fl`` with metadata as an installer writes it; its backend's text is ``source``."""

    def installed(stated: str, source: str = "", device: bool = False) -> None:
        clear_discovered_plugins()
        group, target = ("vllm_fl.device", "SPEC") if device else ("vllm_fl.plugin", "register_builtins")
        (tmp_path / "acme_api_fl.py").write_text(source or "raise SystemExit('imported')")
        metadata = tmp_path / "acme_api_fl-2.5.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-api\nVersion: 2.5\n")
        api = f"[fl_dispatch.api]\nacme = {stated}\n" if stated else ""
        (metadata / "entry_points.txt").write_text(f"[{group}]\nacme = acme_api_fl:{target}\n{api}")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "acme_api_fl", raising=False)

    yield installed
    sys.modules.pop("acme_api_fl", None)


REGISTERS = """
from fl_dispatch import BackendImplKind, OpImpl

def register_builtins(registry):
    registry.register_impl(
        OpImpl("silu_and_mul", "vendor.acme", BackendImplKind.VENDOR, lambda x: x, vendor="acme", signature="unchecked")
    )
"""


@pytest.mark.parametrize("stated", ["", "fl_dispatch.api:V1"])
def test_a_package_of_this_version_or_without_one_is_loaded(install: Install, stated: str) -> None:
    install(stated, REGISTERS)
    registry = OpRegistry()
    assert discover_plugins(registry) == 1
    assert registry.get_implementation("silu_and_mul", "vendor.acme") is not None


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ("fl_dispatch.api:V7", f"is built for version 7 of {SERVES}: install a newer fl-dispatch"),
        ("fl_dispatch.api:V0", f"is built for version 0 of {SERVES}: install a newer one of it"),
        ("fl_dispatch.api:newest", "states no version of the API: 'fl_dispatch.api:newest' is not fl_dispatch.api:V1"),
    ],
)
def test_a_package_for_another_core_is_refused_and_not_imported(install: Install, stated: str, said: str) -> None:
    install(stated)
    registry = OpRegistry()
    registry.register_impl(impl("reference.torch", op="rms_norm", signature="unchecked"))
    assert discover_plugins(registry) == 0
    (found,) = get_discovered_plugins()
    assert (found.name, found.loaded) == ("acme", False)
    assert f"acme-api 2.5 {said}" in found.detail
    assert "acme_api_fl" not in sys.modules
    assert registry.list_operators() == ["rms_norm"]


@pytest.mark.parametrize("editable", [False, True], ids=["installed", "editable"])
@pytest.mark.parametrize("name", ["acme_api_fl", "acme_api_fl:register_builtins"])
def test_a_module_that_is_named_is_asked_for_its_version_too(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, editable: bool
) -> None:
    install("fl_dispatch.api:V7")
    if not editable:
        (tmp_path / "acme_api_fl-2.5.dist-info" / "RECORD").write_text("acme_api_fl.py,,\n")
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", name)
    reset_settings()
    said = rf"VLLM_FL_PLUGIN_MODULES: plugin module '{name}' cannot be loaded: .*acme-api 2.5 is built for version 7"
    with pytest.raises(PluginLoadError, match=said):
        discover_plugins(OpRegistry())
    assert "acme_api_fl" not in sys.modules


def test_a_named_module_of_no_package_needs_no_version(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install("fl_dispatch.api:V7")
    (tmp_path / "acme_api_fl-2.5.dist-info" / "RECORD").write_text("acme_api_fl.py,,\n")
    (tmp_path / "acme_api_fl_beside.py").write_text(REGISTERS)
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "acme_api_fl_beside")
    reset_settings()
    assert discover_plugins(OpRegistry()) == 1


def test_a_device_for_another_core_is_left_out_in_the_same_sentence(install: Install) -> None:
    install("fl_dispatch.api:V7", device=True)
    detect._packages.cache_clear()
    try:
        (why,) = detect.load_failures()
        assert "device entry point 'acme' (acme_api_fl:SPEC) is not used: acme-api 2.5 is built for version 7" in why
    finally:
        detect._packages.cache_clear()
