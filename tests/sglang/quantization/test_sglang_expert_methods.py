"""Quantized experts without an engine: the method that SGLang's layer gets, what it loads, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from single_layers import COUNT, HIDDEN, INNER, MIXTURE, load, mixture
from torch import nn

from quantized_checkpoints import AWQ, FP8_CONFIG, GPTQ, SCHEMES, TOKEN8, TOKEN_FP8, W4, compressed, whole
from quantized_mixture import EXPERTS

GPTQ4 = {**GPTQ, "bits": 4, "group_size": 32}
BLOCK_WEIGHTS = {**whole("float", "block"), "block_structure": [128, 128]}
BLOCK_ROWS = {**whole("float", "group"), "group_size": 128, "dynamic": True}
REFUSED = {
    "fp8 for inputs as they are": (
        SCHEMES["compressed-tensors W8A16 fp8"].config,
        r"experts with weights of 8 bits \(float, channel\) for inputs as they are in 'float-quantized' of",
    ),
    "fp8 in oblong blocks of compressed-tensors": (
        compressed("float-quantized", {**BLOCK_WEIGHTS, "block_structure": [64, 128]}, BLOCK_ROWS),
        r"experts with weights of 8 bits \(float, blocks of 64 x 128\) for inputs of 8 bits \(float, groups of 128\)",
    ),
    "int4 for inputs of int8": (
        compressed("int-quantized", W4, TOKEN8),
        r"experts with weights of 4 bits \(int, groups of 32\) for inputs of 8 bits \(int, token\)",
    ),
    "fp8 in oblong blocks": ({**FP8_CONFIG, "weight_block_size": [64, 128]}, "blocks of 64 x 128"),
    "awq without zero points": ({**AWQ, "zero_point": False}, "'awq' without zero points"),
    "gptq with zero points": ({**GPTQ4, "sym": False}, "'gptq' with zero points"),
}


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.inference_mode():
        yield


def dispatched(x: torch.Tensor, expert: int) -> Any:
    """Tokens that all go to one expert."""
    from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    ids = torch.full((len(x), 1), expert, dtype=torch.int32)
    return StandardDispatchOutput(x, None, StandardTopKOutput(torch.ones(len(x), 1), ids, torch.zeros(len(x), COUNT)))


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("scheme", EXPERTS)
def test_each_expert_computes_with_the_weights_that_its_checkpoint_stands_for(
    scheduler: None, scheme: str, rank: int | None
) -> None:
    """``rank``: of two that share each expert."""
    layer = mixture(SCHEMES[scheme].config)
    mine, inner = slice(None), INNER
    if rank is not None:
        layer.moe_tp_size, layer.moe_tp_rank = 2, rank
        mine, inner = slice(rank * INNER, (rank + 1) * INNER), 2 * INNER
    experts = load(layer, scheme, inner=inner)
    layer.quant_method.process_weights_after_loading(layer)
    change = SCHEMES[scheme].rows or (lambda rows: rows)
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    for number, weights in enumerate(experts):
        rows = change(x)
        between = nn.functional.silu(rows @ weights["w1"][mine].t()) * (rows @ weights["w3"][mine].t())
        expected = change(between) @ weights["w2"][:, mine].t()
        got = layer.quant_method.apply(layer, dispatched(x, number)).hidden_states
        assert (got - expected).norm() <= 0.02 * expected.norm()  # a step of quantized inputs may turn
        if SCHEMES[scheme].rows is None:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", REFUSED)
def test_a_kind_of_experts_that_is_not_served_is_refused_in_the_checkpoints_words(scheduler: None, name: str) -> None:
    config, said = REFUSED[name]
    with pytest.raises(ValueError, match=rf"^sglang_fl does not support .*{said}.* yet(;|$)"):
        mixture(config)


def test_experts_whose_products_differ_are_refused(scheduler: None) -> None:
    config = compressed("pack-quantized", W4, None)
    other = {**config["config_groups"]["group_0"], "targets": [r"re:.*down_proj"]}
    other["weights"] = {**other["weights"], "num_bits": 8}
    config["config_groups"] = {"group_1": other, **config["config_groups"]}
    with pytest.raises(ValueError, match=rf"experts with products that differ in their scheme \({MIXTURE}\) yet"):
        mixture(config)


NAMED = [f"{MIXTURE}.{number}.{name}" for number in range(COUNT) for name in ("gate_proj", "up_proj", "down_proj")]
ELSEWHERE = [name.replace("layers.0", "layers.1") for name in NAMED]


@pytest.mark.parametrize(
    ("config", "left"),
    [
        ({**FP8_CONFIG, "modules_to_not_convert": NAMED}, True),
        ({**FP8_CONFIG, "modules_to_not_convert": [*ELSEWHERE, "lm_head"]}, False),
        ({**GPTQ4, "dynamic": {r"-:.*\.mlp\.experts": {}}}, True),
        ({**GPTQ4, "dynamic": {r"-:.*\.mlp\.gate$": {}}}, False),
        ({**AWQ, "modules_to_not_convert": ["layers.0.mlp"]}, True),
        ({**AWQ, "modules_to_not_convert": ["layers.1.mlp"]}, False),
        ({**compressed("pack-quantized", W4, None), "ignore": NAMED}, True),
        ({**compressed("pack-quantized", W4, None), "ignore": [r"re:.*mlp\.experts.*"]}, True),
        ({**compressed("pack-quantized", W4, None), "ignore": ELSEWHERE}, False),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else value["quant_method"],
)
def test_experts_that_a_checkpoint_leaves_as_they_are_are_not_quantized(
    scheduler: None, config: Any, left: bool
) -> None:
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    from sglang_fl.quantization.expert_method import QuantizedExpertsMethod

    method = mixture(config).quant_method
    assert isinstance(method, UnquantizedFusedMoEMethod if left else QuantizedExpertsMethod)


@pytest.mark.parametrize("scheme", EXPERTS)
def test_a_scale_that_the_checkpoint_lacks_is_noticed(scheduler: None, scheme: str) -> None:
    scales = [name for name, _ in mixture(SCHEMES[scheme].config).named_parameters() if "scale" in name]
    assert len(scales) == (4 if "static" in scheme else 2)
    for without in scales:
        layer = mixture(SCHEMES[scheme].config)
        load(layer, scheme, without)
        with pytest.raises(ValueError, match=rf"the checkpoint has no '{without}' .* \({MIXTURE}\)"):
            layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("scheme", "hidden", "inner", "said"),
    [
        ("gptq", 128, 48, "48 elements on a rank, not a multiple of a group's 32"),
        ("awq", 48, 128, "48 elements on a rank, not a multiple of a group's 32"),
        ("compressed-tensors W8A16 int8", 128, 42, "42 elements on a rank, not a multiple of a word's 4"),
    ],
)
def test_parts_that_do_not_stand_alone_are_refused(
    scheduler: None, scheme: str, hidden: int, inner: int, said: str
) -> None:
    with pytest.raises(ValueError, match=rf"sglang_fl does not support experts with {said} \({MIXTURE}\) yet"):
        mixture(SCHEMES[scheme].config, hidden, inner)


def test_ranks_divide_experts_between_blocks(scheduler: None) -> None:
    from fl_dispatch.hosting.quantized import schemes
    from fl_dispatch.hosting.quantized.stored_experts import Fp8BlockExperts, Parameters, Sizes

    parameters, kind = (
        Parameters(torch.nn.Module(), {"weight_loader": print}),
        Fp8BlockExperts(schemes.fp8("dynamic", [128, 128])),
    )
    said = kind.create_weights(parameters, Sizes(2, 128, 64, 2, ranks=2, dtype=torch.float32))
    assert said == "experts with 64 elements on a rank, not a multiple of a block's 128"
    assert not kind.create_weights(parameters, Sizes(2, 128, 64, 2, ranks=1, dtype=torch.float32))


def test_experts_that_are_loaded_in_a_way_of_their_own_are_refused(scheduler: None) -> None:
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    class Own(FusedMoE):
        def weight_loader(self, *args: Any, **kwargs: Any) -> None:
            raise NotImplementedError

    with pytest.raises(ValueError, match="quantized experts that Own loads in a way of its own"):
        mixture(AWQ, kind=Own)
    with pytest.raises(ValueError, match="quantized experts that FusedMoE loads in a way of its own"):
        mixture(AWQ, use_weight_loader_fused=True)
    with pytest.raises(ValueError, match="quantized experts with biases"):
        mixture(AWQ, with_bias=True)
    with pytest.raises(ValueError, match="quantized experts with the activation 'tanh' in a mixture of experts yet"):
        mixture(AWQ, activation="tanh")


def test_quantized_experts_are_scaled_once(scheduler: None) -> None:
    """By us, unless the block around them does it."""
    from sglang_fl.layers import classes

    class Glm4MoeSparseMoeBlock(nn.Module):
        """Stands for the class of this name."""

        def __init__(self, experts: nn.Module) -> None:
            super().__init__()
            self.experts = experts

    x, found = torch.randn(3, HIDDEN), []
    for factor, block in ((1.0, nn.Module), (2.5, nn.Module), (2.5, Glm4MoeSparseMoeBlock)):
        layer = mixture(SCHEMES["awq"].config, routed_scaling_factor=factor)
        load(layer, "awq")
        layer.quant_method.process_weights_after_loading(layer)
        held = block(layer) if block is Glm4MoeSparseMoeBlock else nn.ModuleDict({"experts": layer})
        classes.prepare(nn.ModuleDict({"mlp": held}))
        assert layer.quant_method.kind.fl_scope == "mlp.experts"
        found.append(layer.quant_method.apply(layer, dispatched(x, 0)).hidden_states)
    plain, scaled, by_block = found
    torch.testing.assert_close(scaled, 2.5 * plain)
    assert torch.equal(by_block, plain)


def test_quantized_experts_are_refused_where_their_references_come_first_on_an_accelerator(
    scheduler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fl_dispatch.devices import ASCEND, CPU
    from fl_dispatch.hosting.quantized import layers
    from sglang_fl.quantization import configs

    monkeypatch.setattr(configs, "detect_device", lambda: ASCEND)
    with pytest.raises(
        ValueError,
        match=rf"quantized experts on ascend where their references, which wait for it, come first \({MIXTURE}\) yet",
    ):
        mixture(AWQ)
    for module in (configs, layers):
        monkeypatch.setattr(module, "detect_device", lambda: replace(CPU, float8=False))
    floats = compressed("float-quantized", whole("float", "channel"), TOKEN_FP8)
    for config in (floats, FP8_CONFIG, {**FP8_CONFIG, "weight_block_size": [128, 128]}):
        with pytest.raises(ValueError, match=rf"the weights of {MIXTURE} \(cpu has no float8_e4m3fn\) yet"):
            mixture(config)
    assert mixture(AWQ).quant_method.kind.fl_operator == "weight_only_moe"
