"""The communicator of a group of ranks, over gloo and over a stand-in for FlagCX with its C interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import two_ranks
from vllm_fl.worker.communicator import CommunicatorFL, any_communicator

LIBRARIES = ("TorchCollectives", "FlagCXCollectives", "OlderFlagCX")


@pytest.fixture(scope="session")
def results(standin: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Library → what each of two ranks got."""
    paths = ("", standin(), standin("ID_BY_POINTER") / "build/lib/libflagcx.so")
    libraries = dict(zip(LIBRARIES, paths, strict=True))
    return two_ranks.run(Path(__file__).with_name("communicate.py"), tmp_path_factory.mktemp("ranks"), libraries)


def test_vllm_finds_the_communicator_through_the_platform() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_fl.platform.out_of_tree import PlatformFL

    assert resolve_obj_by_qualname(PlatformFL.get_device_communicator_cls()) is CommunicatorFL


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_collective_gives_what_its_name_says(library: str, results: dict[str, list[Any]]) -> None:
    first, second = results[library]
    for rank in (first, second):
        assert rank["all_reduce"] == [[10, 12, 14], [16, 18, 20]]
        assert rank["all_reduce_strided"] == [[10, 16], [12, 18], [14, 20]]
        assert rank["all_gather_last"] == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]
        assert rank["all_gather_first"] == [[0, 1, 2], [3, 4, 5], [10, 11, 12], [13, 14, 15]]
        assert rank["broadcast"] == [[10, 11, 12], [13, 14, 15]]
    assert [first["reduce_scatter"], second["reduce_scatter"]] == [[[0, 3], [6, 9]], [[12, 15], [18, 21]]]
    assert [first["reduce_scatter_last"], second["reduce_scatter_last"]] == [
        [[0], [6], [12], [18]],
        [[3], [9], [15], [21]],
    ]
    assert second["recv"] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_parts_of_the_ranks_may_differ_in_size_and_be_empty(library: str, results: dict[str, list[Any]]) -> None:
    first, second = results[library]
    for rank in (first, second):
        assert rank["all_gatherv"] == [[1, 1], [2, 2], [2, 2], [2, 2]]
        assert rank["all_gatherv_empty"] == [[2, 2], [2, 2]]
        assert rank["all_gatherv_list"] == [[1, 1, 2, 2], [2, 2, 4, 4], [2, 2, 4, 4], [2, 2, 4, 4]]
    assert [first["reduce_scatterv"], second["reduce_scatterv"]] == [[[0, 3]], [[6, 9], [12, 15], [18, 21]]]
    assert [first["reduce_scatterv_empty"], len(second["reduce_scatterv_empty"])] == [[], 4]
    assert "cannot be divided" in first["error"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_sum_has_memory_of_its_own_so_compiled_code_may_reuse_its_parts(
    library: str, results: dict[str, list[Any]]
) -> None:
    for rank in results[library]:
        assert rank["compiled"] == [4 * [4 * [144.0]], 4 * [4 * [7.0]]]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_named_library_ran_and_every_call_is_counted(library: str, results: dict[str, list[Any]]) -> None:
    first = results[library][0]
    assert first["library"] == {"OlderFlagCX": "FlagCXCollectives"}.get(library, library)
    assert first["calls"] == {
        "tp:0": {"all_reduce": 3, "all_gather": 6, "reduce_scatter": 5, "broadcast": 1, "send": 1}
    }


@pytest.mark.parametrize("ours", [True, False])
def test_a_graph_capture_of_vllms_meets_its_own_communicators_alone(ours: bool) -> None:
    communicator = object.__new__(CommunicatorFL) if ours else object()
    group = SimpleNamespace(device_communicator=communicator)
    met = []

    @contextmanager
    def vllms(group: SimpleNamespace, context: str) -> Iterator[str]:
        met.append(group.device_communicator)
        yield context

    with any_communicator(vllms)(group, "context") as context:
        assert context == "context"
        assert group.device_communicator is communicator
    assert met == [None if ours else communicator]
    assert group.device_communicator is communicator


def test_a_capture_that_fails_leaves_the_group_its_communicator() -> None:
    communicator = object.__new__(CommunicatorFL)
    group = SimpleNamespace(device_communicator=communicator)

    @contextmanager
    def broken(group: SimpleNamespace) -> Iterator[None]:
        raise RuntimeError("no stream")
        yield

    with pytest.raises(RuntimeError, match="no stream"), any_communicator(broken)(group):
        raise AssertionError
    assert group.device_communicator is communicator
