"""A KV cache in fp8 in SGLang's engines: what Hugging Face's network computes whose keys and values fp8 has rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantized_cache import COMPRESSED, FP8, HOSTS_NAMES, PLAIN, QuantizedCaches, Run
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
