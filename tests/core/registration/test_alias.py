"""``vllm_fl.dispatch`` is ``fl_dispatch``. Import order matters here, so most rules run in a fresh interpreter."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from pathlib import Path

import pytest
from test_public_api import BY_MODULE

import fl_dispatch
import vllm_fl
from fresh_interpreter import SOURCES, fresh


def test_importing_the_plugin_imports_neither_host_nor_torch() -> None:
    fresh("import sys, vllm_fl; assert not {'vllm', 'torch', 'fl_dispatch'} & set(sys.modules)", cold=True)


def test_the_plugin_and_the_core_have_one_version() -> None:
    assert vllm_fl.__version__ == fl_dispatch.__version__


@pytest.mark.parametrize("first", ["fl_dispatch.types", "vllm_fl.dispatch.types"])
def test_a_module_is_the_same_object_in_either_import_order(first: str) -> None:
    fresh(
        f"""
import importlib, sys, {first}
import vllm_fl.dispatch, fl_dispatch
assert vllm_fl.dispatch is fl_dispatch
for name in ("types", "config", "backends.base", "ops.declaration", "settings.model"):
    alias, real = importlib.import_module("vllm_fl.dispatch." + name), importlib.import_module("fl_dispatch." + name)
    assert alias is real is sys.modules["vllm_fl.dispatch." + name], name
    assert real.__name__ == real.__spec__.name == "fl_dispatch." + name
"""
    )


def test_classes_from_both_names_are_the_same() -> None:
    fresh(
        """
from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch.types import OpImpl as second
import fl_dispatch.types
assert OpImpl is second is fl_dispatch.types.OpImpl is fl_dispatch.OpImpl
"""
    )


def test_a_submodule_that_was_not_imported_yet_is_imported_under_both_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_part.py").write_text("")
    monkeypatch.setattr(fl_dispatch, "__path__", [*fl_dispatch.__path__, str(tmp_path)])
    late = importlib.import_module("vllm_fl.dispatch.late_part")
    try:
        assert sys.modules["fl_dispatch.late_part"] is sys.modules["vllm_fl.dispatch.late_part"] is late
        assert fl_dispatch.late_part is late  # type: ignore[attr-defined]
    finally:
        del sys.modules["fl_dispatch.late_part"], sys.modules["vllm_fl.dispatch.late_part"], fl_dispatch.late_part


def test_a_missing_submodule_names_the_alias_and_leaves_nothing() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'vllm_fl\.dispatch\.nothing'"):
        importlib.import_module("vllm_fl.dispatch.nothing")
    assert importlib.util.find_spec("vllm_fl.dispatch.nothing") is None
    assert "vllm_fl.dispatch.nothing" not in sys.modules


def test_a_broken_submodule_raises_its_own_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_part.py").write_text("raise ZeroDivisionError('in the module')")
    monkeypatch.setattr(fl_dispatch, "__path__", [*fl_dispatch.__path__, str(tmp_path)])
    with pytest.raises(ZeroDivisionError, match="in the module"):
        importlib.import_module("vllm_fl.dispatch.broken_part")
    assert not {"vllm_fl.dispatch.broken_part", "fl_dispatch.broken_part"} & set(sys.modules)


def test_reload_keeps_one_module() -> None:
    fresh(
        """
import importlib, sys, vllm_fl.dispatch.types
import fl_dispatch.types
again = importlib.reload(vllm_fl.dispatch.types)
assert again is fl_dispatch.types is vllm_fl.dispatch.types is sys.modules["fl_dispatch.types"]
"""
    )


def test_pickles_name_the_core_and_old_ones_with_the_alias_load() -> None:
    fresh(
        """
import pickle, vllm_fl.dispatch.types as types
kind = types.BackendImplKind
text = pickle.dumps(kind)
assert b"fl_dispatch.types" in text and b"vllm_fl" not in text
old = pickle.dumps(kind, protocol=0).replace(b"fl_dispatch.types", b"vllm_fl.dispatch.types")
assert pickle.loads(old) is kind
"""
    )


def test_patching_by_dotted_path_patches_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_fl.dispatch.types.match_token", "patched")
    assert fl_dispatch.types.match_token == "patched"


def test_mock_patch_by_dotted_path_patches_the_core() -> None:
    fresh(
        """
from unittest import mock
import vllm_fl, fl_dispatch
with mock.patch("vllm_fl.dispatch.types.match_token", "patched"):
    assert fl_dispatch.types.match_token == "patched"
assert callable(fl_dispatch.types.match_token)
"""
    )


@pytest.mark.parametrize("name", ["types", "errors"])
def test_python_dash_m_runs_the_real_code(name: str) -> None:
    fresh("", "-W", "ignore", "-m", f"vllm_fl.dispatch.{name}", cold=True)


def test_pkgutil_walks_the_alias() -> None:
    alias = importlib.import_module("vllm_fl.dispatch")
    assert "vllm_fl.dispatch.types" in {info.name for info in pkgutil.iter_modules(alias.__path__, "vllm_fl.dispatch.")}


def test_inspect_finds_the_source() -> None:
    fresh(
        """
import inspect, vllm_fl.dispatch.types as types
assert inspect.getsourcefile(types).endswith("fl_dispatch/types.py")
assert "class OpImpl" in inspect.getsource(types.OpImpl)
assert inspect.getmodule(types.OpImpl) is types
"""
    )


def test_resources_are_found_through_the_alias() -> None:
    fresh(
        """
from importlib import resources
import vllm_fl
assert resources.files("vllm_fl.dispatch.config").joinpath("cpu.yaml").is_file()
"""
    )


def test_spawned_children_need_no_alias() -> None:
    fresh(
        """
import multiprocessing
from vllm_fl.dispatch.types import BackendImplKind
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(str, (BackendImplKind.DEFAULT,)) == "flagos"
"""
    )


def test_installing_twice_adds_one_finder() -> None:
    from vllm_fl import _alias

    before = list(sys.meta_path)
    _alias.install("vllm_fl.dispatch", "fl_dispatch")
    assert sys.meta_path == before


def test_type_checkers_find_every_documented_module() -> None:
    """One line a module in ``vllm_fl/dispatch``, and none for modules that are no documented import path."""
    folder = SOURCES / "vllm_fl" / "dispatch"
    lines = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix("__init__").rstrip("."): path.read_text()
        for path in folder.rglob("*.py")
    }
    packages = {name.rpartition(".")[0] for name in BY_MODULE if "." in name}
    wanted = {name: f"from fl_dispatch.{name} import *\n" for name in {*BY_MODULE, *packages} if name}
    assert lines == wanted | {"": "from fl_dispatch import *\n"}
