"""A host that is not tested is checked once for an installation, and anew when it or our facts change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fl_dispatch.hosting.facts import untested
from fl_dispatch.hosting.facts.fact import Findings, HostFact, check

FACT = HostFact("somehost.engine", ("start(model)",), "reads", "compat", "engines")
Ask = Callable[..., str]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The versions for which a source was read."""
    done: list[str] = []

    def counted(facts: tuple[HostFact, ...], tree: object, version: str) -> Findings:
        done.append(version)
        return check(facts, tree, version)  # type: ignore[arg-type]

    monkeypatch.setattr(untested, "check", counted)
    return done


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module of an installed host that the fact is about."""
    folder = tmp_path / "site" / "somehost"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "engine.py").write_text("def start(model): ...\n")
    plugin = folder.parent / "someplugin"
    plugin.mkdir()
    (plugin / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delitem(sys.modules, "somehost", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder / "engine.py"


def ask(*facts: HostFact, version: str = "1.0") -> str:
    return untested.findings(lambda: facts or (FACT,), "someplugin", ("somehost",), version)


def test_the_second_process_reads_the_sentence_of_the_first(engine: Path, checks: list[str]) -> None:
    assert ask() == ask() == "all 1 names that are relied on are there"
    assert checks == ["1.0"]


def test_a_host_that_changed_is_checked_again(engine: Path, checks: list[str]) -> None:
    ask()
    engine.write_text("def start(model, name): ...\n")
    assert "somehost.engine has start(model, name)" in ask()
    assert checks == ["1.0", "1.0"]


def test_another_version_and_other_facts_are_checked_by_themselves(engine: Path, checks: list[str]) -> None:
    ask()
    ask(version="1.1")
    (engine.parents[1] / "someplugin" / "host_facts.yaml").write_text("somehost.engine:\n- reads: stop\n")
    assert "has no stop" in ask(HostFact("somehost.engine", ("stop",), "reads", "compat", "engines"))
    assert checks == ["1.0", "1.1", "1.0"]


def test_a_cache_that_cannot_be_written_costs_a_check_and_no_more(
    engine: Path, checks: list[str], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert ask() == ask() == "all 1 names that are relied on are there"
    assert checks == ["1.0", "1.0"]


def test_a_kept_sentence_that_is_no_text_is_made_anew(engine: Path, checks: list[str], tmp_path: Path) -> None:
    ask()
    (kept,) = (tmp_path / "cache").rglob("*.txt")
    assert kept.stat().st_mode & 0o777 == 0o600
    kept.write_bytes(b"\xff\xfe")
    assert ask() == "all 1 names that are relied on are there"
    assert checks == ["1.0", "1.0"]
