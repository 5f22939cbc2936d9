"""A plugin's facts about a host are compared with the host's source, and nothing of the host is imported."""

from __future__ import annotations

import json
import re
import shlex
import sys
import zipfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fl_transfer
from fl_dispatch.cli import app, host_contract
from fl_dispatch.hosting.facts.fact import Broken, HostFact, check, release
from fl_dispatch.hosting.facts.host import Host, HostLayers
from fl_dispatch.hosting.facts.source import SourceTree

TOOLS = Path(__file__).parents[4] / "tools"

HOST = {
    "__init__.py": "raise RuntimeError('imported')",
    "base.py": """
        class Base:
            limit = 3
            def __init__(self):
                self.width = 1
                self.register_buffer("table", None)
            def run(self, x, residual=None): ...
            @staticmethod
            def made(x): ...
        """,
    "layers/__init__.py": "from .norm import Norm",
    "layers/norm.py": """
        import importlib
        import host.base
        from typing import Generic
        from ..base import Base as _Base
        try:
            from host.gone import kernel
        except ImportError:
            def kernel(a, b): ...
        class Norm(_Base, Generic[int]):
            def forward(self, x, *, scale=1.0): ...
        class Gated(host.base.Base): ...
        class Exact(Norm):
            def forward(self, x): return super().forward(x)
        class Odd(Norm):
            def forward(self, x): return x
        def mark(other):
            other.marked = True
        """,
}


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    return SourceTree({"host": write(tmp_path / "host", HOST)})


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
        file.write_text("\n".join(line[indent:] for line in lines) + "\n")
    return folder


def fact(owner: str, *names: str, since: str = "", until: str = "") -> HostFact:
    return HostFact(owner, names, "overrides", "worker", "because.", since, until)


def told(tree: SourceTree, *facts: HostFact, version: str = "2.0") -> list[str]:
    return [broken.what for broken in check(facts, tree, version).broken]


# ---- versions


@pytest.mark.parametrize(
    ("since", "until", "version", "concerned"),
    [
        ("", "", "9.99", True),
        ("0.33", "", "0.33.0", True),
        ("0.33", "", "9.99", True),
        ("0.33", "", "0.32.1", False),
        ("", "0.33", "0.32.0", True),
        ("", "0.33", "0.33.0rc1", False),
        ("0.9", "0.10", "0.9.5", True),
    ],
)
def test_a_range_says_which_versions_should_have_it(since: str, until: str, version: str, concerned: bool) -> None:
    assert fact("host.base", "x", since=since, until=until).concerns(version) is concerned


def test_what_is_no_version_is_said() -> None:
    with pytest.raises(ValueError, match="'main' is no version"):
        release("main")


@pytest.mark.parametrize("plugin", ["vllm_fl", "sglang_fl"])
def test_an_unknown_newer_version_is_checked_for_everything_that_is_not_known_to_have_ended(plugin: str) -> None:
    facts = import_module(f"{plugin}.host").HOST.facts()
    passed_over = check(facts, SourceTree({}), "9.99").of_other_versions
    assert [found for found in passed_over if not found.until] == []
    assert len(passed_over) < len(facts) / 10


# ---- names


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("host.base:Base", "limit"),
        ("host.layers:Norm", "limit"),  # inherited, and found through two imports
        ("host.layers:Norm", "width"),  # of an instance
        ("host.layers:Norm", "table"),
        ("host.layers.norm:Gated", "run"),  # its base is named as host.base.Base
        ("host.layers.norm", "kernel"),
        ("host.layers.norm", "marked"),  # given to an object by a function
        ("host.layers", "Norm"),
    ],
)
def test_a_name_is_found_where_the_host_has_it(owner: str, name: str, tree: SourceTree) -> None:
    assert told(tree, fact(owner, name)) == []


@pytest.mark.parametrize(
    ("owner", "name", "what"),
    [
        ("host.layers:Norm", "depth", "has no depth"),
        ("host.layers.norm", "Lost", "has no Lost"),
        ("host.layers:Lost", "limit", "is gone: there is no such class"),
        ("host.lost:Norm", "limit", "is gone: there is no such module"),
        ("host.lost", "limit", "is gone: there is no such module"),
    ],
)
def test_a_name_that_moved_is_told(owner: str, name: str, what: str, tree: SourceTree) -> None:
    assert told(tree, fact(owner, name)) == [what]
    assert str(Broken(fact(owner, name), name, what)) == f"{owner} {what}, which worker overrides"


def test_facts_about_a_package_that_is_not_there_are_counted_and_not_passed_for_held(tree: SourceTree) -> None:
    findings = check([fact("torch.accelerator", "synchronize"), fact("host.base", "Base")], tree, "1.0")
    assert (findings.names, len(findings.elsewhere), str(findings)) == (
        1,
        1,
        "all 1 names that are relied on are there",
    )


# ---- parameters


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        ("x, residual=None", "x, residual=None", None),
        ("x", "x, residual=None", "with residual as well"),
        ("x, *rest", "x, residual=None", None),
        ("x, **rest", "x, *, residual", None),
        ("x", "x, *, residual", "with residual as well"),
        ("x, residual", "x", "without residual"),
        ("x, residual=None", "x", None),
        ("x, residual", "residual, x", "with 'residual' where 'x' was"),
        ("x, /", "input", None),
        ("*, x, **rest", "a, b, x", None),
        ("*, x, **rest", "a, b", "without x"),
        ("x, residual", "x, *args", None),
    ],
)
def test_what_takes_a_functions_place_takes_what_it_is_given(
    ours: str, theirs: str, why: str | None, tmp_path: Path
) -> None:
    code = f"class A:\n    def f(self, {theirs}): ...\n"
    tree = SourceTree({"h": write(tmp_path / "h", {"__init__.py": "", "a.py": code})})
    expected = [] if why is None else [why]
    assert [what.partition(") ")[2] for what in told(tree, fact("h.a:A", f"f({ours})"))] == expected


def test_only_what_is_bound_loses_its_first_parameter(tree: SourceTree) -> None:
    assert (
        told(tree, fact("host.base:Base", "made(x)", "run(x, residual)"), fact("host.layers.norm", "kernel(a, b)"))
        == []
    )


# ---- layer classes


def layers(*replaced: str, inherited: bool = False, **left: str) -> HostLayers:
    return HostLayers(("host.base:Base",), frozenset(replaced), left, inherited)


@pytest.mark.parametrize(
    ("known", "unjudged"),
    [
        (layers(), ["Norm", "Gated", "Exact", "Odd"]),
        (layers("host.layers.norm:Norm", Gated="because."), ["Exact", "Odd"]),
        (layers("host.layers.norm:Norm", inherited=True), ["Gated", "Odd"]),
        (layers("host.elsewhere:Norm"), ["Norm", "Gated", "Exact", "Odd"]),
        (layers(**{"host.layers": "because."}), []),
    ],
    ids=["nothing", "by exact name", "inherited", "of the same name elsewhere", "a whole module"],
)
def test_classes_that_nobody_has_judged_are_listed(known: HostLayers, unjudged: list[str], tree: SourceTree) -> None:
    assert [found.cls.node.name for found in known.judge(tree, "host") if found.state == "unjudged"] == unjudged


def test_a_class_that_could_be_ours_is_work_and_not_hidden_behind_a_reason(tree: SourceTree) -> None:
    known = HostLayers(("host.base:Base",), frozenset(), {"host.layers": "theirs."}, False, {"Odd": "no row."})
    judged = {found.cls.node.name: (found.state, found.why) for found in known.judge(tree, "host")}
    assert judged["Odd"] == ("pending", "no row.")
    assert judged["Norm"] == ("left", "theirs.")


def test_only_files_that_may_have_a_layer_class_are_parsed(tmp_path: Path) -> None:
    files = {
        **HOST,
        "broken.py": "class Other(Somebody): !",
        "renamed.py": "from host.base import Base as B\nclass C(B): ...",
    }
    tree = SourceTree({"host": write(tmp_path / "host", files)})
    names = [cls.node.name for cls in tree.subclasses("host", ("host.base:Base",))]
    assert sorted(names) == ["C", "Exact", "Gated", "Norm", "Odd"]


# ---- the tool


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(TOOLS)
    yield import_module("host_check")
    for name in ("host_check", "unpack_python"):
        sys.modules.pop(name, None)


@pytest.fixture
def run(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the tool on a wheel that it "downloads"."""

    def run(*facts: HostFact) -> tuple[int, str]:
        def download(package: str, version: str, folder: Path, python: str) -> Path:
            wheel = folder / "vllm.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                for file in write(tmp_path / "host", HOST).rglob("*.py"):
                    archive.write(file, f"host/{file.relative_to(tmp_path / 'host')}")
            return wheel

        host = Host("Host", "host", lambda: facts, layers(Norm="because.", Odd="because.", Exact="because."), "plugin")
        monkeypatch.setattr(tool, "host_of", lambda package: host)
        monkeypatch.setattr(tool, "download", download)
        return tool.main(["vllm", "2.0"]), capsys.readouterr().out

    return run


def test_the_tool_says_which_facts_do_not_hold_and_fails(run: Callable[..., tuple[int, str]]) -> None:
    status, out = run(fact("host.layers:Norm", "limit", "depth"), fact("host.base:Base", "old", until="1.0"))
    assert status == 1
    assert "Host 2.0: 1 of 2 names hold (not looked at: 1 facts of other versions)" in out
    assert re.search(r"broken[ │]+worker overrides[ │]+host\.layers:Norm[ │]+has no depth[ │]+because\.", out)


def test_a_class_that_nobody_has_judged_is_listed_and_is_no_failure(run: Callable[..., tuple[int, str]]) -> None:
    status, out = run(fact("host.layers:Norm", "limit"))
    assert status == 0
    assert "3 stay Host's for a reason, 0 to do, 1 not judged" in out
    assert re.search(r"not judged[ │]+Gated[ │]+host\.layers\.norm", out)


def test_a_wheel_that_cannot_be_had_is_said_in_a_line(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["vllm", "9.99", "--wheel", "/nowhere/vllm.whl"]) == 2
    assert "vllm 9.99 cannot be read: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            "WARNING: slow\nERROR: Could not find a version (from versions: 0.1, 0.33.0)\nERROR: none",
            "there is no such version, the newest is 0.33.0",
        ),
        ("ERROR: no network", "pip failed: ERROR: no network"),
    ],
)
def test_a_version_that_does_not_exist_is_one_sentence(
    lines: str, says: str, tool: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A program in the place of pip's interpreter prints what pip does."""
    pip = tmp_path / "python"
    pip.write_text(f"#!/bin/sh\nprintf '%s' {shlex.quote(lines)} >&2\nexit 1\n")
    pip.chmod(0o755)
    assert tool.main(["vllm", "9.99", "--pip", str(pip)]) == 2
    assert capfd.readouterr().err == f"vllm 9.99 cannot be read: {says}\n"


# ---- fl doctor --host-contract


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """The command, on a host "Host 2.0" with these facts instead of those that are installed."""

    def doctor(*facts: HostFact) -> Any:
        host = Host("Host", "host", lambda: facts, layers(host="because."), "plugin")
        tree = SourceTree({"host": write(tmp_path, HOST)})
        contracts = [host_contract.compare(host, tree, "2.0")] if facts else []
        monkeypatch.setattr("fl_dispatch.cli.doctor.installed", lambda: contracts)
        return CliRunner().invoke(app, ["doctor", "--host-contract", "--json"])

    return doctor


def test_doctor_tells_which_facts_hold_which_do_not_and_who_needs_them(doctor: Callable[..., Any]) -> None:
    result = doctor(fact("host.layers:Norm", "limit", "depth"), fact("host.base:Base", "run(x, residual)"))
    (contract,) = json.loads(result.stdout)
    rows = [(row["state"], row["used_by"], row["owner"], row["what"], row["why"]) for row in contract["facts"]]
    assert rows == [
        ("broken", "worker", "host.layers:Norm", "has no depth", "because."),
        ("ok", "worker", "host.base:Base", "run", "because."),
    ]
    assert (result.exit_code, contract["holds"]) == (1, False)


def test_doctor_is_content_where_every_fact_holds_and_not_where_no_host_is(doctor: Callable[..., Any]) -> None:
    assert doctor(fact("host.layers:Norm", "limit")).exit_code == 0
    assert doctor().exit_code == 1


def test_doctor_finds_that_the_contract_with_the_installed_hosts_holds() -> None:
    result = CliRunner().invoke(app, ["doctor", "--host-contract"])
    assert result.exit_code == 0
    assert re.search(r"(vLLM|SGLang) [\d.]+: (\d+) of \2 names hold.*, 0 not judged", result.stdout)


# ---- the tables


@pytest.mark.parametrize(("plugin", "package"), [("vllm_fl", "vllm"), ("sglang_fl", "sglang")])
def test_the_host_that_is_installed_has_everything(plugin: str, package: str) -> None:
    tree = SourceTree.installed(package, "torch")
    if package not in tree.packages:
        pytest.skip(f"{package} is not installed here")
    host = import_module(f"{plugin}.host").HOST
    from importlib.metadata import version

    findings = check(host.facts(), tree, version(package))
    assert [str(broken) for broken in findings.broken] == []
    assert not findings.elsewhere
    assert [found.cls.path for found in host.layers.judge(tree, package) if found.state == "unjudged"] == []


@pytest.mark.parametrize("plugin", ["vllm_fl", "sglang_fl"])
def test_every_fact_says_why_and_is_used_by_a_module(plugin: str) -> None:
    folders = Path(import_module(plugin).__path__[0]), Path(fl_transfer.__path__[0]).parent
    for found in import_module(f"{plugin}.host").HOST.facts():
        assert found.why, found
        assert (found.used_by == plugin) == (found.verb == "expects")
        for user in re.sub(r" and \d+ more$", "", found.used_by).split(", ") if found.verb != "expects" else ():
            assert user.removeprefix("fl_transfer."), found
            places = [folder.joinpath(*user.split(".")) for folder in folders]
            assert any(place.with_suffix(".py").exists() or (place / "__init__.py").exists() for place in places), found


@pytest.mark.parametrize(("plugin", "package"), [("vllm_fl", "vllm"), ("sglang_fl", "sglang")])
def test_what_a_plugin_knows_is_known_without_its_host(plugin: str, package: str) -> None:
    import subprocess

    code = f"import sys; sys.modules['{package}'] = None; import {plugin}.host as h; assert h.HOST.layers.names"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
