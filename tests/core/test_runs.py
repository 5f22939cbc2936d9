"""The choices of the workers that ran last are on disk, for ``fl doctor``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fl_dispatch import get_default_manager
from fl_dispatch.cli.doctor import examine
from fl_dispatch.hosting import runs
from fl_dispatch.hosting.survey import Survey

SURVEY = Survey("SGLang", {"RMSNorm": ("rms_norm", 13)}, {"Conv2dLayer": 1}, {"RadixAttention": 3})


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_a_run_is_read_as_it_was_recorded_by_its_user_alone() -> None:
    runs.record("SGLang 1.2", "tiny", SURVEY, {"rms_norm": ["model.norm"]})
    (run,) = runs.recorded()
    assert (run.host, run.pid, run.model, run.alive) == ("SGLang 1.2", os.getpid(), "tiny", True)
    assert run.undispatched == {"rms_norm": ["model.norm"]}
    (file,) = runs.folder().glob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600


def test_doctor_shows_it_and_warns_of_what_was_never_dispatched_while_it_runs() -> None:
    get_default_manager().ensure_initialized()
    runs.record("SGLang 1.2", "tiny", SURVEY, {"rms_norm": ["model.norm"]})
    report = examine()
    (row,) = report["runs"]
    assert row[1:] == [
        "SGLang 1.2",
        f"{os.getpid()} (running)",
        "tiny",
        "RMSNorm 13",
        "Conv2dLayer 1",
        "rms_norm (1 layers)",
        "none by FlagGems: no worker has started in this process",
    ]
    assert any("never dispatched" in warning for warning in report["warnings"])


def test_files_that_are_no_records_are_passed_over_and_old_ones_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.folder().mkdir(parents=True)
    for number in range(runs.KEPT + 5):
        file = runs.folder() / f"{number}.json"
        file.write_text("no record")
        os.utime(file, (number, number))
    runs.record("vLLM 0.32", "tiny", SURVEY, {})
    assert [run.host for run in runs.recorded()] == ["vLLM 0.32"]
    assert len(list(runs.folder().iterdir())) == runs.KEPT


def test_where_nothing_can_be_written_serving_goes_on(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "fl_dispatch").write_text("a file in the place of the folder")
    runs.record("vLLM 0.32", "tiny", SURVEY, {})
    assert "fl doctor will not show this process" in caplog.text
    assert runs.recorded() == []
