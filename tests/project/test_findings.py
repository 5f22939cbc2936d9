"""Every script of ``findings/`` has the form that ``CONTRIBUTING.md`` describes; none is run here."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "findings").glob("*"))
FIELDS = ("Packages:", "Behaviour:", "Why it matters:", "Seen 20")
PROJECT = re.compile(r"fl_dispatch|fl_transfer|vllm_fl|sglang_fl|fl-dispatch|\.venv\b")

each = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)


def header(script: Path) -> str:
    """The comment at its beginning."""
    found = re.match(r"(?:#.*\n)+", script.read_text(encoding="utf-8"))
    assert found is not None
    return found[0]


def test_there_are_findings() -> None:
    assert len(SCRIPTS) >= 8


@each
def test_a_finding_is_an_executable_script_of_few_lines(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert script.suffix == ".sh"
    assert os.access(script, os.X_OK)
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert len(text.splitlines()) <= 80


@each
def test_its_header_says_what_happens_with_which_versions_and_what_was_seen(script: Path) -> None:
    said = header(script)
    assert [field for field in FIELDS if f"\n# {field}" not in said] == []
    assert re.search(r"\n# Seen 20\d\d-\d\d-\d\d:\n#   .*\S", said)
    packages = re.search(r"\n# Packages: (.*)\n", said)
    assert packages is not None
    one = r"[\w.-]+ \d[\w.]*( \([^)]*\))?"
    assert re.fullmatch(f"{one}(, {one})*", packages[1])


@each
def test_it_installs_the_pinned_packages_of_its_header_alone(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    body = text.removeprefix(header(script))
    packages = header(script).partition("# Packages:")[2].partition("\n")[0]
    named = {pair for pair in re.findall(r"([\w.-]+) (\d[\w.]*)", packages) if pair[0] != "Python"}
    installed = set(re.findall(r"(?<![\w.-])([\w.-]+)==([\w.]+\w)", body))
    assert named <= installed
    assert "mktemp -d" in body
    assert "-m venv" in body


@each
def test_it_fails_at_the_first_error_and_is_without_this_project(script: Path) -> None:
    body = script.read_text(encoding="utf-8").removeprefix(header(script))
    assert "\nset -euo pipefail\n" in f"\n{body}"
    assert PROJECT.search(body) is None
