"""Each mode of graphs on a GPU: which batches replay which graphs, and how a kernel that fails in one is found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import PROMPTS, Runs, expected_tokens, start_features

from fl_dispatch.cli.checkpoints import build_checkpoint

pytestmark = pytest.mark.gpu
PIECEWISE, FULL = "PIECEWISE", "FULL"
SHORT = [prompt[:5] for prompt in PROMPTS[:3]]
NEW = 4
COMMON = {"gpu_memory_utilization": 0.1, "enforce_eager": False, "enable_prefix_caching": False}
OURS = {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}
MODES: dict[str, tuple[str | None, str | None]] = {
    "NONE": (None, None),
    "PIECEWISE": (PIECEWISE, PIECEWISE),
    "FULL": (PIECEWISE, FULL),
    "FULL_DECODE_ONLY": (None, FULL),
    "FULL_AND_PIECEWISE": (PIECEWISE, FULL),
}
"""Mode that is asked for → the graphs that a prompt replays, and those that a step of decoding does.

Graphs hold our attention only for batches with one number of new tokens for every request, so ``FULL`` becomes the
last one.
"""
each = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("qwen3", tmp_path_factory.mktemp("checkpoints") / "qwen3")


@pytest.fixture(scope="module")
def results(model: Path) -> Runs:
    """One request alone, and three together; what was replayed is asked for before and after each."""

    def start(mode: str) -> Any:
        sizes = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
        ask = [{"do": "generate", "prompts": given, "sampling": {"max_tokens": NEW}} for given in (SHORT[:1], SHORT)]
        steps = [{"do": "replays"}, ask[0], {"do": "replays"}, ask[1], {"do": "replays"}]
        return start_features((model, steps, {**COMMON, "compilation_config": sizes}), **OURS)

    return Runs({mode: start(mode) for mode in MODES})


@each
def test_tokens_equal_hugging_face(mode: str, results: Runs, model: Path) -> None:
    _, alone, _, together, _ = results[mode]["runs"][0]["steps"]
    expected = expected_tokens(model, SHORT, NEW)
    assert [output["tokens"][0] for output in alone] == expected[:1]
    assert [output["tokens"][0] for output in together] == expected


@each
def test_a_batch_replays_the_graphs_of_the_least_size_that_holds_it(mode: str, results: Runs) -> None:
    _, _, alone, _, together = results[mode]["runs"][0]["steps"]
    prompt, decode = MODES[mode]
    assert _kinds(alone) == {(kind, size) for kind, size in ((prompt, 8), (decode, 1)) if kind}
    assert _kinds(together) == {(kind, size) for kind, size in ((prompt, 16), (decode, 4)) if kind}


@each
def test_a_step_replays_one_whole_graph_or_a_piece_around_each_attention(mode: str, results: Runs) -> None:
    (run,) = results[mode]["runs"]
    layers, counted = sum(run["report"]["attention"].values()), Counter(kind for _, kind, _ in run["steps"][2])
    in_pieces = MODES[mode].count(PIECEWISE) and (NEW if MODES[mode][1] == PIECEWISE else 1)
    assert counted[FULL] == (NEW - 1 if MODES[mode][1] == FULL else 0)
    assert counted[PIECEWISE] >= in_pieces * (layers + 1)
    assert counted[PIECEWISE] % max(1, in_pieces) == 0
    assert bool(counted[PIECEWISE]) == bool(in_pieces)


def _kinds(replayed: list[list[Any]]) -> set[tuple[str, int]]:
    return {(mode, tokens) for _, mode, tokens in replayed}


# -- prompts ----------------------------------------------------------------------------------------------------------

LONG, PADDED = 700, 768
CHOSEN = {"compilation_config": {"max_cudagraph_capture_size": 512}}


@pytest.fixture(scope="module")
def long(model: Path) -> Runs:
    """A prompt of more tokens than vLLM's graphs have, read with our sizes and with those that a user chose."""
    prompts = [[10 + (7 * place) % 200 for place in range(LONG)]]
    ask = {"do": "generate", "prompts": prompts, "sampling": {"max_tokens": NEW, "logprobs": 0}}
    steps = [{"do": "replays"}, ask, {"do": "replays"}]
    engines = {"ours": {}, "chosen": CHOSEN}
    sizes = {"max_model_len": 1024, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
    common = {**COMMON, **sizes, "kv_cache_memory_bytes": 1 << 30}
    runs = {name: (model, steps, {**common, **engine}) for name, engine in engines.items()}
    return Runs({name: start_features(run, **OURS) for name, run in runs.items()})


def test_a_prompt_replays_graphs_where_the_device_would_wait_for_the_host(long: Runs) -> None:
    (ours,), (chosen,) = long["ours"]["runs"], long["chosen"]["runs"]
    assert (PIECEWISE, PADDED) in _kinds(ours["steps"][2])
    assert not {kind for kind in _kinds(chosen["steps"][2]) if kind[1] > 512}
    layers = sum(ours["report"]["attention"].values())
    assert (ours["report"]["compiled"]["captured"], chosen["report"]["compiled"]["captured"]) == (2048, 512)
    assert Counter(tokens for _, _, tokens in ours["steps"][2])[PADDED] == layers + 1
    assert ours["steps"][1][0]["tokens"] == chosen["steps"][1][0]["tokens"]


# -- a kernel that fails ----------------------------------------------------------------------------------------------

PLUGIN = {"VLLM_FL_PLUGIN_MODULES": "asserting_plugin", "VLLM_FL_PER_OP": "kv_cache_write=impl:vendor.asserting"}
FRAME = 'asserting_plugin.py", line'
"""As a stack names the kernel's function."""
REACHING = PROMPTS[1:2]
"""A prompt of 27 tokens, so that its first new one lies in the second half of a block."""


def _failing(model: Path, eagerly: bool, **variables: str) -> str:
    """The end of the log of an engine that such a kernel ends."""
    step = {"do": "generate", "prompts": REACHING, "sampling": {"max_tokens": NEW}}
    started = start_features((model, [step], {**COMMON, "enforce_eager": eagerly}), **OURS, **PLUGIN, **variables)
    return str(started.exception())


def test_a_kernel_that_fails_in_a_graph_is_named_by_an_eager_engine_that_waits_for_each_launch(model: Path) -> None:
    """As vLLM's page has it: ``enforce_eager`` isolates it, and ``CUDA_LAUNCH_BLOCKING=1`` has its stack."""
    in_graph = _failing(model, eagerly=False)
    assert "device-side assert triggered" in in_graph
    assert FRAME not in in_graph
    named = _failing(model, eagerly=True, CUDA_LAUNCH_BLOCKING="1")
    assert "device-side assert triggered" in named
    assert FRAME in named
