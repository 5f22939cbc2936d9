"""Expert load balancing (EPLB) on vLLM's own platform, on two GPUs: experts move while the engine serves.

On an out-of-tree platform vLLM refuses it (``config/parallel.py``, line 560 in 0.32 and 564 in 0.33).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)
pytest.importorskip("vllm")

from engines import STEP, expected_tokens, start

from fl_dispatch.cli.checkpoints import build_checkpoint

pytestmark = pytest.mark.gpu
NATIVE = {"VLLM_FL_NATIVE_PLATFORM": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
BALANCED = {
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "eplb_config": {"window_size": 4, "step_interval": 4, "use_async": False, "communicator": "torch_gloo"},
    "gpu_memory_utilization": 0.1,
    "enforce_eager": True,
}


def test_experts_change_places_and_no_token_changes(tmp_path: Path) -> None:
    model = build_checkpoint("qwen3_moe", tmp_path / "model")
    result = start(model, STEP, STEP, engine=BALANCED, variables=NATIVE).result()
    expected = expected_tokens(model)
    assert [step["tokens"] for step in result["steps"]] == [expected, expected]
    assert "Rearranged experts" in result["log"]
