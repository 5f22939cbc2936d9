"""A KV cache in fp8 in SGLang's engines: what Hugging Face's network computes whose keys and values fp8 has rounded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import quantized_checkpoints
from fl_dispatch.cli.checkpoints import build_checkpoint
from host_engines import Engine, Host, Pass, Served
from quantized_cache import COMPRESSED, FP8, HOSTS_NAMES, ONES, PLAIN, Cache, QuantizedCaches, Run
from quantized_checkpoints import CACHE_SCALES
from quantized_network import computed, distance, network, scores, with_fp8_cache
from sampling import drawn

IN_FP8 = {"kv_cache_dtype": "fp8_e4m3"}
FLOAT32 = Run("float32", PLAIN, IN_FP8)
PAGES = Run("pages of 16", PLAIN, {**IN_FP8, "page_size": 16})
HALF = Run("bfloat16", PLAIN, {**IN_FP8, "dtype": "bfloat16"})
SCALED = Run("scales of a compressed-tensors checkpoint", COMPRESSED, {})
OWN_SCALES = Run("scales of an fp8 checkpoint", FP8, IN_FP8)
NAMED = Run("scales with SGLang's names", HOSTS_NAMES, {})
DRAWN = drawn((PAGES, HALF, SCALED, OWN_SCALES, NAMED), 1, "a cache in fp8, SGLang")


@pytest.mark.engine
class TestCaches(QuantizedCaches):
    ALONE = [FLOAT32]
    SINGLE = [FLOAT32, *(run for run in DRAWN if run is not HALF)]
    HALVES = [run for run in DRAWN if run is HALF]


# -- models that SGLang makes without the configuration of their attention ---------------------------------------------

FAMILIES: Mapping[str, Cache] = {"qwen3": FP8, "qwen3_moe": COMPRESSED}


def _model(family: str, folder: Path) -> Path:
    """Write a model without quantization that has a layer for each pair of scales."""
    layers = len(CACHE_SCALES)
    # whole groups of a weight; all experts, because rounding changes close choices
    experts = {"moe_intermediate_size": 64, "num_experts_per_tok": 8} if family == "qwen3_moe" else {}
    kinds = ["full_attention"] * layers
    return build_checkpoint(family, folder, num_hidden_layers=layers, layer_types=kinds, **experts)


@pytest.mark.engine
class TestModelsWithoutConfiguration:
    @pytest.fixture(scope="class")
    def models(self, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
        folder = tmp_path_factory.mktemp("models")
        return {family: _model(family, folder / family) for family in FAMILIES}

    @pytest.fixture(scope="class")
    def served(self, host: Host, models: Mapping[str, Path]) -> Mapping[str, Served]:
        engines = []
        for family, of in FAMILIES.items():
            folder = models[family].with_name(f"{family}-quantized")
            assert of.scheme is not None
            made = quantized_checkpoints.write_checkpoint(folder, of.scheme, of.owner, models[family])
            engines.append(Engine(made, [Pass(scores=True)], IN_FP8))
        found = dict(zip(FAMILIES, host.serve(*engines), strict=True))
        return {family: each.result() for family, each in found.items()}

    @pytest.mark.parametrize("family", FAMILIES)
    def test_their_layers_have_the_checkpoints_scales(
        self, family: str, models: Mapping[str, Path], served: Mapping[str, Served]
    ) -> None:
        def right(scales: Any) -> Any:
            return with_fp8_cache(network(FAMILIES[family].scheme, model=models[family]), scales)

        texts, got = served[family].answers[0].scored()
        there = computed(right(CACHE_SCALES), texts)
        assert distance(got, there.scores) <= there.rounding
        for scales in (ONES, [(value, key) for key, value in CACHE_SCALES]):
            assert distance(got, scores(right(scales), texts)) > there.rounding


# -- without an engine ------------------------------------------------------------------------------------------------


def test_scales_that_a_checkpoint_announces_must_be_loaded(scheduler: None) -> None:
    from sglang_fl.quantization.cache import CacheScales

    def scales(announced: bool, key: float, value: float) -> tuple[float, float]:
        layer = torch.nn.Module()
        method = CacheScales(None, announced, "attn")
        with torch.inference_mode():
            method.create_weights(layer)
            layer.k_scale.fill_(key)
            layer.v_scale.fill_(value)
            method.process_weights_after_loading(layer)
        return layer.k_scale_float, layer.v_scale_float

    assert scales(True, 0.5, 0.25) == scales(False, 0.5, 0.25) == (0.5, 0.25)
    assert scales(False, -1.0, -1.0) == (1.0, 1.0)
    for key, value, name in ((-1.0, 0.5, "k_scale"), (0.5, -1.0, "v_scale")):
        with pytest.raises(ValueError, match=rf"the checkpoint announces '{name}', which was not loaded \(attn\)"):
            scales(True, key, value)


@pytest.mark.parametrize(
    "name",
    ["k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale", "attn.k_scale"],
)
def test_each_name_of_a_scale_is_that_of_sglangs_parameter(scheduler: None, name: str) -> None:
    from sglang.srt.model_loader.weight_utils import maybe_remap_kv_scale_name

    from sglang_fl.quantization.cache import keep_own_name

    own = "model.layers.0.self_attn.attn.k_scale"
    found = keep_own_name(maybe_remap_kv_scale_name, f"model.layers.0.self_attn.{name}", {own: None})
    assert found == own


class _Model(torch.nn.Module):
    """Attention layers by their names, made without a configuration, and one layer that has it."""

    def __init__(self, *names: str) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention

        super().__init__()
        for name in names:
            *above, last = name.split(".")
            module: torch.nn.Module = self
            for part in above:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.add_module(last, RadixAttention(2, 8, 1.0, num_kv_heads=2, layer_id=0))
        self.add_module("product", torch.nn.Module())
        self.product.quant_config = self

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        from sglang_fl.quantization.cache import CacheScales

        return CacheScales(None, True, prefix)


@pytest.mark.parametrize(
    "names",
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    ],
)
def test_attention_without_the_configuration_gets_the_checkpoints_scales(
    scheduler: None, names: tuple[str, str]
) -> None:
    from sglang_fl.quantization.cache import add_scales, without_scales

    model = _Model("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
    others = ["mtp.layers.0.self_attn.k_scale", "model.layers.7.self_attn.k_scale", "model.layers.0.mlp.weight_scale"]
    scales = {f"model.layers.0.{name}": torch.tensor([scale]) for name, scale in zip(names, (0.5, 0.25), strict=True)}
    given = add_scales(model)
    weights = {**scales, **dict.fromkeys(others, torch.ones(1))}
    assert [name for name, _ in without_scales(weights.items(), given)] == others
    first, second = (layer.self_attn.attn for layer in model.model.layers.children())
    with torch.inference_mode():
        first.quant_method.process_weights_after_loading(first)
        with pytest.raises(ValueError, match=r"announces 'k_scale', .* \(model.layers.1.self_attn.attn\); --kv-cache-"):
            second.quant_method.process_weights_after_loading(second)
    assert (first.k_scale_float, first.v_scale_float) == (0.5, 0.25)


def test_a_checkpoint_names_a_module_that_falcon_h1_lacks(scheduler: None) -> None:
    from sglang_fl.quantization.cache import add_scales, without_scales

    model = _Model("model.layers.0.attn")
    names = ("model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_proj.v_scale")
    scales = zip(names, (torch.tensor(0.5), torch.tensor(0.25)), strict=True)
    assert list(without_scales(scales, add_scales(model))) == []
    layer = model.model.layers.get_submodule("0").attn
    assert (layer.k_scale.item(), layer.v_scale.item()) == (0.5, 0.25)


def test_layers_that_sglang_gave_a_configuration_and_pairs_stay_as_they_are(scheduler: None) -> None:
    from sglang_fl.quantization.cache import add_scales

    model = _Model("layers.0.self_attn.attn_mqa", "layers.0.self_attn.attn_mha", "layers.1.self_attn.attn")
    model.layers.get_submodule("1").self_attn.attn.quant_method = object()
    assert add_scales(model) == {}


def test_sglangs_own_attention_has_no_cache_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_fl.attention import pools

    sizes = {"page_size": 16, "layer_num": 1, "device": "cpu", "enable_memory_saver": False}
    monkeypatch.setattr(pools, "_in_force", pools.DEFAULT)
    monkeypatch.setattr(pools, "_hosts_own", ("torch_native",))
    with pytest.raises(ValueError, match="does not support a KV cache in fp8 for the attention 'torch_native' yet"):
        pools.KVPoolFL(64, dtype=torch.float8_e4m3fn, head_num=2, head_dim=8, **sizes)
    with pytest.raises(ValueError, match="does not support a KV cache in fp8 for the attention 'torch_native' yet"):
        pools.MLAPoolFL(64, dtype=torch.float8_e4m3fn, kv_lora_rank=16, qk_rope_head_dim=8, **sizes)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "a KV cache of type fp8_e5m2 on cpu"),
        ({"kv_cache_dtype": "mxfp8"}, "a KV cache of type mxfp8 on cpu"),
        ({"quantization_param_path": "scales.json"}, "scales of a KV cache in a file of their own on cpu"),
    ],
)
def test_other_caches_are_refused(scheduler: None, asked: dict[str, str], said: str) -> None:
    from sglang.srt.runtime_context import get_server_args

    from fl_dispatch.devices import ASCEND, CPU
    from sglang_fl.platform import refusals

    class Asked:
        """The arguments of the test's SGLang, with others in their place."""

        def __init__(self, **given: str) -> None:
            vars(self).update(given)

        def __getattr__(self, name: str) -> Any:
            return getattr(get_server_args(), name)

    for device, given, sentence in (
        (CPU, asked, said),
        (ASCEND, {"kv_cache_dtype": "fp8_e4m3"}, "a KV cache of type fp8_e4m3 on ascend"),
    ):
        with pytest.raises(ValueError, match=f"sglang_fl does not support {sentence} yet"):
            refusals.refuse_unsupported(Asked(**given), device)
    refusals.refuse_unsupported(Asked(kv_cache_dtype="fp8_e4m3"), CPU)
