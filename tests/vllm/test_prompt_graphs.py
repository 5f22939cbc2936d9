"""Graphs of prompts: which sizes, for which engines, and how far they go. Engines with graphs are in ``tests/gpu``."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

from fl_dispatch.devices import detect_device
from vllm_fl import config, prompt_graphs, ranks
from vllm_fl.attention import AttentionFLImpl
from vllm_fl.prompt_graphs import Batch, limits, sizes
from vllm_fl.states import StateLayer

captured_sizes = st.integers(1, 1024)
token_limits = st.integers(1, 1 << 16)


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_sizes_of_common_engines() -> None:
    assert sizes(512, 2048) == [768, 1024, 1280, 1536, 1792, 2048]
    assert sizes(4096, 8192) == [4608, 5120, 5632, 6144, 6656, 7168, 7680, 8192]
    assert len(sizes(512, 8192)) == 22
    assert sizes(8, 600) == [256, 512, 600]


@given(captured_sizes, token_limits)
def test_sizes_ascend_from_what_is_captured_to_the_limit_itself(captured: int, most: int) -> None:
    found = sizes(captured, most)
    assert found == sorted(set(found))
    assert all(captured < size <= most for size in found)
    assert (found[-1:] == [most]) == (captured < most)


@given(captured_sizes, token_limits, st.data())
def test_a_batch_is_padded_by_an_eighth_or_a_step_at_most(captured: int, most: int, data: st.DataObject) -> None:
    found = [captured, *sizes(captured, most)]
    tokens = data.draw(st.integers(captured, found[-1]))
    padded = min(size for size in found if size >= tokens)
    assert padded - tokens < max(tokens / 8, prompt_graphs.LEAST_STEP)


@given(captured_sizes, token_limits)
def test_limits_to_try_end_with_all_tokens_of_a_batch_and_are_few(captured: int, most: int) -> None:
    tried = limits(captured, most)
    assert tried == sorted(set(tried))
    assert tried[-1:] == ([most] if captured < most else [])
    assert len(tried) <= 9


def test_limits_of_a_common_engine() -> None:
    assert limits(512, 8192) == [1024, 2048, 4096, 8192]
    assert limits(8, 2048) == [512, 1024, 2048]
    assert limits(512, 512) == []


# -- whether the user chose -------------------------------------------------------------------------------------------


def _defaults(**chosen: Any) -> CompilationConfig:
    """A compilation configuration with the platform's defaults, before vLLM fills in sizes."""
    compilation = CompilationConfig(**chosen)
    config.apply_defaults(SimpleNamespace(compilation_config=compilation, model_config=None), detect_device())  # type: ignore[arg-type]
    return compilation


def test_a_configuration_without_sizes_is_marked_and_keeps_the_mark_on_its_way_to_a_worker() -> None:
    compilation = pickle.loads(pickle.dumps(_defaults()))
    assert getattr(compilation, prompt_graphs.MARK)
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [1, 2], 2  # as vLLM fills them in
    prompt_graphs.note_choice(compilation)
    assert getattr(compilation, prompt_graphs.MARK)


@pytest.mark.parametrize("chosen", [{"max_cudagraph_capture_size": 512}, {"cudagraph_capture_sizes": [1, 512]}])
def test_a_configuration_with_sizes_is_not(chosen: dict[str, Any]) -> None:
    assert not hasattr(_defaults(**chosen), prompt_graphs.MARK)


# -- how far graphs go ------------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """A worker's configuration, as :func:`prompt_graphs.add` reads it."""

    mode: CompilationMode = CompilationMode.VLLM_COMPILE
    graphs: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE
    captured: int = 512
    most: int = 8192
    compile_sizes: list[int] | None = None
    left_to_us: bool = True
    cache: int | None = None
    lora: Any = None
    drafts: Any = None
    data_parallel: int = 1
    pipeline: int = 1
    ubatches: bool = False
    model: nn.Module = field(default_factory=nn.Module)

    def config(self) -> Any:
        compilation = SimpleNamespace(
            mode=self.mode,
            cudagraph_mode=self.graphs,
            cudagraph_capture_sizes=[1, self.captured],
            max_cudagraph_capture_size=self.captured,
            compile_sizes=self.compile_sizes,
        )
        if self.left_to_us:
            setattr(compilation, prompt_graphs.MARK, True)
        return SimpleNamespace(
            compilation_config=compilation,
            parallel_config=SimpleNamespace(
                data_parallel_size=self.data_parallel,
                pipeline_parallel_size=self.pipeline,
                use_ubatching=self.ubatches,
            ),
            cache_config=SimpleNamespace(kv_cache_memory_bytes=self.cache),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=self.most),
            lora_config=self.lora,
            speculative_config=self.drafts,
        )


@pytest.fixture
def taking(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[int, Batch]], None]:
    """Sets what batches take, on a single rank."""

    def take(batches: Mapping[int, Batch]) -> None:
        monkeypatch.setattr(prompt_graphs, "measure", lambda run, tokens: batches[tokens])
        monkeypatch.setattr(ranks, "everywhere", bool)

    return take


def _batches(the_devices_from: int = 1 << 30, memory: int = 1) -> dict[int, Batch]:
    """Batches that need a byte a token, of which the device takes longer than the host from some size on."""
    return {
        tokens: Batch(tokens, 0.07, 0.04 if tokens >= the_devices_from else 0.001, memory * tokens)
        for tokens in (1024, 2048, 4096, 8192)
    }


ROOM = 8192 * prompt_graphs.PART


def test_where_the_device_keeps_up_graphs_hold_the_largest_batch(taking: Callable[..., None]) -> None:
    taking(_batches())
    given = Engine().config()
    assert prompt_graphs.add(given, nn.Module(), print, ROOM) == 8192
    assert given.compilation_config.cudagraph_capture_sizes == [1, 512, *sizes(512, 8192)]
    assert given.compilation_config.max_cudagraph_capture_size == 8192


@pytest.mark.parametrize(("longer", "limit"), [(2048, 1024), (4096, 2048), (8192, 4096), (1024, 512)])
def test_they_end_below_the_size_at_which_the_device_takes_longer(
    longer: int, limit: int, taking: Callable[..., None]
) -> None:
    taking(_batches(the_devices_from=longer))
    given = Engine().config()
    left = prompt_graphs.add(given, nn.Module(), print, ROOM)
    assert given.compilation_config.max_cudagraph_capture_size == limit
    assert given.compilation_config.cudagraph_capture_sizes == [1, 512, *sizes(512, limit)]
    assert left == (limit if limit > 512 else 0)


def test_sizes_that_are_compiled_by_themselves_are_not_padded(taking: Callable[..., None]) -> None:
    taking(_batches(the_devices_from=4096))
    given = Engine(compile_sizes=[8, 1000, 2048, 3000]).config()
    prompt_graphs.add(given, nn.Module(), print, ROOM)
    assert given.compilation_config.cudagraph_capture_sizes == sorted([1, 512, 1000, *sizes(512, 2048)])


def test_they_take_no_more_than_their_part_of_the_memory_for_the_cache(taking: Callable[..., None]) -> None:
    taking(_batches())
    given = Engine().config()
    assert prompt_graphs.add(given, nn.Module(), print, ROOM // 2) == 4096
    assert given.compilation_config.max_cudagraph_capture_size == 4096


def test_beside_a_cache_of_a_chosen_size_they_take_a_part_of_what_is_left(
    taking: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    taking(_batches())
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (ROOM, 2 * ROOM))
    given = Engine(cache=ROOM // 2).config()
    assert prompt_graphs.add(given, nn.Module(), print, ROOM // 2) == 0
    assert given.compilation_config.max_cudagraph_capture_size == 4096


def test_a_rank_whose_device_takes_longer_decides_for_all(
    taking: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    taking(_batches())
    asked: list[bool] = []
    monkeypatch.setattr(ranks, "everywhere", lambda holds: asked.append(holds) or len(asked) < 2)
    given = Engine().config()
    assert prompt_graphs.add(given, nn.Module(), print, ROOM) == 1024
    assert asked == [True, True]


class Layer(nn.Module):
    """A layer with attention."""

    def __init__(self, impl: object) -> None:
        super().__init__()
        self.impl = impl


class Stateful(StateLayer, nn.Module):
    """A layer with a state."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


OWN = object.__new__(AttentionFLImpl)
NOT_FOR = {
    "sizes of the user's": Engine(left_to_us=False),
    "another mode of compilation": Engine(mode=CompilationMode.DYNAMO_TRACE_ONCE),
    "whole graphs alone": Engine(graphs=CUDAGraphMode.FULL_DECODE_ONLY),
    "no graphs": Engine(graphs=CUDAGraphMode.NONE),
    "no sizes": Engine(captured=0),
    "adapters": Engine(lora=object()),
    "drafts": Engine(drafts=object()),
    "data-parallel ranks": Engine(data_parallel=2),
    "pipeline stages": Engine(pipeline=2),
    "batches cut in two": Engine(ubatches=True),
    "attention of another backend": Engine(model=nn.ModuleList([Layer(OWN), Layer(object())])),
    "layers with a state": Engine(model=nn.ModuleList([Layer(OWN), Stateful()])),
}


@pytest.mark.parametrize("name", NOT_FOR)
def test_engines_keep_to_vllms_sizes_with(name: str, taking: Callable[..., None]) -> None:
    taking({})
    engine = NOT_FOR[name]
    given = engine.config()
    assert prompt_graphs.add(given, engine.model, print, ROOM) == 0
    assert given.compilation_config.cudagraph_capture_sizes == [1, engine.captured]


def test_layers_with_our_attention_have_graphs_of_prompts(taking: Callable[..., None]) -> None:
    taking(_batches())
    assert prompt_graphs.why_none(Engine().config(), nn.ModuleList([Layer(OWN)])) is None


# -- what is measured -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "device", "is_the_hosts"), [(0.04, 0.0, True), (0.04, 0.01, True), (0.01, 0.04, False)]
)
def test_a_batch_is_the_hosts_when_less_than_half_is_left_after_its_last_launch(
    host: float, device: float, is_the_hosts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def run(tokens: int) -> None:
        ran.append(tokens)
        time.sleep(host)

    accelerator = SimpleNamespace(
        synchronize=lambda: time.sleep(device),
        memory_allocated=lambda: 100,
        max_memory_allocated=lambda: 350,
        reset_peak_memory_stats=lambda: None,
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    found = prompt_graphs.measure(run, 1024)
    assert found.is_the_hosts == is_the_hosts
    assert found.memory == 250 * prompt_graphs.POOL
    assert ran == [1024] * (1 + prompt_graphs.RUNS)
    assert found.seconds >= host + device
