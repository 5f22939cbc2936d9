"""The cores of a CPU worker, on machines that only exist as files."""

from __future__ import annotations

import os
import types
from pathlib import Path

import pytest
import torch

from fl_dispatch import ConfigError
from vllm_fl.compat import threads
from vllm_fl.cores import VARIABLE, check, cores_for, share_out

ALL = frozenset(range(16))


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """Two nodes of four cores with two threads each: 0-3 and 8-11 on node 0, 4-7 and 12-15 on node 1."""
    for node, text in enumerate(("0-3,8-11", "4-7,12-15")):
        folder = tmp_path / f"node/node{node}"
        folder.mkdir(parents=True)
        folder.joinpath("cpulist").write_text(text + "\n")
    for cpu in range(16):
        folder = tmp_path / f"cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        folder.joinpath("thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("worker", "workers", "wish", "cores"),
    [
        (0, 1, None, [0, 1, 2, 3]),
        (0, 2, "auto", [0, 1, 2, 3]),
        (1, 2, "auto", [4, 5, 6, 7]),
        (0, 1, "nobind", None),
        (0, 1, "2-4,9", [2, 3, 4, 9]),
        (1, 2, "0-1|6-7", [6, 7]),
    ],
)
def test_a_worker_keeps_to_the_physical_cores_of_a_node_or_to_its_list(
    worker: int, workers: int, wish: str | None, cores: list[int] | None, two_nodes: Path
) -> None:
    environment = {} if wish is None else {VARIABLE: wish}
    assert cores_for(worker, workers, ALL, environment, two_nodes) == cores


def test_a_number_of_threads_that_the_user_chose_holds(two_nodes: Path) -> None:
    assert cores_for(0, 1, ALL, {"OMP_NUM_THREADS": "3"}, two_nodes) is None
    assert cores_for(0, 1, ALL, {"OMP_NUM_THREADS": "3", VARIABLE: "0-1"}, two_nodes) == [0, 1]


def test_only_allowed_cores_count_and_all_of_them_need_no_binding(two_nodes: Path) -> None:
    assert cores_for(0, 1, frozenset({5, 6, 13}), {}, two_nodes) == [5, 6]
    assert cores_for(0, 1, frozenset({5, 6}), {}, two_nodes) is None


def test_the_parent_shares_the_cores_out_and_each_worker_finds_its_own(two_nodes: Path) -> None:
    environment: dict[str, str] = {}
    mine = sorted(os.sched_getaffinity(0))[:1]
    two_nodes.joinpath("node/node1/cpulist").write_text("4096\n")
    two_nodes.joinpath("node/node0/cpulist").write_text(f"{mine[0]}\n")
    share_out(1, environment, two_nodes)
    several = len(os.sched_getaffinity(0)) > 1  # a process that may use a single core needs no binding
    assert environment == ({VARIABLE: str(mine[0])} if several else {})
    assert cores_for(0, 1, frozenset(mine), {VARIABLE: str(mine[0]), "OMP_NUM_THREADS": "1"}) == mine


@pytest.mark.parametrize(
    ("wish", "problem"),
    [
        ("0-1", "the cores of 1 workers, and 2 run"),
        ("0-1|14-17", "may not use: 16, 17"),
        ("0-x|1", "not '0-x|1'"),
        ("none", "'nobind', or a list"),
    ],
)
def test_a_wrong_list_is_one_error_that_says_what_may_stand_there(wish: str, problem: str, two_nodes: Path) -> None:
    with pytest.raises(ConfigError, match=VARIABLE) as raised:
        cores_for(1, 2, ALL, {VARIABLE: wish}, two_nodes)
    assert problem in str(raised.value)


def test_a_wrong_list_is_found_before_there_are_workers() -> None:
    mine = min(os.sched_getaffinity(0))
    for right in ("auto", "nobind", "", f"{mine}|{mine}"):
        check({VARIABLE: right})
    for wrong in ("0-x", f"{mine}|4096"):
        with pytest.raises(ConfigError):
            check({VARIABLE: wrong})


def test_vllm_leaves_the_threads_of_a_cpus_model_alone_and_warns_of_none(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from vllm.utils import torch_utils

    worker = types.ModuleType("worker")
    worker.set_torch_threads_for_runtime = torch_utils.set_torch_threads_for_runtime
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    threads.leave(worker)
    worker.set_torch_threads_for_runtime()
    assert torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    worker.set_torch_threads_for_runtime()
    torch.set_num_threads(before)
    assert "OMP_NUM_THREADS" not in capfd.readouterr().err
