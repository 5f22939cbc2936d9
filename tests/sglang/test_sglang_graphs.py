"""Captured decode graphs: all that they rely on and a CPU can run; with a GPU ``tests/gpu/test_sglang_gpu.py`` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_dispatch import SelectionPolicy, policy_context
from fl_dispatch.devices.cpu import CPU
from fl_dispatch.devices.cuda import CUDA
from fl_dispatch.settings import get_settings

pytestmark = pytest.mark.usefixtures("host")
HEADS, KV_HEADS, SIZE, PAGE, PAGES, LENGTH = 4, 2, 16, 4, 24, 40
REQUESTS = ([3, 9, 1], [17, 2, 30])
"""Lengths of the requests of two batches."""


@pytest.fixture
def backend() -> Any:
    """Our backend over a pool of random keys, in which request ``r`` has pages of its own in no order."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_fl.attention import AttentionFLBackend

    torch.manual_seed(0)
    rows = {"page_size": PAGE, "dtype": torch.float32, "head_num": KV_HEADS, "head_dim": SIZE, "layer_num": 1}
    pool = MHATokenToKVPool((PAGES * 3 + 1) * PAGE, **rows, device="cpu", enable_memory_saver=False)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    pages = (1 + torch.randperm(PAGES * 3)).view(3, PAGES)
    table = (pages.unsqueeze(-1) * PAGE + torch.arange(PAGE)).flatten(1).to(torch.int32)
    runner = SimpleNamespace(
        attention_chunk_size=None,
        model_config=SimpleNamespace(context_len=LENGTH),
        page_size=PAGE,
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=pool,
    )
    return AttentionFLBackend(runner)  # type: ignore[arg-type]


@pytest.fixture
def layer() -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    from sglang_fl import layers

    layer = RadixAttention(HEADS, SIZE, SIZE**-0.5, KV_HEADS, 0)
    layers.prepare(nn.ModuleDict({"attn": layer}))
    return layer


def decode(backend: Any, lengths: list[int]) -> Any:
    """A batch that decodes; the new key of each request goes to its last row."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rows, lens = torch.arange(len(lengths)), torch.tensor(lengths)
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        encoder_lens=None,
        seq_lens=lens,
        seq_lens_cpu=lens,
        req_pool_indices=rows,
        out_cache_loc=backend.req_to_token_pool.req_to_token[rows, lens - 1].long(),
        spec_info=None,
    )


def inputs(requests: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(requests, HEADS * SIZE, generator=draw)
    key, value = torch.randn(2, requests, KV_HEADS, SIZE, generator=draw)
    return query, key, value


@pytest.mark.parametrize("written", [True, False], ids=["written", "not written"])
def test_what_a_graph_captured_sees_the_batch_that_is_replayed(backend: Any, layer: Any, written: bool) -> None:
    """A graph runs again with the tensors that it captured, and nothing of Python; so does this."""
    backend.init_cuda_graph_state(4, 4)
    first, second = (decode(backend, lengths) for lengths in REQUESTS)
    backend.init_forward_metadata_out_graph(first, in_capture=True)
    captured = backend.forward_metadata
    assert captured.max_seq_len == LENGTH
    assert captured.query_start_loc_host is captured.seq_lens_host is None
    backend.init_forward_metadata(second)
    expected = backend.forward(*inputs(3, 1), layer, second)
    if written:
        backend.init_forward_metadata_out_graph(second)
    backend.forward_metadata = captured
    found = backend.forward(*inputs(3, 1), layer, second)
    assert torch.allclose(found, expected, atol=1e-6) == written


def test_padding_beside_a_batch_leaves_its_results_alone(backend: Any, layer: Any) -> None:
    """SGLang pads a batch with requests of one token in row 0; their keys go to the pool's row for padding."""
    backend.init_cuda_graph_state(4, 4)
    batch = decode(backend, REQUESTS[1])
    backend.init_forward_metadata(batch)
    expected = backend.forward(*inputs(3, 1), layer, batch)
    padded = SimpleNamespace(**vars(batch))
    for name, filling in (("seq_lens", 1), ("seq_lens_cpu", 1), ("req_pool_indices", 0), ("out_cache_loc", 0)):
        setattr(padded, name, nn.functional.pad(getattr(batch, name), (0, 1), value=filling))
    backend.init_forward_metadata_out_graph(padded)
    rows = [nn.functional.pad(x, [0, 0] * (x.dim() - 1) + [0, 1], value=7.0) for x in inputs(3, 1)]
    torch.testing.assert_close(backend.forward(*rows, layer, padded)[:3], expected)


def test_warming_up_calls_attention_for_every_kind_of_batch_and_writes_padding_alone(
    backend: Any, layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fl_dispatch import get_default_manager
    from sglang_fl import attention_warm_up

    monkeypatch.setattr(attention_warm_up, "largest_step", lambda: 64)
    before = [buffer.clone() for buffer in (*backend.token_to_kv_pool.k_buffer, *backend.token_to_kv_pool.v_buffer)]
    runner = SimpleNamespace(model=nn.ModuleDict({"attn": layer}), max_running_requests=4, dtype=torch.float32)
    manager = get_default_manager()
    manager.set_counting(True)
    manager.reset_counts()
    calls = attention_warm_up.warm_up(backend, runner)
    counts = {op: count for (op, _), count in manager.call_counts().items() if count}
    manager.set_counting(False)
    assert calls > 20
    assert counts == {"kv_cache_write": calls, "paged_attention": calls}
    after = (*backend.token_to_kv_pool.k_buffer, *backend.token_to_kv_pool.v_buffer)
    assert all(torch.equal(old[1:], new[1:]) for old, new in zip(before, after, strict=True))


def test_warming_up_latent_attention_leaves_out_the_layers_that_are_not_absorbed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    from fl_dispatch import get_default_manager
    from sglang_fl import attention, attention_warm_up, layers

    rank, rope = 32, 16
    absorbed = RadixAttention(HEADS, rank + rope, SIZE**-0.5, 1, 0, v_head_dim=rank)
    plain = RadixAttention(HEADS, SIZE + rope, SIZE**-0.5, HEADS, 0, v_head_dim=SIZE)
    model = nn.ModuleDict({"attn_mqa": absorbed, "attn_mha": plain})
    layers.prepare(model)
    sizes = {"page_size": PAGE, "dtype": torch.float32, "kv_lora_rank": rank, "qk_rope_head_dim": rope, "layer_num": 1}
    runner: Any = SimpleNamespace(
        attention_chunk_size=None,
        model_config=SimpleNamespace(context_len=LENGTH),
        page_size=PAGE,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(3, PAGES * PAGE, dtype=torch.int32)),
        token_to_kv_pool=MLATokenToKVPool(PAGES * PAGE, **sizes, device="cpu", enable_memory_saver=False),
        model=model,
        max_running_requests=4,
        dtype=torch.float32,
    )
    monkeypatch.setattr(attention_warm_up, "largest_step", lambda: 64)
    manager = get_default_manager()
    manager.set_counting(True)
    manager.reset_counts()
    calls = attention_warm_up.warm_up(attention.MLAFLBackend(runner), runner)
    counts = {op: count for (op, _), count in manager.call_counts().items() if count}
    manager.set_counting(False)
    assert counts == {"kv_cache_write": calls, "mla_decode": calls}


def test_nothing_is_captured_of_what_no_graph_can_hold(caplog: pytest.LogCaptureFixture) -> None:
    from fl_dispatch import get_default_manager
    from fl_dispatch.hosting.survey import Survey
    from sglang_fl.graphs import GraphRunnerFL
    from sglang_fl.loaded import LOADED, LoadedModel

    runner = object.__new__(GraphRunnerFL)  # SGLang's constructor needs a GPU
    runner.model_runner, runner.attn_backend = nn.Module(), SimpleNamespace()  # type: ignore[assignment]
    LOADED.give(runner.model_runner, LoadedModel(Survey("SGLang", {"FusedMoE": ("fused_moe", 1)}, {}, {}, ())))
    with policy_context(SelectionPolicy.from_dict(prefer="reference")):
        runner.capture()
    assert "no graphs are captured, because none can hold 'reference.torch' of 'fused_moe'" in caplog.text
    assert not runner.can_run_graph(SimpleNamespace())  # type: ignore[arg-type]
    assert not get_default_manager().frozen


@pytest.mark.parametrize("share", [None, 0.1])
def test_shadow_mode_says_that_it_compares_no_step_of_a_graph(
    share: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fl_dispatch import get_default_manager
    from fl_dispatch.shadow.sampling import Sampling, Wish
    from sglang_fl import distributed, graphs

    wish = None if share is None else Sampling(Wish(share, None, "reference", ban=False, budget=0.01))
    monkeypatch.setattr(get_default_manager().shadow, "_sampling", wish)
    monkeypatch.setattr(graphs.DecodeCudaGraphRunner, "capture", lambda runner: None)
    monkeypatch.setattr(distributed, "check_manifest", lambda manifest: None)
    monkeypatch.setattr(graphs, "freeze_dispatch", lambda compiling: None)
    for step, answer in (("_can_be_held", True), ("_warm_up", None)):
        monkeypatch.setattr(graphs.GraphRunnerFL, step, lambda runner, answer=answer: answer)
    object.__new__(graphs.GraphRunnerFL).capture()  # SGLang's constructor needs a GPU
    assert caplog.messages == ([] if share is None else [graphs.NOT_COMPARED])


def graphs_of(device: Any, algorithm: str | None = None, **asked: str) -> dict[str, str]:
    """The kinds of graphs that are left of those asked for; ``algorithm`` drafts."""
    from sglang.srt.model_executor.cuda_graph_config import Phase, default_cuda_graph_config, with_phase

    from sglang_fl import config

    graphs = default_cuda_graph_config()
    for phase, kind in asked.items():
        graphs = with_phase(graphs, phase, backend=kind)
    args: Any = SimpleNamespace(cuda_graph_config=graphs, speculative_algorithm=algorithm)
    config._adapt_graphs(args, device)
    return {phase: args.cuda_graph_config[phase].backend for phase in Phase.ALL}


def test_decoding_is_captured_where_sglang_has_a_runner_for_it() -> None:
    assert graphs_of(CUDA, decode="full", prefill="breakable") == {"decode": "full", "prefill": "disabled"}
    assert graphs_of(CUDA, decode="breakable") == {"decode": "full", "prefill": "disabled"}
    assert graphs_of(CUDA, decode="disabled") == {"decode": "disabled", "prefill": "disabled"}
    for other in (CPU, replace(CUDA, host_kernels={}), replace(CUDA, graphs=False)):
        assert graphs_of(other, decode="full") == {"decode": "disabled", "prefill": "disabled"}
    assert graphs_of(CUDA, "EAGLE", decode="full") == {"decode": "disabled", "prefill": "disabled"}


def test_sglangs_own_kernels_run_where_its_spec_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_fl import own_kernels

    assert (own_kernels.key(), own_kernels.capture(), own_kernels.start_triton()) == ("fl", False, False)
    monkeypatch.setattr(own_kernels, "detect_device", lambda: CUDA)
    assert (own_kernels.key(), own_kernels.capture()) == ("cuda", True)


@pytest.mark.parametrize(
    ("left", "backends", "expected"),
    [
        (frozenset(), [], [False, False]),
        (frozenset({"rms_norm"}), [], [False, True]),
        (frozenset({"rotary_embedding"}), [], [False, False]),
        (frozenset({"rotary_embedding", "rms_norm"}), ["fa3"], [True, True]),
    ],
)
def test_a_kernel_for_several_layers_runs_only_where_none_of_them_is_ours(
    left: frozenset[str], backends: list[str], expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_fl import own_kernels

    settings = replace(get_settings(), oot_blacklist=left)
    monkeypatch.setattr(own_kernels, "get_settings", lambda: settings)
    monkeypatch.setattr(own_kernels, "hosts_own_attention", lambda: backends)
    yes: Callable[..., bool] = lambda *_: True
    found = [own_kernels.rotate_and_write(yes, None), own_kernels.norm_queries_and_keys(yes, 128, torch.bfloat16)]
    assert found == expected
