"""Ranks that find other configurations of a kernel fastest run the same one; the manifest lists it, a file keeps it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import two_ranks
from fl_dispatch.hosting.start import tactics
from fresh_interpreter import fresh

SCRIPT = Path(__file__).parent / "agree_on_tactics.py"
Ranks = Sequence[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tactics")


@pytest.fixture(scope="module")
def starts(folder: Path) -> Mapping[str, Ranks]:
    """Each start → what each rank found."""
    return two_ranks.run(SCRIPT, folder, {"first": "", "later": "", "unsealed": ""})


@pytest.fixture(scope="module")
def first(starts: Mapping[str, Ranks]) -> Ranks:
    return starts["first"]


def test_ranks_that_measure_differently_run_different_configurations(first: Ranks) -> None:
    assert [rank["alone"] for rank in first] == [[64, 64], [32, 32]]


def test_once_they_agree_both_run_the_lowest_ranks(first: Ranks) -> None:
    assert [rank["agreed"] for rank in first] == [[64, 64], [64, 64]]


def test_a_key_that_one_rank_met_is_not_timed_on_another(first: Ranks) -> None:
    assert [rank["met by rank 1"] for rank in first] == [32, 32]
    assert [rank["timed in the start"] for rank in first] == [6, 9]
    assert all(rank["timed in all"] == rank["timed in the start"] for rank in first)


def test_a_key_that_none_met_runs_the_first_configuration_that_the_device_takes(first: Ranks) -> None:
    assert [rank["new"] for rank in first] == [[16, 32], [16, 32]]


def test_it_is_launched_once(first: Ranks) -> None:
    assert [rank["launched"] for rank in first] == [[32], [32]]


def test_an_agreement_may_be_repeated(first: Ranks) -> None:
    assert [rank["again"] for rank in first] == [[64, 32, 16]] * 2


def test_another_start_of_the_process_times_what_was_not_agreed(first: Ranks) -> None:
    assert [rank["another start"] for rank in first] == [[64, 64], [64, 32]]
    assert [rank["timed in it"] for rank in first] == [3, 3]


def test_the_manifest_lists_kernel_key_and_configuration(first: Ranks) -> None:
    one, other = (rank["manifest"] for rank in first)
    assert one == other
    kernel = next(choices for name, choices in one.items() if name.startswith("__main__.kernel "))
    assert [words.partition(",")[0] for key, words in kernel.items() if key == "(100, 'torch.int32')"] == ["BLOCK: 64"]


def test_its_hash_is_that_of_the_choices_that_compiled_code_was_made_for(starts: Mapping[str, Ranks]) -> None:
    assert len({rank["hash"] for ranks in starts.values() for rank in ranks}) == 1


def test_a_later_start_runs_what_the_first_one_agreed_on_and_times_nothing(starts: Mapping[str, Ranks]) -> None:
    for rank in starts["later"]:
        assert rank["alone"] == rank["agreed"] == [64, 64]
        assert rank["again"] == [64, 32, 16]
        assert rank["timed in all"] == 0


def test_ranks_with_other_numbers_of_threads_are_named(starts: Mapping[str, Ranks]) -> None:
    told = {name: [[text for text in rank["said"] if "threads" in text] for rank in starts[name]] for name in starts}
    assert told["first"] == told["unsealed"] == [[], []]
    (text,), nothing = told["later"][0][:1], told["later"][1]
    assert re.fullmatch(r"ranks have other threads or processors, so equal products may differ: 1 of .*; 2 of .*", text)
    assert nothing == []


def test_without_a_seal_new_keys_are_timed_and_agreed_when_ranks_meet_again(starts: Mapping[str, Ranks]) -> None:
    assert [rank["new"][0] for rank in starts["unsealed"]] == [64, 32]
    assert [rank["again"] for rank in starts["unsealed"]] == [[64, 32, 64]] * 2
    assert [rank["timed in the start"] for rank in starts["unsealed"]] == [0, 0]
    assert all(rank["timed in all"] > 0 for rank in starts["unsealed"])
    said = "Triton, at new sizes (VLLM_FL_SEAL_TACTICS=1)"
    assert [said in rank["elsewhere"] for rank in (*starts["first"], *starts["unsealed"])] == [False, False, True, True]


def test_the_file_names_chip_and_versions(starts: Mapping[str, Ranks], folder: Path) -> None:
    (place,) = json.loads((folder / "fl-dispatch" / "tactics.json").read_text())
    assert f"PyTorch {torch.__version__}" in place


@pytest.mark.parametrize(("known", "wrong"), [(16, False), (32, True), (0, True)])
def test_a_wrong_tactic_of_a_replaced_operator_is_found_at_its_key(known: int, wrong: bool, tmp_path: Path) -> None:
    """That of an earlier start (a block size), or one that this start timed (0)."""
    pytest.importorskip("triton")
    script = str(Path(__file__).parent / "wrong_tactic.py")
    found = json.loads(fresh("", script, str(tmp_path), str(known), cold=True).splitlines()[-1])
    assert found["right"]
    assert found["disabled"].startswith("wrong: ") == wrong
    assert (found["calls"], found["timed"]) == (int(not wrong), 0 if known else 2)


PLANTED: tactics.Tactics = {"kernel": {(1, "torch.int32"): "BLOCK: 16"}}


@pytest.mark.parametrize("changed", ["chip", "driver", "Triton", "PyTorch", "nothing"])
def test_tactics_of_another_chip_or_version_are_not_used(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    chip = SimpleNamespace(device_name=lambda index: "a chip", driver_version=lambda: "580.1")
    monkeypatch.setattr(tactics, "_file", lambda: tmp_path / "tactics.json")
    monkeypatch.setattr(tactics, "detect_device", lambda: chip)
    assert tactics.remembered(PLANTED) == (PLANTED, 0)
    if changed == "chip":
        monkeypatch.setattr(chip, "device_name", lambda index: "another chip")
    elif changed == "driver":
        monkeypatch.setattr(chip, "driver_version", lambda: "580.2")
    elif changed != "nothing":
        monkeypatch.setattr({"Triton": triton, "PyTorch": torch}[changed], "__version__", "9.9")
    assert tactics.remembered({}) == ((PLANTED, 1) if changed == "nothing" else ({}, 0))


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are looked at, which are never run."""
    pytest.importorskip("triton")
    monkeypatch.setattr(tactics, "why_unavailable", str)


@pytest.mark.usefixtures("with_triton")
def test_a_tactic_of_another_source_of_the_kernel_is_not_used() -> None:
    one, other, same = tuned(one_more), tuned(two_more), tuned(one_more)
    assert cached_after(one, other, same) == ({}, {KEY: same.configs[1]})


@pytest.mark.usefixtures("with_triton")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("way", ["name", "module", "closure"])
def test_neither_is_one_of_another_source_of_a_function_that_it_calls(way: str, depth: int) -> None:
    one, other, same = (tuned(calling(helper, way, depth)) for helper in (one_more, two_more, one_more))
    assert cached_after(one, other, same) == ({}, {KEY: same.configs[1]})


@pytest.mark.usefixtures("with_triton")
def test_nor_one_for_another_constant_that_it_reads() -> None:
    constexpr = pytest.importorskip("triton.language").constexpr
    one, other, same = (tuned(calls_by_name, helper=constexpr(value)) for value in (1, 2, 1))
    assert cached_after(one, other, same) == ({}, {KEY: same.configs[1]})


KEY = (100, "torch.int32")


def cached_after(known: Any, *others: Any) -> tuple[Any, ...]:
    """What each of other kernels keeps, once a tactic of one is installed everywhere."""
    known.cache[KEY] = known.configs[1]
    tactics.install(tactics.chosen())
    return tuple(other.cache for other in others)


def tuned(source: Any, **names: Any) -> Any:
    """A kernel with two configurations, a copy of a function that finds some names."""
    triton = pytest.importorskip("triton")
    fn = FunctionType(source.__code__, {**source.__globals__, **names}, closure=source.__closure__)
    fn.__qualname__ = "kernel"
    configs = [triton.Config({"BLOCK": size}) for size in (16, 32)]
    return triton.autotune(configs, key=["elements"], do_bench=print)(triton.jit(fn))


def calling(source: Any, way: str, depth: int) -> Any:
    """A function that calls another one, found in a way; or a function that calls it, and so on."""
    helper: Any = pytest.importorskip("triton").jit(source)
    module = ModuleType("helpers")
    vars(module)["helper"] = helper

    def calls(out: Any, elements: Any, BLOCK: Any) -> None:  # noqa: N803
        helper(out, elements, BLOCK)

    if way == "name":
        calls = FunctionType(calls_by_name.__code__, {**globals(), "helper": helper})
    elif way == "module":
        calls = FunctionType(calls_of_module.__code__, {**globals(), "helpers": module})
    return calls if depth == 1 else calling(calls, "name", depth - 1)


def calls_by_name(out: Any, elements: Any, BLOCK: Any) -> None:  # noqa: N803
    """A kernel that calls another function."""
    helper(out, elements, BLOCK)  # type: ignore[name-defined]  # noqa: F821


def calls_of_module(out: Any, elements: Any, BLOCK: Any) -> None:  # noqa: N803
    """A kernel that calls a module's function."""
    helpers.helper(out, elements, BLOCK)  # type: ignore[name-defined]  # noqa: F821


def one_more(out: Any, elements: Any, BLOCK: Any) -> None:  # noqa: N803
    """A kernel's source, which is never run."""
    out[0] = elements + BLOCK + 1


def two_more(out: Any, elements: Any, BLOCK: Any) -> None:  # noqa: N803
    """Another source."""
    out[0] = elements + BLOCK + 2


def test_a_damaged_file_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tactics, "_file", lambda: tmp_path / "tactics.json")
    (tmp_path / "tactics.json").write_text("{")
    assert tactics.remembered(PLANTED) == (PLANTED, 0)
    assert "is damaged" in caplog.text
    assert tactics.remembered({"kernel": {(1, "torch.int32"): "BLOCK: 32"}}) == (PLANTED, 1)


@pytest.mark.parametrize(
    "kept",
    [
        ["a"],
        {"kernel": "BLOCK: 16"},
        {"kernel": {"[1]": "BLOCK: 16", "(" * 9999: "", "1": ["BLOCK: 16"], f"(0x{'f' * 6000},)": ""}},
    ],
    ids=["a list", "a text", "keys"],
)
def test_other_data_in_the_file_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: object) -> None:
    monkeypatch.setattr(tactics, "_file", lambda: tmp_path / "tactics.json")
    (tmp_path / "tactics.json").write_text(json.dumps({tactics._place(): kept}))
    given: tactics.Tactics = {"another": {(1,): "BLOCK: 16"}}
    assert tactics.remembered(given)[0]["another"] == given["another"]
    tactics.install(tactics.remembered(given)[0])


def test_a_folder_that_cannot_be_written_to_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tactics, "_file", lambda: tmp_path / "file" / "tactics.json")
    assert tactics.remembered({"kernel": {(1,): "BLOCK: 16"}})[1] == 0
    assert "chosen anew at every start" in caplog.text


def test_what_chooses_by_timing_without_an_agreement_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor

    assert tactics.timed_elsewhere() == []
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with inductor.patch(max_autotune=True):
        cudnn, compiler = tactics.timed_elsewhere()
    assert cudnn.startswith("cuDNN")
    assert compiler == "Inductor (max_autotune off)"
