"""Steps whose kernels begin early give the same bits as those whose kernels come in turn, in graphs and eagerly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from decode_step import SHAPE, Step, announced, captured, patched
from shapes import SHAPES

from fl_dispatch.backends.triton.impl import overlap

pytestmark = pytest.mark.gpu
LAYERS, TOKENS = 6, 300


@pytest.mark.skipif(overlap.announcing() == overlap.NO, reason="needs compute capability 9 and later")
@pytest.mark.parametrize("quantized", [False, True], ids=["bfloat16", "fp8"])
def test_every_step_has_the_same_bits(quantized: bool) -> None:
    step = Step(SHAPES[SHAPE].config, LAYERS, 300, quantized)
    early, found = captured(step)
    with patched(announced(overlap.NO)):
        in_turn, expected = captured(step)
    for number in range(TOKENS):
        step.token.normal_()
        early.replay()
        in_turn.replay()
        assert torch.equal(found, expected), number
    assert torch.equal(step(), expected)
    assert expected.isfinite().all()
