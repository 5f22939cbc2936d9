"""Settings and policy reach the processes that a host starts, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fl_dispatch import ConfigError, SelectionPolicy, get_policy, set_global_policy
from fl_dispatch.hosting.start import handover
from fl_dispatch.settings import Settings, install_settings

ASK = """
import json, subprocess, sys
from fl_dispatch import get_policy
from fl_dispatch.hosting.start import handover
from fl_dispatch.settings import get_settings
handover.adopt()
deeper = int(sys.argv[1])
if deeper:
    sys.exit(subprocess.run([sys.executable, "-c", sys.argv[2], str(deeper - 1), sys.argv[2]]).returncode)
print(json.dumps([get_policy().prefer, str(get_settings().origin("prefer")), get_settings().log_level]))
"""


@pytest.fixture(autouse=True)
def _no_variable_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(handover.VARIABLE, "")


def ask(generation: int) -> list[str]:
    """The choice of a child (1), grandchild (2), ... of this process."""
    command = [sys.executable, "-c", ASK, str(generation - 1), ASK]
    answer: list[str] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return answer


@pytest.mark.parametrize("generation", [1, 2])
def test_children_run_the_settings_and_the_policy_of_the_process_that_offered_them(generation: int) -> None:
    install_settings(Settings.of(log_level="ERROR"))
    set_global_policy(SelectionPolicy(prefer="vendor"))
    handover.offer()
    assert ask(generation) == ["vendor", "code", "ERROR"]


def test_a_later_offer_replaces_the_one_before() -> None:
    set_global_policy(SelectionPolicy(prefer="vendor"))
    handover.offer()
    set_global_policy(SelectionPolicy(prefer="reference"))
    handover.offer()
    assert ask(1)[0] == "reference"


def test_a_process_that_only_inherits_the_variable_ignores_it() -> None:
    set_global_policy(SelectionPolicy(prefer="vendor"))
    handover.offer()
    before = get_policy()
    packed = json.loads(os.environ[handover.VARIABLE])
    set_global_policy(SelectionPolicy(prefer="reference"))
    os.environ[handover.VARIABLE] = json.dumps({**packed, "pid": os.getppid() + 1_000_000})
    handover.adopt()
    assert get_policy() != before
    assert get_policy().prefer == "reference"


def test_a_child_with_variables_of_its_own_reads_them_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    set_global_policy(SelectionPolicy(prefer="vendor"))
    handover.offer()
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    assert ask(1) == ["reference", "environment variable VLLM_FL_PREFER", "INFO"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"pid": "1", "settings": ""}', '{"pid": 1}', "3"])
def test_a_variable_that_somebody_else_wrote_is_one_clear_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(handover.VARIABLE, text)
    with pytest.raises(ConfigError, match=f"{handover.VARIABLE}.*written by a parent process"):
        handover.adopt()


def test_what_a_parent_cannot_have_written_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = {"pid": os.getppid(), "variables": handover._variables(), "settings": "{}"}
    monkeypatch.setenv(handover.VARIABLE, json.dumps(packed))
    with pytest.raises(ConfigError, match="settings of another process"):
        handover.adopt()
