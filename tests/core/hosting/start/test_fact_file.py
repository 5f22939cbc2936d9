"""A plugin's facts are its file and what its classes override, and a host that moves any of it is found out."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from fl_dispatch.hosting.facts import yaml_file
from fl_dispatch.hosting.facts.fact import HostFact, check
from fl_dispatch.hosting.facts.source import SourceTree

HOST = """
class Base:
    limit = 3
    def run(self, x, residual=None): ...
    def _write(self, cache): ...
    def stop(self): ...
class Newer:
    def start(self): ...
def kernel(a, b): ...
def fast(a): ...
def slow(a): ...
"""
PLUGIN = '''
from host import engine
from host.engine import Newer as Theirs
from .mixins import Mixin
class Ours(Mixin, engine.Base):
    """Runs our operators."""
    _own = 1
    def run(self, x, residual=None): ...
    def _write(self, cache): ...
    def fl_bind(self): ...
    def describe(self): ...
class Late(Theirs):
    """Starts later."""
    def start(self): ...
engine.kernel, engine.fast, engine.Base.limit
'''
MIXINS = """
class Mixin:
    def stop(self): ...
"""
FACTS = """
host.engine:
- reads: kernel(a, b)
  why: It is called.
- expects: slow
  why: The host calls it.
- hooks: fast(a)
  why: It would run the host's code.
- replaces: kernel(a, b)
  why: Ours runs.
host.engine:Base:
- reads: limit
  why: The limit.
- overrides: _write
  why: The cache is ours.
- adds: describe
  why: Reports ask it.
host.engine:Newer:
- since: 2.0
"""


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[HostFact, ...]]:
    """Write the plugin, with some text of it replaced, and return its facts."""
    folder = tmp_path / "plugged"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))

    def facts(old: str = "", new: str = "") -> tuple[HostFact, ...]:
        for name, text in {"__init__.py": PLUGIN, "mixins.py": MIXINS, yaml_file.NAME: FACTS}.items():
            (folder / name).write_text(text.replace(old, new) if old else text)
        yaml_file.written.cache_clear()
        return yaml_file.facts("plugged", "host")

    return facts


def broken(found: tuple[HostFact, ...], folder: Path, old: str = "", new: str = "", version: str = "2.0") -> list[str]:
    """Return the sentences about facts that do not hold in the host, with some text of it replaced."""
    (folder / "host").mkdir(exist_ok=True)
    (folder / "host" / "__init__.py").touch()
    (folder / "host" / "engine.py").write_text(HOST.replace(old, new) if old else HOST)
    return list(map(str, check(found, SourceTree({"host": folder / "host"}), version).broken))


def test_what_a_class_overrides_is_derived_with_its_parameters_its_mixins_and_its_reason(
    facts: Callable[..., tuple[HostFact, ...]], tmp_path: Path
) -> None:
    found = {(fact.owner, name): fact for fact in facts() for name in fact.names if fact.verb == "overrides"}
    assert {name: fact.why for (_, name), fact in found.items()} == {
        "run(x, residual=None)": "Runs our operators.",
        "stop()": "Runs our operators.",
        "_write(cache)": "The cache is ours.",
        "start()": "Starts later.",
    }
    assert broken(tuple(found.values()), tmp_path) == []


def test_the_versions_of_a_section_hold_for_what_is_derived(
    facts: Callable[..., tuple[HostFact, ...]], tmp_path: Path
) -> None:
    assert broken(facts(), tmp_path, "class Newer", "class Gone", version="1.9") == []
    assert broken(facts(), tmp_path, "class Newer", "class Gone") == [
        "host.engine:Newer is gone: there is no such class, which __init__ overrides"
    ]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("limit = 3", "bound = 3", "host.engine:Base has no limit, which __init__ reads"),
        ("def slow", "def slower", "host.engine has no slow, which plugged expects"),
        ("def fast", "def faster", "host.engine has no fast, which __init__ hooks"),
        ("def fast(a)", "def fast(a, b)", "host.engine has fast(a, b) with b as well, which __init__ hooks"),
        ("def _write", "def _store", "host.engine:Base has no _write, which __init__ overrides"),
        ("def stop", "def halt", "host.engine:Base has no stop, which __init__ overrides"),
        ("def run(self, x, ", "def run(self, y, ", "host.engine:Base has run(y, residual=None) with 'y' where 'x' was"),
        ("def stop", "def describe(self): ...\n    def stop", "host.engine:Base has a describe of its own"),
        ("def kernel(a, b)", "def kernels(a, b)", "host.engine has no kernel, which __init__ replaces"),
    ],
)
def test_a_host_that_renames_what_a_fact_of_any_kind_names_is_found_out(
    old: str, new: str, says: str, facts: Callable[..., tuple[HostFact, ...]], tmp_path: Path
) -> None:
    assert any(says in line for line in broken(facts(), tmp_path, old, new))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("def describe", "def explain", "host.engine:Base has no explain, which __init__ overrides"),
        ("def stop", "def halt", "host.engine:Base has no halt, which __init__ overrides"),
        ("reads: limit", "reads: bound", "host.engine:Base has no bound"),
        ("hooks: fast(a)", "hooks: fast(a, b)", "host.engine has fast(a) without b"),
    ],
)
def test_a_plugin_whose_class_or_file_names_what_the_host_lacks_is_found_out(
    old: str, new: str, says: str, facts: Callable[..., tuple[HostFact, ...]], tmp_path: Path
) -> None:
    assert any(says in line for line in broken(facts(old, new), tmp_path))


def test_a_fact_is_used_by_the_modules_that_name_it(facts: Callable[..., tuple[HostFact, ...]]) -> None:
    words = {"a": {"run", "Base"}, "b": {"run", "limit"}, "c": {"limit"}}
    assert yaml_file.users(HostFact("host.engine:Base", ("run", "limit"), "reads", "", ""), words) == ["b"]
    assert yaml_file.users(HostFact("host.engine:Base", ("Base", "limit"), "reads", "", ""), words) == ["a", "b", "c"]
    assert yaml_file.users(HostFact("host.engine:Base", ("run", "gone"), "reads", "", ""), words) == []


@pytest.mark.parametrize(
    "entry", ["- why: Because.", "- reads: x\n  hooks: x", "- reads: x\n  wants: y", "- reads: x\n  by: worker"]
)
def test_an_entry_without_one_verb_or_with_an_unknown_key_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=r"^host\.engine: an entry has one of reads, "):
        yaml_file.parse(f"host.engine:\n{entry}\n")


@pytest.mark.parametrize("value", ["banana", "0.33.x", "v0.33", "", "[0, 33]"])
@pytest.mark.parametrize("key", ["since", "until"])
@pytest.mark.parametrize("entry", ["- {}\n- reads: x", "- reads: x\n  {}"], ids=["section", "fact"])
def test_a_version_that_is_none_is_refused_by_file_key_and_value(
    facts: Callable[..., tuple[HostFact, ...]], tmp_path: Path, entry: str, key: str, value: str
) -> None:
    stated = entry.format(f"{key}: {value}")
    with pytest.raises(ValueError, match=rf"plugged/host_facts\.yaml: host\.engine:Newer: '{key}: .*' is no version"):
        facts("- since: 2.0", stated)


def test_a_version_is_text_so_its_last_zero_stays() -> None:
    (section,) = yaml_file.parse("host.engine:\n- since: 0.30\n- reads: x\n  until: 0.330\n")
    (fact,) = section.facts
    assert (fact.since, fact.until) == ("0.30", "0.330")


@pytest.mark.parametrize("plugin", ["vllm_fl", "fl_transfer", "sglang_fl"])
def test_each_class_or_module_of_a_host_has_one_section_in_alphabetical_order(plugin: str) -> None:
    lines = (yaml_file.folder_of(plugin) / yaml_file.NAME).read_text().splitlines()
    owners = [line.removesuffix(":") for line in lines if line and line[0] not in "# -"]
    assert owners == sorted(set(owners))
    assert owners == [section.owner for section in yaml_file.written(plugin)]


@pytest.mark.parametrize("plugin", ["vllm_fl", "fl_transfer", "sglang_fl"])
def test_a_name_in_a_file_is_an_identifier_with_the_parameters_of_a_function_or_none(plugin: str) -> None:
    import_module(plugin)
    for section in yaml_file.written(plugin):
        for fact in section.facts:
            for name in fact.names:
                compile(f"def {name if '(' in name else f'{name}()'}: ...", section.owner, "exec")


@pytest.mark.parametrize("text", ["a:b:\n- reads: x\na:b:\n- reads: y\n", "a:b:\n- reads: x\n  reads: y\n"])
def test_a_key_that_stands_twice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="stands twice, at line"):
        yaml_file.parse(text)
