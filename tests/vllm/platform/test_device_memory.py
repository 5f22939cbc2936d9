"""Sleep mode on a GPU of an out-of-tree platform: vLLM's allocator where it loads, and a refusal elsewhere."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fl_dispatch.devices import ASCEND, CPU
from fl_dispatch.devices.cuda import CUDA
from vllm_fl.compat import device_memory
from vllm_fl.platform import out_of_tree
from vllm_fl.worker import gpu


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    device_memory.loads.cache_clear()
    yield
    device_memory.loads.cache_clear()


class _Allocator:
    """In the place of vLLM's; ``tags`` has the pools that somebody entered."""

    tags: list[str]

    def __init__(self) -> None:
        self.tags = []

    def get_current_usage(self) -> int:
        return 0

    def use_memory_pool(self, tag: str) -> Any:
        self.tags.append(tag)
        return nullcontext()

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        self.tags += offload_tags


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> _Allocator:
    """vLLM's allocator module, as where its library loads."""
    found, module = _Allocator(), ModuleType(device_memory.ALLOCATOR)
    module.cumem_available = True  # type: ignore[attr-defined]
    module.CuMemAllocator = SimpleNamespace(get_instance=lambda: found)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, device_memory.ALLOCATOR, module)
    for name in device_memory.USERS:
        user = importlib.import_module(name)
        if hasattr(user, device_memory.GETTER):
            monkeypatch.setattr(user, device_memory.GETTER, getattr(user, device_memory.GETTER))
    return found


def _available(monkeypatch: pytest.MonkeyPatch, device: Any) -> tuple[bool, bool]:
    monkeypatch.setattr(out_of_tree, "DEVICE", device)
    ours = out_of_tree.PlatformFL()
    return ours.is_sleep_mode_available(), ours.is_cumem_allocator_available()


def test_a_gpu_sleeps_where_the_allocator_loads(theirs: _Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _available(monkeypatch, CUDA) == (True, True)
    assert _available(monkeypatch, CPU) == (True, False)  # main memory needs no allocator
    assert _available(monkeypatch, replace(ASCEND, extension=None)) == (False, False)


@pytest.mark.parametrize("missing", [ImportError("libcuda.so.1"), AssertionError("libcudart is not loaded")])
def test_it_does_not_where_the_library_is_missing(missing: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise missing

    monkeypatch.setattr(device_memory.importlib, "import_module", fail)
    assert _available(monkeypatch, CUDA) == (False, False)


def _worker(**asked: bool) -> Any:
    worker = gpu.GPUWorkerFL.__new__(gpu.GPUWorkerFL)
    worker.fl_pools = any(asked.values())
    return worker


def test_weights_and_cache_lie_in_its_pools_only_if_somebody_asks(theirs: _Allocator) -> None:
    device_memory.lend_allocator()
    for tag in ("weights", "kv_cache", "runtime"):
        with _worker()._maybe_get_memory_pool_context(tag):
            assert theirs.tags == []
    for tag in ("weights", "kv_cache", "runtime"):
        with _worker(enable_sleep_mode=True)._maybe_get_memory_pool_context(tag):
            assert theirs.tags[-1] == tag


def test_vllm_gets_its_allocator_whatever_the_platform_is_called(theirs: _Allocator) -> None:
    from vllm.device_allocator import get_mem_allocator_instance

    with pytest.raises(RuntimeError, match="not available on platform PlatformFL"):
        get_mem_allocator_instance()
    device_memory.lend_allocator()
    from vllm.device_allocator import sleep_mode_backend

    backend = sleep_mode_backend.CuMemBackend()
    backend.suspend(level=1)
    assert "weights" in theirs.tags


def test_what_adapters_need_lies_where_every_level_of_sleep_keeps_it(
    theirs: _Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.device_allocator import sleep_mode_backend

    mixin = importlib.import_module(device_memory.ADAPTERS).LoRAModelRunnerMixin
    monkeypatch.setattr(mixin, "load_lora_model", lambda self, model: (model, list(theirs.tags)))
    for _ in range(2):
        device_memory.keep_adapters()
    assert mixin().load_lora_model("model") == ("model", [device_memory.KEPT])
    device_memory.lend_allocator()
    for level in (1, 2):
        theirs.tags.clear()
        sleep_mode_backend.CuMemBackend().suspend(level)
        assert device_memory.KEPT in theirs.tags
