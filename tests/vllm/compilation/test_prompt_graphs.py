"""Graphs of prompts: which sizes, for which engines, and how far they go. Engines with graphs are in ``tests/gpu``."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

from fl_dispatch import ConfigError
from fl_dispatch.devices import detect_device
from vllm import envs
from vllm_fl.attention.dense import AttentionFLImpl
from vllm_fl.compilation import compile
from vllm_fl.layers.states import StateLayer
from vllm_fl.platform import config, startup
from vllm_fl.worker import gpu, prompt_graphs, ranks
from vllm_fl.worker.prompt_graphs import Batch, limits, sizes

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


def _configured(model: object = None, **chosen: Any) -> Any:
    """A configuration that the platform's two functions have seen, between which vLLM fills in sizes."""
    compilation = CompilationConfig(**chosen)
    given: Any = SimpleNamespace(compilation_config=compilation, model_config=model, additional_config={"mine": 1})
    given.parallel_config = SimpleNamespace(local_world_size=1, data_parallel_size_local=1)
    config.apply_defaults(given, detect_device())
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [1, 512], 512
    config.pack_settings(given)
    return given


MODEL = SimpleNamespace(is_encoder_decoder=False)


@pytest.mark.parametrize("model", [None, MODEL])
def test_sizes_that_nobody_chose_are_known_on_the_way_to_a_worker(model: object) -> None:
    given = _configured(model)
    assert given.additional_config["mine"] == 1
    assert config.are_sizes_left(pickle.loads(pickle.dumps(given)))
    config.apply_defaults(given, detect_device())  # a configuration may be made anew from its parts
    config.pack_settings(given)
    assert config.are_sizes_left(given)


def test_a_configuration_keeps_nothing_else_of_it() -> None:
    given = _configured()
    assert config.SIZES_KEY not in vars(given)
    assert not [name for name in vars(given.compilation_config) if name.startswith("fl")]


@pytest.mark.parametrize("chosen", [{"max_cudagraph_capture_size": 512}, {"cudagraph_capture_sizes": [1, 512]}])
@pytest.mark.parametrize("model", [None, MODEL])
def test_chosen_sizes_are_known_too(model: object, chosen: dict[str, Any]) -> None:
    assert not config.are_sizes_left(_configured(model, **chosen))


def test_only_true_says_so() -> None:
    with pytest.raises(ConfigError, match=rf"{config.SIZES_KEY}.*is true or not there, not 1"):
        config._check_packed({config.SIZES_KEY: 1})


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
    requests: int = 256
    longest: int = 4096
    whole_memory: bool = False
    elastic: bool = False
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
        left = {config.SIZES_KEY: True} if self.left_to_us else {}
        return SimpleNamespace(
            compilation_config=compilation,
            parallel_config=SimpleNamespace(
                data_parallel_size=self.data_parallel,
                pipeline_parallel_size=self.pipeline,
                use_ubatching=self.ubatches,
                enable_elastic_ep=self.elastic,
            ),
            model_config=SimpleNamespace(
                max_model_len=self.longest, original_max_model_len=-1 if self.whole_memory else None
            ),
            additional_config={startup.CONFIG_KEY: left},
            cache_config=SimpleNamespace(kv_cache_memory_bytes=self.cache),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=self.most, max_num_seqs=self.requests),
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


HOST = 0.035
"""Seconds that launching a batch takes."""


def _batches(the_devices_from: int = 1 << 30, memory: int = 1) -> dict[int, Batch]:
    """Batches that need a byte a token, and twice the host's time, or hardly more from some size on."""
    batches = {
        tokens: Batch(tokens, (2.01 if tokens >= the_devices_from else 2.0) * HOST, HOST, memory * tokens)
        for tokens in (1024, 2048, 4096, 8192)
    }
    return {513: Batch(513, 1.2 * HOST, HOST, 513), **batches}


ROOM = 8192 * prompt_graphs.PART


def added(given: Any, cache: int = ROOM, longest_request: int = 0) -> int:
    """Have graphs added for a model without layers."""
    return prompt_graphs.add(given, nn.Module(), print, cache, longest_request)


def test_where_the_device_keeps_up_graphs_hold_the_largest_batch(taking: Callable[..., None]) -> None:
    taking(_batches())
    given = Engine().config()
    assert added(given) == 8192
    assert given.compilation_config.cudagraph_capture_sizes == [1, 512, *sizes(512, 8192)]
    assert given.compilation_config.max_cudagraph_capture_size == 8192


def test_launching_is_timed_where_the_device_has_least_to_do(taking: Callable[..., None]) -> None:
    """A device's queue is bounded: with many kernels, launching a large batch takes as long as the device does."""
    queued = {
        tokens: Batch(tokens, batch.seconds, batch.seconds, 1)
        for tokens, batch in _batches(the_devices_from=2048).items()
    }
    taking({**queued, 513: _batches()[513]})
    given = Engine().config()
    added(given)
    assert given.compilation_config.max_cudagraph_capture_size == 1024


@pytest.mark.parametrize(("longer", "limit"), [(2048, 1024), (4096, 2048), (8192, 4096), (1024, 512)])
def test_they_end_below_the_size_at_which_the_device_takes_longer(
    longer: int, limit: int, taking: Callable[..., None]
) -> None:
    taking(_batches(the_devices_from=longer))
    given = Engine().config()
    left = added(given)
    assert given.compilation_config.max_cudagraph_capture_size == limit
    assert given.compilation_config.cudagraph_capture_sizes == [1, 512, *sizes(512, limit)]
    assert left == (limit if limit > 512 else 0)


def test_sizes_that_are_compiled_by_themselves_are_not_padded(taking: Callable[..., None]) -> None:
    taking(_batches(the_devices_from=4096))
    given = Engine(compile_sizes=[8, 1000, 2048, 3000]).config()
    added(given)
    assert given.compilation_config.cudagraph_capture_sizes == sorted([1, 512, 1000, *sizes(512, 2048)])


def test_they_take_no_more_than_their_part_of_the_memory_for_the_cache(taking: Callable[..., None]) -> None:
    taking(_batches())
    given = Engine().config()
    assert added(given, ROOM // 2) == 4096
    assert given.compilation_config.max_cudagraph_capture_size == 4096


@pytest.mark.parametrize(("spare", "limit"), [(8192, 8192), (8191, 4096), (2048, 2048), (100, 512), (-1, 512)])
def test_a_request_of_the_greatest_length_still_fits(spare: int, limit: int, taking: Callable[..., None]) -> None:
    taking(_batches())
    given = Engine().config()
    assert added(given, ROOM, ROOM - spare) == (limit if limit > 512 else 0)
    assert given.compilation_config.max_cudagraph_capture_size == limit


def test_beside_a_cache_of_a_chosen_size_they_take_a_part_of_what_is_left(
    taking: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    taking(_batches())
    chosen = 5 * ROOM
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (chosen + 4096 * prompt_graphs.PART_BESIDE, ROOM))
    given = Engine(cache=chosen).config()
    assert added(given, chosen, longest_request=chosen) == 0
    assert given.compilation_config.max_cudagraph_capture_size == 4096


def test_decoding_of_all_requests_has_a_whole_graph(taking: Callable[..., None]) -> None:
    """Whole graphs of more requests than there are would not be captured."""
    taking(_batches())
    given = Engine(requests=600).config()
    added(given)
    assert given.compilation_config.cudagraph_capture_sizes == sorted([1, 512, 600, *sizes(512, 8192)])


def test_layers_of_several_kinds_are_counted_as_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Any = object.__new__(gpu.GPUWorkerFL)
    specs = {name: SimpleNamespace(max_memory_usage_bytes=lambda config, size=size: size) for name, size in NEEDS}
    worker.model_runner = SimpleNamespace(get_kv_cache_spec=lambda: specs)
    worker.vllm_config, asked = None, []
    monkeypatch.setattr(worker, "fl_models", lambda: None)
    monkeypatch.setattr(prompt_graphs, "add", lambda *given: asked.append(given[-2:]) or 0)
    worker._add_prompt_graphs(1000)
    assert asked == [(1000, 300)]


NEEDS = (("sliding", 10), ("full", 100), ("sliding too", 10))


@pytest.mark.parametrize(("requests", "longest", "limit"), [(4, 1024, 4096), (2, 500, 1000), (1, 512, 512)])
def test_no_graph_is_larger_than_all_requests_together(
    requests: int, longest: int, limit: int, taking: Callable[..., None]
) -> None:
    taking({**_batches(), 1000: Batch(1000, 2 * HOST, HOST, 1000)})
    given = Engine(requests=requests, longest=longest).config()
    added(given)
    assert given.compilation_config.max_cudagraph_capture_size == limit


def test_a_rank_whose_device_takes_longer_decides_for_all(
    taking: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    taking(_batches())
    asked: list[bool] = []
    monkeypatch.setattr(ranks, "everywhere", lambda holds: asked.append(holds) or len(asked) < 2)
    given = Engine().config()
    assert added(given) == 1024
    assert asked == [True, True]


def test_every_rank_of_the_engine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ranks, "get_world_group", lambda: SimpleNamespace(cpu_group="everybody"))
    monkeypatch.setattr(ranks.agreement, "everywhere", lambda *given: asked.append(given) or False)
    assert ranks.everywhere(True) is False
    assert asked == [("everybody", True)]


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
    "data-parallel ranks that come and go": Engine(elastic=True),
    "a context that takes all memory": Engine(whole_memory=True),
    "attention of another backend": Engine(model=nn.ModuleList([Layer(OWN), Layer(object())])),
    "layers with a state": Engine(model=nn.ModuleList([Layer(OWN), Stateful()])),
}


@pytest.mark.parametrize("name", NOT_FOR)
def test_engines_keep_to_vllms_sizes_with(name: str, taking: Callable[..., None]) -> None:
    taking({})
    engine = NOT_FOR[name]
    given = engine.config()
    assert prompt_graphs.add(given, engine.model, print, ROOM, 0) == 0
    assert given.compilation_config.cudagraph_capture_sizes == [1, engine.captured]


def test_engines_keep_to_vllms_sizes_with_a_plan_of_the_start(
    taking: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM looks such a plan up by a configuration's hash, which has the sizes, before they are extended."""
    taking({})
    monkeypatch.setattr(envs, "VLLM_ENABLE_STARTUP_PLAN", True, raising=False)
    assert added(Engine().config()) == 0


def test_layers_with_our_attention_have_graphs_of_prompts(taking: Callable[..., None]) -> None:
    taking(_batches())
    assert prompt_graphs.why_none(Engine().config(), nn.ModuleList([Layer(OWN)])) is None


# -- what is measured -------------------------------------------------------------------------------------------------


class Device:
    """An accelerator whose work takes as long as it is told, and whose memory has a peak from before."""

    def __init__(self, works: Sequence[float]) -> None:
        self.works, self.queued, self.peak, self.held = iter(works), 0.0, 1000, 100
        self.tokens: list[int] = []

    def run(self, tokens: int) -> None:
        """Launch a batch, which takes the host ten milliseconds."""
        self.tokens.append(tokens)
        time.sleep(0.01)
        self.queued += next(self.works)
        self.peak = max(self.peak, self.held + 250)

    def synchronize(self) -> None:
        time.sleep(self.queued)
        self.queued = 0.0

    def memory_allocated(self) -> int:
        return self.held

    def max_memory_allocated(self) -> int:
        return self.peak

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.held


def test_a_batch_is_measured_by_the_median_of_runs_after_one_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device([0.5, 0.05, 0.0, 0.15])
    monkeypatch.setattr(torch, "accelerator", device)
    found = prompt_graphs.measure(device.run, 1024)
    assert device.tokens == [1024] * (1 + prompt_graphs.RUNS)
    assert 0.06 <= found.seconds < 0.14
    assert 0.01 <= found.launching < 0.05
    assert found.memory == 250 * prompt_graphs.POOL


# -- what is told -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("graphs", "told"), [(CUDAGraphMode.PIECEWISE, {"captured": 8192}), (CUDAGraphMode.NONE, {})])
def test_a_report_has_the_largest_batch_with_a_graph(graphs: CUDAGraphMode, told: dict[str, int]) -> None:
    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=graphs)
    compilation.max_cudagraph_capture_size = 8192
    given: Any = SimpleNamespace(compilation_config=compilation)
    found = compile.report(given, compile.counts())
    assert {name: value for name, value in found.items() if name == "captured"} == told
