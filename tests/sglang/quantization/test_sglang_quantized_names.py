"""A checkpoint's rules about layers by name mean under SGLang what the format's own library says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import STEP, answered, start
from single_layers import layer_of, made

import quantized_checkpoints as checkpoints
from quantized_checkpoints import AWQ, GPTQ, SCHEMES, W4, Partly, compressed
from quantized_network import Comparison
from running import PROMPTS

LAYER = "model.layers.0"
GPTQ4 = {**GPTQ, "bits": 4, "group_size": 32}
PACKED = compressed("pack-quantized", W4, None)
ATTENTION = tuple(f"{LAYER}.self_attn.{name}_proj" for name in "qkv")


def ignoring(*names: str) -> dict[str, Any]:
    return {**PACKED, "ignore": [*names]}


def targeting(**groups: Sequence[str]) -> dict[str, Any]:
    """One group of 4 bits, and one of 8, with these targets."""
    (usual,) = PACKED["config_groups"].values()
    made = {name: {**usual, "targets": [*targets]} for name, targets in groups.items()}
    for name, group in made.items():
        made[name] = {**group, "weights": {**group["weights"], "num_bits": 8 if name == "eight" else 4}}
    return {**PACKED, "config_groups": made}


def bits(config: dict[str, Any], name: str, layer_name: str = LAYER, names: Any = None) -> int:
    """Bits of the weights of a layer of SGLang's; 0 where it is left as it is; ``names``: how SGLang maps them."""
    from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    kinds = {"qkv_proj": QKVParallelLinear, "gate_up_proj": MergedColumnParallelLinear}
    layer = layer_of(kinds.get(name.rpartition(".")[2], RowParallelLinear))
    quantization = made(config)
    if names is not None:
        quantization.apply_weight_name_mapper(names)
    method = quantization.get_quant_method(layer, f"{layer_name}.{name}")
    return 0 if isinstance(method, UnquantizedLinearMethod) else method.scheme.fl_bits


QKV, MLP, DOWN = "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"


@pytest.mark.parametrize(
    ("config", "name", "expected"),
    [
        (ignoring(*ATTENTION), QKV, 0),
        (ignoring(*ATTENTION), MLP, 4),
        (ignoring(*(name.replace("layers.0", "layers.1") for name in ATTENTION)), QKV, 4),
        (ignoring(r"re:.*self_attn\..*"), QKV, 0),
        (ignoring(f"{LAYER}.{QKV}"), QKV, 0),  # of a checkpoint that joined them
        (ignoring(f"model.language_model.{DOWN}".replace("model.mlp", "model.layers.0.mlp")), DOWN, 0),
        (ignoring("down_proj"), DOWN, 4),  # names are whole
        (ignoring("mlp.down_proj"), DOWN, 4),
        (ignoring("re:down_proj"), DOWN, 4),  # from the start
        (ignoring("re:.*down_proj"), DOWN, 0),
        (targeting(four=["re:.*mlp.*"]), QKV, 0),
        (targeting(four=["re:.*mlp.*"]), MLP, 4),
        (targeting(four=["Linear"], eight=["re:.*down_proj"]), DOWN, 8),
        (targeting(four=["Linear"], eight=["re:.*down_proj"]), QKV, 4),
        (targeting(four=["re:.*b"], eight=["re:.*down.*"]), DOWN, 8),
        (targeting(eight=["re:.*down_proj"], four=["re:.*.own_proj"]), DOWN, 4),  # "." is before "d"
        (targeting(four=ATTENTION), QKV, 4),
        ({**GPTQ4, "dynamic": {r"-:.*\.mlp\..*": {}}}, MLP, 0),
        ({**GPTQ4, "dynamic": {r"-:.*\.mlp\..*": {}}}, QKV, 4),
        ({**GPTQ4, "dynamic": {r"+:.*(gate|up)_proj": {"bits": 8}}}, MLP, 8),
        ({**GPTQ4, "dynamic": {r"-:.*gate_up_proj": {}}}, MLP, 0),
        ({**GPTQ4, "dynamic": {r"-:mlp": {}}}, MLP, 4),
        ({**AWQ, "modules_to_not_convert": ["o_proj"]}, QKV, 4),
        ({**AWQ, "modules_to_not_convert": ["gate_proj", "up_proj"]}, MLP, 0),
        ({**AWQ, "modules_to_not_convert": ["self_attn"]}, QKV, 0),
    ],
)  # fmt: skip
def test_a_layer_is_what_the_library_makes_of_its_parts(
    scheduler: None, config: dict[str, Any], name: str, expected: int
) -> None:
    assert bits(config, name) == expected


@pytest.mark.parametrize(
    ("config", "name", "said"),
    [
        (ignoring(ATTENTION[0]), QKV, r"q_proj not quantized, k_proj 4 bits \(int, groups of 32\), v_proj 4 bits"),
        (ignoring(r"re:.*v_proj"), QKV, r"v_proj not quantized"),
        (targeting(four=["Linear"], eight=["re:.*up_proj"]), MLP, r"gate_proj 4 bits .*, up_proj 8 bits"),
        ({**GPTQ4, "dynamic": {r"-:.*gate_proj": {}}}, MLP, r"gate_proj not quantized, up_proj 4 bits \(int,"),
        ({**GPTQ4, "dynamic": {r"-:.*gate": {}}}, MLP, r"gate_proj not quantized, up_proj 4 bits \(int,"),
        ({**GPTQ4, "dynamic": {r"+:.*gate_proj": {"bits": 8}}}, MLP, r"gate_proj 8 bits \(.*\), up_proj 4 bits \("),
        ({**AWQ, "modules_to_not_convert": ["gate"]}, MLP, "gate_proj not quantized, up_proj quantized"),
        ({**AWQ, "modules_to_not_convert": ["v_proj"]}, QKV, "k_proj quantized, v_proj not quantized"),
    ],
)  # fmt: skip
def test_parts_that_differ_are_refused_in_one_sentence(
    scheduler: None, config: dict[str, Any], name: str, said: str
) -> None:
    whole = (
        rf"^sglang_fl does not support one layer with parts .* in different ways \(.*{said}.*; {LAYER}.{name}\) yet$"
    )
    with pytest.raises(ValueError, match=whole):
        bits(config, name)


@pytest.mark.parametrize("config", [PACKED, AWQ], ids=["compressed-tensors", "awq"])
def test_a_predictors_layer_has_the_number_in_lists_that_follows_the_models_last_one(
    scheduler: None, config: dict[str, Any]
) -> None:
    from sglang.srt.models.deepseek_nextn import DeepseekV3ForCausalLMNextN
    from sglang.srt.models.glm4_moe import GlmMoeDsaForCausalLMNextN

    ignored = "modules_to_not_convert" if config is AWQ else "ignore"
    said = {**config, ignored: ["model.layers.78.self_attn.indexer.wk", "model.layers.7.mlp.down_proj"]}
    text: Any = SimpleNamespace(num_hidden_layers=78)
    for predictor in (DeepseekV3ForCausalLMNextN, GlmMoeDsaForCausalLMNextN):
        names = predictor.get_hf_to_sglang_mapper(text)
        found = [bits(said, name, "model.decoder", names) for name in ("self_attn.indexer.wk", "mlp.down_proj")]
        assert found == [0, 4]


@pytest.mark.engine
def test_a_checkpoint_that_ignores_queries_keys_and_values_by_name_is_served(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.self_attn.{letter}_proj" for layer in range(4) for letter in "qkv"]
    whole = SCHEMES["compressed-tensors W4A16"]
    config = {**whole.config, "ignore": ["lm_head", "down_proj", *names]}  # "down_proj" is no whole name
    scheme = Partly(config, whole.write, whole.layer, operators=whole.operators, left=("q_proj", "k_proj", "v_proj"))
    model = checkpoints.write_checkpoint(tmp_path / "model", scheme)
    found = start(model, {**STEP, "scores": True}).result()
    texts, scores = answered(PROMPTS, found["steps"][0])
    assert Comparison.of(texts, scores, replace(scheme), 1).agrees
    assert found["report"]["layers"]["PackedLayer"] == 3 * 4
