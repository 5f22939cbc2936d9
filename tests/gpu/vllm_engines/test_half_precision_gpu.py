"""In bfloat16 an engine on a GPU is as near to float32 as Hugging Face is in bfloat16, in prefill and in decode.

Teacher forced: Hugging Face's model gets the tokens that the engine chose. The prompts' log-probabilities are those of
prefill, the chosen tokens' those of decode, which in the default mode replays full graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import PROMPTS, ran, start_features

from fl_dispatch.cli.checkpoints import VOCABULARY, build_checkpoint
from fl_dispatch.cli.half_precision import table
from half_types import INDEX_KEYS, SPARSE, as_near_as_hugging_face

pytestmark = pytest.mark.gpu
FAMILIES = ("llama", "qwen3_moe", "deepseek_v2", "deepseek_v32", "glm_moe_dsa")
NEUTRAL = {"VLLM_FL_DENY_VENDORS": "cuda", "USE_FLAGGEMS": "0"}
PIECEWISE = {"cudagraph_mode": "PIECEWISE"}
MODES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, str]]] = {
    "eager": ({"enforce_eager": True}, NEUTRAL),
    "piecewise": ({"enforce_eager": False, "compilation_config": PIECEWISE}, NEUTRAL),
    "full and piecewise": ({"enforce_eager": False}, NEUTRAL),
    "shipped choices": ({"enforce_eager": False}, {}),
}
"""Name → arguments of ``LLM``, variables."""
TOKENS = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda family: build_checkpoint(family, folder / family))


@pytest.fixture(scope="module")
def runs(checkpoint: Callable[[str], Path]) -> Callable[[str, str], dict[str, Any]]:
    """Mode and family → what the engine says. A process each."""
    sampling = {"max_tokens": TOKENS, "logprobs": VOCABULARY, "prompt_logprobs": VOCABULARY}
    ask = [{"do": "generate", "prompts": PROMPTS, "sampling": sampling}]
    common = {"dtype": "bfloat16", "max_logprobs": VOCABULARY, "gpu_memory_utilization": 0.1}

    def run(mode: str, family: str) -> dict[str, Any]:
        engine, variables = MODES[mode]
        keys = {"attention_config": INDEX_KEYS} if family in SPARSE else {}
        job = start_features((checkpoint(family), ask, {**common, **keys, **engine}), **variables)
        found: dict[str, Any] = job.result()["runs"][0]
        return found

    return cache(run)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_log_probabilities_are_as_near_to_float32_as_hugging_faces(
    mode: str,
    family: str,
    runs: Callable[[str, str], dict[str, Any]],
    checkpoint: Callable[[str], Path],
) -> None:
    run = runs(mode, family)
    (outputs,) = run["steps"]
    found = table(row for output in outputs for row in (*output["prompt_logprobs"][1:], *output["logprobs"][0]))
    texts = [[*prompt, *output["tokens"][0]] for prompt, output in zip(PROMPTS, outputs, strict=True)]
    assert as_near_as_hugging_face(family, checkpoint(family), texts, found, "bfloat16")
    assert run["report"]["native_layers"] == {}
    attention = ran(run, "paged_attention") | ran(run, "mla_decode") | ran(run, "mla_sparse")
    if mode == "shipped choices":
        assert "reference.torch" not in attention
    else:
        assert attention == {"default.triton"}
    if mode == "eager":
        assert "default.triton" in ran(run, "linear")
    else:  # compiled code has the kernel in it, without a call
        assert "default.triton" in str(run["report"]["manifest"]["choices"]["linear"])
