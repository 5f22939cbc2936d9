"""Weights of MXFP4 become fp8 in blocks with no number changed, or are refused by name and number of elements."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fl_dispatch.devices import CPU
from fl_dispatch.hosting.quantized import reencoding, schemes
from fl_dispatch.hosting.quantized.reencoding import in_blocks
from fl_dispatch.hosting.quantized.schemes import MXFP4_FORM, Numbers, Scheme
from fl_dispatch.hosting.quantized.stored_experts import Float4Experts, Parameters, Sizes
from fl_dispatch.ops.quantization import FP4, unpacked, weight_only_linear

GROUP = 32


def stored(*shape: int, exponents: tuple[int, int] = (118, 124)) -> tuple[Tensor, Tensor]:
    """Random bytes of e2m1 for weights of a shape, and exponents as a checkpoint has them."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=generator).to(torch.uint8)
    drawn = torch.randint(*exponents, (*shape[:-1], shape[-1] // GROUP), generator=generator)
    return codes, drawn.to(torch.uint8)


def scales(exponents: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (exponents.double() - 127).exp2().to(dtype)


def numbers(weight: Tensor, scale: Tensor) -> Tensor:
    """Those that a weight and its scales stand for."""
    wide = unpacked(weight).double()
    return (wide.view(*scale.shape, -1) * scale.double()[..., None]).view(wide.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(256, 256), (130, 192), (40, 96), (3, 130, 64)], ids=str)
def test_every_number_stays_and_a_block_has_one_scale(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codes, exponents = stored(*shape)
    weight, scale = codes.view(FP4), scales(exponents, dtype)
    found, units = in_blocks("w", weight, scale)
    assert (found.dtype, units.dtype, found.shape) == (torch.float8_e4m3fn, dtype, shape)
    assert torch.equal(numbers(found, units), numbers(weight, scale))
    inner = shape[-1] // units.shape[-1]
    for down in units.split(128, -2):
        for across in down.split(128 // inner, -1):
            assert bool((across == across[..., :1, :1]).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_equal_bit_for_bit(dtype: torch.dtype) -> None:
    codes, exponents = stored(256, 256)
    weight, scale = codes.view(FP4), scales(exponents, dtype)
    x = torch.randn((5, 256), generator=torch.Generator().manual_seed(1)).to(dtype)
    right = weight_only_linear.reference(x, weight, scale)
    assert torch.equal(weight_only_linear.reference(x, *in_blocks("w", weight, scale)), right)


def test_a_block_may_span_fifteen_powers_of_two_and_no_more() -> None:
    codes, exponents = stored(128, 128, exponents=(120, 121))
    codes[0] = 0x11  # halves, the least magnitude
    for least in (-14, -15):
        exponents[0] = 120 + least
        weight, scale = codes.view(FP4), scales(exponents)
        if least == -14:
            assert torch.equal(numbers(*in_blocks("w", weight, scale)), numbers(weight, scale))
        else:
            with pytest.raises(ValueError) as refused:
                in_blocks("model.layers.0.mlp.down_proj.weight_packed", weight, scale)
            assert str(refused.value) == (
                "VLLM_FL_MXFP4_AS_FP8: 128 of 16384 elements of 'model.layers.0.mlp.down_proj.weight_packed' are no "
                "numbers of fp8 with a scale for each block of 128 x 128; unset it"
            )


def test_groups_of_zeros_may_have_any_exponent() -> None:
    codes, exponents = stored(128, 128)
    codes[3], exponents[3] = 0, 1
    weight, scale = codes.view(FP4), scales(exponents)
    assert torch.equal(numbers(*in_blocks("w", weight, scale)), numbers(weight, scale))


def loaded(monkeypatch: pytest.MonkeyPatch, asked: bool, lowest: int = 118) -> tuple[Float4Experts, nn.Module]:
    """Experts of a checkpoint; ``asked``: whether the user wants fp8."""
    monkeypatch.setattr(reencoding, "get_settings", lambda: SimpleNamespace(mxfp4_as_fp8=asked))
    kernel = Float4Experts(Scheme("compressed-tensors", Numbers(4, "float", schemes.GROUP, GROUP), form=MXFP4_FORM))
    kernel.fl_bind("model.layers.0.mlp.experts")
    layer = nn.Module()
    assert not kernel.create_weights(Parameters(layer, {}), Sizes(2, 128, 64, 2, 1, torch.float32))
    for name, shape in (("w13", (2, 128, 128)), ("w2", (2, 128, 64))):
        codes, exponents = stored(*shape)
        exponents[1, 5, 0] = lowest
        getattr(layer, f"{name}_weight_packed").data.copy_(codes)
        getattr(layer, f"{name}_weight_scale").data.copy_(exponents)
    kernel.process_weights_after_loading(layer)
    return kernel, layer


def test_experts_compute_the_same_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn((7, 128), generator=torch.Generator().manual_seed(1))
    routing = torch.ones(7, 1), (torch.arange(7) % 2)[:, None].int(), "silu", False, None, None
    plain, encoded = (loaded(monkeypatch, asked) for asked in (False, True))
    assert plain[1].w2_weight_packed.dtype is FP4
    assert encoded[1].w2_weight_packed.dtype is torch.float8_e4m3fn
    results = [kernel.apply_experts(layer, x, *routing) for kernel, layer in (plain, encoded)]
    assert torch.equal(*results)


def test_experts_that_would_change_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"of 32768 elements of 'model.layers.0.mlp.experts.w13_weight_packed' are no"):
        loaded(monkeypatch, True, lowest=90)


def test_a_chip_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reencoding, "detect_device", lambda: replace(CPU, float8=False))
    with pytest.raises(ValueError, match="VLLM_FL_MXFP4_AS_FP8: cpu has no float8_e4m3fn; unset it"):
        loaded(monkeypatch, True)
