"""The command: tables for people, JSON for programs, one error and an exit code for what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from command import fl
from fl_dispatch.version import __version__


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


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("FLAGCX_PATH", "/nowhere", "environment variable FLAGCX_PATH: /nowhere: there is no such file"),
        ("VLLM_FL_OOT_BLACKLIST", "RMSnorm", "VLLM_FL_OOT_BLACKLIST: [0]: unknown operator or layer class 'RMSnorm'"),
        ("VLLM_CPU_KVCACHE_SPACE", "much", "VLLM_CPU_KVCACHE_SPACE: a number of GiB is needed, not 'much'"),
        ("VLLM_CPU_OMP_THREADS_BIND", "0-x", "VLLM_CPU_OMP_THREADS_BIND: is 'auto', 'nobind', or a list of cores"),
    ],
)
def test_doctor_finds_what_the_server_refuses(variable: str, value: str, says: str) -> None:
    report = data("doctor", **{variable: value})
    assert [says in problem for problem in report["problems"]] == [True]


def test_doctor_says_which_setting_has_no_effect_here() -> None:
    report = data("doctor", VLLM_FL_NATIVE_PLATFORM="1")
    assert any("VLLM_FL_NATIVE_PLATFORM: has no effect" in warning for warning in report["warnings"])


def test_doctor_needs_one_screen_and_all_of_it_is_there_on_request() -> None:
    screen, everything = fl("doctor").stdout, fl("doctor", "--all").stdout
    assert len(screen.splitlines()) <= 40
    assert "flagos (cpu.yaml (platform), line " in screen
    assert "default.triton" in screen
    assert len(everything.splitlines()) > 100
    assert "Implementations that cannot run here" in everything


def test_without_a_host_nothing_can_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    from fl_dispatch.cli import doctor

    monkeypatch.setattr(doctor, "find_spec", lambda package: None)
    assert any("no host is installed in this environment" in problem for problem in doctor.examine()["problems"])


def test_the_command_says_its_version() -> None:
    assert fl("--version").stdout == f"fl-dispatch {__version__}\n"


def test_help_is_there_for_every_command() -> None:
    for command in ([], ["demo"], ["ops"], ["explain"], ["doctor"]):
        done = fl(*command, "--help")
        assert done.returncode == 0
        assert "Usage" in done.stdout
