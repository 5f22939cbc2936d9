"""Graphs of the emulated NPU, captured and replayed by the genuine ``torch.npu.NPUGraph``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu

import emulated_npu
from fl_dispatch import BackendImplKind, OpImpl, OpManager, SelectionPolicy, policy_context
from fl_dispatch.devices import ASCEND
from vllm_fl.compat import library
from vllm_fl.compat.library import unowned_views

Numbers = Callable[..., torch.Tensor]


def captured(function: Callable[[], Any], **options: Any) -> tuple[torch.npu.NPUGraph, Any]:
    """A graph of what the function launches, and what it returned."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        made = function()
    return graph, made


def test_a_capture_computes_nothing_that_lasts() -> None:
    x, total = torch.ones(4).npu(), torch.zeros(4).npu()
    _, (doubled, _) = captured(lambda: (x * 2, total.add_(x)))
    assert total.tolist() == [0.0] * 4
    assert doubled.isnan().all()


def test_a_replay_reads_and_writes_the_memory_of_the_capture() -> None:
    x, total = torch.ones(4).npu(), torch.zeros(4).npu()
    graph, doubled = captured(lambda: total.add_(x * 2) * 1)
    x.copy_(torch.arange(4.0))
    graph.replay()
    graph.replay()
    assert total.tolist() == doubled.tolist() == [0.0, 4.0, 8.0, 12.0]


def test_operators_of_the_chip_and_views_are_in_a_graph(normal: Numbers) -> None:
    x, weight = normal(6, 16).npu(), torch.ones(16).npu()
    graph, made = captured(lambda: torch_npu.npu_swiglu(torch_npu.npu_rms_norm(x, weight)[0][2:]))
    other = normal(6, 16)
    x.copy_(other)
    graph.replay()
    torch.testing.assert_close(made, torch_npu.npu_swiglu(torch_npu.npu_rms_norm(other.npu(), weight)[0][2:]))


def test_a_number_of_the_host_is_repeated() -> None:
    """So no graph can hold a call that takes a batch's lengths as integers."""
    x, lengths = torch.arange(4.0).npu(), [1, 3]
    graph, made = captured(lambda: torch.stack(torch.split(x, lengths)[1:])[0] * lengths[0])
    lengths[:] = [2, 2]
    graph.replay()
    assert made.tolist() == [1.0, 2.0, 3.0]


def test_a_stream_captures_between_begin_and_end_and_graphs_share_a_pool() -> None:
    stream, pool = torch.npu.Stream(), torch.npu.graph_pool_handle()
    x = torch.ones(2).npu()

    def launched() -> tuple[bool, torch.Tensor]:
        return ASCEND.captures(), x + 1

    graphs = [captured(launched, stream=stream, pool=pool) for _ in range(2)]
    assert not ASCEND.captures()
    for graph, (captures, made) in graphs:
        graph.replay()
        assert captures
        assert made.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "read",
    [
        torch.Tensor.cpu,
        torch.Tensor.tolist,
        lambda x: x[0].item(),
        torch.nonzero,
        lambda x: x[x > 0],
        torch.unique,
        lambda x: x.repeat_interleave(x.long()),
    ],
)
def test_the_host_cannot_wait_while_a_graph_is_captured_and_is_counted_elsewhere(
    read: Callable[[torch.Tensor], Any],
) -> None:
    x = torch.ones(2).npu()
    emulated_npu.reset_waits()
    read(x)
    assert sum(emulated_npu.waits().values()) == 1
    with pytest.raises(RuntimeError, match="while a graph is captured: the host waits for it"):
        captured(lambda: read(x))


@pytest.mark.parametrize(
    "launch",
    [
        lambda x: x * 2,
        lambda x: x.to(torch.float16),
        lambda x: x[torch.zeros_like(x).long()],
        lambda x: x.repeat_interleave(2),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: x.add_(torch.ones(2).npu()),
    ],
)
def test_a_launch_makes_nobody_wait(launch: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(2).npu()
    emulated_npu.reset_waits()
    launch(x)
    assert emulated_npu.waits() == {}


def test_a_collective_in_a_graph_is_refused_because_nobody_records_it(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("hccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x = torch.ones(2).npu()
        dist.all_reduce(x)
        with pytest.raises(RuntimeError, match="refuses a collective while a graph is captured"):
            captured(lambda: dist.all_reduce(x))
    finally:
        dist.destroy_process_group()


def test_an_operator_that_fails_while_it_is_captured_leaves_the_graph_to_nobody_else() -> None:
    """A fallback would be in the graph for ever, unseen."""

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of luck")

    manager = OpManager()
    manager.ensure_initialized()
    failing = OpImpl("silu_and_mul", "vendor.failing", BackendImplKind.VENDOR, fail, "failing", 999)
    manager.registry.register_impl(failing)
    x = torch.ones(2, 8).npu()
    with policy_context(SelectionPolicy(prefer="vendor")):
        with pytest.raises(RuntimeError, match="out of luck"):
            captured(lambda: manager.call("silu_and_mul", x))
        assert manager.call("silu_and_mul", x).shape == (2, 4)


def test_what_a_graph_calls_and_fails_with_at_a_replay_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    table, ids = torch.zeros(4, 2).npu(), torch.tensor([0]).npu()
    graph, _ = captured(lambda: table.index_select(0, ids))
    ids.fill_(7)
    with pytest.raises(RuntimeError, match="a graph failed"):
        graph.replay()
    assert "index out of range" in capfd.readouterr().err


def test_a_capture_that_cannot_be_undone_is_an_error() -> None:
    """Always the same: an exception leaves the runtime no number of its own."""
    x = torch.ones(4).npu()

    def launched() -> None:
        x.add_(1)
        x.untyped_storage().resize_(0)

    with pytest.raises(RuntimeError, match="error code is 500000(.|\\n)*a graph failed"):
        captured(launched)


def test_what_vllm_keeps_of_a_graphs_results_is_the_chips_own_tensor_and_does_not_keep_their_memory() -> None:
    """``get_npu_format`` refuses a storage that is not ``torch_npu``'s, behind whose end its operators would write."""
    kept, part = torch.zeros(3).npu(), torch.arange(24.0).npu().view(4, 6)[1:, ::2]
    unowned = unowned_views(ASCEND)
    view = unowned(part)
    assert torch_npu.get_npu_format(view) == torch_npu.get_npu_format(part)
    assert (view.stride(), view.storage_offset()) == (part.stride(), part.storage_offset())
    assert view.tolist() == part.tolist()
    part.fill_(7)
    assert view.tolist() == [[7.0] * 3] * 3
    assert [unowned(other) for other in (None, 4)] == [None, 4]
    assert all(unowned(other) is other for other in (torch.ones(2), kept[:0]))
    allocated = torch.npu.memory_allocated()
    del part
    assert torch.npu.memory_allocated() < allocated


def test_graphs_with_breaks_keep_arguments_by_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's module of such graphs has the function under a name of its own, and the compiled one is not there."""
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.utils import torch_utils
    from vllm.v1.worker import gpu_worker

    from vllm.compilation import breakable_cudagraph

    for owner, name in (
        (importlib.import_module(library.BUFFERS), "get_accelerator_view_from_cpu_tensor"),
        (torch_utils, "weak_ref_tensor"),
        (breakable_cudagraph, "weak_ref_tensor"),
        (gpu_worker, "kernel_warmup"),
        (GroupCoordinator, "graph_capture"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    library.do_without_library(lambda capture: capture)
    x = torch.arange(3.0).npu()
    kept = breakable_cudagraph._weak_ref_capture_arg(x)
    x.fill_(7)
    assert kept.tolist() == [7.0] * 3
