"""``fl verify --impl vendor.ascend`` on the emulated NPU: what runs is right, the rest is declined with a reason."""

from __future__ import annotations

import pytest
import torch

from fl_dispatch import get_default_manager
from fl_dispatch.evidence.verify import implementations, verify

EXCLUDED = {("linear", "bfloat16"), ("mla_prefill", "float16")}
"""Operators and dtypes that the documentation of the chip excludes (docs/evidence/ascend.md)."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_every_operator_is_right_or_declines_what_the_documentation_excludes(dtype: torch.dtype) -> None:
    manager = get_default_manager()
    found = implementations(manager, impl_ids=["vendor.ascend"])
    assert len(found) >= 22
    for impl in found:
        result = verify(manager, impl, dtype, torch.device("npu"), repeats=1)
        excluded = (result.op_name, result.dtype) in EXCLUDED
        assert result.verdict == ("nothing to run" if excluded else "right"), (result.op_name, result.problems)
