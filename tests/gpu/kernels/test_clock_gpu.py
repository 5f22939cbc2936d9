"""Measurements of benchmarks on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from fl_dispatch.evidence.timing import LEAST_ROUNDS, Clock

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def test_the_calls_of_a_graph_write_to_memory_of_their_own() -> None:
    captured: list[int] = []

    def call(x: Tensor) -> Tensor:
        result = x + 1
        if torch.cuda.is_current_stream_capturing():
            captured.append(result.data_ptr())
        return result

    inputs = [torch.zeros(1 << 20, device=CUDA) for _ in range(8)]
    timing = Clock(CUDA, 0.01).time([lambda x=x: call(x) for x in inputs])  # type: ignore[misc]
    assert timing.how == "graph"
    assert timing.rounds >= LEAST_ROUNDS
    assert len(set(captured)) == len(captured) == 8
