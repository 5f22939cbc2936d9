"""SGLang on a GPU through the plugin: greedy tokens equal Hugging Face's in float32, eager and from captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_on_gpu import NEUTRAL, REFERENCES, STEP, all_is_ours, python, replayed, start

from fl_dispatch import get_default_manager
from fl_dispatch.cli.checkpoints import build_checkpoint
from fl_dispatch.evidence.verify import implementations, verify
from fl_dispatch.hosting.records import metrics
from fl_dispatch.hosting.records.runs import PAUSE, recorded
from poison import ORIGIN, SAID, variables
from running import MAX_TOKENS, PROMPTS, expected_tokens, ran

pytestmark = pytest.mark.gpu
EAGER = {"disable_cuda_graph": True}
GRAPHS: Mapping[str, Any] = {}
EAGER_PROMPTS = {"cuda_graph_backend_prefill": "disabled"}
RUNS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, str], str]] = {
    "eager": ("qwen3", EAGER, NEUTRAL, "default.triton"),
    "graphs": ("qwen3", GRAPHS, NEUTRAL, "default.triton"),
    "pages, graphs": ("llama", {"page_size": 16}, NEUTRAL, "default.triton"),
    "experts, eager": ("qwen3_moe", EAGER, NEUTRAL, "default.triton"),
    "experts, graphs": ("qwen3_moe", GRAPHS, NEUTRAL, "default.triton"),
    "latent attention, eager": ("deepseek_v3", EAGER, NEUTRAL, "default.triton"),
    "latent attention, graphs": ("deepseek_v3", GRAPHS, NEUTRAL, "default.triton"),
    "sparse latent attention, eager": ("deepseek_v32", EAGER, NEUTRAL, "default.triton"),
    "sparse latent attention, graphs": ("deepseek_v32", GRAPHS, NEUTRAL, "default.triton"),
    "sparse latent attention, eager prompts, graphs": ("deepseek_v32", EAGER_PROMPTS, NEUTRAL, "default.triton"),
    "shared lists, eager": ("glm_moe_dsa", EAGER, NEUTRAL, "default.triton"),
    "shared lists, graphs": ("glm_moe_dsa", GRAPHS, NEUTRAL, "default.triton"),
    "references": ("llama", GRAPHS, REFERENCES, "reference.torch"),
}
"""Name → checkpoint, arguments of ``sglang.Engine``, variables, and what must run attention."""
ATTENTION = {"deepseek_v3": "mla_decode", "deepseek_v32": "mla_sparse", "glm_moe_dsa": "mla_sparse"}
"""Family → the operator of its attention, if that is latent."""
CAPTURED = [name for name in RUNS if name.endswith("graphs")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda family: build_checkpoint(family, folder / family))


@pytest.fixture(scope="module")
def result(checkpoint: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    """A run's engine, which gets the same prompts twice."""

    def run(name: str) -> dict[str, Any]:
        family, engine, variables, _ = RUNS[name]
        return start(checkpoint(family), STEP, STEP, engine=engine, variables=variables).result()

    return cache(run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sglangs_flash_attention_is_right(dtype: torch.dtype) -> None:
    (impl,) = implementations(get_default_manager(), ["paged_attention"], ["vendor.cuda.sglang_fa3"])
    found = verify(get_default_manager(), impl, dtype, torch.device("cuda"))
    assert found.problems == []
    assert found.samples


@pytest.mark.parametrize("name", RUNS)
def test_tokens_equal_hugging_face_twice(
    name: str, result: Callable[[str], dict[str, Any]], checkpoint: Callable[[str], Path]
) -> None:
    expected = expected_tokens(checkpoint(RUNS[name][0]))
    assert [step["tokens"] for step in result(name)["steps"]] == [expected, expected]
    assert result(name)["steps"][1]["cached"] != [0] * len(expected)


@pytest.mark.parametrize("name", RUNS)
def test_every_layer_is_ours_and_so_is_its_kernel(name: str, result: Callable[[str], dict[str, Any]]) -> None:
    found = result(name)
    assert ran(found, ATTENTION.get(RUNS[name][0], "paged_attention")) == {RUNS[name][3]}
    assert ran(found, "rms_norm") == ran(found, "kv_cache_write") == {RUNS[name][3]}
    assert all_is_ours(found["report"])


@pytest.mark.parametrize("name", CAPTURED)
def test_decoding_replays_graphs_of_what_was_frozen(name: str, result: Callable[[str], dict[str, Any]]) -> None:
    report = result(name)["report"]
    assert replayed(report, 2 * (MAX_TOKENS - 1))
    attention = ATTENTION.get(RUNS[name][0], "paged_attention")
    assert "default.triton" in str(report["manifest"]["choices"][attention])


@pytest.mark.parametrize("name", [name for name in RUNS if name not in CAPTURED])
def test_nothing_is_captured_where_nobody_asks_or_no_graph_can_hold_it(
    name: str, result: Callable[[str], dict[str, Any]]
) -> None:
    found = result(name)
    assert found["report"]["graphs"] is None
    said = "no graphs of decoding are captured, because none can hold 'reference.torch'" in found["log"]
    assert said == (name == "references")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_divided_between_two_gpus_gives_the_same_tokens(checkpoint: Callable[[str], Path]) -> None:
    found = start(checkpoint("qwen3"), STEP, STEP, engine={"tp_size": 2}, variables=NEUTRAL).result()
    expected = expected_tokens(checkpoint("qwen3"))
    assert [step["tokens"] for step in found["steps"]] == [expected, expected]
    first, second = found["reports"]
    assert first["manifest"] == second["manifest"]
    assert first["graphs"]["replays"] == second["graphs"]["replays"] > MAX_TOKENS


def test_sglang_can_be_left_alone() -> None:
    """The switch is SGLang's own: no plugin of that name is loaded, so its platform for NVIDIA GPUs runs."""
    code = "from sglang.srt.platforms import current_platform as p; print(type(p).__name__, p.is_out_of_tree())"
    assert python("-c", code, cold=True, SGLANG_PLUGINS="none").last_line == "CudaSRTPlatform False"
    assert python("-c", code, cold=True).last_line == "PlatformFL True"


@pytest.mark.parametrize("engine", [EAGER, EAGER_PROMPTS, GRAPHS], ids=["eager", "graphs of decoding", "graphs"])
def test_a_request_with_nan_ends_alone_with_its_origin_and_nothing_of_it_stays(
    engine: Mapping[str, Any], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """The token with which numbers stop being finite is the model's own, in an answer; then it is in a prompt."""
    model, right = checkpoint("qwen3"), expected_tokens(checkpoint("qwen3"))
    others = {token for text in (*PROMPTS, *right[:2]) for token in text}
    token = next(token for token in right[2][2:-2] if token not in others)
    innocent, poisoned = [*PROMPTS[2], *PROMPTS[1]], [*PROMPTS[2], token, *PROMPTS[1]]
    batches = ([innocent], [*PROMPTS[:2], PROMPTS[2]], [poisoned, *PROMPTS[:2]], [innocent])
    steps = [{"prompts": prompts, "max_tokens": MAX_TOKENS, "apart": True} for prompts in batches]
    given = {**NEUTRAL, **variables(model, tmp_path, token, XDG_STATE_HOME=str(tmp_path))}
    found = start(model, *steps, engine=engine, variables=given, linger=2 * PAUSE).result()
    before, first, second, after = (step["answers"] for step in found["steps"])
    assert first[:2] == second[1:] == right[:2]
    assert SAID in first[2]
    assert SAID in second[0]
    assert before == after
    told = [sample for one in metrics._metrics(recorded(tmp_path / "fl_dispatch/runs")) for sample in one.samples]
    counted = [(one.labels, one.value) for one in told if one.name == "fl_damage_total"]
    assert counted == [({**ORIGIN, "rank": "0"}, 2)]
    assert ran(found, "rms_norm") >= {"vendor.poison"}
    assert bool(found["report"]["graphs"]) == (engine is not EAGER)
    assert bool(found["report"]["prompt_graphs"]) == (engine is GRAPHS)
