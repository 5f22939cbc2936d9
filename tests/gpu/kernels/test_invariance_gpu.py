"""Batch invariance of our Triton kernels on a GPU: each kernel's rows, and an engine's log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import invariance
from fl_dispatch import Traits
from fl_dispatch.backends.triton.register_ops import IMPL_ID, INVARIANT_ID, ROWS
from fl_dispatch.cli.checkpoints import build_checkpoint

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16)
"""float16 has the tiles of bfloat16."""
INVARIANT_KERNELS = [
    (row.op_name, row.impl_id) for row in ROWS if isinstance(row.traits, Traits) and row.traits.batch_invariant
]


ASKED = {"VLLM_BATCH_INVARIANT": "1"}
GRAPHS = {
    "enforce_eager": False,
    "gpu_memory_utilization": 0.1,
    "dtype": "bfloat16",
    "max_num_seqs": 6,
}
RUNS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, str]]] = {
    "graphs": ("qwen3", GRAPHS, ASKED),
    "experts, graphs": ("qwen3_moe", GRAPHS, ASKED),
    "float32, graphs": ("qwen3", {**GRAPHS, "dtype": "float32"}, ASKED),
    "V1, graphs": ("llama", GRAPHS, {**ASKED, "VLLM_USE_V2_MODEL_RUNNER": "0"}),
}
"""Name → checkpoint, arguments of ``LLM``, variables. Six requests at a time, and eight prompts."""


@pytest.fixture(scope="module", autouse=True)
def engines(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """They start while this process compares the kernels' rows."""
    if find_spec("vllm") is None:
        return {}
    from engines import Runs, engine_arguments, start_script

    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoint = cache(lambda family: build_checkpoint(family, folder / family))

    def start(family: str, engine: Mapping[str, Any], variables: Mapping[str, str]) -> Any:
        arguments = engine_arguments(checkpoint(family), engine)
        job = {"engine": arguments, "prompts": invariance.PROMPTS, "max_tokens": 6, "drawn": True}
        return start_script("run_invariant.py", job, **variables)

    return Runs({name: start(*run) for name, run in RUNS.items()})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op_name", "impl_id"), INVARIANT_KERNELS)
def test_a_kernels_rows_do_not_depend_on_the_batch(op_name: str, impl_id: str, dtype: torch.dtype) -> None:
    (impl,) = (impl for impl in invariance.declared(impl_id) if impl.op_name == op_name)
    assert invariance.differences(impl, dtype, torch.device("cuda")) == []


@pytest.mark.parametrize("op_name", ["linear", "paged_attention"])
def test_the_faster_kernels_would_be_found_out(op_name: str) -> None:
    (impl,) = (impl for impl in invariance.implementations(op_name) if impl.impl_id == IMPL_ID)
    assert invariance.differences(impl, torch.bfloat16, torch.device("cuda")) != []


@pytest.mark.parametrize("name", RUNS)
def test_a_prompt_has_the_same_bits_alone_and_in_every_batch(name: str, engines: Mapping[str, Any]) -> None:
    if not engines:
        pytest.skip("needs vLLM")
    from engines import ran

    answered = engines[name]
    assert invariance.different(answered["ways"]) == []
    assert answered["cached"] > 0
    assert answered["report"]["failed"] == {}
    assert answered["report"]["native_layers"] == {}
    assert ran(answered, "paged_attention") == {INVARIANT_ID}
    assert ran(answered, "linear") == {INVARIANT_ID}
