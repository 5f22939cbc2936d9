"""The command: tables for people, JSON for programs, one error and an exit code for what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from typing import Any

import pytest

import processes


def fl(*arguments: str, cold: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in its own process; ``cold``: as a user does."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_FL_")}
    command = ["-c", "from fl_dispatch.cli import main; main()", *arguments]
    with tempfile.TemporaryFile() as errors:
        ended = processes.python(*command, environment={**clean, **environment}, cold=cold, errors=errors)
        errors.seek(0)
        return subprocess.CompletedProcess(command, ended.returncode, ended.log, errors.read().decode())


def data(*arguments: str, **environment: str) -> Any:
    done = fl(*arguments, "--json", **environment)
    return json.loads(done.stdout)


def test_ops_lists_every_operator_with_its_choice() -> None:
    rows = {row["operator"]: row for row in data("ops")}
    assert rows["rms_norm"]["chosen"] == "reference.torch"
    assert "kv_cache_write" in rows
    assert "rms_norm" in fl("ops", cold=True).stdout


def test_explain_says_why_for_each_implementation_and_where_the_setting_is_from() -> None:
    decision = data("explain", "silu_and_mul", VLLM_FL_PREFER="reference", FL_DISPATCH_TEMPLATE="1")
    assert "environment variable VLLM_FL_PREFER" in decision["origin"]
    assert decision["considered"][0]["impl_id"] == "reference.torch"
    assert {entry["status"] for entry in decision["considered"]} >= {"chosen", "fallback"}
    assert "VLLM_FL_PREFER" in fl("explain", "silu_and_mul", VLLM_FL_PREFER="reference").stdout


def test_explain_names_the_nearest_operator() -> None:
    done = fl("explain", "rms_nrom")
    assert done.returncode == 2
    assert "did you mean 'rms_norm'" in done.stderr


def test_doctor_is_healthy_here_and_tells_versions_and_origins() -> None:
    report = data("doctor")
    assert report["problems"] == []
    assert report["versions"]["torch"] != "not installed"
    assert ["prefer", "flagos"] in [row[:2] for row in report["settings"]]


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("VLLM_FL_PREFER", "vendr", "Invalid prefer value"),
        ("VLLM_FL_CONFIG", "/no/such/file.yaml", "config file not found"),
        ("VLLM_FL_PLUGIN_MODULES", "no.such.module", "cannot be loaded"),
        ("VLLM_FL_PER_OP", "rms_norm=vendor:nobody", "leaves nothing to run"),
    ],
)
def test_something_wrong_is_one_message_and_a_non_zero_exit(variable: str, value: str, text: str) -> None:
    doctor = fl("doctor", **{variable: value})
    assert doctor.returncode == 1
    assert text in doctor.stderr.replace("\n", " ")
    explain = fl("explain", "rms_norm", **{variable: value})
    assert explain.returncode == 2
    assert text in explain.stderr.replace("\n", " ")
    assert "Traceback" not in doctor.stderr + explain.stderr


def test_help_is_there_for_every_command() -> None:
    for command in ([], ["demo"], ["ops"], ["explain"], ["doctor"]):
        done = fl(*command, "--help")
        assert done.returncode == 0
        assert "Usage" in done.stdout
