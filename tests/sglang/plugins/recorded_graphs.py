"""Graphs on a CPU, for SGLang's graphs of prompts: a piece is the list of its calls, replayed on the same tensors.

As on a GPU nothing of Python runs again, results come to the addresses that the next calls read, and a call that waits
for the device fails. Everything else is SGLang's own: its runner, its breaks, its buffers and its padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"}


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in WAITING:
            raise RuntimeError(f"{func._schema.name} is not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class RecordedGraph:
    """In the place of ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.recorder = _Recorder(self.calls)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        from sglang.srt.model_executor.runner import prefill_cuda_graph_runner

        prefill_cuda_graph_runner.is_cuda = lambda: True  # elsewhere DeepSeek's prompts with a prefix are eager
        self.recorder.__enter__()

    def capture_end(self) -> None:
        self.recorder.__exit__(None, None, None)

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def load() -> None:
    from fl_dispatch.devices import CUDA
    from sglang_fl.platform import config

    torch.cuda.CUDAGraph = RecordedGraph  # type: ignore[assignment, misc]
    torch.cpu.graph_pool_handle = lambda: (0, 0)  # type: ignore[attr-defined]
    adapt = config._adapt_graphs
    config._adapt_graphs = lambda args, device: adapt(args, CUDA)
