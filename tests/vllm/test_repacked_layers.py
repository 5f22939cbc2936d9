"""vLLM's own linear layer and head with repacked weights: what a loader or a trainer writes is what is multiplied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.layers import vocab_parallel_embedding as vllm_embedding

from fl_dispatch import call_op, get_default_manager
from vllm_fl import layers, linear
from vllm_fl.moe import ExpertsLayer


def replaced(name: str) -> type:
    (row,) = (row for row in layers.LAYER_CLASSES if row.name == name)
    base = row.in_tree()
    assert base is not None
    return layers._replacement(row, base)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A single rank, without its process group."""
    for module in (parameter, vllm_linear, vllm_embedding):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)
    with set_current_vllm_config(VllmConfig()):
        yield


def product(layer: Any, x: Tensor) -> Tensor:
    found: Tensor = layer.quant_method.apply(layer, x)
    return found


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["ReplicatedLinear", "ParallelLMHead"])
def test_a_layer_of_vllms_multiplies_with_what_was_loaded_last(name: str) -> None:
    chosen = get_default_manager().explain("linear").chosen
    assert chosen is not None
    assert chosen.vendor == "cpu"
    options = {"bias": False, "params_dtype": torch.float32}
    layer: Any = replaced(name)(64, 128, **options)
    assert layer.fl_runs()
    model, x = torch.nn.ModuleList([layer]), torch.randn(3, layer.weight.shape[1])
    weights = linear.Weights(model, compiled=False)
    compiled = torch.compile(lambda x: product(layer, x), fullgraph=True, backend="eager")
    for _ in range(3):
        loaded = torch.randn_like(layer.weight)
        layer.weight.weight_loader(layer.weight, loaded)
        weights.follow()
        wanted = call_op("linear", x, loaded, None)
        with torch.inference_mode():
            torch.testing.assert_close(product(layer, x), wanted)
            assert layer.weight.fl_prepared.made[chosen.impl_id] is not None
            torch.testing.assert_close(compiled(x), wanted)


def test_the_weights_of_experts_stay_too() -> None:
    layer: Any = torch.nn.Module()
    layer.quant_method = object.__new__(ExpertsLayer)
    for name in ExpertsLayer.fl_weights:
        layer.register_parameter(name, torch.nn.Parameter(torch.ones(2, 4, 4)))
    declared = linear.Weights(torch.nn.ModuleList([layer]), compiled=False).declared
    assert [name for _, name, _ in declared] == ["w13_weight", "w2_weight"]
