"""Merged layers: each part has the blocks and the scale of inputs of its own, and ranks cut no block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_dispatch.hosting.quantized import blocks, orders
from fl_dispatch.hosting.quantized.layers import Fp8BlockLayer, Fp8Layer

BLOCK = 32
FP8 = torch.float8_e4m3fn


def spread(scale: Tensor, rows: int, inner: int) -> Tensor:
    """A scale for each number of a weight."""
    return scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :inner]


def layer_of(weight: Tensor, scale: Tensor, parts: list[int]) -> Any:
    layer = nn.Module()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
    layer.logical_widths = parts
    return layer


def kernel() -> Fp8BlockLayer:
    made = Fp8BlockLayer()
    made.fl_block = BLOCK
    return made


@pytest.mark.parametrize("parts", [[48, 16, 16], [40, 40], [64, 20], [7, 32, 1]], ids=str)
@pytest.mark.parametrize("inner", [64, 56])
def test_each_part_of_a_merged_layer_has_the_blocks_that_its_checkpoint_has(parts: list[int], inner: int) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(rows, inner).to(FP8) for rows in parts]
    scales = [torch.rand(-(-rows // BLOCK), -(-inner // BLOCK)) + 0.5 for rows in parts]
    of_rows = torch.cat([scale.repeat_interleave(BLOCK, 0)[:rows] for scale, rows in zip(scales, parts, strict=True)])
    layer, used = layer_of(torch.cat(weights), of_rows, parts), kernel()
    used.process_weights_after_loading(layer)
    x, bias = torch.randn(3, inner), torch.randn(sum(parts))
    whole = torch.cat([w.float() * spread(s, *w.shape) for w, s in zip(weights, scales, strict=True)])
    rows, scale = used.fl_quantize(x, "float8_e4m3fn", BLOCK, None)
    right = (rows.float() * scale.repeat_interleave(BLOCK, -1)[:, :inner]) @ whole.t()
    torch.testing.assert_close(used.apply_weights(layer, x, bias), right + bias, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(used.apply_weights(layer, x), right, rtol=1e-5, atol=1e-5)


def test_a_layer_that_the_checkpoint_merged_keeps_the_blocks_of_the_whole() -> None:
    scale = torch.rand(3, 2) + 0.5  # of 80 rows, whichever layers they are of
    layer, used = layer_of(torch.randn(80, 64).to(FP8), scale.repeat_interleave(BLOCK, 0)[:80], [48, 32]), kernel()
    used.process_weights_after_loading(layer)
    assert torch.equal(layer.weight_scale, scale)
    assert layer.weight.shape == (80, 64)


def test_ranks_that_cut_a_block_are_refused_with_the_layers_columns() -> None:
    of_file = (torch.rand(3, 2) + 0.5).repeat_interleave(BLOCK, 0)  # 80 rows, of which a second rank has the last 40
    layer, used = layer_of(torch.randn(80, 64).to(FP8), torch.cat([of_file[40:80]] * 2), [40, 40]), kernel()
    used.fl_bind("model.layers.0.mlp.gate_up_proj")
    said = r"ranks cut blocks of 32 .*\[40, 40\] columns on a rank \(model.layers.0.mlp.gate_up_proj\); use fewer ranks"
    with pytest.raises(ValueError, match=said):
        used.process_weights_after_loading(layer)


def test_rows_that_ranks_cut_are_refused_before_anything_is_loaded() -> None:
    assert blocks.indivisible(192, 192, 128) == blocks.indivisible(256, 512, 128) == ""
    assert "192 elements on a rank" in blocks.indivisible(192, 384, 128)


def test_a_part_that_was_not_loaded_is_named() -> None:
    of_rows = torch.full((80, 2), orders.UNSET)
    of_rows[:48] = 1.0
    layer = layer_of(torch.zeros(80, 64).to(FP8), of_rows, [48, 32])
    with pytest.raises(ValueError, match="the checkpoint has no 'weight_scale'"):
        kernel().process_weights_after_loading(layer)


def test_a_hosts_loader_gets_a_scale_for_each_row() -> None:
    given: list[Tensor] = []
    load = blocks.loads_rows(lambda parameter, loaded, part: given.append(loaded), 2)
    load(SimpleNamespace(), torch.tensor([[1.0], [2.0]]), "q")
    assert given[0].flatten().tolist() == [1, 1, 2, 2]


def test_scales_of_inputs_that_were_powers_of_two_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(blocks.logger, "warning", warnings.append)
    blocks._warn_of_powers_of_two.cache_clear()
    for config in ({"scale_fmt": "ue8m0"}, {"weight_block_size": [128, 128]}):
        blocks.warn_of_powers_of_two(config)
    assert not warnings
    for _ in range(2):
        blocks.warn_of_powers_of_two({"scale_fmt": "ue8m0", "weight_block_size": [128, 128]})
    assert [warning[:22] for warning in warnings] == ["'scale_fmt': 'ue8m0' s"]


@pytest.mark.parametrize("bias", [False, True])
def test_merged_layers_have_each_the_scale_of_inputs_that_their_checkpoint_has(bias: bool) -> None:
    torch.manual_seed(0)
    parts, scales = [48, 16, 16], torch.tensor([0.01, 0.02, 0.05])
    weights, x = [torch.randn(rows, 64).to(FP8) for rows in parts], torch.randn(3, 64)
    added = torch.randn(80) if bias else None
    layer, used = layer_of(torch.cat(weights), torch.ones(1, 1), parts), Fp8Layer()
    layer.weight_scale, layer.input_scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0])), nn.Parameter(scales)
    used.process_weights_after_loading(layer)
    right = []
    for number, weight in enumerate(weights):
        rows, scale = used.fl_quantize(x, "float8_e4m3fn", -1, scales[number : number + 1])
        right.append((rows.float() * scale) @ weight.float().t() * (number + 1))
    expected = torch.cat(right, -1) + (0 if added is None else added)
    torch.testing.assert_close(used.apply_weights(layer, x, added), expected, rtol=1e-5, atol=1e-5)


def test_scales_of_inputs_that_are_equal_are_one() -> None:
    same, of_merged = torch.tensor([0.5, 0.5]), torch.tensor([0.5, orders.UNSET])
    assert [orders.scale_of_rows(scale, 2).tolist() for scale in (same, of_merged, same[:1])] == [[0.5]] * 3
    assert orders.scale_of_rows(torch.tensor([0.5, 0.25]), 2).tolist() == [0.5, 0.25]
