"""ATen operators that FlagGems gets wrong on one rank are PyTorch's on every rank, and the manifests agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import two_ranks

SCRIPT = Path(__file__).parent / "agree_on_aten.py"
RIGHT = ["_softmax", "addmm", "cumsum", "div.Tensor", "mm.out", "mul_.Tensor", "true_divide.Tensor"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Sequence[dict[str, Any]]:
    """The report of each rank."""
    return two_ranks.run(SCRIPT, tmp_path_factory.mktemp("aten"), {"gloo": ""})["gloo"]


@pytest.mark.parametrize("when", ["both", "again"])
def test_what_is_wrong_on_one_rank_is_replaced_on_none(when: str, found: Sequence[dict[str, Any]]) -> None:
    for rank in found:
        assert rank[when]["replaced"] == RIGHT
        assert sorted(rank[when]["aten"]) == [f"aten::{key}" for key in RIGHT]
        assert rank[when]["heard"] == ""


def test_each_rank_says_where_it_was_wrong(found: Sequence[dict[str, Any]]) -> None:
    first, second = (rank["both"]["wrong"] for rank in found)
    assert first["mm"].startswith("on rank 1: wrong: ")
    assert second["mm"].startswith("wrong: ")
    assert first["add.Tensor"] == "ValueError: one dimension"
    assert second["add.Tensor"] == "on rank 0: ValueError: one dimension"


def test_ranks_of_which_one_replaces_nothing_do_not_wait_for_each_other(found: Sequence[dict[str, Any]]) -> None:
    for rank in found:
        assert "the ranks froze different choices: " in rank["nothing there"]["heard"]
    assert found[1]["nothing there"]["replaced"] == []
