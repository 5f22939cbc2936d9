"""vLLM's own linear layer and head with repacked weights: what a loader or a trainer writes is what is multiplied.

So it is in a compiled engine, too, which repacks a weight once for each time that it is written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import MAX_TOKENS, PROMPTS, expected_tokens, start_features
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.layers import vocab_parallel_embedding as vllm_embedding
from vllm.v1.worker.gpu_worker import Worker

import variants
from fl_dispatch import SelectionPolicy, call_op, get_default_manager, policy_context, weight_forms
from fl_dispatch.cli.checkpoints import build_checkpoint
from vllm_fl.layers import classes, linear
from vllm_fl.layers.mixture import ExpertsLayer
from vllm_fl.worker import base as worker


def replaced(name: str) -> type:
    (row,) = (row for row in classes.LAYER_CLASSES if row.name == name)
    base = row.in_tree()
    assert base is not None
    return classes._replacement(row, base)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A single rank, without its process group."""
    for module in (parameter, vllm_linear, vllm_embedding):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)
    with set_current_vllm_config(VllmConfig()):
        yield


PACKED = "impl:vendor.cpu.onednn"
"""A product with a packed weight, which float32 has not where plain weights are as fast."""


@pytest.fixture
def packed() -> Iterator[None]:
    with policy_context(SelectionPolicy.from_dict(per_op_order={"linear": [PACKED]})):
        yield


def product(layer: Any, x: Tensor) -> Tensor:
    found: Tensor = layer.quant_method.apply(layer, x)
    return found


@pytest.mark.usefixtures("alone", "packed")
@pytest.mark.parametrize("name", ["ReplicatedLinear", "ParallelLMHead"])
def test_a_layer_of_vllms_multiplies_with_what_was_loaded_last(name: str) -> None:
    chosen = get_default_manager().explain("linear").chosen
    assert chosen is not None
    assert chosen.vendor == "cpu"
    options = {"bias": False, "params_dtype": torch.float32}
    layer: Any = replaced(name)(512, 512, **options)  # PyTorch's product repacks no small weight in float32
    assert layer.fl_runs()
    model, x = torch.nn.ModuleList([layer]), torch.randn(3, layer.weight.shape[1])
    weights = linear.Weights(model, compiled=False)
    compiled = torch.compile(lambda x: product(layer, x), fullgraph=True, backend="eager")
    for _ in range(3):
        loaded = torch.randn_like(layer.weight)
        layer.weight.weight_loader(layer.weight, loaded)
        wanted = call_op("linear", x, loaded, None)
        with weights.settled(), torch.inference_mode():
            torch.testing.assert_close(product(layer, x), wanted, rtol=1e-4, atol=1e-4)
            assert layer.weight.fl_prepared.made[chosen.impl_id] is not None
            torch.testing.assert_close(compiled(x), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["update_weights", "finish_weight_update", "reload_weights"])
def test_new_weights_are_used_also_where_a_transfer_writes_to_an_address(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 8), requires_grad=False)
    weight_forms.declare(weight)
    address = weight.data_ptr()

    def write(self: Any, *arguments: Any) -> None:
        (ctypes.c_float * weight.numel()).from_address(address)[:] = [3.0] * weight.numel()

    def form() -> Tensor | None:
        return weight_forms.of(weight, "a", lambda weight, before: weight.clone())

    form()
    monkeypatch.setattr(Worker, method, write)
    ours: Any = object.__new__(worker.WorkerFL)
    getattr(ours, method)(*([{}] if method == "update_weights" else []))
    found = form()
    assert found is not None
    assert found.eq(3.0).all()


def test_the_weights_of_experts_stay_too() -> None:
    layer: Any = torch.nn.Module()
    layer.quant_method = object.__new__(ExpertsLayer)
    for name in ExpertsLayer.fl_weights:
        layer.register_parameter(name, torch.nn.Parameter(torch.ones(2, 4, 4)))
    declared = linear.Weights(torch.nn.ModuleList([layer]), compiled=False).declared
    assert [name for _, name, _ in declared] == ["w13_weight", "w2_weight"]


@pytest.mark.parametrize(
    ("method", "drafts"), [("execute_model", None), ("execute_dummy_batch", None), ("sample_tokens", "by a model")]
)
def test_whatever_runs_the_model_is_a_step(method: str, drafts: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code takes the mark of a weight away there, which is no reason to prepare it anew."""
    layer: Any = object.__new__(type("Layer", (linear.LinearLayer, torch.nn.Module), {}))
    torch.nn.Module.__init__(layer)
    layer.weight = torch.nn.Parameter(torch.ones(4, 8), requires_grad=False)
    layer.quant_method = SimpleNamespace(apply=linear.apply)
    ours: Any = object.__new__(worker.WorkerFL)
    ours.fl_weights = linear.Weights(torch.nn.ModuleList([layer]), compiled=True)
    ours.vllm_config, ours.fl_several_steps = SimpleNamespace(speculative_config=drafts), False
    ours.fl_watched_steps = SimpleNamespace(begin=bool, step=nullcontext, attach_report=bool)
    made: list[Tensor] = []

    def run(self: Any, *arguments: Any) -> None:
        layer.weight.data_ptr()
        weight_forms.of(layer.weight, "a", lambda weight, before: made.append(weight.clone()))

    monkeypatch.setattr(Worker, method, run)
    weight_forms.of(layer.weight, "a", lambda weight, before: made.append(weight.clone()))
    arguments = () if method == "execute_dummy_batch" else (SimpleNamespace(total_num_scheduled_tokens=1),)
    for _ in range(3):
        getattr(ours, method)(*arguments)
    assert len(made) == 1
    layer.weight.data.mul_(3.0)
    getattr(ours, method)(*arguments)
    assert [float(form.sum()) for form in made] == [32.0, 96.0]


def test_a_compiled_engine_repacks_what_was_written_and_nothing_else(tmp_path: Path) -> None:
    """Its embedding shares the head's weight, so code of Inductor's reads one that is repacked."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 16, "head_dim": 32}
    model = build_checkpoint("llama", tmp_path / "tied", tie_word_embeddings=True, num_hidden_layers=2, **sizes)
    other = variants.other_weights(model, tmp_path / "other", seed=13)
    ask = {"do": "generate", "prompts": PROMPTS, "sampling": {"max_tokens": MAX_TOKENS}}
    load = {"do": "rpc", "method": "trainer_load", "args": [str(other)]}
    forms = {"do": "forms"}
    steps = [forms, ask, forms, load, {"do": "reset_prefix_cache"}, ask, forms]
    arguments = {"enforce_eager": False, "worker_extension_cls": "worker_extension.TrainerExtension"}
    (run,) = start_features((model, steps, arguments), VLLM_FL_PER_OP=f"linear={PACKED}").result()["runs"]
    started, first, served, *_, second, written = run["steps"]
    assert run["report"]["compiled"]["backend"] == "inductor"
    assert started["made"] == started["kept"] > 0
    assert served == started
    assert written == {**started, "made": 2 * started["made"]}
    for answers, folder in ((first, model), (second, other)):
        assert [answer["tokens"][0] for answer in answers] == expected_tokens(folder)
