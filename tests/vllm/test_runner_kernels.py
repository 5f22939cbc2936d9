"""Each PyTorch form of a kernel of the V2 runner does what the Triton kernel does, in Triton's interpreter.

vLLM's functions launch both on the same random inputs (``run_runner_kernels.py``). Two kernels the interpreter cannot
run: those are compared with loops.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from engines import HERE, environment

import processes
from vllm_fl.runner_kernels import logits, table

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

LOOPS = {"gpu.structured_outputs._apply_grammar_bitmask_kernel", "gpu.metrics.logits._num_nans_kernel"}
SEEDS = 3


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    return processes.finish(HERE / "run_runner_kernels.py", {"seeds": SEEDS}, environment(), True)


def test_every_form_gives_what_its_kernel_gives(compared: dict[str, Any]) -> None:
    assert {name: why for name, why in compared["differing"].items() if why} == {}


def test_every_form_ran(compared: dict[str, Any]) -> None:
    assert set(compared["ran"]) == set(table.FORMS) - LOOPS


def test_a_grammar_rules_tokens_out_by_request_and_place() -> None:
    generator, size, stride = torch.Generator().manual_seed(0), 70, 3
    values = torch.randn(6, size, generator=generator)
    places, cu_num_logits = [(0, 0), (2, 0), (2, 1), (2, 2)], [0, 1, 4, 6]
    mask = torch.randint(-(1 << 31), 1 << 31, (4, 3), generator=generator).int()
    expected = values.clone()
    for number, (request, place) in enumerate(places):
        row = cu_num_logits[request] + place
        for token in range(size if row < cu_num_logits[request + 1] else 0):
            if not int(mask[number, token // 32]) >> token % 32 & 1:
                expected[row, token] = float("-inf")
    rows = torch.tensor([request * stride + place for request, place in places]).int()
    logits.apply_grammar_bitmask(
        values, size, rows, torch.tensor(cu_num_logits).int(), mask, 3, size, MASK_STRIDE=stride
    )
    assert torch.equal(values, expected)


def test_what_is_not_a_number_is_counted() -> None:
    values, found = torch.zeros(3, 5), torch.full((3,), -1).int()
    values[1, 2] = values[1, 4] = float("nan")
    values[2, 0] = float("inf")
    logits.num_nans(values, 5, found, 5)
    assert found.tolist() == [0, 2, 0]
