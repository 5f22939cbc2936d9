"""Attention of encoders over our operator equals vLLM's own, and stays vLLM's where it is another function."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import custom_op
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention

from fl_dispatch.settings import get_settings
from vllm_fl.layers import classes
from vllm_fl.platform import startup

HEADS, HEAD_SIZE = 4, 16


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our classes registered with vLLM, inside a configuration of vLLM."""
    startup.activate()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else our platform sets it for this process
    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    config = VllmConfig()
    classes.register(get_settings())
    with set_current_vllm_config(config):
        yield


def compare(layer: Any, tokens: int, keys: int, batch: int, flat: bool, cuts: list[int] | None) -> int:
    """Compare with vLLM's forward; returns how often our operator was called."""
    torch.manual_seed(0)
    sizes = ((tokens, layer.num_heads), (keys, layer.num_kv_heads), (keys, layer.num_kv_heads))
    inputs = [torch.randn(batch, length, heads, HEAD_SIZE) for length, heads in sizes]
    if flat:
        inputs = [each.flatten(2) for each in inputs]
    starts = None if cuts is None else torch.tensor(cuts, dtype=torch.int32)
    calls, ours = [], layer.fl_call
    layer.fl_call = lambda *args, **hints: calls.append(1) or ours(*args, **hints)
    torch.testing.assert_close(layer(*inputs, starts), layer.forward_native(*inputs, starts), rtol=1e-5, atol=1e-6)
    return len(calls)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize(
    ("batch", "cuts"),
    [(1, None), (3, None), (1, [0, 7]), (1, [0, 2, 3, 7]), (1, [0, 4, 7, 7])],
    ids=["a picture", "a batch", "one sequence", "windows", "an empty window"],
)
def test_it_attends_as_vllm_does(batch: int, cuts: list[int] | None, kv_heads: int, flat: bool) -> None:
    layer: Any = MMEncoderAttention(HEADS, HEAD_SIZE, scale=0.3, num_kv_heads=kv_heads)
    assert layer.fl_runs()
    assert compare(layer, 7, 7, batch, flat, cuts) == 1


@pytest.mark.parametrize(
    ("keys", "batch", "cuts"), [(3, 1, None), (7, 2, [0, 3, 7])], ids=["other keys", "a batch cut"]
)
def test_what_the_operator_does_not_say_stays_vllms(keys: int, batch: int, cuts: list[int] | None) -> None:
    assert compare(MMEncoderAttention(HEADS, HEAD_SIZE), 7, keys, batch, False, cuts) == 0


def test_on_accelerators_it_stays_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes, "detect_device", lambda: SimpleNamespace(accelerator=True))
    classes.register(get_settings())
    layer = MMEncoderAttention(HEADS, HEAD_SIZE)
    assert type(layer) is MMEncoderAttention
    found = classes.survey(torch.nn.ModuleList([layer]))
    assert (found.ours, found.native) == ({}, {})
    found.refuse_native_run(get_settings())
