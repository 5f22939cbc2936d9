"""vLLM's configuration and process on a device that PyTorch does not call ``cuda``."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.utils import system_utils

from fl_dispatch import devices
from fl_dispatch.hosting.start import startup as hosting
from vllm_fl.compat import streams
from vllm_fl.compilation import compile
from vllm_fl.platform import config, startup


class Stream: ...


class Event:
    """Like ``torch.xpu.Event``, it knows nothing of ``blocking``."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing


class NimbusGraph: ...


NIMBUS = replace(
    devices.ASCEND,
    name="nimbus",
    vendor="nimbus",
    torch_type="nimbus",
    graph_class="NimbusGraph",
    device_count=lambda: 2,
)
NAMES = ("Stream", "Event", "current_stream", "CUDAGraph")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch's module of the device; ``torch.cuda`` is itself again afterwards."""
    for name in NAMES:
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    own = SimpleNamespace(Stream=Stream, Event=Event, NimbusGraph=NimbusGraph, current_stream=lambda: "current")
    monkeypatch.setattr(torch, "nimbus", own, raising=False)
    return own


def test_vllms_names_mean_the_devices_own_streams_events_and_graphs(module: Any) -> None:
    streams.lend_names(NIMBUS)
    assert (torch.cuda.Stream, torch.cuda.CUDAGraph) == (Stream, NimbusGraph)
    assert torch.cuda.current_stream is not module.current_stream
    assert torch.cuda.current_stream() == "current"
    assert torch.cuda.Event(enable_timing=True, blocking=True).enable_timing


def test_a_class_of_events_stays_a_class_for_annotations_and_isinstance(module: Any) -> None:
    """vLLM has ``torch.cuda.Event | None`` in the bodies of classes, which is evaluated when they are imported."""
    streams.lend_names(NIMBUS)
    event = torch.cuda.Event(blocking=True)
    assert type(event) is Event
    assert isinstance(event, torch.cuda.Event | None)
    assert not isinstance(torch.cuda.Stream(), torch.cuda.Event)


def test_a_class_of_events_in_c_that_shows_no_parameters_is_not_asked_to_block(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Event", dict)  # like most classes of Python in C
    streams.lend_names(NIMBUS)
    assert torch.cuda.Event(enable_timing=True, blocking=True) == {"enable_timing": True}


def test_a_device_that_pytorch_calls_cuda_and_the_host_keep_them() -> None:
    before = {name: getattr(torch.cuda, name) for name in NAMES}
    for spec in (devices.CUDA, devices.CPU, devices.OTHERS[0]):
        streams.lend_names(spec)
    assert before == {name: getattr(torch.cuda, name) for name in NAMES}


def test_defaults_are_eager_and_without_graphs_until_somebody_verified_it() -> None:
    for verified, mode in (({}, CUDAGraphMode.NONE), ({"vLLM": "served"}, None)):
        given = VllmConfig()
        given.compilation_config.mode = given.compilation_config.cudagraph_mode = None
        config.apply_defaults(given, replace(NIMBUS, verified=verified))
        assert given.compilation_config.mode == CompilationMode.NONE
        assert given.compilation_config.cudagraph_mode == mode


@pytest.mark.parametrize(
    ("graphs", "asked", "mode"),
    [
        (True, CUDAGraphMode.PIECEWISE, CompilationMode.VLLM_COMPILE),
        (True, CUDAGraphMode.FULL_AND_PIECEWISE, CompilationMode.VLLM_COMPILE),
        (True, CUDAGraphMode.FULL, CompilationMode.NONE),
        (False, CUDAGraphMode.PIECEWISE, CompilationMode.NONE),
    ],
)
def test_who_asks_for_piecewise_graphs_gets_the_pieces(
    graphs: bool, asked: CUDAGraphMode, mode: CompilationMode
) -> None:
    given = VllmConfig()
    given.compilation_config.mode, given.compilation_config.cudagraph_mode = None, asked
    config.apply_defaults(given, replace(NIMBUS, graphs=graphs))
    assert given.compilation_config.mode == mode
    assert given.compilation_config.cudagraph_mode == (asked if graphs else CUDAGraphMode.NONE)


OWN = {"vLLM": "nimbus.Platform"}


@pytest.mark.parametrize("ends_threads", [False, True], ids=["as vLLM 0.32", "vLLM ends OpenMP's threads"])
def test_the_worker_and_how_processes_start_follow_from_the_spec(
    ends_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "_release_libgomp_threads"
    monkeypatch.setattr(system_utils, name, None, raising=False)
    if not ends_threads:
        monkeypatch.delattr(system_utils, name)
    for spec, threads, worker, method in (
        (NIMBUS, 1, config.GPU_WORKER, "spawn"),
        (replace(NIMBUS, forks=True), 1, config.GPU_WORKER, None),
        (replace(NIMBUS, forks=True), 2, config.GPU_WORKER, "spawn"),  # a fork would wait for OpenMP's threads for ever
        (replace(NIMBUS, forks=True, native_platforms=OWN), 2, config.GPU_WORKER, None if ends_threads else "spawn"),
        (replace(NIMBUS, workers={"vLLM": "nimbus.Worker"}), 1, "nimbus.Worker", "spawn"),
        (devices.CPU, 1, config.CPU_WORKER, None),
        (devices.CPU, 2, config.CPU_WORKER, "spawn"),
    ):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_USE_V2_MODEL_RUNNER", "OMP_NUM_THREADS"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        if "v2" not in spec.model_runners:  # the configuration is made on a CPU, which has both
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        given = VllmConfig()
        monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)  # this machine's device has been asked
        given.parallel_config.worker_cls = "auto"
        config.adapt(given, spec)
        assert given.parallel_config.worker_cls == worker
        assert os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == method


@pytest.mark.parametrize(
    ("language", "model", "helper"),
    [(None, "eager", "eager"), ("cpp", "inductor", "eager"), ("triton", "inductor", "inductor")],
)
def test_the_compilation_backend_is_what_inductor_writes(language: str | None, model: str, helper: str) -> None:
    spec = replace(NIMBUS, inductor=language)
    assert (compile.model_backend(spec), compile.helper_backend(spec)) == (model, helper)


def test_inductor_where_it_writes_nothing_is_refused() -> None:
    given = VllmConfig()
    given.compilation_config.mode, given.compilation_config.backend = CompilationMode.VLLM_COMPILE, "inductor"
    with pytest.raises(ValueError, match="Inductor writes no code for nimbus; choose the compilation backend 'eager'"):
        compile.refuse_missing_compiler(given, NIMBUS)


def test_one_warning_says_that_nobody_verified_it(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    start = replace(startup.START, warned=set())
    monkeypatch.setattr(hosting, "detect_device", lambda: replace(NIMBUS, verified={"SGLang": "served on a Nimbus X2"}))
    for _ in range(2):
        start.warn_of_unverified_device()
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(
        "device 'nimbus' was never verified under vLLM (under SGLang served on a Nimbus X2): compare"
    )
