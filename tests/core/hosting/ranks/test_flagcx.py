"""FlagCX's library: what ``FLAGCX_PATH`` may name, and how a failing call is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fl_dispatch import ConfigError
from fl_dispatch.hosting.ranks import flagcx

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


def test_an_accelerator_whose_stream_nobody_states_is_refused_by_its_name(standin: Callable[..., Path]) -> None:
    assert "streams of device 'musa'" in refusal(standin(), "musa")


def test_a_failing_call_is_named_with_its_reason(standin: Callable[..., Path]) -> None:
    library = flagcx.load(standin(), "cpu")
    with pytest.raises(RuntimeError, match=r"flagcxCommInitRank of FlagCX failed with 4: invalid argument"):
        flagcx._check(library, "flagcxCommInitRank", 4)
