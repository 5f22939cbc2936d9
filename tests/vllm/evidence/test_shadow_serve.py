"""A running ``vllm serve`` finds its wrong operator, says so in log, metrics and commands, and goes on without it."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from damaged import refused
from engines import PROMPTS
from served import Server

from fl_dispatch.hosting.damage.verdicts import of_wrong
from fl_dispatch.hosting.records.runs import Sizes, recorded

LONG = max(range(len(PROMPTS)), key=lambda row: len(PROMPTS[row]))
VARIABLES = {
    "VLLM_FL_PLUGIN_MODULES": "long_wrong",
    "VLLM_FL_PER_OP": "silu_and_mul=vendor:long|reference",
    "VLLM_FL_SHADOW_SHARE": "1",
    "VLLM_FL_SHADOW_BUDGET": "1",
    "VLLM_FL_SHADOW_ACTION": "ban",
}
WRONG = {"operator": "silu_and_mul", "implementation": "vendor.long", "rank": "0"}
RIGHT = {**WRONG, "implementation": "reference.torch"}


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log, state = tmp_path_factory.mktemp("shadow") / "log.txt", tempfile.mkdtemp(prefix="fl-state-")
    running = Server(checkpoint("qwen3"), log, state, VARIABLES)
    yield running
    running.end()


def test_a_fault_in_a_running_server_is_found_told_once_counted_and_taken_out(
    server: Server, expected: Callable[[str], list[list[int]]]
) -> None:
    right = expected("qwen3")
    assert server.tokens(PROMPTS[0]) == right[0]
    assert server.until("fl_shadow_calls_total", WRONG, 1.0) >= 1
    assert server.metric("fl_shadow_differences_total", WRONG) == 0
    assert server.metric("fl_selected_implementation", WRONG) == 1
    assert server.metric("fl_selected_implementation", RIGHT) is None
    assert server.metric("vllm:num_requests_running", {"engine": "0", "model_name": "tiny"}) == 0

    assert server.tokens(PROMPTS[LONG]) == right[LONG]  # what the wrong operator computed was computed again
    assert len(re.findall(r"an implementation that was wrong: cmpl-\S+\n", server.log.read_text())) == 1
    assert server.until("fl_bans", WRONG, 3.0) == 3
    assert server.metric("fl_shadow_differences_total", WRONG) == 3
    assert server.metric("fl_selected_implementation", RIGHT) == 1
    assert server.metric("fl_selected_implementation", WRONG) is None

    assert server.tokens(PROMPTS[LONG]) == right[LONG]
    assert server.tokens(PROMPTS[0]) == right[0]
    told = re.findall(r"shadow: 'silu_and_mul' by 'vendor.long' .* in (\S+)\); it is banned", server.log.read_text())
    assert len(told) == len(set(told)) == 3, told
    assert server.log.read_text().count("shadow: ") == 3


def test_explain_and_doctor_speak_of_the_serving_process(server: Server) -> None:
    explained = server.fl("explain", "silu_and_mul", "--run", str(server.pid), "--json")
    (entry,) = json.loads(explained.log)
    assert entry["rank"] == 0
    assert entry["pid"] != server.pid
    chosen = [each for each in entry["decision"]["considered"] if each["status"] == "chosen"]
    assert [each["impl_id"] for each in chosen] == ["reference.torch"]
    ended = server.fl("doctor", "--run", str(server.pid), "--json")
    report = json.loads(ended.log)
    assert ended.returncode == 1
    assert "it is banned" in report["problems"][0]
    assert ["shadow_action", "ban", "environment variable VLLM_FL_SHADOW_ACTION", "0"] in report["settings"]
    assert report["workers"][0][1] == f"{entry['pid']} (running)"
    assert report["workers"][0][4].startswith("V2, because vLLM prefers it")


def test_the_record_has_the_sizes_of_its_steps_for_fl_tune(server: Server) -> None:
    (run,) = recorded(Path(server.state) / "fl_dispatch" / "runs")
    sizes = Sizes(**run.sizes)
    assert (sizes.dtype, sizes.tensor_parallel, sizes.eager, sizes.compiled) == ("float32", 1, True, False)
    assert (sizes.requests, sizes.step_tokens) == (3, 384)


def test_a_number_that_is_no_run_is_one_error(server: Server) -> None:
    ended = server.fl("explain", "silu_and_mul", "--run", "4194304")
    assert ended.returncode == 2
    assert "no worker of that process left a record" in ended.last_line


@pytest.mark.parametrize("v2", ["0", "1"], ids=["V1", "V2"])
def test_a_request_that_a_wrong_operator_touched_ends_with_the_reason_and_others_go_on(
    v2: str, checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]], tmp_path: Path
) -> None:
    """The fault is found in the first of three parts of the long prompt; the others run when it has ended."""
    right, others = expected("qwen3"), [row for row in range(len(PROMPTS)) if row != LONG]
    given = {**VARIABLES, "VLLM_FL_DAMAGED_REQUESTS": "end", "VLLM_USE_V2_MODEL_RUNNER": v2}
    options = ("--max-num-seqs", "1", "--max-num-batched-tokens", "128")
    server = Server(checkpoint("qwen3"), tmp_path / "log.txt", tempfile.mkdtemp(prefix="fl-state-"), given, options)
    labels = {"engine": "0", "model_name": "tiny"}

    def hits() -> float:
        return server.metric("vllm:prefix_cache_hits_total", labels) or 0.0

    try:
        with ThreadPoolExecutor(len(PROMPTS)) as clients:
            ends = clients.submit(refused, server, PROMPTS[LONG])
            time.sleep(0.02)  # so that it is the first
            answers = [clients.submit(server.tokens, PROMPTS[row]) for row in others]
            assert ends.result() == (500, of_wrong(["'silu_and_mul' by 'vendor.long'"]))
            assert [answer.result() for answer in answers] == [right[row] for row in others]
        assert len(re.findall(r"an implementation that was wrong: cmpl-\S+\n", server.log.read_text())) == 1
        before = hits()
        assert server.tokens(PROMPTS[LONG]) == right[LONG]
        assert hits() == before
        assert server.tokens(PROMPTS[LONG]) == right[LONG]
        assert server.until("vllm:prefix_cache_hits_total", labels, before + 1) > before
    finally:
        server.end()
