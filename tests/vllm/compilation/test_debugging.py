"""The host's tools to debug compiled models show our operators by their names, and change no token."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import Runs, start_compiled

from sampling import drawn

ENGINES: Mapping[str, Mapping[str, Any]] = {
    "unbacked": {"dynamic_shapes_config": {"type": "unbacked"}, "backend": "eager"},
    "oblivious": {
        "dynamic_shapes_config": {"type": "backed_size_oblivious"},
        "compile_cache_save_format": "unpacked",
        "backend": "inductor",
    },
    "partition": {"use_inductor_graph_partition": True, "backend": "inductor"},
}
"""Two kinds of dynamic shapes, the second with a cache to read; and cuts by Inductor, without a cache."""
DRAWN = drawn(tuple(ENGINES), 1, "compiled model to debug")


def only(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(name not in DRAWN, reason="another engine was drawn")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("debugging")


@pytest.fixture(scope="module")
def results(checkpoint: Callable[[str], Path], folder: Path) -> Mapping[str, Any]:
    started: dict[str, Any] = {}
    for name in DRAWN:
        started |= _start(name, checkpoint("llama"), folder)
    return Runs(started)


def _start(name: str, model: Path, folder: Path) -> dict[str, Any]:
    compilation = {"mode": 3, "debug_dump_path": str(folder / name / "dump"), **ENGINES[name]}
    engine = {"enforce_eager": False, "compilation_config": compilation}
    variables = {"VLLM_CACHE_ROOT": str(folder / name / "cache"), "TORCH_TRACE": str(folder / name / "trace")}
    variables |= {"TORCH_LOGS": "graph_code", "TORCH_LOGS_OUT": str(folder / f"{name}.txt")}
    variables["VLLM_FL_PLUGIN_MODULES"] = "linear_plugin"
    if name == "partition":
        variables["VLLM_DISABLE_COMPILE_CACHE"] = "1"
    return start_compiled({name: {"model": model, "engine": engine, "policy": {}}}, cold=True, **variables)


def _written(folder: Path, pattern: str = "*") -> str:
    return "".join(file.read_text(errors="replace") for file in folder.rglob(pattern) if file.is_file())


@pytest.mark.parametrize("name", DRAWN)
def test_one_graph_gives_hugging_faces_tokens(
    name: str, results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert results[name]["tokens"] == expected("llama")
    assert results[name]["report"]["compiled"]["graphs"] == 1
    assert {"kv_cache_write", "paged_attention"} <= {key.split(" ")[0] for key in results[name]["report"]["counts"]}


@pytest.mark.parametrize("name", DRAWN)
def test_the_log_the_page_of_the_trace_and_the_dump_name_our_operators(
    name: str, results: Mapping[str, Any], folder: Path
) -> None:
    assert results[name]["tokens"]
    (trace,) = (folder / name / "trace").glob("*.log")
    page = folder / name / "page"
    subprocess.run([Path(sys.executable).with_name("tlparse"), trace, "-o", page, "--no-browser"], check=True)
    for written in ((folder / f"{name}.txt").read_text(), _written(page), _written(folder / name / "dump", "*.py")):
        assert "fl_dispatch.linear" in written  # one that stays whole
        assert "fl_dispatch/ops/normalization.py" in written  # one that is traced into


@only("partition")
def test_without_a_cache_nothing_is_saved(results: Mapping[str, Any]) -> None:
    assert results["partition"]["report"]["compiled"]["saved"] == 0


@only("oblivious")
def test_the_cache_is_code_that_a_reader_can_open(results: Mapping[str, Any], folder: Path) -> None:
    assert results["oblivious"]["report"]["compiled"]["saved"] == 1
    assert "def call(" in _written(folder / "oblivious" / "cache", "*.py")


@only("oblivious")
def test_an_edited_file_of_the_cache_runs(
    results: Mapping[str, Any], checkpoint: Callable[[str], Path], folder: Path
) -> None:
    tokens = results["oblivious"]["tokens"]
    files = {file: file.read_text() for file in (folder / "oblivious" / "cache").rglob("*.py")}
    edited = {file: code for file, code in files.items() if "def call(" in code}
    for file, code in edited.items():
        tell = f"open({str(folder / 'ran')!r}, 'a').write({file.name + ' '!r})"
        file.write_text(re.sub(r"( *)def call\(.*\):\n", lambda found: f"{found[0]}{found[1]}    {tell}\n", code))
    assert _start("oblivious", checkpoint("llama"), folder)["oblivious"].result()["tokens"] == tokens
    assert set((folder / "ran").read_text().split()) == {file.name for file in edited} != set()


@only("partition")
def test_inductor_may_cut_the_graph_at_attention(results: Mapping[str, Any]) -> None:
    assert results["partition"]["report"]["compiled"]["pieces"] == 1
