"""``fl verify --impl vendor.ascend`` on the emulated NPU: what runs is right, the rest is declined with a reason."""

from __future__ import annotations

import pytest
import torch

from fl_dispatch import get_default_manager
from fl_dispatch.backends.vendor.ascend.impl import sparse_latent
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


def test_lists_over_index_keys_that_are_copied_in_parts_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    first_requests, copy = [], sparse_latent.copied

    def noted(cache: torch.Tensor, table: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        first_requests.append(table.storage_offset())
        return copy(cache, table, longest)

    monkeypatch.setattr(sparse_latent, "COPIED_AT_ONCE", 256)
    monkeypatch.setattr(sparse_latent, "_fits", lambda key_cache: False)
    monkeypatch.setattr(sparse_latent, "copied", noted)
    manager = get_default_manager()
    (impl,) = implementations(manager, ["index_topk"], ["vendor.ascend"])
    result = verify(manager, impl, torch.float16, torch.device("npu"), repeats=1)
    assert result.verdict == "right", result.problems
    assert any(first_requests)
