"""Every replaced layer gives what vLLM's own forward gives, in float32 on random inputs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import custom_op

from fl_dispatch.settings import get_settings
from vllm_fl.layers import classes
from vllm_fl.platform import startup

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 9, 4, 2, 32
POSITIONS = 64
F32 = torch.float32
FAMILIES = ("activation", "layernorm", "rotary_embedding")  # the modules of vLLM whose classes are compared here
LAYERS = tuple(f"vllm.model_executor.layers.{family}" for family in FAMILIES)
ROWS = {row.name: row for row in classes.LAYER_CLASSES if row.module.startswith(LAYERS)}

# class → several sets of its arguments
ROTARY: dict[str, list[dict[str, Any]]] = {
    "RotaryEmbedding": [
        {"is_neox_style": True},
        {"is_neox_style": False},
        {"rotary_dim": 16, "is_neox_style": True},
        {"rotary_dim": 16, "is_neox_style": False},
    ],
    "Llama3RotaryEmbedding": [
        {"scaling_factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "orig_max_position": 16}
    ],
    "LinearScalingRotaryEmbedding": [{"scaling_factors": 2.0}],
    "NTKScalingRotaryEmbedding": [{"scaling_factor": 2.0}, {"scaling_factor": 2.0, "mixed_b": 0.7}],
    "DynamicNTKScalingRotaryEmbedding": [{"scaling_factor": 2.0, "max_trained_positions": 16}],
    "DynamicNTKAlphaRotaryEmbedding": [{"scaling_alpha": 3.0}],
    "YaRNScalingRotaryEmbedding": [{"scaling_factor": 4.0}],
    "Gemma4RotaryEmbedding": [{"rotary_dim": 16}],
    "DeepseekScalingRotaryEmbedding": [
        {"scaling_factor": 4.0, "is_neox_style": False, "mscale": 0.7, "mscale_all_dim": 0.5},
        {"scaling_factor": 4.0, "rotary_dim": 16},
    ],
    "MRotaryEmbedding": [
        {"mrope_section": [4, 6, 6]},
        {"mrope_section": [4, 6, 6], "is_neox_style": False},
        {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
        {"mrope_section": [2, 3, 3], "rotary_dim": 16, "scaling_factor": 2.0},
    ],
    "MRotaryEmbeddingInterleaved": [{"mrope_section": [6, 5, 5]}],
    "Ernie4_5_VLRotaryEmbedding": [{"mrope_section": [6, 6, 4], "is_neox_style": False}],
    "BailingMRotaryEmbedding": [{"mrope_section": [4, 6, 6], "is_neox_style": False}],
}
SECTIONS = ("MRotaryEmbedding", "MRotaryEmbeddingInterleaved", "Ernie4_5_VLRotaryEmbedding", "BailingMRotaryEmbedding")
ACTIVATIONS: dict[str, list[dict[str, Any]]] = {
    "SiluAndMul": [{}],
    "GeluAndMul": [{}, {"approximate": "tanh"}],
    "MulAndSilu": [{}],
    "FatreluAndMul": [{}, {"threshold": 0.3}],
    "SwigluOAIAndMul": [{}, {"alpha": 1.0, "limit": 0.5}],
    "SiluAndMulWithClamp": [{"swiglu_limit": 7.0}, {"swiglu_limit": 0.5, "alpha": 1.702, "beta": 1.0}],
    "SwigluStepAndMul": [{}, {"limit": 0.5}],
    "SituAndMul": [{}, {"beta": 2.0, "linear_beta": 0.5}],
    "GeluAndMulSparse": [{"activation_sparsity": 0.95}, {"activation_sparsity": 0.5, "approximate": "tanh"}],
    "GELU": [{}],
    "GELUTanh": [{}],
    "NewGELU": [{}],
    "FastGELU": [{}],
    "QuickGELU": [{}],
    "ReLUSquaredActivation": [{}],
    "XIELU": [{"dtype": F32}, {"dtype": F32, "alpha_p_init": 0.3, "beta": 0.25}],
}
NORMS: dict[str, list[dict[str, Any]]] = {
    "RMSNorm": [{}, {"eps": 1e-2}],
    "GemmaRMSNorm": [{}],
    "LayerNorm": [{}, {"bias": False}, {"elementwise_affine": False}],
    "RMSNormGated": [{}, {"norm_before_gate": True}, {"group_size": HEAD_DIM // 2}, {"activation": "sigmoid"}],
}
LONG_ROPE = "Phi3LongRoPEScaledRotaryEmbedding"


def cases(table: dict[str, list[dict[str, Any]]], only: tuple[str, ...] | None = None) -> list[Any]:
    return [
        pytest.param(name, options, id=f"{name}-{index}")
        for name, several in table.items()
        if only is None or name in only
        for index, options in enumerate(several)
    ]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our classes registered with vLLM, inside a configuration of vLLM."""
    startup.activate()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else our platform sets it for this process
    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    config = VllmConfig()
    classes.register(get_settings())
    config.model_config = SimpleNamespace(max_model_len=POSITIONS)
    with set_current_vllm_config(config):
        yield


def make(name: str, *args: Any, **options: Any) -> tuple[Any, list[str]]:
    """A layer, as vLLM makes it, and a list that grows by every call of our operator."""
    torch.manual_seed(zlib.crc32(name.encode()))
    layer = ROWS[name].in_tree()(*args, **options)
    assert isinstance(layer, classes.DispatchedLayer)
    assert layer.fl_runs()
    calls: list[str] = []
    ours = layer.fl_call

    def counted(*operands: Any) -> Any:
        calls.append(layer.fl_operator)
        return ours(*operands)

    layer.fl_call = counted
    return layer, calls


def native(layer: Any, *args: Any) -> Any:
    """vLLM's own forward of the same layer."""
    base = type(layer).__mro__[type(layer).__mro__.index(ROWS[type(layer).__name__.removesuffix("FL")].in_tree())]
    own = base.forward if "forward" in vars(base) else base.forward_native
    return own(layer, *args)


def rotary(name: str, options: dict[str, Any]) -> tuple[Any, list[str]]:
    given = {"head_size": HEAD_DIM, "rotary_dim": HEAD_DIM, "max_position_embeddings": POSITIONS, "base": 10000.0}
    return make(name, **{**given, "is_neox_style": True, "dtype": F32, **options})


def compare_rotations(layer: Any, positions: Tensor, query: Tensor, key: Tensor, calls: list[str]) -> None:
    expected = native(layer, positions, query.clone(), key.clone())
    actual = layer(positions, query.clone(), key.clone())
    assert calls == ["rotary_embedding"]
    assert not torch.equal(actual[0], query)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_every_replaced_class_of_these_families_is_compared() -> None:
    assert set(ROWS) == {*ROTARY, *ACTIVATIONS, *NORMS, LONG_ROPE}


@pytest.mark.parametrize(("name", "options"), cases(ROTARY))
def test_rotary_classes_turn_as_vllm_does(name: str, options: dict[str, Any]) -> None:
    layer, calls = rotary(name, options)
    query, key = torch.randn(TOKENS, HEADS * HEAD_DIM), torch.randn(TOKENS, KV_HEADS * HEAD_DIM)
    axes = (3,) if name == "MRotaryEmbeddingInterleaved" else ()  # it knows nothing else
    positions = torch.randint(0, POSITIONS, (*axes, TOKENS))
    if name == "DeepseekScalingRotaryEmbedding":  # heads are an axis of their own
        query, key = query.view(TOKENS, HEADS, -1), key.view(TOKENS, KV_HEADS, -1)
    compare_rotations(layer, positions, query, key, calls)


@pytest.mark.parametrize(("name", "options"), cases(ROTARY, SECTIONS))
def test_multimodal_positions_turn_each_frequency_by_its_axis(name: str, options: dict[str, Any]) -> None:
    layer, calls = rotary(name, options)
    query, key = torch.randn(TOKENS, HEADS * HEAD_DIM), torch.randn(TOKENS, KV_HEADS * HEAD_DIM)
    compare_rotations(layer, torch.randint(0, POSITIONS, (3, TOKENS)), query, key, calls)


def test_positions_on_several_axes_without_sections_are_refused() -> None:
    layer, _ = rotary("MRotaryEmbedding", {})
    with pytest.raises(ValueError, match="mrope_section"):
        layer(torch.zeros(3, TOKENS, dtype=torch.int64), torch.randn(TOKENS, 32), torch.randn(TOKENS, 32))


@pytest.mark.parametrize("original", [16, POSITIONS], ids=["long factors", "short factors"])
def test_long_rope_takes_the_table_that_vllm_takes(original: int) -> None:
    from vllm.model_executor.layers.rotary_embedding import get_rope

    rope = {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0 + index for index in range(HEAD_DIM // 4)],
        "long_factor": [2.0 + 3 * index for index in range(HEAD_DIM // 4)],
    }
    layer = get_rope(HEAD_DIM, 2 * POSITIONS, rope_parameters=rope, dtype=F32)
    assert isinstance(layer, classes.DispatchedLayer)
    assert layer.use_long_rope == (original == 16)
    calls: list[str] = []
    ours = layer.fl_call
    layer.fl_call = lambda *operands: calls.append(layer.fl_operator) or ours(*operands)
    query, key = torch.randn(TOKENS, HEADS * HEAD_DIM), torch.randn(TOKENS, KV_HEADS * HEAD_DIM)
    compare_rotations(layer, torch.randint(0, POSITIONS, (TOKENS,)), query, key, calls)


def test_switching_long_rope_off_gives_vllms_class_back() -> None:
    from vllm.model_executor.layers import rotary_embedding

    classes.register(get_settings())
    assert issubclass(rotary_embedding.Phi3LongRoPEScaledRotaryEmbedding, classes.DispatchedLayer)
    classes.register(SimpleNamespace(registers=lambda *names: False, oot_whitelist=None, oot_blacklist=frozenset()))
    assert rotary_embedding.Phi3LongRoPEScaledRotaryEmbedding is ROWS[LONG_ROPE].in_tree()


@pytest.mark.parametrize(("name", "options"), cases(ACTIVATIONS))
def test_activations_equal_vllms(name: str, options: dict[str, Any]) -> None:
    layer, calls = make(name, **options)
    x = torch.randn(5, 2 * HEAD_DIM) * 3
    expected = layer.forward_native(x)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert calls == [layer.fl_operator]


@pytest.mark.parametrize(("name", "options"), cases(NORMS))
def test_norms_equal_vllms(name: str, options: dict[str, Any]) -> None:
    layer, calls = make(name, HEAD_DIM, **options)
    for parameter in layer.parameters():
        parameter.data.normal_()
    x, second = torch.randn(5, HEAD_DIM), torch.randn(5, HEAD_DIM)  # a residual, or a gate
    for more in ((), (second,)) if name != "LayerNorm" else ((),):
        expected = layer.forward_native(x.clone(), *(tensor.clone() for tensor in more))
        actual = layer(x.clone(), *(tensor.clone() for tensor in more))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert set(calls) == {layer.fl_operator}


@pytest.mark.parametrize("groups", [1, 4])
def test_the_norm_behind_a_state_space_equals_vllms(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, calls = _norm_behind_a_state_space(monkeypatch, groups)
    layer.weight.data.normal_()
    x, gate = torch.randn(5, HEAD_DIM), torch.randn(5, HEAD_DIM)
    torch.testing.assert_close(layer(x, gate), layer.forward_native(x, gate), rtol=1e-5, atol=1e-6)
    assert calls == ["rms_norm_gated"]


@pytest.mark.parametrize("options", [{"use_rms_norm": False}, {"ranks": 2}])
def test_where_there_is_no_norm_or_a_mean_goes_over_ranks_vllms_forward_runs(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = options.pop("ranks", 1)
    layer, _ = _norm_behind_a_state_space(monkeypatch, 1, ranks, **options)
    assert not layer.fl_runs()
    assert layer._forward_method == layer.forward_native
    grouped, _ = _norm_behind_a_state_space(monkeypatch, 2, 2)
    assert grouped.fl_runs()


def _norm_behind_a_state_space(
    monkeypatch: pytest.MonkeyPatch, groups: int, ranks: int = 1, **options: Any
) -> tuple[Any, list[str]]:
    """``Mixer2RMSNormGated`` as one of so many ranks has it, and a list that grows by every call of our operator."""
    from vllm.model_executor.layers.mamba import mamba_mixer2

    monkeypatch.setattr(mamba_mixer2, "get_tensor_model_parallel_world_size", lambda: ranks)
    monkeypatch.setattr(mamba_mixer2, "get_tensor_model_parallel_rank", lambda: 0)
    layer = mamba_mixer2.Mixer2RMSNormGated(HEAD_DIM, groups, eps=1e-5, **options)
    assert isinstance(layer, classes.DispatchedLayer)
    calls: list[str] = []
    ours = layer.fl_call
    layer.fl_call = lambda *operands: calls.append(layer.fl_operator) or ours(*operands)
    return layer, calls
