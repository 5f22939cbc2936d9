"""Captured graphs: all that they rely on and a CPU can run; with a GPU ``test_sglang_gpu.py`` does.

``test_sglang_prefill_graphs.py`` has engines whose graphs of prompts are recorded by a stand-in.
"""

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

pytestmark = pytest.mark.usefixtures("scheduler")
HEADS, KV_HEADS, SIZE, PAGE, PAGES, LENGTH = 4, 2, 16, 4, 24, 40
REQUESTS = ([3, 9, 1], [17, 2, 30])
"""Lengths of the requests of two batches."""


@pytest.fixture(autouse=True)
def one_rank(scheduler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No others to agree with about tactics."""
    from sglang_fl.ranks import communicator

    monkeypatch.setattr(communicator, "agree_on_tactics", lambda: None)


@pytest.fixture
def backend() -> Any:
    """Our backend over a pool of random keys, in which request ``r`` has pages of its own in no order."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_fl.attention.attention_backend import AttentionFLBackend

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

    from sglang_fl.layers import classes

    layer = RadixAttention(HEADS, SIZE, SIZE**-0.5, KV_HEADS, 0)
    classes.prepare(nn.ModuleDict({"attn": layer}))
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
    from sglang_fl.attention import attention_warm_up

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


@pytest.mark.parametrize(("topk", "operator"), [(None, "mla_decode"), (20, "mla_sparse")])
def test_warming_up_latent_attention_leaves_out_the_layers_that_are_not_absorbed(
    topk: int | None, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    from fl_dispatch import get_default_manager
    from sglang_fl.attention import attention_backend, attention_warm_up
    from sglang_fl.layers import classes

    rank, rope = 32, 16
    absorbed = RadixAttention(HEADS, rank + rope, SIZE**-0.5, 1, 0, v_head_dim=rank)
    plain = RadixAttention(HEADS, SIZE + rope, SIZE**-0.5, HEADS, 0, v_head_dim=SIZE)
    model = nn.ModuleDict({"attn_mqa": absorbed, "attn_mha": plain})
    classes.prepare(model)
    sizes = {"page_size": PAGE, "dtype": torch.float32, "kv_lora_rank": rank, "qk_rope_head_dim": rope, "layer_num": 1}
    runner: Any = SimpleNamespace(
        attention_chunk_size=None,
        model_config=SimpleNamespace(context_len=LENGTH, hf_text_config=SimpleNamespace(index_topk=topk)),
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
    made = attention_backend.MLAFLBackend(runner)
    made.lists = None if topk is None else torch.zeros(1, topk, dtype=torch.int32)  # a list of an earlier step
    calls = attention_warm_up.warm_up(made, runner)
    counts = {op: count for (op, _), count in manager.call_counts().items() if count}
    manager.set_counting(False)
    assert counts == {"kv_cache_write": calls, operator: calls}


def test_graphs_of_decoding_hold_what_lists_tokens(backend: Any) -> None:
    from sglang_fl.graphs import choices

    assert choices.of_attention(backend) == {"kv_cache_write", "paged_attention"}
    backend.operator = "mla_sparse"
    assert choices.of_attention(backend) == {"kv_cache_write", "mla_sparse", "index_key_write", "index_topk"}


def test_nothing_is_captured_of_what_no_graph_can_hold(caplog: pytest.LogCaptureFixture) -> None:
    from fl_dispatch import get_default_manager
    from sglang_fl.graphs.decode import GraphRunnerFL

    runner = object.__new__(GraphRunnerFL)  # SGLang's constructor needs a GPU
    runner.model_runner = with_operators("fused_moe")
    runner.attn_backend = runner.model_runner.attn_backend
    with policy_context(SelectionPolicy.from_dict(prefer="reference")):
        runner.capture()
    assert "no graphs of decoding are captured, because none can hold 'reference.torch' of 'fused_moe'" in caplog.text
    assert not runner.can_run_graph(SimpleNamespace())  # type: ignore[arg-type]
    assert not get_default_manager().frozen


def test_graphs_of_decoding_hold_what_updates_states_by_single_tokens() -> None:
    from sglang_fl.graphs import choices

    assert choices.of_layers(with_operators("rms_norm")) == {"rms_norm"}
    convolution = {"causal_conv1d_update"}
    assert choices.of_layers(with_operators("causal_conv1d")) == {"causal_conv1d"} | convolution
    assert choices.of_layers(with_operators("gated_delta_rule")) == {
        "gated_delta_rule",
        "gated_delta_rule_update",
        *convolution,
    }


def prompts_of(model_runner: Any) -> Any:
    """SGLang's runner of prompts' graphs, whose constructor needs a GPU."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    prompts = object.__new__(PrefillCudaGraphRunner)
    prompts.model_runner = model_runner
    return prompts


def with_operators(*operators: str) -> Any:
    """A model runner with a loaded model that has layers of ours."""
    from fl_dispatch.hosting.layers.survey import Survey
    from sglang_fl.runner_state import LOADED, LoadedModel

    runner: Any = SimpleNamespace(attn_backend=SimpleNamespace())
    LOADED.give(runner, LoadedModel(Survey("SGLang", {name: (name, 1) for name in operators}, {}, {}, ())))
    return runner


def test_graphs_of_prompts_hold_what_decoding_could_not_but_no_layer_that_waits(
    backend: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention is called between pieces, so its references may be."""
    from sglang_fl.graphs import choices
    from sglang_fl.graphs import prompts as prefill_graphs
    from sglang_fl.runner_state import PROMPT_GRAPHS

    done: list[str] = []
    monkeypatch.setattr(prefill_graphs, "_warm_up", lambda prompts: done.append("warmed up"))
    monkeypatch.setattr(choices, "freeze_dispatch", lambda compiling: done.append("frozen"))
    monkeypatch.setattr(choices.communicator, "check_manifest", lambda manifest: done.append("compared"))
    batch: Any = SimpleNamespace()
    with policy_context(SelectionPolicy.from_dict(prefer="reference")):
        for operators, captured in (("rms_norm",), True), (("rms_norm", "fused_moe"), False):
            model_runner, order = with_operators(*operators), ["warmed up", "frozen", "compared", "captured"]
            model_runner.attn_backend = backend
            prompts = prompts_of(model_runner)
            done.clear()
            prefill_graphs.capture(lambda _: done.append("captured"), prompts)
            assert done == (order if captured else [])
            assert prefill_graphs.can_run_graph(lambda *_: True, prompts, batch) == captured
            prefill_graphs.execute(lambda *_: None, prompts, batch)
            assert PROMPT_GRAPHS.of(prompts).replays == 1
    assert caplog.messages == [
        "no graphs of prompts are captured, because none can hold 'reference.torch' of 'fused_moe'"
    ]


@pytest.mark.parametrize("operator", ["causal_conv1d", "gated_delta_rule", "selective_scan"])
def test_layers_with_a_state_read_prompts_eagerly(operator: str, caplog: pytest.LogCaptureFixture) -> None:
    from sglang_fl.graphs import prompts as prefill_graphs

    prompts = prompts_of(with_operators("rms_norm", operator))
    with caplog.at_level("INFO", logger="sglang_fl.graphs.prompts"):
        prefill_graphs.capture(lambda _: pytest.fail("captured"), prompts)
    assert not prefill_graphs.can_run_graph(lambda *_: True, prompts, SimpleNamespace())  # type: ignore[arg-type]
    assert caplog.messages == ["no graphs of prompts are captured, because layers with a state read prompts eagerly"]


def test_choices_that_are_frozen_for_prompts_are_not_made_again_for_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    from fl_dispatch import get_default_manager
    from sglang_fl.graphs import choices

    monkeypatch.setattr(type(get_default_manager()), "frozen", property(lambda manager: True))
    monkeypatch.setattr(choices, "freeze_dispatch", lambda compiling: pytest.fail("frozen twice"))
    assert choices.fix({"rms_norm"}, "none", "", lambda: pytest.fail("warmed up twice"))


@pytest.mark.parametrize("share", [None, 0.1])
def test_shadow_mode_says_that_it_compares_no_step_of_a_graph(
    share: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fl_dispatch import get_default_manager
    from fl_dispatch.shadow.sampling import Sampling, SamplingOptions
    from sglang_fl.graphs import choices
    from sglang_fl.graphs import decode as graphs
    from sglang_fl.graphs import prompts as prefill_graphs

    sampling = None if share is None else Sampling(SamplingOptions(share, None, "reference", ban=False, budget=0.01))
    monkeypatch.setattr(get_default_manager().shadow, "_sampling", sampling)
    monkeypatch.setattr(graphs.DecodeCudaGraphRunner, "capture", lambda runner: None)
    monkeypatch.setattr(choices.communicator, "check_manifest", lambda manifest: None)
    monkeypatch.setattr(choices, "freeze_dispatch", lambda compiling: None)
    monkeypatch.setattr(graphs.GraphRunnerFL, "_warm_up", lambda runner: None)
    monkeypatch.setattr(prefill_graphs, "_warm_up", lambda prompts: None)
    decoding = object.__new__(graphs.GraphRunnerFL)  # SGLang's constructor needs a GPU
    decoding.model_runner = with_operators()
    decoding.attn_backend = decoding.model_runner.attn_backend
    prefill_graphs.capture(lambda _: None, prompts_of(decoding.model_runner))
    decoding.capture()
    assert caplog.messages == ([] if share is None else [prefill_graphs.NOT_COMPARED, graphs.NOT_COMPARED])


def graphs_of(device: Any, before: dict[str, str], **args: Any) -> dict[str, str]:
    """The kinds of graphs that are left of those asked for."""
    from sglang.srt.model_executor.cuda_graph_config import Phase, default_cuda_graph_config, with_phase

    from sglang_fl.platform import config

    graphs = default_cuda_graph_config()
    for phase, kind in before.items():
        graphs = with_phase(graphs, phase, backend=kind)
    usual = {"speculative_algorithm": None, "enable_lora": None, "lora_paths": None, "pp_size": 1, "tp_size": 1}
    given: Any = SimpleNamespace(cuda_graph_config=graphs, **{**usual, **args})
    config._adapt_graphs(given, device)
    return {phase: given.cuda_graph_config[phase].backend for phase in Phase.ALL}


BOTH = {"decode": "full", "prefill": "breakable"}
NEITHER = {"decode": "disabled", "prefill": "disabled"}


@pytest.mark.parametrize("asked", [BOTH, {"decode": "breakable", "prefill": "full"}])
def test_graphs_are_of_the_kind_that_holds_our_operators(asked: dict[str, str]) -> None:
    assert graphs_of(CUDA, asked) == BOTH
    for phase in BOTH:
        assert graphs_of(CUDA, {**asked, phase: "disabled"}) == {**BOTH, phase: "disabled"}


def test_nothing_is_captured_where_sglang_has_no_runner_for_it_or_drafts() -> None:
    for other in (CPU, replace(CUDA, host_kernels={}), replace(CUDA, graphs=False)):
        assert graphs_of(other, BOTH) == NEITHER
    assert graphs_of(CUDA, BOTH, speculative_algorithm="EAGLE") == NEITHER


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"enable_lora": True}, "sglang_fl reads prompts for adapters eagerly"),
        ({"lora_paths": ["one"]}, "sglang_fl reads prompts for adapters eagerly"),
        ({"pp_size": 2}, "sglang_fl reads prompts eagerly in stages of a pipeline"),
        ({"tp_size": 2}, "sglang_fl reads prompts eagerly on several ranks"),
        ({}, "sglang_fl does not know those of SGLang 0.5.21"),
    ],
)
def test_prompts_are_read_eagerly_beside_what_nobody_has_tried_and_the_log_says_why(
    asked: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang_fl.platform import config

    if not asked:
        monkeypatch.setattr(config, "host_version", lambda: "0.5.21")
    with caplog.at_level("INFO", logger="sglang_fl.platform.config"):
        assert graphs_of(CUDA, BOTH, **asked) == {**BOTH, "prefill": "disabled"}
    assert caplog.messages == [f"graphs of prefill: 'disabled' instead of 'breakable', because {why}"]


def test_sglangs_own_kernels_run_where_its_spec_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_fl.compat import native_kernels

    assert (native_kernels.key(), native_kernels.capture(), native_kernels.start_triton()) == ("fl", False, False)
    monkeypatch.setattr(native_kernels, "detect_device", lambda: CUDA)
    assert (native_kernels.key(), native_kernels.capture()) == ("cuda", True)


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
    from sglang_fl.compat import native_kernels

    settings = replace(get_settings(), oot_blacklist=left)
    monkeypatch.setattr(native_kernels, "get_settings", lambda: settings)
    monkeypatch.setattr(native_kernels, "hosts_own_attention", lambda: backends)
    yes: Callable[..., bool] = lambda *_: True
    found = [native_kernels.rotate_and_write(yes, None), native_kernels.norm_queries_and_keys(yes, 128, torch.bfloat16)]
    assert found == expected
