"""What the user got wrong ends the start with one clear error, before a model loads, and with a non-zero exit.

Three cases start a real ``vllm serve``. The others take the steps that it begins with, the platform's entry point and
the platform's own hook, each in a fork of one process that has imported everything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import Finished, background

FORKS = """
import json, os, sys, traceback
import vllm_fl
from vllm_fl import startup

for name, variables in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        output = os.open(os.path.join(sys.argv[2], name), os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 2)
        os.environ.update(variables)
        try:
            assert vllm_fl.register_platform() == vllm_fl.register_platform() == startup.PLATFORM
            startup.raise_stored()
            startup.activate()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(name, os.waitstatus_to_exitcode(os.wait()[1]))
"""

FILES = {
    "unknown_key": "prefr: vendor\n",
    "wrong_type": "strict: sometimes\n",
    "bad_token": "op_backends:\n  rms_norm: [vendor, refrence]\n",
    "near_miss": "op_backends:\n  rms_nrom: [reference]\n",
    "bad_value": "prefer: fastest\n",
}

# case → (variables, or a file's name, and what the error's line says)
CASES: dict[str, tuple[dict[str, str], str]] = {
    "unknown_key": ({"VLLM_FL_CONFIG": "unknown_key"}, r"ConfigError: .*unknown_key\.yaml, line 1.*prefr.*prefer"),
    "wrong_type": ({"VLLM_FL_CONFIG": "wrong_type"}, r"ConfigError: .*wrong_type\.yaml, line 1.*strict.*sometimes"),
    "bad_token": ({"VLLM_FL_CONFIG": "bad_token"}, r"ConfigError: .*bad_token\.yaml, line 2.*refrence.*reference"),
    "near_miss": ({"VLLM_FL_CONFIG": "near_miss"}, r"ConfigError: .*near_miss\.yaml, line 2.*rms_nrom.*rms_norm"),
    "bad_value": ({"VLLM_FL_CONFIG": "bad_value"}, r"ConfigError: .*bad_value\.yaml, line 1.*prefer.*fastest"),
    "variable": ({"VLLM_FL_PREFER": "vendr"}, r"ConfigError: .*VLLM_FL_PREFER.*vendr.*vendor"),
    "near_miss_variable": ({"VLLM_FL_PREFFER": "vendor"}, r"ConfigError: .*VLLM_FL_PREFFER.*VLLM_FL_PREFER"),
    "duplicate_id": (
        {"VLLM_FL_PLUGIN_MODULES": "duplicate_plugin"},
        r"RegistrationError: .*vendor\.twice.*silu_and_mul",
    ),
    "nothing_left": ({"VLLM_FL_PER_OP": "rms_norm=vendor:nobody"}, r"ConfigError: .*rms_norm"),
}
SERVED: dict[str, tuple[dict[str, str], str]] = {
    "missing_file": ({"VLLM_FL_CONFIG": "/nowhere/fl.yaml"}, r"ConfigFileNotFoundError: .*/nowhere/fl\.yaml"),
    "both_lists": (
        {"VLLM_FL_OOT_WHITELIST": "rms_norm", "VLLM_FL_OOT_BLACKLIST": "rotary_embedding"},
        r"ConfigError: .*VLLM_FL_OOT_(WHITE|BLACK)LIST",
    ),
    "plugin_module": ({"VLLM_FL_PLUGIN_MODULES": "no_such_plugin"}, r"PluginLoadError: .*no_such_plugin"),
}


@pytest.fixture(scope="session")
def ended(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Every case in a process of its own."""
    folder = tmp_path_factory.mktemp("config")
    for name, text in FILES.items():
        (folder / f"{name}.yaml").write_text(text)

    def variables(given: dict[str, str]) -> dict[str, str]:
        file = given.get("VLLM_FL_CONFIG")
        return {**given, "VLLM_FL_CONFIG": str(folder / f"{file}.yaml")} if file in FILES else given

    serve = ("-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint("qwen3")), "--port", "0")
    running = {name: background(*serve, **variables(given)) for name, (given, _) in SERVED.items()}
    cases = {name: variables(given) for name, (given, _) in CASES.items()}
    logs = tmp_path_factory.mktemp("logs")
    forks = background("-c", FORKS, json.dumps(cases), str(logs)).result()
    codes = dict(re.findall(r"^(\w+) (\d+)$", forks.log, re.MULTILINE))
    ended = {name: Finished(int(codes[name]), (logs / name).read_text()) for name in cases}
    return ended | {name: process.result() for name, process in running.items()}


@pytest.mark.parametrize("case", [*CASES, *SERVED])
def test_one_line_says_what_is_wrong_and_the_exit_code_is_not_zero(case: str, ended: dict[str, Finished]) -> None:
    finished = ended[case]
    assert finished.returncode != 0
    errors = [line for line in finished.log.splitlines() if line.startswith("fl_dispatch.errors.")]
    assert len(errors) == 1, finished.log[-2000:]
    assert re.search((CASES | SERVED)[case][1], errors[0])


@pytest.mark.parametrize("case", SERVED)
def test_serve_stops_before_a_model_loads(case: str, ended: dict[str, Finished]) -> None:
    assert "Starting to load model" not in ended[case].log
    assert "Resolved architecture" not in ended[case].log
