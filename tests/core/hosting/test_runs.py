"""The choices of the workers that ran last are on disk, for ``fl doctor``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from builders import impl
from fl_dispatch import (
    SelectionPolicy,
    bind_op,
    call_op,
    freeze_dispatch,
    get_default_manager,
    set_global_policy,
    thaw_dispatch,
    with_preference,
)
from fl_dispatch.cli import run_view
from fl_dispatch.cli.doctor import examine
from fl_dispatch.errors import DispatchError
from fl_dispatch.hosting.layers.survey import LayerChoice, Survey
from fl_dispatch.hosting.records import metrics, processes, report, runs
from fl_dispatch.knowledge.failures import ArgumentKind

SURVEY = Survey("SGLang", {"RMSNorm": ("rms_norm", 13)}, {"Conv2dLayer": 1}, {"RadixAttention": 3})


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(runs._recorder, "_run", None)  # the one of other files writes nothing here
    monkeypatch.setattr(runs, "_recorder", runs.Recorder())
    monkeypatch.setattr(runs, "PAUSE", 3600.0)


def test_a_run_is_read_as_it_was_recorded_by_its_user_alone() -> None:
    runs.record("SGLang 1.2", "tiny", SURVEY, {"rms_norm": ["model.norm"]})
    (run,) = runs.recorded()
    assert (run.host, run.pid, run.model, run.alive) == ("SGLang 1.2", os.getpid(), "tiny", True)
    assert run.undispatched == {"rms_norm": ["model.norm"]}
    (file,) = runs.folder().glob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600


def test_doctor_shows_it_and_warns_of_what_was_never_dispatched_while_it_runs() -> None:
    get_default_manager().ensure_initialized()
    runs.record("SGLang 1.2", "tiny", SURVEY, {"rms_norm": ["model.norm"]})
    report = examine()
    (row,) = report["runs"]
    assert row[1:] == [
        "SGLang 1.2",
        f"{os.getpid()} (running)",
        "tiny",
        "",  # SGLang has one model runner
        "RMSNorm 13",
        "Conv2dLayer 1",
        "rms_norm (1 layers)",
        "none by FlagGems: no worker has started in this process",
    ]
    assert any("never dispatched" in warning for warning in report["warnings"])


def test_files_that_are_no_records_are_passed_over_and_old_ones_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.folder().mkdir(parents=True)
    for number in range(runs.KEPT + 5):
        file = runs.folder() / f"{number}.json"
        file.write_text("no record")
        os.utime(file, (number, number))
    runs.record("vLLM 0.32", "tiny", SURVEY, {})
    assert [run.host for run in runs.recorded()] == ["vLLM 0.32"]
    assert len(list(runs.folder().iterdir())) == runs.KEPT


def test_where_nothing_can_be_written_serving_goes_on(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "fl_dispatch").write_text("a file in the place of the folder")
    runs.record("vLLM 0.32", "tiny", SURVEY, {})
    assert "fl doctor will not show this process" in caplog.text
    assert runs.recorded() == []


# -- what a worker runs ------------------------------------------------------------------------------------------------


def _recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runs.folder() / f"{os.getpid()}.json").read_text())
    return found


def test_a_record_has_what_runs_and_follows_a_change() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    runs.record("vLLM 0.32", "tiny", SURVEY, {}, rank=3)
    before = _recorded()
    assert before["rank"] == 3
    assert before["choices"]["settings"]["prefer"][1].startswith("cpu.yaml (platform), line ")
    assert before["choices"]["failed"] == []
    (mine,) = runs.recorded()
    assert runs.chosen(mine, "silu_and_mul") == manager.explain("silu_and_mul").chosen.impl_id

    def fails(x: Any) -> Any:
        raise RuntimeError("boom")

    manager.registry.register_impl(impl("default.fails", fails, op="silu_and_mul", priority=900))
    manager.call("silu_and_mul", torch.ones(2, 4))
    runs._recorder.update()
    (ban,) = _recorded()["choices"]["failed"]
    assert (ban["operator"], ban["implementation"], ban["fallbacks"]) == ("silu_and_mul", "default.fails", 1)
    assert (runs.folder() / f"{os.getpid()}.json").stat().st_mode & 0o777 == 0o600


def test_what_did_not_change_is_not_written_again() -> None:
    get_default_manager().ensure_initialized()
    runs.record("vLLM 0.32", "tiny", SURVEY, {})
    before = _recorded()["updated"]
    runs._recorder.update()
    assert _recorded()["updated"] == before


def test_a_report_is_made_anew_by_whatever_changes_it_and_by_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, made = get_default_manager(), []
    manager.ensure_initialized()
    original = report.run_choices
    monkeypatch.setattr(report, "run_choices", lambda manager: made.append(1) or original(manager))
    kept = report.RunReport()

    def fails(x: Any) -> Any:
        raise RuntimeError("boom")

    def call() -> None:
        manager.call("silu_and_mul", torch.ones(2, 4))

    def trace() -> None:
        manager.state.traces.add(manager.explain("rms_norm").chosen, "it calls C")

    changes: dict[str, Callable[[], Any]] = {
        "a registration, which is banned": lambda: manager.registry.register_impl(
            impl("default.fails", fails, op="silu_and_mul", priority=900)
        ),
        "a second failure": lambda: manager.state.failures.record(
            manager.explain("silu_and_mul").chosen, ArgumentKind.of((), None), RuntimeError("again")
        ),
        "lifting bans": manager.clear_failed_impls,
        "a policy": lambda: set_global_policy(SelectionPolicy(prefer="vendor")),
        "a bound layer": lambda: manager.bind("silu_and_mul", "recorded.3"),
        "a rule for it": lambda: set_global_policy(
            SelectionPolicy(per_op_order=(("silu_and_mul@recorded.3", ("reference",)),))
        ),
        "a fact": lambda: manager.set_facts(kv_layout="NHD"),
        "a trace": trace,
        "a manifest": freeze_dispatch,
        "no manifest": thaw_dispatch,
    }
    call()
    for name, change in changes.items():
        before = kept.choices()
        made.clear()
        assert kept.choices() == before, name
        assert not made, name
        change()
        call()
        made.clear()
        assert kept.choices() == report.RunReport().choices(), name
        assert len(made) == 2, name


def test_a_report_made_while_a_change_was_tried_and_refused_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, here = get_default_manager(), [True]
    manager.registry.register_impl(
        impl("default.flips", lambda x: x[..., :2], op="silu_and_mul", priority=900, available=lambda: here[0])
    )
    manager.call("silu_and_mul", torch.ones(2, 4))
    kept, availability = report.RunReport(), manager.state.availability
    before = kept.choices()["decisions"]["silu_and_mul"]
    here[0] = False
    with pytest.raises(RuntimeError, match="refused"), availability.asked_again():
        for _ in range(2):  # the answers are as many as before in the second look
            assert kept.choices()["decisions"]["silu_and_mul"] != before
        raise RuntimeError("refused")
    assert kept.choices()["decisions"]["silu_and_mul"] == before


def test_a_report_first_made_in_a_context_is_not_kept_outside_of_it() -> None:
    get_default_manager().ensure_initialized()
    kept = report.RunReport()
    with with_preference("vendor"):
        inside = kept.choices()["decisions"]
    assert kept.choices()["decisions"] == report.RunReport().choices()["decisions"] != inside


def test_a_worker_that_ends_leaves_its_last_word(tmp_path: Path) -> None:
    program = """
import torch
from fl_dispatch import get_default_manager, BackendImplKind, OpImpl
from fl_dispatch.hosting.records import runs
from fl_dispatch.hosting.layers.survey import LayerChoice, Survey
import multiprocessing
def fails(x):
    raise RuntimeError("boom")
def work():
    manager = get_default_manager()
    manager.ensure_initialized()
    runs.PAUSE = 3600.0
    runs.record("host 1", "tiny", Survey("host", {}, {}, {}), {})
    manager.registry.register_impl(
        OpImpl("silu_and_mul", "vendor.fails", BackendImplKind.VENDOR, fails, vendor="fails", priority=1)
    )
    manager.registry.register_impl(
        OpImpl("silu_and_mul", "default.fails", BackendImplKind.DEFAULT, fails, priority=999)
    )
    manager.call("silu_and_mul", torch.ones(2, 4))
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
"""
    script = tmp_path / "worker.py"
    script.write_text(program)
    subprocess.run([sys.executable, script], check=True, env={**os.environ, "XDG_STATE_HOME": str(tmp_path)})
    (run,) = runs.recorded()
    assert not run.alive
    assert {ban["implementation"] for ban in run.choices["failed"]} == {"default.fails", "vendor.fails"}


@pytest.mark.parametrize("options", [(), ("-i",)], ids=["a program", "a prompt"])
def test_an_error_that_a_person_met_at_a_prompt_is_not_what_ended_the_process(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    program = """
from fl_dispatch.hosting.records import runs
from fl_dispatch.hosting.layers.survey import Survey
runs.record("host 1", "tiny", Survey("host", {}, {}, {}), {})
raise RuntimeError("of one cell")
"""
    state = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, *options, "-c", program], check=False, env=state, input=b"", capture_output=True)
    (run,) = runs.recorded()
    assert run.ended == ("" if options else "RuntimeError: of one cell")


# -- the runs of an engine ---------------------------------------------------------------------------------------------


def _decision(impl_id: str) -> dict[str, Any]:
    entry = {
        "impl_id": impl_id,
        "kind": "x",
        "vendor": None,
        "priority": 1,
        "rank": 1,
        "status": "chosen",
        "reason": "y",
    }
    return {"order": ["x"], "source": "prefer", "origin": "default", "considered": [entry], "conditional": []}


def _worker(rank: int, impl_id: str = "reference.torch", **fields: Any) -> runs.Run:
    """A record as a worker of a server with process number 4194301 left it, which has ended."""
    choices = {
        "decisions": {"rms_norm": _decision(impl_id)},
        "settings": {"prefer": ["vendor", "code"]},
        "layers": {},
        "failed": [],
        "shadow": None,
    }
    first = {"time": 1.0, "layers": {}, "native": {}, "undispatched": {}, "began": 5, "ancestors": [(4194301, 7)]}
    choices |= fields.pop("choices", {})
    return runs.Run("vLLM 0.32", 4194302 + rank, "tiny", rank=rank, choices=choices, **{**first, **fields})


def _leave(*found: runs.Run) -> None:
    runs.folder().mkdir(parents=True, exist_ok=True)
    for run in found:
        (runs.folder() / f"{run.pid}.json").write_text(json.dumps(asdict(run)))


FINDING = {
    "operator": "rms_norm",
    "implementation": "vendor.wrong",
    "second": "reference.torch",
    "kind": "float32, rank 2, contiguous, cpu",
    "calls": 4,
    "worst": 12.5,
    "example": "output 0 at [0, 1]: 2 instead of 1",
    "outcome": "it is banned for these arguments",
}
SHADOW = {
    "second": "reference",
    "compared": {"rms_norm vendor.wrong": 40},
    "passed_over": 7,
    "share_of_time": 0.004,
    "not_compared": {},
    "findings": [FINDING],
}
BAN = {"operator": "rms_norm", "implementation": "vendor.wrong", "kind": "float32", "cause": "boom", "fallbacks": 2}


def test_a_run_is_named_by_its_server_by_a_worker_or_by_a_directory() -> None:
    _leave(_worker(1), _worker(0))
    for name in ("4194301", str(runs.folder())):
        assert [run.rank for run in runs.named(name)] == [0, 1]
    assert [run.rank for run in runs.named("4194303")] == [1]


@pytest.mark.parametrize(("name", "problem"), [("17", "the newest are 4194302"), ("/nowhere", "no such directory")])
def test_a_run_that_is_not_there_is_an_error_that_says_which_are(name: str, problem: str) -> None:
    _leave(_worker(0))
    with pytest.raises(DispatchError, match=problem):
        runs.named(name)


def test_ranks_that_differ_are_shown_and_are_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    found = [_worker(0), _worker(1, "vendor.cuda"), _worker(2)]
    assert runs.differences(found) == {"rms_norm": {"reference.torch": [0, 2], "vendor.cuda": [1]}}
    commands = (
        lambda: run_view.explain("rms_norm", None, found, json=False),
        lambda: run_view.doctor(found, json=False),
    )
    for command in commands:
        with pytest.raises(typer.Exit) as ended:
            command()
        assert ended.value.exit_code == 1
    output = capsys.readouterr()
    assert "rms_norm, ranks 0, 2 (processes 4194302, 4194304)" in output.out
    assert "rms_norm, rank 1 (process 4194303)" in output.out
    assert "ranks run different implementations of 'rms_norm': reference.torch on [0, 2], vendor.cuda on" in output.err


CHOICES = (
    LayerChoice("RMSNorm", 12, ("rms_norm",), "forward_cuda"),
    LayerChoice("TopK", 4, ("topk_softmax", "rms_norm"), "forward_native", "routing by a model"),
    LayerChoice("SiluAndMul", 4, ("silu_and_mul",), "forward_cuda"),
)


def test_a_hosts_own_choice_is_in_one_table_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """A rule for single layers counts; where the host's choice runs, nothing of ours does."""
    rule = {"rms_norm@model.norm": {"runs": [{"when": "", "runs": ["vendor.cpu"]}]}}
    found = [
        _worker(0, choices={"layers": rule}, layer_choices=[asdict(each) for each in CHOICES]),
        _worker(1, layer_choices=[asdict(CHOICES[0])]),
    ]
    run_view.explain("rms_norm", None, found, json=True)
    first, second = (entry["layers"] for entry in json.loads(capsys.readouterr().out))
    assert [(each["layer"], each["host"], each["runs"], each["kept"]) for each in first] == [
        ("RMSNorm", "forward_cuda", "reference.torch, vendor.cpu", ""),
        ("TopK", "forward_native", "forward_native", "routing by a model"),
    ]
    assert [(each["layer"], each["runs"]) for each in second] == [("RMSNorm", "reference.torch")]
    run_view.explain("rms_norm", None, found, json=False)
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if "vendor.cpu" in line]
    assert [part for part in ("RMSNorm", "12", "forward_cuda", "reference.torch") if part not in row] == []
    assert not [line for line in lines if "SiluAndMul" in line]


def test_doctor_of_a_run_shows_bans_and_what_shadow_mode_found(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        run_view.doctor([_worker(0, choices={"failed": [BAN], "shadow": SHADOW})], json=False)
    output = capsys.readouterr().out
    assert "compared 40 calls with 'reference', 0.40% of the time; 7 more were over the budget" in output
    assert "12.5" in output
    assert "boom" in output


def test_a_run_without_a_problem_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    run_view.doctor([_worker(0), _worker(1)], json=False)
    assert "No problem found." in capsys.readouterr().out


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_run_that_crashed_is_a_problem_and_one_that_ended_well_is_none(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers are children of ``multiprocessing``, as hosts start theirs."""
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, script, method], check=True, env=environment, capture_output=True)
    found = {run.model: run for run in runs.recorded()}
    assert {model: run.crash.partition(",")[0] for model, run in found.items()} == {
        "well": "",
        "asked": "",
        "raises": "ended with RuntimeError: no memory",
        "killed": "ended without recording it",
        "its host kills it": "",
    }
    for model, run in found.items():
        if run.crash:
            with pytest.raises(typer.Exit):
                run_view.doctor([run], json=False)
            output = capsys.readouterr()
            assert "(crashed)" in output.out
            assert f"rank 0: process {run.pid} {run.crash}" in output.err.replace("\n", " ")
            assert "No problem found." not in output.out, model


WORKERS = """
import multiprocessing, os, signal, sys
from fl_dispatch.hosting.records import runs
from fl_dispatch.hosting.layers.survey import Survey
def work(how):
    runs.PAUSE = 3600.0
    runs.record("host 1", how, Survey("host", {}, {}, {}), {}, says_end=how != "its host kills it")
    if how == "raises":
        raise RuntimeError("no memory\\nand more")
    if how in ("killed", "its host kills it"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "asked":
        sys.exit(1)
if __name__ == "__main__":
    for how in ("well", "asked", "raises", "killed", "its host kills it"):
        child = multiprocessing.get_context(sys.argv[1]).Process(target=work, args=(how,))
        child.start()
        child.join()
"""


def test_an_error_in_a_step_is_the_last_word_where_the_host_kills_its_processes() -> None:
    runs.record("SGLang 1.2", "tiny", SURVEY, {})
    with pytest.raises(RuntimeError), runs.ending():
        raise RuntimeError("no memory")
    (run,) = runs.recorded()
    assert run.ended == "RuntimeError: no memory"
    assert replace(run, began=1).crash == "ended with RuntimeError: no memory"


def test_only_operators_that_layers_are_bound_to_or_that_ran_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    before = set(report.RunReport().choices()["used"])
    assert len(before) < 20 < len(manager.registry.list_operators())  # of other tests in this process
    bind_op("relu2", scope="model.act")
    call_op("quick_gelu", torch.ones(2, 4))
    assert set(report.RunReport().choices()["used"]) == before | {"relu2", "quick_gelu"}
    decisions = {"rms_norm": _decision("reference.torch"), "gelu": _decision("vendor.other")}
    run_view.doctor([_worker(0, choices={"decisions": decisions, "used": ["rms_norm"]})], json=False)
    output = capsys.readouterr().out
    assert "reference.torch" in output
    assert "vendor.other" not in output


# -- metrics -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mine() -> list[tuple[int, int]]:
    """This process as the ancestor of workers."""
    return [(os.getpid(), processes.began(os.getpid()) or 0)]


def _running(run: runs.Run, child: subprocess.Popen[bytes]) -> runs.Run:
    return replace(run, pid=child.pid, began=processes.began(child.pid) or 0)


def test_metrics_have_what_the_workers_of_this_front_end_recorded(mine: list[tuple[int, int]]) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    with subprocess.Popen(["sleep", "60"]) as child:
        ours = _worker(1, choices={"failed": [BAN, BAN], "shadow": SHADOW}, ancestors=mine)
        _leave(_running(ours, child), _worker(0, "vendor.ended", ancestors=mine), _worker(2, "vendor.others"))
        registry = metrics.join(metrics.join(prometheus_client.CollectorRegistry()))
        lines = prometheus_client.generate_latest(registry).decode().splitlines()
        child.kill()
    found = {line for line in lines if not line.startswith("#")}
    wrong = '{implementation="vendor.wrong",operator="rms_norm",rank="1"}'
    assert found == {
        'fl_selected_implementation{implementation="reference.torch",operator="rms_norm",rank="1"} 1.0',
        f"fl_bans{wrong} 2.0",
        f"fl_fallbacks_total{wrong} 4.0",
        f"fl_shadow_calls_total{wrong} 40.0",
        f"fl_shadow_differences_total{wrong} 4.0",
        'fl_shadow_time_ratio{rank="1"} 0.004',
    }


def test_a_process_with_the_number_of_an_ended_worker_is_not_that_worker(mine: list[tuple[int, int]]) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        run = _running(_worker(0, ancestors=mine), child)
        assert run.alive
        assert not replace(run, began=run.began - 1).alive
        assert run.descends_from(os.getpid())
        assert not replace(run, ancestors=[(os.getpid(), 1)]).descends_from(os.getpid())
        child.kill()


def test_a_process_knows_its_ancestors() -> None:
    parents = [pid for pid, _ in processes.ancestors(os.getpid())]
    assert parents[0] == os.getppid()
    assert processes.began(4194304) is None


def test_the_sizes_of_a_run_s_steps_are_read_as_they_were_recorded() -> None:
    sizes = runs.Sizes("bfloat16", 2, 64, 2048, eager=False)
    runs.record("vLLM 0.32", "tiny", SURVEY, {}, sizes=sizes)
    (run,) = runs.recorded()
    assert runs.Sizes(**run.sizes) == sizes
