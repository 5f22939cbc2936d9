"""Benchmarks: what is timed, what it is compared with, what a failure looks like. Times themselves are not tested."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from builders import impl
from command import fl
from fl_dispatch import DispatchError, get_default_manager
from fl_dispatch.cli import bench as command
from fl_dispatch.evidence.bench import bench, calls_of
from fl_dispatch.evidence.cases import Case, cases, short_cases
from fl_dispatch.evidence.plot import plot
from fl_dispatch.evidence.rates import Rates, sets_to_rotate
from fl_dispatch.evidence.timing import HOST_CALLS, LEAST_ROUNDS, WARMUPS, Clock
from fl_dispatch.ops import OPERATORS, Place

CPU = torch.device("cpu")
PLACE = Place(torch.float32, CPU)


class FixedYardstick:
    """A device of known rates."""

    def __init__(self) -> None:
        self.clock = Clock(CPU, 0.0)
        self.rates = Rates(copy_bytes_per_s=1e9, operations_per_s=1e12)

    def copy(self, bytes_moved: int) -> float:
        return bytes_moved / 0.5e9


def measured(fn: Any, **fields: Any) -> Any:
    manager = get_default_manager()
    manager.ensure_initialized()
    candidate = impl("default.timed", fn, "silu_and_mul", **fields)
    manager.registry.register_impl(candidate)
    case = Case("silu_and_mul", "", 4, 8, lambda: (torch.randn(4, 16),))
    (result,) = bench(manager, candidate, case, torch.float32, FixedYardstick())  # type: ignore[arg-type]
    return result


def sleepy(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.002)
    return x[:, :8]


def test_a_result_has_the_time_of_a_call_and_its_share_of_the_floor_and_of_a_copy() -> None:
    result = measured(sleepy)
    assert 0.002 <= result.device.low <= result.device.median <= result.device.high < 1
    assert result.bytes_moved == 3 * 4 * 8 * 4
    assert result.floor == result.bytes_moved / 1e9
    assert result.share == pytest.approx(result.floor / result.device.median)
    assert result.share_of_copy == pytest.approx(2 * result.share)
    row = result.as_data()
    assert row["device_us"]["how"] == "wall"
    assert row["host_us"] is None
    json.dumps(row)


def test_the_floor_is_the_larger_of_bytes_and_operations() -> None:
    rates = Rates(copy_bytes_per_s=1e9, operations_per_s=1e12)
    assert rates.floor_s(10**9, 10**12) == 1
    assert rates.floor_s(10**9, 10**13) == 10


def test_an_implementation_that_declines_or_fails_has_a_note_and_no_time() -> None:
    declined = measured(sleepy, supports=lambda x: "too small")
    assert (declined.device, declined.share, declined.note) == (None, None, "too small")


def test_an_implementation_that_fails_has_its_error_as_note() -> None:
    failed = measured(lambda x: x.no_such_attribute)
    assert failed.device is None
    assert failed.note.startswith("AttributeError:")


def test_inputs_are_rotated_past_the_cache_but_not_without_bound() -> None:
    assert sets_to_rotate(CPU, 1) == 64
    assert sets_to_rotate(CPU, 32 << 20) == 4
    assert sets_to_rotate(CPU, 1 << 40) == 1


def test_every_set_was_called_before_a_time_is_taken() -> None:
    """So a form of its weight is there: a graph would hold, and time, what makes it."""
    called: list[int] = []
    sets = [(index,) for index in range(4)]
    calls = calls_of(called.append, sets, Clock(CPU, 0.0))
    assert (len(calls), set(called)) == (len(sets), set(range(len(sets))))


@pytest.mark.parametrize("name", [name for name, op in OPERATORS.items() if op.work and op.samples])
def test_every_operator_has_cases_that_its_reference_runs(name: str) -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    impls = [i for i in manager.registry.get_implementations(name) if i.impl_id == "reference.torch"]
    found, _ = short_cases(OPERATORS[name], PLACE, FixedYardstick().rates)
    assert found
    for case in found[:2]:
        args = OPERATORS[name].bind(case.make(), {})
        assert OPERATORS[name].work(*args).bytes_moved > 0
        for reference in impls:
            reference.fn(*OPERATORS[name].operands(args))


def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = ["--op", "silu_and_mul", "--impl", "reference.torch", "--tokens", "2", "--hidden", "64"]
    done = fl("bench", *options, "--seconds", "0.001", "--dtype", "float32", "--out", str(file))
    assert done.returncode == 0, done.stderr
    assert "reference.torch" in done.stdout
    written = json.loads(file.read_text())
    assert written["copy_bytes_per_s"] > 0 < written["operations_per_s"]
    assert written["machine"]["versions"]["torch"]
    (row,) = written["results"]
    assert (row["op_name"], row["tokens"], row["width"]) == ("silu_and_mul", 2, 64)


def test_an_interrupted_run_keeps_what_it_has_and_an_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any) -> Any:
        if given[2].tokens == 4:
            raise KeyboardInterrupt
        return one(*given)

    one = command.bench_one
    monkeypatch.setattr(command, "bench_one", interrupted)
    file = tmp_path / "bench.json"
    file.write_text("older")
    chosen = {"op": ["silu_and_mul"], "impl": ["reference.torch"], "tokens": [2, 4], "hidden": [64]}
    with pytest.raises(typer.Exit) as stopped:
        command.bench(**chosen, seconds=0.001, dtype="float32", out=file)
    assert stopped.value.exit_code == 130
    assert file.read_text() == "older"
    partial = tmp_path / "bench.json.partial"
    assert [row["tokens"] for row in json.loads(partial.read_text())["results"]] == [2]
    monkeypatch.setattr(command, "bench_one", one)
    command.bench(**chosen, seconds=0.001, dtype="float32", out=file)
    assert [row["tokens"] for row in json.loads(file.read_text())["results"]] == [2, 4]
    assert list(tmp_path.iterdir()) == [file]


def test_results_go_through_links_and_into_pipes(tmp_path: Path) -> None:
    chosen = {"op": ["silu_and_mul"], "impl": ["reference.torch"], "tokens": [2], "hidden": [64]}
    link, target, pipe = (tmp_path / name for name in ("link", "target", "pipe"))
    target.touch()
    link.symlink_to(target)
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True)
    for output in (link, pipe):
        command.bench(**chosen, seconds=0.001, dtype="float32", out=output)
    assert json.loads(target.read_text())["results"]
    assert link.is_symlink()
    assert json.loads(reader.communicate(timeout=30)[0])["results"]
    assert pipe.is_fifo()
    assert {path.name for path in tmp_path.iterdir()} == {"link", "target", "pipe"}


def test_a_log_says_what_is_measured_in_a_line_each() -> None:
    options = ["--op", "silu_and_mul", "--impl", "reference.torch", "--tokens", "2", "--hidden", "64"]
    done = fl("bench", *options, "--seconds", "0.001", "--dtype", "float32")
    assert "measuring silu_and_mul 2x64 reference.torch" in done.stderr.splitlines()


def test_slow_code_is_called_few_times_for_its_host_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        now[0] += 0.01 if calls > WARMUPS else 0.02

    now = [0.0]
    monkeypatch.setattr("fl_dispatch.evidence.timing.time.perf_counter", lambda: now[0])
    assert Clock(CPU, 0.05).host(call).median == pytest.approx(0.01)
    assert calls == WARMUPS + LEAST_ROUNDS * 2
    calls = 0
    assert Clock(CPU, 10.0).host(call).median == pytest.approx(0.01)
    assert calls == WARMUPS + LEAST_ROUNDS * HOST_CALLS


def test_a_directory_is_no_file_for_results(tmp_path: Path) -> None:
    done = fl("bench", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "is a directory" in done.stderr
    assert not tmp_path.with_name(f"{tmp_path.name}.partial").exists()


@pytest.mark.parametrize("option", ["--plot", "--out"])
def test_a_file_in_no_directory_is_refused_before_anything_is_measured(option: str) -> None:
    done = fl("bench", option, "/no/such/directory/x.png")
    assert done.returncode == 2
    assert "there is no directory /no/such/directory" in done.stderr


ROW = {"op_name": "silu_and_mul", "label": "", "width": 64, "tokens": 2, "impl_id": "a", "share_of_floor": 0.5}


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_a_plot_without_matplotlib_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(DispatchError, match=r"pip install 'fl-dispatch\[report\]'"):
        plot([ROW], "title", tmp_path / "x.png")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_plot_is_an_image_file(tmp_path: Path) -> None:
    plot([ROW, {**ROW, "tokens": 4}], "title", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_long_here_is_left_out_of_the_default_sizes_and_said() -> None:
    fast, slow = Rates(4e12, 8e14), Rates(1e10, 1e11)
    assert short_cases(OPERATORS["rms_norm"], PLACE, fast)[1] == 0
    short, left_out = short_cases(OPERATORS["rms_norm"], PLACE, slow)
    assert max(case.tokens for case in short) == 256
    assert len(short) + left_out == len(short_cases(OPERATORS["rms_norm"], PLACE, fast)[0])


def test_an_operator_without_a_short_shape_has_its_serving_samples() -> None:
    short, _ = short_cases(OPERATORS["fused_moe"], PLACE, Rates(1e9, 1e10))
    assert {case.width for case in short} == {0}


def test_a_size_that_is_asked_for_is_measured_however_long_it_takes() -> None:
    assert [case.tokens for case in cases(OPERATORS["silu_and_mul"], PLACE, (1 << 20,), (4096,))] == [1 << 20]


def test_planning_a_case_takes_no_memory() -> None:
    (case,) = cases(OPERATORS["silu_and_mul"], PLACE, (1 << 30,), (4096,))
    assert case.least[0].bytes_moved == 3 * (1 << 30) * 4096 * 4


def test_the_time_is_said_beforehand_and_defaults_are_in_the_help() -> None:
    options = ["--op", "silu_and_mul", "--impl", "reference.torch", "--tokens", "2", "--hidden", "64"]
    lines = fl("bench", *options, "--seconds", "0.001", "--dtype", "float32").stdout.splitlines()
    assert lines[1].startswith("1 rows, about ")
    text = " ".join(fl("bench", "--help", COLUMNS="200").stdout.split())
    assert "1, 16, 256, 1024, 4096, 16384" in text
    assert "4096, 5120, 7168, 8192" in text
