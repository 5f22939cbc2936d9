"""What the user got wrong ends the start with one clear error, before a model loads, and with a non-zero exit.

SGLang swallows what a plugin raises, so each case goes through both of its ways to start, the server's and the
engine's. Most are forks of one process; some are processes of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import HERE, background, distribution, engine_arguments, environment, server_arguments

import running
from running import Finished

FILES = {
    "unknown_key": "prefr: vendor\n",
    "wrong_type": "strict: sometimes\n",
    "bad_token": "op_backends:\n  rms_norm: [vendor, refrence]\n",
    "near_miss": "op_backends:\n  rms_nrom: [reference]\n",
    "bad_value": "prefer: fastest\n",
}

# case → (variables, where FL_CONFIG may be a file's name, and what the error's line says)
CASES: dict[str, tuple[dict[str, str], str]] = {
    "unknown_key": ({"SGLANG_FL_CONFIG": "unknown_key"}, r"ConfigError: .*unknown_key\.yaml, line 1.*prefr.*prefer"),
    "wrong_type": ({"VLLM_FL_CONFIG": "wrong_type"}, r"ConfigError: .*wrong_type\.yaml, line 1.*strict.*sometimes"),
    "bad_token": ({"SGLANG_FL_CONFIG": "bad_token"}, r"ConfigError: .*bad_token\.yaml, line 2.*refrence.*reference"),
    "near_miss": ({"SGLANG_FL_CONFIG": "near_miss"}, r"ConfigError: .*near_miss\.yaml, line 2.*rms_nrom.*rms_norm"),
    "bad_value": ({"SGLANG_FL_CONFIG": "bad_value"}, r"ConfigError: .*bad_value\.yaml, line 1.*prefer.*fastest"),
    "missing_file": ({"SGLANG_FL_CONFIG": "/nowhere/fl.yaml"}, r"ConfigFileNotFoundError: .*/nowhere/fl\.yaml"),
    "variable": ({"SGLANG_FL_PREFER": "vendr"}, r"ConfigError: .*SGLANG_FL_PREFER.*vendr.*vendor"),
    "vllm_variable": ({"VLLM_FL_PREFER": "vendr"}, r"ConfigError: .*VLLM_FL_PREFER.*vendr.*vendor"),
    "near_miss_variable": ({"SGLANG_FL_PREFFER": "vendor"}, r"ConfigError: .*SGLANG_FL_PREFFER.*SGLANG_FL_PREFER"),
    "both_lists": (
        {"SGLANG_FL_OOT_WHITELIST": "rms_norm", "SGLANG_FL_OOT_BLACKLIST": "rotary_embedding"},
        r"ConfigError: .*SGLANG_FL_OOT_(WHITE|BLACK)LIST",
    ),
    "plugin_module": ({"SGLANG_FL_PLUGIN_MODULES": "no_such_plugin"}, r"PluginLoadError: .*no_such_plugin"),
    "duplicate_id": (
        {"SGLANG_FL_PLUGIN_MODULES": "duplicate_plugin"},
        r"RegistrationError: .*vendor\.twice.*silu_and_mul",
    ),
    "nothing_left": ({"SGLANG_FL_PER_OP": "rms_norm=vendor:nobody"}, r"ConfigError: .*rms_norm"),
    "platform_without_plugin": (
        {"SGLANG_PLATFORM": "fl", "SGLANG_PLUGINS": "another"},
        r"RuntimeError: .*did not apply any of its hooks: SGLANG_PLUGINS must contain 'fl'",
    ),
}
CPU_ENGINE = {"SGLANG_USE_CPU_ENGINE": "1"}
WAYS = ("server", "engine")
ERROR = re.compile(r"^(fl_dispatch\.errors\.\w+|RuntimeError): .*$", re.MULTILINE)
BROKEN = r"RuntimeError: .*did not apply hooks.*GroupCoordinator\.all_gatherv"


@pytest.fixture(scope="module")
def ended(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Every case, as a server and as an engine."""
    folder = tmp_path_factory.mktemp("config")
    for name, text in FILES.items():
        (folder / f"{name}.yaml").write_text(text)

    def variables(given: dict[str, str]) -> dict[str, str]:
        return {name: str(folder / f"{value}.yaml") if value in FILES else value for name, value in given.items()}

    model = checkpoint("qwen3")
    serve = ("-m", "sglang.launch_server", *server_arguments(model))
    whole = {
        "whole_server": background(*serve, **CASES["missing_file"][0]),
        "broken_hook": background(
            *serve, PYTHONPATH=distribution(tmp_path_factory.mktemp("everywhere"), "break_hook:everywhere")
        ),
        "hook_broken_in_scheduler": background(
            *serve, PYTHONPATH=distribution(tmp_path_factory.mktemp("children"), "break_hook:in_children")
        ),
    }
    job = {
        "server": server_arguments(model),
        "engine": engine_arguments(model),
        "starts": {
            f"{way} {name}": {"how": way, "variables": variables(given)}
            for name, (given, _) in {**CASES, "cpu_engine": (CPU_ENGINE, "")}.items()
            for way in WAYS
        },
    }
    forks = running.pool.submit(running.finish, HERE / "run_starts.py", job, environment()).result()
    del forks["log"]
    finished = {name: Finished(result["code"], result["log"]) for name, result in forks.items()}
    return finished | {name: process.result() for name, process in whole.items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_one_line_says_what_is_wrong_and_the_exit_code_is_not_zero(
    case: str, way: str, ended: dict[str, Finished]
) -> None:
    _refused(ended[f"{way} {case}"], CASES[case][1])


def test_a_server_in_a_process_of_its_own_is_refused_alike(ended: dict[str, Finished]) -> None:
    _refused(ended["whole_server"], CASES["missing_file"][1])


@pytest.mark.parametrize("way", WAYS)
def test_sglangs_compiled_cpu_kernels_are_refused_even_where_sglang_stops_first(
    way: str, ended: dict[str, Finished]
) -> None:
    """Importing its engine needs them, so there ours can only be the first error."""
    finished = ended[f"{way} cpu_engine"]
    assert finished.returncode != 0
    assert re.search(r"ConfigError: environment variable SGLANG_USE_CPU_ENGINE: .*unset it", finished.log)
    assert finished.log.index("SGLANG_USE_CPU_ENGINE") < finished.log.index("Traceback")


def test_a_hook_whose_target_does_not_exist_is_refused(ended: dict[str, Finished]) -> None:
    assert "Failed to apply hooks to" in ended["broken_hook"].log
    _refused(ended["broken_hook"], BROKEN)


def test_a_hook_that_only_the_scheduler_could_not_apply_is_refused(ended: dict[str, Finished]) -> None:
    finished = ended["hook_broken_in_scheduler"]
    assert finished.returncode != 0
    assert re.search(BROKEN, finished.log), finished.log[-3000:]
    assert "Load weight begin" not in finished.log


def _refused(finished: Finished, error: str) -> None:
    assert finished.returncode != 0
    errors = [found.group() for found in ERROR.finditer(finished.log)]
    assert len(errors) == 1, finished.log[-3000:]
    assert re.search(error, errors[0])
    assert "Load weight begin" not in finished.log
