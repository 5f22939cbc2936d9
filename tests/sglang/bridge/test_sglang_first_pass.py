"""An operator that is claimed and never dispatched is seen in the first forward pass: SGLang runs its own code unseen.

The output is right all the same, so tokens cannot show it. Here a plugin of another distribution makes SGLang's
``SiluAndMul`` go around the function that we hook.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import background, distribution, server_arguments, start

from sglang_fl.version import host_version

MISSED = "SGLang's own code runs in the place of operators that were to be dispatched: 'silu_and_mul' (3 layers, "


@pytest.fixture(scope="module")
def results(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A server in strict mode, and an engine in the usual one."""
    path = distribution(tmp_path_factory.mktemp("plugin"), "go_around:load")

    def variables() -> dict[str, str]:
        return {"PYTHONPATH": path, "XDG_STATE_HOME": str(tmp_path_factory.mktemp("state"))}

    serve = [part for part in server_arguments(checkpoint("qwen3")) if part != "--skip-server-warmup"]
    strict = background("-m", "sglang.launch_server", *serve, **variables(), SGLANG_FL_STRICT="1")
    usual = start(checkpoint("qwen3"), variables=variables(), engine={"log_level": "warning"}, doctor=True)
    return {"strict": strict.result(), "usual": usual.result()}


def test_the_tokens_are_right_and_the_operator_did_not_run(
    results: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    result = results["usual"]
    assert result["steps"][0]["tokens"] == expected("qwen3")
    assert not [key for key in result["report"]["counts"] if key.startswith("silu_and_mul")]


def test_the_log_warns_once(results: dict[str, Any]) -> None:
    found = [line for line in results["usual"]["log"].splitlines() if MISSED in line]
    assert len(found) == 1


def test_the_report_names_every_layer(results: dict[str, Any]) -> None:
    missed = results["usual"]["report"]["undispatched"]
    assert missed == {"silu_and_mul": [f"model.layers.{layer}.mlp.act_fn" for layer in range(3)]}


def test_doctor_warns_while_the_engine_serves(results: dict[str, Any]) -> None:
    doctor = results["usual"]["doctor"]
    pid = results["usual"]["report"]["pid"]
    assert doctor["warnings"] == [
        f"SGLang {host_version()}, process {pid}: never dispatched although it was to be: silu_and_mul (3 layers)"
    ]
    assert f"{pid} (running)" in doctor["runs"][0]


def test_in_strict_mode_the_server_ends_with_an_error(results: dict[str, Any]) -> None:
    finished = results["strict"]
    assert finished.returncode != 0
    assert f"UndispatchedError: {MISSED}" in finished.log
    assert "The server is fired up" not in finished.log
