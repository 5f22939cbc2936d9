"""The order of quantized products: a start records it, in one eager step of one token, before kernels are compiled."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import start_features
from vllm.v1.worker.gpu_worker import Worker

import quantized_checkpoints as checkpoints
from fl_dispatch import successors
from fl_dispatch.cli.checkpoints import build_checkpoint
from vllm_fl.compilation import compile
from vllm_fl.platform import config
from vllm_fl.worker import gpu, prompt_graphs, warm_up

EXTENSION = {"worker_extension_cls": "worker_extension.TrainerExtension", "enforce_eager": True}
NOTING = {"VLLM_FL_PLUGIN_MODULES": "noting_plugin", "VLLM_FL_PER_OP": "scaled_linear=vendor:noting"}
PRODUCTS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_order_is_that_of_the_products_in_a_forward(family: str, tmp_path: Path) -> None:
    scheme = checkpoints.SCHEMES["compressed-tensors W8A8 int8"]
    whole = build_checkpoint(family, tmp_path / "whole")
    model = checkpoints.write_checkpoint(tmp_path / "quantized", scheme, model=whole)
    steps = [{"do": "rpc", "method": "record_step", "args": []}]
    (run,) = start_features((model, steps, EXTENSION), **NOTING).result()["runs"]
    ((order,),) = run["steps"]
    layers = len(order) // 4
    assert layers > 1
    assert order == [f"model.layers.{layer}.{name}.weight" for layer in range(layers) for name in PRODUCTS]


@pytest.mark.parametrize("model", ["quantized", "not quantized", "experts"])
def test_a_gpus_start_records_a_step_and_then_meets_the_kernels_that_ask(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No product asks without a quantized weight, nor with experts: they read so much that nothing would be left."""
    first, second = torch.zeros(4), torch.zeros(4)
    batches: list[tuple[int, bool]] = []
    lines: list[str] = []
    asked: list[tuple[Any, ...]] = []

    def run(tokens: int) -> None:
        after = [successors.after(weight) for weight in (first, second) if model != "not quantized"]
        batches.append((tokens, any(found is second for found in after)))

    worker: Any = object.__new__(gpu.GPUWorkerFL)
    worker.fl_weights = SimpleNamespace(settled=nullcontext)
    worker.vllm_config, worker.compilation_config = None, SimpleNamespace(cudagraph_mode=gpu.CUDAGraphMode.NONE)
    specs = [SimpleNamespace(max_memory_usage_bytes=lambda config: 2)] * 2
    worker.model_runner = SimpleNamespace(
        get_kv_cache_spec=lambda: dict(enumerate(specs)), _dummy_run=lambda tokens, randomize_inputs=False: None
    )
    models = object()
    for name, answer in (("fl_models", models), ("_compare_ranks", None)):
        monkeypatch.setattr(worker, name, lambda answer=answer: answer)
    monkeypatch.setattr(worker, "_run_batch_without_cache", run)
    monkeypatch.setattr(compile, "uncompiled", lambda model: nullcontext())
    monkeypatch.setattr(compile, "is_compiled", lambda config: False)
    monkeypatch.setattr(config, "has_experts", lambda vllm_config: model == "experts")
    monkeypatch.setattr(gpu.logger, "info", lambda text, *values: lines.append(text % values))
    monkeypatch.setattr(warm_up, "token_counts", lambda vllm_config: [1, 2, 4])
    worker.available_kv_cache_memory_bytes = 7
    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: 7, raising=False)
    monkeypatch.setattr(prompt_graphs, "add", lambda *given: asked.append(given) or 2)  # bytes that they take
    with successors.recorded():
        pass  # forgets what other tests have recorded
    assert worker.determine_available_memory() == worker.available_kv_cache_memory_bytes == 5
    assert asked == [(None, models, worker._run_drawn_batch, 7, 4)]
    if model == "quantized":
        assert batches == [(1, False), (2, True), (4, True), (1, True)]
        assert lines == ["1 products know the weight that the next one reads"]
    else:
        assert batches == [(1, False), (2, False), (4, False)]
        assert lines == []
