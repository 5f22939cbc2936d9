"""Two ranks on two emulated NPUs exchange tensors through "hccl"."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXPECTED: dict[str, list[Any]] = {
    "all_reduce": [[3.0] * 3] * 2,
    "all_reduce_max": [[2.0] * 3] * 2,
    "all_gather": [[1.0] * 3 + [2.0] * 3] * 2,
    "all_gather_into_tensor": [[1.0] * 3 + [2.0] * 3] * 2,
    "reduce_scatter_tensor": [[0.0, 3.0], [6.0, 9.0]],
    "broadcast": [[2.0] * 3] * 2,
    "all_to_all_single": [[10.0, 11.0], [20.0, 21.0]],
    "batch_isend_irecv": [[2.0] * 3, [1.0] * 3],
    "all_reduce_of_a_view": [[0.0] * 3 + [2.0] * 3] * 2,
    "functional": [[3.0] * 3] * 2,
    "all_gather_object": [[{"rank": 0}, {"rank": 1}]] * 2,
    "broadcast_object_list": [["of 1"]] * 2,
    "group_of_one": [[1.0] * 3, [2.0] * 3],
    "gloo_on_the_cpu": [[2.0, 2.0]] * 2,
}


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("two_ranks_of_npus.py")
    ended = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("collective", EXPECTED)
def test_each_rank_receives_what_the_collective_says(collective: str, received: list[dict[str, Any]]) -> None:
    assert [rank[collective] for rank in received] == EXPECTED[collective]


def test_one_rank_receives_where_one_is_named(received: list[dict[str, Any]]) -> None:
    first, second = received
    assert (first["reduce"], first["gather"]) == ([3.0] * 3, [1.0] * 3 + [2.0] * 3)
    assert second["recv"] == [5.0] * 3
