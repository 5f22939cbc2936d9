"""A quantized layer that the operators cannot compute is refused by what the checkpoint says; so is one not loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from single_layers import PREFIX, layer_of, linear, made

from quantized_checkpoints import CACHE_SCHEME, SCHEMES
from single_quantized import GPTQ4, Layers, QuantizedLayers, filled


class TestLayers(QuantizedLayers):
    REFUSAL = "quantization '{method}' ({works})"

    def refusal(self, method: str) -> str:
        from sglang.srt.layers.quantization import QUANTIZATION_METHODS

        from fl_dispatch.devices import CPU
        from sglang_fl import quantization
        from sglang_fl.platform import refusals

        quantization.announce()
        assert method in QUANTIZATION_METHODS  # else SGLang says that it does not know it
        of_model = SimpleNamespace(quantization_config={}, architectures=["LlamaForCausalLM"])
        model = SimpleNamespace(quantization=method, hf_config=of_model)
        asked = SimpleNamespace(model_config=model, use_mla_backend=False)
        return next(sentence for refused, sentence in refusals._quantized(asked, CPU) if refused)  # type: ignore[arg-type]


def test_a_cache_in_fp8_that_a_checkpoint_asks_for_has_its_scales(
    scheduler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    from fl_dispatch.devices import ASCEND
    from sglang_fl.quantization import configs
    from sglang_fl.quantization.cache import CacheScales

    plain, attention = dict(SCHEMES["compressed-tensors W8A8 fp8"].config), layer_of(RadixAttention)
    assert made(plain).get_quant_method(attention, "attn") is None
    asking = made({**plain, "kv_cache_scheme": CACHE_SCHEME})
    assert isinstance(asking.get_quant_method(attention, "attn"), CacheScales)
    assert made({**plain, "kv_cache_scheme": {**CACHE_SCHEME, "num_bits": 4}}).get_quant_method(attention, "") is None
    monkeypatch.setattr(configs, "detect_device", lambda: ASCEND)
    with pytest.raises(ValueError, match="the KV cache in fp8 that the checkpoint asks for on ascend"):
        asking.get_quant_method(attention, "attn")


@pytest.mark.parametrize("scheme", [name for name, kind in SCHEMES.items() if kind.layer.startswith(("Fp8", "Mxfp8"))])
def test_fp8_is_refused_on_a_chip_without_it(scheduler: None, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fl_dispatch.devices import ASCEND
    from fl_dispatch.hosting.quantized import layers

    monkeypatch.setattr(layers, "detect_device", lambda: ASCEND)
    with pytest.raises(ValueError, match=rf"the weights of {PREFIX} \(ascend has no float8_e4m3fn\) yet"):
        made(dict(SCHEMES[scheme].config)).get_quant_method(linear(), PREFIX)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_without_its_scales_is_not_computed(layers: Layers, scheme: str) -> None:
    layer, method = filled(layers, SCHEMES[scheme].config)
    with pytest.raises(ValueError, match=rf"the checkpoint has no '\w*scale\w*' .* \({PREFIX}\)"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("scheme", "sizes", "said"),
    [
        ("gptq", (40, [64]), "no whole words of 4 bits, or no whole groups of 32"),
        ("awq", (64, [60]), "no whole words of 4 bits"),
        ("fp8, blocks of 128", (192, [256]), "no whole blocks of 128"),
    ],
)
def test_ranks_that_divide_no_whole_groups_are_refused(
    scheduler: None, scheme: str, sizes: tuple[int, list[int]], said: str
) -> None:
    layer, (inner, parts) = linear(), sizes
    method = made(dict(SCHEMES[scheme].config)).get_quant_method(layer, PREFIX)
    with pytest.raises(ValueError, match=said):
        method.create_weights(layer, inner, parts, 2 * inner, sum(parts), torch.float32, weight_loader=print)


@pytest.mark.parametrize("order", [torch.arange(128) // 32, (torch.arange(128) // 32).flip(0)], ids=["in", "out of"])
def test_columns_of_gptq_out_of_order_are_refused_when_they_are_loaded(scheduler: None, order: torch.Tensor) -> None:
    layer, taken = linear(), []
    method = made(GPTQ4).get_quant_method(layer, PREFIX)
    method.create_weights(layer, 128, [64], 128, 64, torch.float32, weight_loader=lambda *given: taken.append(given))
    load = layer.g_idx.weight_loader
    if order[0] == 0:
        load(layer.g_idx, order.int())
        assert len(taken) == 1
        return
    with pytest.raises(ValueError, match=rf"^'g_idx' of {PREFIX} puts columns out of order, .* 'desc_act' is false"):
        load(layer.g_idx, order.int())
