"""A user's mistake ends the start with one clear error, before a model loads, and with a non-zero exit.

SGLang swallows what a plugin raises, so each case goes through both of its ways to start, the server's and the
engine's. Most are forks of one process; some are processes of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import HERE, background, distribution, engine_arguments, environment, server_arguments

import bad_settings
import processes
from processes import Finished, pool

CASES = bad_settings.cases("SGLANG_FL") | {
    "vllm_variable": ({"VLLM_FL_PREFER": "vendr"}, r"ConfigError: .*VLLM_FL_PREFER.*vendr.*vendor"),
    "platform_without_plugin": (
        {"SGLANG_PLATFORM": "fl", "SGLANG_PLUGINS": "another"},
        r"RuntimeError: .*did not apply any of its hooks: SGLANG_PLUGINS must contain 'fl'",
    ),
    "forced_backend": (
        {"SGLANG_FORCE_FUSED_OP_BACKEND": "torch"},
        r"ConfigError: environment variable SGLANG_FORCE_FUSED_OP_BACKEND: 'torch' .*SGLANG_FL_PER_OP",
    ),
}
CPU_ENGINE = {"SGLANG_USE_CPU_ENGINE": "1"}
WAYS = ("server", "engine")
ERROR = re.compile(r"^(fl_dispatch\.errors\.\w+|RuntimeError|sglang_fl: error): .*$", re.MULTILINE)
BROKEN = r"RuntimeError: .*did not apply hooks.*GroupCoordinator\.all_gatherv"


@pytest.fixture(scope="module")
def ended(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    """Name of a case → its process: each case as a server and as an engine, and whole servers as a user starts them."""
    folder = tmp_path_factory.mktemp("config")
    bad_settings.write(folder)
    model = checkpoint("qwen3")
    serve = ("-m", "sglang.launch_server", *server_arguments(model))

    def broken(kind: str) -> str:
        return distribution(tmp_path_factory.mktemp(kind), f"break_hook:{kind}")

    whole = {
        "whole_server": background(*serve, cold=True, **CASES["missing_file"][0]),
        "unserved": background(*serve, "--enable-torch-compile"),
        "broken_hook": background(*serve, PYTHONPATH=broken("everywhere")),
        "hook_broken_in_scheduler": background(*serve, cold=True, PYTHONPATH=broken("in_children")),
    }
    job = {
        "server": server_arguments(model),
        "engine": engine_arguments(model),
        "starts": {
            f"{way} {name}": {"how": way, "variables": bad_settings.located(given, folder)}
            for name, (given, _) in {**CASES, "cpu_engine": (CPU_ENGINE, "")}.items()
            for way in WAYS
        },
    }
    forks = pool.submit(processes.finish, HERE / "run_starts.py", job, environment())

    def find(case: str) -> Finished:
        if case in whole:
            return whole[case].result()
        found = forks.result()[case]
        return Finished(found["code"], found["log"])

    return find


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_one_line_says_what_is_wrong_and_the_exit_code_is_not_zero(
    case: str, way: str, ended: Callable[[str], Finished]
) -> None:
    _refused(ended(f"{way} {case}"), CASES[case][1])


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("whole_server", CASES["missing_file"][1].partition("Error: ")[2]),
        ("unserved", r"sglang_fl does not support --enable-torch-compile on cpu yet \(model .*\)"),
    ],
)
def test_the_command_ends_with_one_line_in_place_of_a_traceback(
    case: str, says: str, ended: Callable[[str], Finished]
) -> None:
    finished = ended(case)
    assert finished.returncode == 1
    errors = [line for line in finished.log.splitlines() if re.search(says, line)]
    assert len(errors) == 1, finished.log[-3000:]
    assert errors[0].startswith("sglang_fl: error: ")
    assert "Traceback" not in finished.log
    assert "Load weight begin" not in finished.log


@pytest.mark.parametrize("way", WAYS)
def test_sglangs_compiled_cpu_kernels_are_refused_even_where_sglang_stops_first(
    way: str, ended: Callable[[str], Finished]
) -> None:
    """Importing its engine needs them, so there ours can only be the first error."""
    finished = ended(f"{way} cpu_engine")
    assert finished.returncode != 0
    assert re.search(r"ConfigError: environment variable SGLANG_USE_CPU_ENGINE: .*unset it", finished.log)
    assert finished.log.index("SGLANG_USE_CPU_ENGINE") < finished.log.index("Traceback")


def test_a_hook_whose_target_does_not_exist_is_refused(ended: Callable[[str], Finished]) -> None:
    assert "Failed to apply hooks to" in ended("broken_hook").log
    _refused(ended("broken_hook"), BROKEN)


def test_a_hook_that_only_the_scheduler_could_not_apply_is_refused(ended: Callable[[str], Finished]) -> None:
    finished = ended("hook_broken_in_scheduler")
    assert finished.returncode != 0
    assert re.search(BROKEN, finished.log), finished.log[-3000:]
    assert "Load weight begin" not in finished.log


def _refused(finished: Finished, error: str) -> None:
    assert finished.returncode != 0
    errors = [found.group() for found in ERROR.finditer(finished.log)]
    assert len(errors) == 1, finished.log[-3000:]
    of_command = errors[0].startswith("sglang_fl: error: ")  # which names no class
    assert re.search(error.partition("Error: ")[2] if of_command else error, errors[0])
    assert "Load weight begin" not in finished.log
