"""The comparison of vLLM's own tests with the plugin and without it: what a report says, and how tests are counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.delitem(sys.modules, "host_suite", raising=False)
    import host_suite

    return host_suite


def line(name: str, when: str, outcome: str = "passed", longrepr: object = None) -> str:
    return json.dumps(
        {"$report_type": "TestReport", "nodeid": name, "when": when, "outcome": outcome, "longrepr": longrepr}
    )


def test_a_report_that_was_cut_off_has_its_outcomes_and_the_test_that_was_at_work(tool: object, tmp_path: Path) -> None:
    lines = [
        json.dumps({"$report_type": "CollectReport", "nodeid": "c.py", "outcome": "failed", "longrepr": "no module"}),
        *(line("a.py::good", when) for when in ("setup", "call", "teardown")),
        line("a.py::bad", "call", "failed", {"reprcrash": {"message": "wrong"}}),
        *(line("a.py::untidy", when) for when in ("setup", "call")),
        line("a.py::untidy", "teardown", "failed", "left"),
        line("a.py::late", "setup", "skipped", ["a.py", 1, f"Skipped: {tool.CUT}"]),  # type: ignore[attr-defined]
        line("a.py::hangs", "setup"),
        line("a.py::hangs", "call")[:20],
    ]
    (tmp_path / "report").write_text("\n".join(lines))
    found, at, imported = tool._outcomes(tmp_path / "report")  # type: ignore[attr-defined]
    assert found == {
        "c.py": ("failed", "no module"),
        "a.py::good": ("passed", ""),
        "a.py::bad": ("failed", "wrong"),
        "a.py::untidy": ("failed", "left"),
    }
    assert at == "a.py::hangs"
    assert imported == {"c.py"}


def test_a_refusal_by_name_is_told_from_a_test_that_is_lost(tool: object) -> None:
    passed, failed = ("passed", ""), ("failed", "wrong")
    refused = ("failed", "Value error, vllm_fl does not support drafts on cpu yet")
    with_ = {"both": passed, "gained": passed, "refused": refused, "lost": failed, "neither": failed, "cut": passed}
    without = {"both": passed, "gained": failed, "refused": passed, "lost": passed, "neither": failed}
    table = tool.summary({"area": {"with": with_, "without": without}})  # type: ignore[attr-defined]
    assert "| area | 1 | 1 | 1 | 1 | 0 | 1 | 1 |" in table
    assert "refused  refused: Value error" in table
    assert "lost     lost: wrong" in table


def test_only_the_tests_that_ended_pytest_are_left_out(
    tool: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").write_text("a.py::test_a")
    monkeypatch.setenv("FL_LEFT_OUT", str(tmp_path / "gone"))
    items = [type("Item", (), {"nodeid": name}) for name in ("a.py::test_a", "a.py::test_ab")]
    tool.pytest_collection_modifyitems(items)  # type: ignore[attr-defined]
    assert [item.nodeid for item in items] == ["a.py::test_ab"]


def test_what_ends_pytest_is_left_out_and_the_rest_goes_on(
    tool: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [({}, "tests/b.py"), ({"tests/a.py::test_a": ("passed", "")}, "tests/c.py::test_c"), ({}, "")]
    runs = []

    def once(files: list[str], *_: object) -> object:
        runs.append(files)
        return ends[len(runs) - 1]

    monkeypatch.setattr(tool, "_run", once)
    found = tool.run(["a.py", "b.py", "c.py", "d.py"], "with", tmp_path, 60, 60, 30)  # type: ignore[attr-defined]
    assert runs == [["a.py", "b.py", "c.py", "d.py"], ["a.py", "c.py", "d.py"], ["c.py", "d.py"]]
    assert found == {
        "tests/b.py": tool.ENDED,  # type: ignore[attr-defined]
        "tests/a.py::test_a": ("passed", ""),
        "tests/c.py::test_c": tool.ENDED,  # type: ignore[attr-defined]
    }


def test_a_file_gives_way_to_the_next_when_its_time_is_over(tool: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_FILE_LIMIT", "10")
    a, b = (type("Item", (), {"nodeid": f"{file}.py::test"}) for file in "ab")
    now = 0.0
    monkeypatch.setattr(tool.time, "monotonic", lambda: now)  # type: ignore[attr-defined]
    setup = tool.pytest_runtest_setup  # type: ignore[attr-defined]
    setup(a)
    now = 10.0
    setup(a)
    now = 11.0
    with pytest.raises(pytest.skip.Exception, match=tool.CUT):  # type: ignore[attr-defined]
        setup(a)
    setup(b)


def test_files_that_start_engines_come_last(tool: object, tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    for name, text in {"test_a.py": "with vllm_runner(", "test_b.py": "def test_b(): pass", "test_c.py": ""}.items():
        (tmp_path / "lora" / name).write_text(text)
    files = tool.files_of("lora", tmp_path)  # type: ignore[attr-defined]
    assert files == ["lora/test_b.py", "lora/test_c.py", "lora/test_a.py"]
