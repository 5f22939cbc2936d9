"""A process that answers lines says why it ended, and ends when it is told."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fl_dispatch import DispatchError
from fl_dispatch.evidence import child
from fl_dispatch.evidence.child import Child

ECHO = """
import json, sys
print('"ready"', flush=True)
for line in sys.stdin:
    if json.loads(line) == "stumble":
        sys.exit("no such kernel")
    if json.loads(line) == "chat":
        print("tokens: many", flush=True)
    print(line, end="", flush=True)
"""


def echo(log: Path | None, source: str = ECHO) -> Child:
    return Child("vanilla", [sys.executable, "-c", source], os.environ, log)


def test_each_question_has_its_answer(tmp_path: Path) -> None:
    one, other = echo(tmp_path / "one.log"), echo(tmp_path / "other.log")
    assert (one.answer(), other.answer()) == ("ready", "ready")
    assert [process.ask([number]) for number in range(3) for process in (one, other)] == [[n // 2] for n in range(6)]
    one.stop()
    other.stop()


def test_one_that_ends_is_named_with_its_status_its_last_words_and_its_log(tmp_path: Path) -> None:
    process = echo(tmp_path / "log")
    process.answer()
    with pytest.raises(DispatchError, match=rf"'vanilla' ended with 1: no such kernel \(its log: {tmp_path}/log\)"):
        process.ask("stumble")
    with pytest.raises(DispatchError, match="ended with 1"):
        process.ask("again")
    process.stop()


def test_without_a_log_its_messages_are_where_ours_are(capfd: pytest.CaptureFixture[str]) -> None:
    process = echo(None)
    process.answer()
    with pytest.raises(DispatchError, match="ended with 1; its messages are above"):
        process.ask("stumble")
    assert "no such kernel" in capfd.readouterr().err
    process.stop()


def test_what_is_no_answer_is_quoted(tmp_path: Path) -> None:
    process = echo(tmp_path / "log")
    process.answer()
    with pytest.raises(DispatchError, match="'vanilla' said 'tokens: many' in place of an answer"):
        process.ask("chat")
    process.stop()


def test_one_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "PATIENCE", 0.1)
    process = echo(tmp_path / "log", "import time\nprint(1, flush=True)\ntime.sleep(600)")
    process.answer()
    process.stop()
    with pytest.raises(DispatchError, match="ended with -9"):
        process.answer()
