"""A user's mistake ends the start with one clear error, before a model loads, and with a non-zero exit.

Real ``vllm serve`` commands end with a single line. The other cases take the steps that it begins with, the platform's
entry point and the platform's own hook, each in a fork of one process that has imported everything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import Finished, background, serve_command

import bad_settings

FORKS = """
import json, os, sys, traceback
import vllm_fl
from vllm_fl.platform import startup
from vllm_fl.platform.out_of_tree import PlatformFL

for name, variables in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        output = os.open(os.path.join(sys.argv[2], name), os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 2)
        os.environ.update(variables)
        try:
            assert vllm_fl.register_platform() == vllm_fl.register_platform() == startup.PLATFORM
            startup.START.raise_kept()
            PlatformFL.pre_register_and_update()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(name, os.waitstatus_to_exitcode(os.wait()[1]))
"""

CASES = bad_settings.cases("VLLM_FL") | {
    "cache_size": ({"VLLM_CPU_KVCACHE_SPACE": "much"}, r"ConfigError: .*VLLM_CPU_KVCACHE_SPACE: .*GiB.*'much'"),
}
SERVED = {
    "missing_file": ((), CASES["missing_file"][1]),
    "no_library": ((), CASES["no_library"][1]),
    "layers_off": (
        ("--compilation-config", '{"custom_ops": ["none"]}'),
        r"Error: custom_ops=\['none'\] would .* set VLLM_FL_OOT_ENABLED=0",
    ),
}
"""Real servers: further arguments, and what the error says. The last one is found when the model is known."""


@pytest.fixture(scope="session")
def ended(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    """Name of a case → its process. Servers are started as a user does, in no fork."""
    folder, logs = tmp_path_factory.mktemp("config"), tmp_path_factory.mktemp("logs")
    bad_settings.write(folder)
    variables = {name: bad_settings.located(given, folder) for name, (given, _) in CASES.items()}
    command = (*serve_command(str(checkpoint("qwen3"))), "--port", "0")
    servers = {
        name: background(*command, *more, cold=True, **variables.pop(name, {})) for name, (more, _) in SERVED.items()
    }
    forks = background("-c", FORKS, json.dumps(variables), str(logs))

    def find(case: str) -> Finished:
        if case in servers:
            return servers[case].result()
        codes = dict(re.findall(r"^(\w+) (\d+)$", forks.result().log, re.MULTILINE))
        return Finished(int(codes[case]), (logs / case).read_text())

    return find


@pytest.mark.parametrize("case", CASES.keys() - SERVED.keys())
def test_one_line_says_what_is_wrong_and_the_exit_code_is_not_zero(case: str, ended: Callable[[str], Finished]) -> None:
    finished = ended(case)
    assert finished.returncode != 0
    errors = [line for line in finished.log.splitlines() if line.startswith("fl_dispatch.errors.")]
    assert len(errors) == 1, finished.log[-2000:]
    assert re.search(CASES[case][1], errors[0])


@pytest.mark.parametrize("case", SERVED)
def test_the_command_ends_with_one_line_in_place_of_a_traceback(case: str, ended: Callable[[str], Finished]) -> None:
    finished = ended(case)
    says = SERVED[case][1].partition("Error: ")[2]
    assert finished.returncode == 1
    assert re.fullmatch(f"vllm_fl: error: .*{says}.*", finished.log.splitlines()[-1]), finished.log[-3000:]
    assert len(re.findall(says, finished.log)) == 1
    assert "Traceback" not in finished.log
    assert "Starting to load model" not in finished.log


def test_what_needs_no_model_is_said_before_there_is_one(ended: Callable[[str], Finished]) -> None:
    assert "Resolved architecture" not in ended("missing_file").log + ended("no_library").log
