"""A finding of shadow mode names requests once: by the scheduler if vLLM reads the rank's output, else by the rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fl_dispatch.hosting.damage.verdicts import Wrong
from vllm_fl.worker import watched_steps
from vllm_fl.worker.watched_steps import WatchedSteps

FOUND = SimpleNamespace(op_name="linear", impl_id="vendor.x")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> WatchedSteps:
    """A worker's steps, after a finding without a ban in a step of two requests."""
    made = object.__new__(WatchedSteps)
    made.watches, made.origins, made.can_watch = False, [], False
    made.wrong = Wrong(SimpleNamespace(found=lambda: [FOUND], banned=frozenset()))  # type: ignore[arg-type]
    monkeypatch.setattr(watched_steps, "attach", lambda output, report: output.append(report.kept))
    made.begin(SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 1}))
    return made


def in_rank(first: bool, last_stage: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_steps, "get_tp_group", lambda: SimpleNamespace(is_first_rank=first))
    monkeypatch.setattr(watched_steps, "get_pp_group", lambda: SimpleNamespace(is_last_rank=last_stage))


def test_a_finding_waits_for_a_step_with_output(
    steps: WatchedSteps, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_rank(True, True, monkeypatch)
    output: list[Any] = []
    steps.attach_report(None)
    steps.attach_report(output)
    steps.attach_report(output)
    assert output == [("'linear' by 'vendor.x'",)]
    assert caplog.text == ""


@pytest.mark.parametrize(("first", "last_stage"), [(False, True), (True, False)])
def test_a_rank_without_a_reader_names_its_steps_requests_itself(
    first: bool,
    last_stage: bool,
    steps: WatchedSteps,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    in_rank(first, last_stage, monkeypatch)
    with caplog.at_level("WARNING", logger="vllm_fl"):
        steps.attach_report(None)
        steps.attach_report(None)
    (line,) = caplog.messages
    assert line.startswith(
        "requests with keys and values of 'linear' by 'vendor.x', which differed and stays in service: a, b;"
    )
