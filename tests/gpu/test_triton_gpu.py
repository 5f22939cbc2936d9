"""Our Triton kernels on a GPU: all inputs in all dtypes, the short launch, and compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_dispatch.evidence.verify import DTYPES

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from fl_dispatch import get_default_manager
from fl_dispatch.backends.triton.impl import activation, launch
from fl_dispatch.backends.triton.register_ops import IMPLEMENTED, NOT_TRACED
from fl_dispatch.backends.triton.triton import TritonBackend
from fl_dispatch.evidence.verify import implementations, verify
from fl_dispatch.ops import OPERATORS

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IMPLEMENTED)
def test_a_kernel_is_right(name: str, dtype: torch.dtype) -> None:
    manager = get_default_manager()
    (impl,) = implementations(manager, [name], ["default.triton"])
    found = verify(manager, impl, dtype, CUDA)
    assert found.problems == []
    assert not found.declined


def test_the_short_launch_runs_what_the_public_one_runs_for_every_stride_and_alignment() -> None:
    launcher = activation._launch
    memory = torch.randn(4 * 4096 + 64, device=CUDA, dtype=torch.bfloat16)
    for offset in (0, 1, 8):
        for width, stride in ((64, 128), (64, 136), (67, 134), (67, 150), (512, 1024)):
            x = memory.as_strided((4, 2 * width), (stride, 1), offset)
            outputs = []
            for short in (False, None, None):
                launcher._short = short
                outputs.append(activation.silu_and_mul(x))
            assert torch.equal(outputs[0], outputs[1])
            assert torch.equal(outputs[0], outputs[2])


def test_the_short_launch_is_taken_where_it_is_tested() -> None:
    activation._launch._short = None
    activation.silu_and_mul(torch.randn(1, 64, device=CUDA))
    assert activation._launch._short == launch._short_way()


@pytest.mark.parametrize(
    "name", [name for name in IMPLEMENTED if name not in NOT_TRACED and name != "rotary_embedding"]
)
def test_dynamo_traces_a_kernel_without_a_graph_break(name: str) -> None:
    torch._dynamo.reset()
    fn: Any = getattr(TritonBackend(), name)
    (first, *_) = OPERATORS[name].samples(torch.bfloat16, CUDA, torch.Generator().manual_seed(0))
    compiled, eager = torch.compile(fn, fullgraph=True)(*first.args), fn(*first.args)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
