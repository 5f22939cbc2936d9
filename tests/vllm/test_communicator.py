"""The communicator of a group of ranks, over gloo and over a stand-in for FlagCX with its C interface."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import HERE, python

from fl_dispatch import ConfigError
from vllm_fl import flagcx

LIBRARIES = ("TorchCollectives", "FlagCXCollectives", "OlderFlagCX")


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles the stand-in, as the library of a FlagCX source tree, with some macros defined."""

    def build(*macros: str) -> Path:
        root = tmp_path_factory.mktemp("flagcx")
        library = root / "build/lib/libflagcx.so"
        library.parent.mkdir(parents=True)
        source = HERE / "native/flagcx_standin.cpp"
        flags = [f"-D{macro}" for macro in macros]
        subprocess.run(["c++", "-O1", "-shared", "-fPIC", *flags, "-o", library, source], check=True)
        return root

    return build


@pytest.fixture(scope="session")
def results(standin: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Library → what each of two ranks got."""
    paths = ("", standin(), standin("ID_BY_POINTER") / "build/lib/libflagcx.so")
    folder = tmp_path_factory.mktemp("ranks")
    libraries = [f"{name}={path}" for name, path in zip(LIBRARIES, paths, strict=True)]
    ended = python(str(HERE / "communicate.py"), str(folder), *libraries)
    assert ended.returncode == 0, ended.log
    return {name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)] for name in LIBRARIES}


def test_vllm_finds_the_communicator_through_the_platform() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_fl.distributed import CommunicatorFL
    from vllm_fl.platform import PlatformFL

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
def test_the_named_library_ran_and_every_call_is_counted(library: str, results: dict[str, list[Any]]) -> None:
    first = results[library][0]
    assert first["library"] == {"OlderFlagCX": "FlagCXCollectives"}.get(library, library)
    assert first["calls"] == {
        "tp:0": {"all_reduce": 2, "all_gather": 6, "reduce_scatter": 5, "broadcast": 1, "send": 1}
    }


# -- FLAGCX_PATH ------------------------------------------------------------------------------------------------------

ADVICE = "unset FLAGCX_PATH to use torch.distributed"


def refusal(path: Path, device: str = "cpu") -> str:
    with pytest.raises(ConfigError) as caught:
        flagcx.load(path, device)
    assert f"FLAGCX_PATH: {path}: " in str(caught.value)
    assert ADVICE in str(caught.value)
    return str(caught.value)


def test_a_path_without_a_library_is_refused(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(tmp_path / "nowhere")
    assert "no libflagcx.so is there" in refusal(tmp_path)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "libflagcx.so"
    file.write_text("not a library")
    assert "does not load" in refusal(file)


def test_a_library_without_flagcx_functions_is_refused_by_their_names(standin: Callable[..., Path]) -> None:
    assert refusal(standin("LACKS_ALL_REDUCE")).count("it lacks flagcxAllReduce;") == 1


def test_an_accelerator_is_refused_by_its_name(standin: Callable[..., Path]) -> None:
    assert "streams of device 'npu'" in refusal(standin(), "npu")


def test_a_failing_call_is_named_with_its_reason(standin: Callable[..., Path]) -> None:
    library = flagcx.load(standin(), "cpu")
    with pytest.raises(RuntimeError, match=r"flagcxCommInitRank of FlagCX failed with 4: invalid argument"):
        flagcx._check(library, "flagcxCommInitRank", 4)
