"""A vendor's first hour, as docs/guide/vendors.md has it: every command is run, and prints what the page shows."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from vendor_machine import ROOT, Machine, make_machine, normal

PAGE = ROOT / "docs/guide/vendors.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"(?:# |/\* )(acme_fl/\w+\.\w+)")


@dataclass
class Step:
    """Commands of the page: the files that it gives before them, and what it says that they print."""

    commands: str
    files: list[tuple[str, str]] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return self.commands.strip().partition("\n")[0]


def read_page() -> list[Step]:
    """The steps in order; configuration that the generated package has already is no part of them."""
    steps: list[Step] = []
    files: list[tuple[str, str]] = []
    for language, text in BLOCK.findall(PAGE.read_text()):
        if language == "sh":
            steps.append(Step(text, files))
            files = []
        elif language == "text":
            steps[-1].shown += text.splitlines()
        elif place := PLACE.match(text):
            files.append((place[1], text))
    assert not files, "the page gives a file that no command follows"
    return steps


def put(target: Path, text: str) -> None:
    """Write a file of the page, or replace the functions that it defines in one of the package."""
    if target.suffix != ".py":
        target.write_text(text)
        return
    old = target.read_text()
    lines, replaced = old.splitlines(keepends=True), [node.name for node in _functions(text)]
    known = [node for node in _functions(old) if node.name in replaced]
    assert known, f"{target.name} has none of {replaced}"
    for node in known:
        lines[node.lineno - 1 : node.end_lineno] = [text]
    target.write_text("".join(lines))


def _functions(text: str) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]


STEPS = read_page()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return make_machine(tmp_path_factory.mktemp("vendor"))


@pytest.fixture(scope="module")
def run_until(machine: Machine) -> Callable[[int], str]:
    """The output of a step; the steps before it are run before, each once."""
    printed: list[str] = []

    def output(number: int) -> str:
        for step in STEPS[len(printed) : number + 1]:
            for place, text in step.files:
                put(machine.directory / place, text)
            printed.append(machine.run(step.commands))
        return printed[number]

    return output


@pytest.mark.engine
@pytest.mark.parametrize("number", range(len(STEPS)), ids=map(str, STEPS))
def test_the_hour_goes_as_the_page_says(number: int, run_until: Callable[[int], str]) -> None:
    found = normal(run_until(number))
    for line in STEPS[number].shown:
        assert normal(line) in found


@pytest.mark.engine
@pytest.mark.parametrize("host", ["vllm", "sglang"])
def test_the_kernel_in_c_ran_in_both_engines(host: str, run_until: Callable[[int], str]) -> None:
    option = {"vllm": "--compiled", "sglang": "--host sglang"}[host]
    number = next(index for index, step in enumerate(STEPS) if option in step.commands)
    calls = re.findall(r"(\w+)\s*│ vendor\.acme\s*│ vendor\s*│ (\d+)", run_until(number))
    assert {operator for operator, count in calls if int(count) > 50} == {
        "silu_and_mul",
        "rms_norm",
        "rotary_embedding",
        "kv_cache_write",
        "paged_attention",
    }


def test_the_page_has_engines_of_both_hosts() -> None:
    commands = "".join(step.commands for step in STEPS)
    assert commands.count("fl demo") == 4
    assert {"--compiled", "--dtype bfloat16", "--host sglang"} <= set(re.findall(r"--\w+(?: [a-z]\w+)?", commands))
