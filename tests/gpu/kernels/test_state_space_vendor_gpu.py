"""vLLM's kernels of state spaces on a GPU, behind our operators."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("vllm")

from engines import STEP, expected_tokens, ran, start

from architectures import build_architecture
from fl_dispatch import get_default_manager
from fl_dispatch.backends.reference.reference import ReferenceBackend
from fl_dispatch.evidence.verify import implementations, verify
from fl_dispatch.ops import OPERATORS
from fl_dispatch.ops.inputs.state_space import _StateSpaces
from fl_dispatch.ops.named import of_arguments

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDINGS = 4
"""vLLM's products for prompts round the state and the decayed tokens to a half type, and terms cancel."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "impl_id"), [("selective_state_update", "vendor.cuda.triton"), ("selective_scan", "vendor.cuda")]
)
def test_a_kernel_is_right(name: str, impl_id: str, dtype: torch.dtype) -> None:
    manager = get_default_manager()
    (impl,) = implementations(manager, [name], [impl_id])
    found = verify(manager, impl, dtype, CUDA)
    assert found.problems == []
    assert found.samples, found.declined


def test_the_scan_of_heads_is_right_at_the_size_of_a_model() -> None:
    (impl,) = implementations(get_default_manager(), ["selective_scan"], ["vendor.cuda.triton"])
    assert impl.supports is not None
    args, again = (
        _StateSpaces(torch.bfloat16, CUDA, torch.Generator().manual_seed(0))
        .sequences("Mamba2-2.7B", (333, 0, 1, 256, 600), (80, 1), (64, 128), new=(1, 3))
        .args
        for _ in range(2)
    )
    assert of_arguments(impl.supports, OPERATORS["selective_scan"].parameters)(*args) is True
    wide = [arg.double() if torch.is_tensor(arg) and arg.is_floating_point() else arg for arg in again]
    tolerance = OPERATORS["selective_scan"].tolerance(torch.bfloat16, args)
    for got, wanted in ((impl.fn(*args), ReferenceBackend().selective_scan(*wide)), (args[7], wide[7])):
        torch.testing.assert_close(
            got.double(), wanted, rtol=ROUNDINGS * tolerance.rtol, atol=ROUNDINGS * tolerance.atol
        )


def test_tokens_equal_hugging_face_by_vllms_kernels(tmp_path: Path) -> None:
    chosen = "selective_scan=impl:vendor.cuda;selective_state_update=impl:vendor.cuda.triton"
    variables = {"VLLM_FL_PER_OP": chosen, "USE_FLAGGEMS": "0"}
    model = build_architecture("mamba", tmp_path / "mamba")
    engine = {"enforce_eager": True, "gpu_memory_utilization": 0.1}
    result = start(model, STEP, engine=engine, variables=variables).result()
    assert result["steps"][0]["tokens"] == expected_tokens(model)
    assert ran(result, "selective_scan") == {"vendor.cuda"}
    assert ran(result, "selective_state_update") == {"vendor.cuda.triton"}
    assert result["report"]["failed"] == {}
    late = re.findall(r"during inference: (\S+)", result["log"])  # vLLM's monitor of late compilations
    assert not [name for name in late if "_selective_scan_update_kernel" in name]
