"""Every bridge gives what SGLang's own forward gives, for all its parameters, in float32 and bfloat16."""

from __future__ import annotations

import copy
import functools
import importlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_dispatch import (
    BackendImplKind,
    OpImpl,
    SelectionPolicy,
    get_default_manager,
    policy_context,
    reset_default_manager,
)
from fl_dispatch.hosting.layers.survey import LayerChoice
from fl_dispatch.ops import OPERATORS
from sglang_fl import bridge as bridges
from sglang_fl.bridge import BRIDGES, Bridge, Unbridged

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = (F32, BF16)
LAYERS = "sglang.srt.layers"
HIDDEN, TOKENS, POSITIONS = 96, 7, 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
EXPERTS, TOPK = 32, 6
ROWS = {row.name: row for row in BRIDGES}
# Half types: SGLang's own forward rounds after each step, so it is as far from exact as ours may be.
NATIVE_BF16 = {"rtol": 3e-2, "atol": 4e-2}


@pytest.fixture(autouse=True)
def in_sglang(scheduler: None) -> Iterator[None]:
    reset_default_manager()
    get_default_manager().set_counting(True)
    bridges.fallen_through.clear()
    with torch.no_grad():
        yield
    reset_default_manager()


def normal(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape).to(dtype)


def in_tree(name: str, module: str | None = None) -> Any:
    return getattr(importlib.import_module(module or ROWS[name].module), name)


# -- layers and what they are called with -----------------------------------------------------------------------------

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A layer of SGLang, an operator, and calls.

    Args:
        build: dtype → the layer.
        calls: dtype → label → arguments.
        looser: the parameters are rounded more than the input, so the result is as exact as in bfloat16.
    """

    name: str
    operator: str
    build: Callable[[torch.dtype], nn.Module]
    calls: Callable[[torch.dtype], dict[str, Arguments]]
    looser: bool = False


def randomized(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        if parameter.numel() > 1:
            parameter.copy_(torch.randn_like(parameter))
    return layer


def rows(width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs that a layer on ``[..., width]`` may meet."""
    return {
        "one token": normal(1, width, dtype=dtype),
        "several tokens": normal(TOKENS, width, dtype=dtype),
        "no token": normal(0, width, dtype=dtype),
        "three dimensions": normal(2, 3, width, dtype=dtype),
        "a gap after each row": normal(5, width + 32, dtype=dtype)[:, :width],
        "transposed": normal(3, 2, width, dtype=dtype).transpose(0, 1),
    }


def activation(name: str, operator: str, factor: int = 2, looser: bool = False, **options: Any) -> Case:
    label = ", ".join((name, *(f"{key}={value}" for key, value in options.items())))
    return Case(
        label,
        operator,
        lambda dtype: in_tree(name)(**({**options, "dtype": dtype} if name == "XIELU" and not looser else options)),
        lambda dtype: {key: ((x,), {}) for key, x in rows(factor * HIDDEN, dtype).items()},
        looser,
    )


def norm(
    name: str,
    operator: str,
    *,
    residual: bool = False,
    added: bool = False,
    keep: bool = False,
    module: str | None = None,
    given: dict[str, Any] | None = None,
    **options: Any,
) -> Case:
    """``added``: with ``post_residual_addition``. ``keep``: the weights stay in float32."""

    def build(dtype: torch.dtype) -> nn.Module:
        chosen = {key: dtype if value == "same" else value for key, value in options.items()}
        layer = randomized(in_tree(name, module)(HIDDEN, **chosen))
        return layer if keep else layer.to(dtype)

    def calls(dtype: torch.dtype) -> dict[str, Arguments]:
        found: dict[str, Arguments] = {}
        for key, x in rows(HIDDEN, dtype).items():
            others = [normal(*x.shape, dtype=dtype) for _ in range(residual + added)]
            found[key] = ((x, *others), dict(given or {}))
        return found

    parts = [name, *(f"{key}={value}" for key, value in options.items())]
    parts += ["residual"] * residual + ["addition"] * added + [f"weights in {F32}"] * keep + list(given or ())
    return Case(", ".join(parts), operator, build, calls)


def rotary(name: str, *, axes: int = 0, heads: bool = False, module: str | None = None, **options: Any) -> Case:
    """``axes``: positions on so many axes. ``heads``: query and key are not flattened."""

    def build(dtype: torch.dtype) -> nn.Module:
        fixed = {"head_size": HEAD_DIM, "rotary_dim": HEAD_DIM, "max_position_embeddings": POSITIONS, "base": 10000}
        return in_tree(name, module)(**{**fixed, "is_neox_style": True, "dtype": dtype, **options})

    def calls(dtype: torch.dtype) -> dict[str, Arguments]:
        def call(tokens: int, fused: bool = False, **extra: Any) -> Arguments:
            positions = torch.randint(0, POSITIONS // 2, (axes, tokens) if axes else (tokens,))
            projection = normal(tokens, (HEADS + KV_HEADS) * HEAD_DIM, dtype=dtype)
            query, key = projection.split((HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM), dim=-1)
            if not fused:
                query, key = query.contiguous(), key.contiguous()
            if heads:
                query, key = (x.unflatten(-1, (-1, HEAD_DIM)) for x in (query, key))
            return (positions, query, key), extra

        found = {"one token": call(1), "several tokens": call(TOKENS), "views of one projection": call(TOKENS, True)}
        if not axes and name not in ("MRotaryEmbedding", "YaRNScalingMRotaryEmbedding", *OWN_FORWARDS):
            found["offsets"] = call(TOKENS, offsets=torch.arange(TOKENS))
        return found

    parts = [name, *(f"{key}={value}" for key, value in options.items() if "factor" not in key)]
    parts += [f"{axes} axes"] * bool(axes) + ["heads"] * heads
    return Case(", ".join(parts), "rotary_embedding", build, calls)


OWN_FORWARDS = ("Ernie4_5_VLRotaryEmbedding", "BailingMRotaryEmbedding")
ROPE = f"{LAYERS}.rotary_embedding"
VARIANTS = f"{ROPE}.rope_variant"
FREQUENCIES = HEAD_DIM // 2

CASES = [
    activation("SiluAndMul", "silu_and_mul"),
    activation("SituAndMul", "situ_and_mul"),
    activation("SituAndMul", "situ_and_mul", beta=2.0, linear_beta=0.5),
    activation("GeluAndMul", "gelu_and_mul"),
    activation("GeluAndMul", "gelu_and_mul", approximate="none"),
    activation("NewGELU", "gelu", 1),
    activation("ReLU2", "relu2", 1),
    activation("QuickGELU", "quick_gelu", 1),
    activation("XIELU", "xielu", 1),
    activation("XIELU", "xielu", 1, alpha_p_init=0.3, alpha_n_init=0.9, beta=0.25, eps=-1e-3),
    activation("XIELU", "xielu", 1, looser=True, dtype=BF16),
    norm("RMSNorm", "rms_norm"),
    norm("RMSNorm", "rms_norm", eps=1e-2),
    norm("RMSNorm", "rms_norm", residual=True),
    norm("RMSNorm", "rms_norm", residual=True, added=True),
    norm("RMSNorm", "rms_norm", given={"quant_linear": nn.Linear(1, 1)}),
    norm("RMSNorm", "rms_norm", residual=True, keep=True),
    norm("RMSNorm", "rms_norm", has_weight=False),
    norm("RMSNorm", "rms_norm", residual=True, has_weight=False),
    norm("RMSNorm", "rms_norm", cast_x_before_out_mul=True),
    norm("RMSNorm", "rms_norm", residual=True, cast_x_before_out_mul=True),
    norm("RMSNorm", "rms_norm", fp32_residual=True),
    norm("RMSNorm", "rms_norm", residual=True, override_orig_dtype="same"),
    norm("RMSNorm", "rms_norm", var_hidden_size=HIDDEN),
    norm("RMSNormWithoutScale", "rms_norm", eps=1e-2),
    norm("GemmaRMSNorm", "gemma_rms_norm", eps=1e-5),
    norm("GemmaRMSNorm", "gemma_rms_norm", residual=True),
    norm("GemmaRMSNorm", "gemma_rms_norm", residual=True, added=True),
    norm("Gemma3RMSNorm", "gemma_rms_norm", eps=1e-5),
    norm("Gemma3RMSNorm", "gemma_rms_norm", residual=True),
    norm("Gemma4RMSNorm", "rms_norm", eps=1e-5),
    norm("Gemma4RMSNorm", "gemma_rms_norm", scale_shift=1.0),
    norm("Gemma4RMSNorm", "rms_norm", with_scale=False, scale_shift=3.0),
    norm("Mixer2RMSNormGated", "rms_norm_gated", residual=True, full_n_groups=1, eps=1e-5),  # its gate
    norm("Mixer2RMSNormGated", "rms_norm_gated", residual=True, full_n_groups=3),
    norm("LayerNorm", "layer_norm", dtype="same"),
    norm("LayerNorm", "layer_norm", keep=True, eps=1e-3),
    norm("LayerNorm", "layer_norm", keep=True, bias=False),
    norm("LayerNorm", "layer_norm", keep=True, elementwise_affine=False),
    rotary("RotaryEmbedding"),
    rotary("RotaryEmbedding", heads=True),
    rotary("RotaryEmbedding", is_neox_style=False),
    rotary("RotaryEmbedding", rotary_dim=16),
    rotary("RotaryEmbedding", rotary_dim=16, is_neox_style=False, heads=True),
    rotary("LinearScalingRotaryEmbedding", module=f"{ROPE}.base", scaling_factors=2.0),
    rotary("YaRNScalingRotaryEmbedding", module=f"{ROPE}.yarn", scaling_factor=4.0, mscale=0.7, mscale_all_dim=0.5),
    rotary(
        "Llama3RotaryEmbedding",
        module=VARIANTS,
        scaling_factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        orig_max_position=16,
    ),
    rotary("DynamicNTKAlphaRotaryEmbedding", module=VARIANTS, scaling_alpha=3.0),
    rotary("DynamicNTKScalingRotaryEmbedding", module=VARIANTS, scaling_factor=2.0),
    rotary("Gemma4RotaryEmbedding", module=VARIANTS, rotary_dim=16),
    rotary(
        "DeepseekScalingRotaryEmbedding",
        heads=True,
        is_neox_style=False,
        scaling_factor=4.0,
        mscale=0.7,
        mscale_all_dim=0.5,
    ),
    rotary("DeepseekScalingRotaryEmbedding", heads=True, is_neox_style=False, scaling_factor=4.0, rotary_dim=16),
    rotary("MRotaryEmbedding", mrope_section=[4, 6, 6]),
    rotary("MRotaryEmbedding", axes=3, mrope_section=[4, 6, 6]),
    rotary("MRotaryEmbedding", axes=3, mrope_section=[4, 6, 6], is_neox_style=False),
    rotary("MRotaryEmbedding", axes=3, mrope_section=[6, 5, 5], mrope_interleaved=True),
    rotary("MRotaryEmbedding", axes=3, mrope_section=[2, 8, 6], mrope_interleaved=True),
    rotary("MRotaryEmbedding", axes=3, mrope_section=[2, 3, 3], rotary_dim=16),
    rotary("YaRNScalingMRotaryEmbedding", module=f"{ROPE}.mrope", axes=3, mrope_section=[4, 6, 6], scaling_factor=4.0),
    rotary("Ernie4_5_VLRotaryEmbedding", mrope_section=[6, 6, 4], is_neox_style=False),
    rotary("Ernie4_5_VLRotaryEmbedding", axes=3, mrope_section=[6, 6, 4], is_neox_style=False),
    rotary("Ernie4_5_VLRotaryEmbedding", axes=3, mrope_section=[6, 6, 4]),
    rotary("BailingMRotaryEmbedding", mrope_section=[4, 6, 6], video_rope=True),
    rotary("BailingMRotaryEmbedding", mrope_section=[4, 6, 6], scaling_factor=4.0, is_neox_style=False),
    rotary(
        "Phi3LongRoPEScaledRotaryEmbedding",
        original_max_position_embeddings=32,
        short_factor=[1.0 + 0.1 * index for index in range(FREQUENCIES)],
        long_factor=[2.0 + 0.3 * index for index in range(FREQUENCIES)],
    ),
    rotary(
        "Phi3LongRoPEScaledRotaryEmbedding",
        original_max_position_embeddings=4,
        rotary_dim=16,
        short_factor=[1.0] * 8,
        long_factor=[3.0] * 8,
        long_mscale=1.5,
    ),
]


# -- running them -----------------------------------------------------------------------------------------------------


def bridge_of(layer: nn.Module) -> Bridge:
    """Bridge a layer, as it happens when a model is loaded."""
    from sglang_fl.layers import classes

    classes.prepare(nn.ModuleDict({"layer": layer}))
    target = getattr(layer, "quant_method", layer)
    bridge = classes.BRIDGE.find(target)
    assert bridge is not None, f"{type(target).__name__} has no bridge"
    return bridge


def native(layer: Any, args: Sequence[Any], given: dict[str, Any]) -> Any:
    """SGLang's own forward. If positions lie on one axis, Bailing's and Ernie's are their forward itself."""
    base = type(layer)
    with_native = hasattr(base, "forward_native") and base.__name__ != "BailingMRotaryEmbedding"
    return (base.forward_native if with_native else base.forward)(layer, *cloned(args), **cloned(given))


def cloned(value: Any, dtype: torch.dtype | None = None) -> Any:
    if isinstance(value, Tensor):
        return value.clone().to(dtype) if dtype is not None and value.is_floating_point() else value.clone()
    if isinstance(value, tuple | list):
        return [cloned(item, dtype) for item in value]
    if isinstance(value, dict):
        return {key: cloned(item, dtype) for key, item in value.items()}
    return value


def calls_of(operator: str) -> int:
    return sum(count for (name, _), count in get_default_manager().call_counts().items() if name == operator)


def results(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [item for item in value if isinstance(item, Tensor)]


def compare(ours: Any, theirs: Any, **tolerance: float) -> None:
    assert len(results(ours)) == len(results(theirs))
    for actual, expected in zip(results(ours), results(theirs), strict=True):
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual.to(expected.dtype), expected, **tolerance)


def seed(text: str) -> None:
    torch.manual_seed(zlib.crc32(text.encode()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bridge_gives_what_sglangs_own_forward_gives(case: Case, dtype: torch.dtype) -> None:
    seed(case.name)
    layer = case.build(dtype)
    exact = copy.deepcopy(layer).float()
    bridge = bridge_of(layer)
    assert bridge.fl_operator == case.operator
    tolerance = OPERATORS[case.operator].tolerances[BF16 if case.looser else dtype]
    for label, (args, given) in case.calls(dtype).items():
        before = calls_of(case.operator)
        ours = layer(*args_of(args), **given)
        assert calls_of(case.operator) == before + 1, label
        for result in results(ours):
            assert result.dtype is dtype, label
        theirs = native(layer, args, given)
        wide = native(exact, cloned(args, F32), cloned(given, F32))
        compare(ours, [x.to(dtype) for x in results(wide)], rtol=tolerance.rtol, atol=tolerance.atol)
        if dtype is BF16:
            compare(ours, theirs, **NATIVE_BF16)
        else:
            compare(ours, theirs, rtol=tolerance.rtol, atol=tolerance.atol)
    assert not bridges.fallen_through


def args_of(args: Sequence[Any]) -> list[Any]:
    """Arguments that may be overwritten, with the strides of the originals."""
    copies: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor) and not arg.is_contiguous():
            room = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype)
            copies.append(room.copy_(arg))
        else:
            copies.append(arg.clone() if isinstance(arg, Tensor) else arg)
    return copies


def test_every_row_has_a_case() -> None:
    covered = {case.name.partition(",")[0] for case in CASES} | {"TopK", "UnquantizedFusedMoEMethod"}
    assert set(ROWS) <= covered


# -- routing ----------------------------------------------------------------------------------------------------------


def logits(tokens: int, dtype: torch.dtype = F32) -> Tensor:
    """Distinct in each row, in every dtype."""
    return torch.linspace(-4.0, 4.0, EXPERTS)[torch.rand(tokens, EXPERTS).argsort(-1)].to(dtype)


def dense(weights: Tensor, ids: Tensor) -> Tensor:
    """Weights by expert, ``[tokens, EXPERTS]``: the order of a token's experts means nothing."""
    return torch.zeros(len(ids), EXPERTS).scatter_(1, ids.long(), weights.float())


def topk_layer(**options: Any) -> Any:
    if options.pop("bias", False):
        options["correction_bias"] = 0.3 * torch.rand(EXPERTS)
    return in_tree("TopK")(TOPK, layer_id=0, **options)


GROUPS = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
SCALED = {"routed_scaling_factor": 2.5, "apply_routed_scaling_factor_on_output": True}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("topk_softmax", {}),
    ("topk_softmax", {"renormalize": False}),
    ("topk_softmax", {"bias": True, "routed_scaling_factor": 2.5}),
    ("topk_softmax", SCALED),
    ("topk_softmax", {**SCALED, "renormalize": False}),
    ("topk_sigmoid", {"scoring_func": "sigmoid"}),
    ("topk_sigmoid", {"scoring_func": "sigmoid", "renormalize": False, "bias": True}),
    ("topk_sigmoid", {"scoring_func": "sigmoid", "bias": True, **SCALED}),
    ("topk_sigmoid", {"scoring_func": "sigmoid", "renormalize": False, **SCALED}),
    ("grouped_topk", GROUPS),
    ("grouped_topk", {**GROUPS, "renormalize": False}),
    ("grouped_topk", {**GROUPS, "scoring_func": "sigmoid", **SCALED}),
    ("grouped_topk", {**GROUPS, **SCALED, "renormalize": False}),
    ("grouped_topk", {**GROUPS, "bias": True}),
    ("grouped_topk", {**GROUPS, "bias": True, "scoring_func": "sigmoid", **SCALED}),
    ("grouped_topk", {**GROUPS, "bias": True, "renormalize": False, "routed_scaling_factor": 2.5}),
    ("grouped_topk", {**GROUPS, "bias": True, "num_expert_group": 1, "topk_group": 1}),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("operator", "options"), ROUTES, ids=lambda value: str(value).replace(" ", ""))
def test_routing_gives_what_sglangs_own_forward_gives(
    operator: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """SGLang's own forward takes the scores of half logits in half, its GPU kernels and the operators in float32."""
    seed(str(options))
    layer = topk_layer(**options)
    bridge = bridge_of(layer)
    assert bridge.fl_operator == operator
    for tokens in (1, TOKENS):
        scores = logits(tokens, dtype)
        ours = layer(normal(tokens, 8, dtype=dtype), scores)
        theirs = native(layer, (normal(tokens, 8), scores.float()), {})
        assert type(ours) is type(theirs)
        assert (ours.topk_weights.dtype, ours.topk_ids.dtype) == (F32, torch.int32)
        assert ours.router_logits is scores
        torch.testing.assert_close(dense(*ours[:2]), dense(*theirs[:2]), rtol=2e-5, atol=2e-6)
    empty = layer(normal(0, 8, dtype=dtype), logits(0, dtype))  # with groups SGLang's own forward fails here
    assert empty.topk_weights.shape == empty.topk_ids.shape == (0, TOPK)
    assert calls_of(operator) == 3


def placement(algorithm: str = "static") -> Any:
    from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo

    physical = torch.randperm(EXPERTS)
    return ExpertLocationDispatchInfo(
        ep_dispatch_algorithm=algorithm,
        partial_logical_to_rank_dispatch_physical_map=physical,
        partial_logical_to_all_physical_map=physical.unsqueeze(-1),
        partial_logical_to_all_physical_map_num_valid=torch.ones(EXPERTS, dtype=torch.int64),
        num_physical_experts=EXPERTS,
    )


@pytest.mark.parametrize("algorithm", ["static", "dynamic"])
@pytest.mark.parametrize("options", [{}, GROUPS], ids=["plain", "grouped"])
def test_routing_names_experts_by_their_place_and_padding_by_none(options: dict[str, Any], algorithm: str) -> None:
    seed(algorithm)
    layer, info = topk_layer(**options), placement(algorithm)
    bridge_of(layer)
    hidden, scores, whole = normal(TOKENS, 8), logits(TOKENS), torch.tensor(4)
    logical = layer(hidden, scores)
    ours = layer(hidden, scores, num_token_non_padded=whole, expert_location_dispatch_info=info)
    expected = info.partial_logical_to_rank_dispatch_physical_map[logical.topk_ids.long()].int()
    assert torch.equal(ours.topk_ids[:4], expected[:4])
    assert torch.equal(ours.topk_ids[4:], torch.full((3, TOPK), -1, dtype=torch.int32))
    assert torch.equal(ours.topk_weights, logical.topk_weights)
    theirs = native(layer, (hidden, scores), {"num_token_non_padded": whole, "expert_location_dispatch_info": info})
    assert torch.equal(ours.topk_ids.sort().values, theirs.topk_ids.int().sort().values)
    assert not bridges.fallen_through


def test_routing_tells_sglang_which_experts_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.moe import topk

    captured: dict[str, Any] = {}

    class Capturer:
        def capture(self, layer_id: int, topk_indices: Tensor) -> None:
            captured["logical"] = (layer_id, topk_indices)

    class Recorder:
        def on_select_experts(self, topk_ids: Tensor) -> None:
            captured["physical"] = topk_ids

    monkeypatch.setattr(topk, "get_global_experts_capturer", Capturer)
    monkeypatch.setattr(topk, "get_global_expert_distribution_recorder", Recorder)
    layer, info = topk_layer(), placement()
    bridge_of(layer)
    ours = layer(normal(TOKENS, 8), logits(TOKENS), expert_location_dispatch_info=info)
    layer_id, logical = captured["logical"]
    assert layer_id == 0
    assert torch.equal(info.partial_logical_to_rank_dispatch_physical_map[logical.long()].int(), ours.topk_ids)
    assert captured["physical"] is ours.topk_ids


# -- experts ----------------------------------------------------------------------------------------------------------

MOE_EXPERTS, MOE_TOPK, MOE_HIDDEN, MOE_INNER = 8, 2, 64, 48


def moe_layer(dtype: torch.dtype = F32, **options: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    given = {"top_k": MOE_TOPK, "num_experts": MOE_EXPERTS, "hidden_size": MOE_HIDDEN, "intermediate_size": MOE_INNER}
    layer = FusedMoE(**{**given, "layer_id": 0, "prefix": "experts", "params_dtype": dtype, **options})
    for parameter in layer.parameters():
        parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return layer


def dispatched(x: Tensor, topk: int = MOE_TOPK, experts: int = MOE_EXPERTS) -> Any:
    """Tokens and their experts, as SGLang's dispatcher hands them to the experts."""
    from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    scores = torch.randn(len(x), experts)
    weights, ids = scores.softmax(-1).topk(topk)
    return StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids.int(), scores))


def native_experts(layer: Any, calls: Any) -> Any:
    """SGLang's own forward."""
    return type(layer.quant_method).forward_native(layer.quant_method, layer, calls)


def experts_of(layer: Any, x: Tensor, weights: Tensor, ids: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """The experts, token by token."""
    total = torch.zeros(x.shape)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            if expert >= 0:
                total[token] += weight * (layer.w2_weight[expert] @ act(layer.w13_weight[expert] @ x[token]))
    return total


GPT_OSS = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "gelu"},
        {"with_bias": True},
        {"with_bias": True, **GPT_OSS},
        {"inplace": False},
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()) or "plain",
)
def test_experts_give_what_sglangs_own_forward_gives(options: dict[str, Any], dtype: torch.dtype) -> None:
    seed(str(options))
    layer = moe_layer(dtype, **options)
    exact = copy.deepcopy(layer).float()
    bridge_of(layer)
    tolerance = OPERATORS["fused_moe"].tolerances[dtype]
    for tokens in (1, TOKENS):
        calls = dispatched(normal(tokens, MOE_HIDDEN, dtype=dtype))
        kept = calls.hidden_states.clone()
        ours = layer.quant_method.apply(layer=layer, dispatch_output=calls)
        assert torch.equal(calls.hidden_states, kept)
        theirs = native_experts(layer, calls)
        wide = native_experts(exact, calls._replace(hidden_states=kept.float()))
        assert type(ours) is type(theirs)
        assert ours.hidden_states.dtype is dtype
        compare(ours, [wide.hidden_states.to(dtype)], rtol=tolerance.rtol, atol=tolerance.atol)
        compare(ours, theirs, **({"rtol": 2e-5, "atol": 1e-5} if dtype is F32 else NATIVE_BF16))
    assert calls_of("fused_moe") == 2
    assert layer.quant_method.apply(layer, dispatched(normal(0, MOE_HIDDEN, dtype=dtype))).hidden_states.shape[0] == 0
    assert not bridges.fallen_through


@pytest.mark.parametrize(
    ("options", "act"),
    [
        ({"activation": "gelu_tanh"}, lambda x: torch.nn.functional.gelu(x[:48], approximate="tanh") * x[48:]),
        ({"activation": "silu", "is_gated": False}, torch.nn.functional.silu),
        ({"activation": "gelu", "is_gated": False}, torch.nn.functional.gelu),
        ({"activation": "relu2", "is_gated": False}, lambda x: torch.relu(x).square()),
    ],
    ids=["gelu_tanh", "silu, no gate", "gelu, no gate", "relu2, no gate"],
)
def test_experts_know_more_activations_than_sglangs_own_forward(
    options: dict[str, Any], act: Callable[[Tensor], Tensor]
) -> None:
    seed(str(options))
    layer = moe_layer(**options)
    bridge_of(layer)
    calls = dispatched(normal(TOKENS, MOE_HIDDEN))
    with pytest.raises((ValueError, RuntimeError)):
        native_experts(layer, calls)
    ours = layer.quant_method.apply(layer, calls).hidden_states
    expected = experts_of(layer, calls.hidden_states, *calls.topk_output[:2], act)
    torch.testing.assert_close(ours, expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("gpu", [False, True])
def test_experts_are_scaled_once(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By us as on SGLang's GPUs, whose native experts leave it out, unless the block around them does it.

    On SGLang's GPUs no block does.
    """
    seed("scaled experts")

    class Glm4MoeSparseMoeBlock(nn.Module):
        """Stands for the class of this name."""

        def __init__(self, experts: nn.Module) -> None:
            super().__init__()
            self.experts = experts

    alone, held = moe_layer(routed_scaling_factor=2.5), moe_layer(routed_scaling_factor=2.5)
    for ours, whole in zip(held.parameters(), alone.parameters(), strict=True):
        ours.copy_(whole)
    bridge_of(alone)
    from sglang.srt.utils import common

    from sglang_fl.layers import classes

    monkeypatch.setattr(common, "is_cuda", lambda: gpu)
    classes.prepare(nn.ModuleDict({"mlp": Glm4MoeSparseMoeBlock(held)}))
    calls = dispatched(normal(TOKENS, MOE_HIDDEN))
    theirs = native_experts(held, calls).hidden_states
    assert calls_of("fused_moe") == 0
    for layer, factor in ((held, 2.5 if gpu else 1.0), (alone, 2.5)):
        ours = layer.quant_method.apply(layer, calls).hidden_states
        torch.testing.assert_close(ours, factor * theirs, rtol=2e-5, atol=1e-5)
    assert calls_of("fused_moe") == 2


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def test_the_weight_of_an_expert_on_its_input_is_honoured() -> None:
    seed("on input")
    layer = moe_layer(apply_router_weight_on_input=True, top_k=1)
    bridge_of(layer)
    calls = dispatched(normal(TOKENS, MOE_HIDDEN), topk=1)
    with pytest.raises(NotImplementedError):
        native_experts(layer, calls)
    ours = layer.quant_method.apply(layer, calls).hidden_states
    weights, ids, _ = calls.topk_output
    expected = experts_of(layer, calls.hidden_states * weights, torch.ones_like(weights), ids, silu_and_mul)
    torch.testing.assert_close(ours, expected, rtol=2e-5, atol=1e-5)


def test_experts_of_two_ranks_add_up_and_padding_adds_nothing() -> None:
    seed("ranks")
    layer, first, second = moe_layer(), *(moe_layer(num_experts=MOE_EXPERTS // 2) for _ in range(2))
    for rank, part in enumerate((first, second)):
        for ours, whole in zip(part.parameters(), layer.parameters(), strict=True):
            ours.copy_(whole[rank * 4 : rank * 4 + 4])
    for each in (layer, first, second):
        bridge_of(each)
    calls = dispatched(normal(TOKENS, MOE_HIDDEN))
    ids = calls.topk_output.topk_ids.clone()
    calls.topk_output.topk_ids[5:] = -1
    total = torch.zeros(TOKENS, MOE_HIDDEN)
    for rank, part in enumerate((first, second)):
        local = torch.where(ids // 4 == rank, ids % 4, -1)
        local[5:] = -1
        chosen = calls.topk_output._replace(topk_ids=local)
        total += part.quant_method.apply(part, calls._replace(topk_output=chosen)).hidden_states
    torch.testing.assert_close(total, layer.quant_method.apply(layer, calls).hidden_states, rtol=2e-5, atol=1e-5)
    expected = experts_of(
        layer, calls.hidden_states, calls.topk_output.topk_weights, calls.topk_output.topk_ids, silu_and_mul
    )
    torch.testing.assert_close(total, expected, rtol=2e-5, atol=1e-5)
    assert not total[5:].any()


def test_experts_are_named_by_the_layer_that_holds_them() -> None:
    layer = moe_layer()
    assert "quant_method" in dict(layer.named_modules())
    bridge_of(layer)
    calls = dispatched(normal(TOKENS, MOE_HIDDEN))
    with policy_context(order("fused_moe", "reference")):
        plain = layer.quant_method.apply(layer, calls).hidden_states
    register_wrong("fused_moe")
    for scope, same in (("other", True), ("layer", False)):
        with policy_context(order(f"fused_moe@{scope}", "impl:vendor.wrong", base="fused_moe")):
            assert torch.equal(layer.quant_method.apply(layer, calls).hidden_states, plain) is same


# -- our code ran -----------------------------------------------------------------------------------------------------


def register_wrong(op_name: str) -> None:
    """An implementation that is off by one; it runs only where a policy asks for it by name."""
    registry = get_default_manager().registry
    right = next(impl.fn for impl in registry.get_implementations(op_name) if impl.impl_id == "reference.torch")

    @functools.wraps(right)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        return result + 1 if isinstance(result, Tensor) else (result[0] + 1, *result[1:])

    registry.register_impl(OpImpl(op_name, "vendor.wrong", BackendImplKind.VENDOR, wrong, vendor="wrong"))


def order(key: str, token: str, base: str | None = None) -> SelectionPolicy:
    orders = {key: [token]} if base is None else {base: ["reference"], key: [token]}
    return SelectionPolicy.from_dict(per_op_order=orders)


SIMPLEST = {case.operator: case for case in reversed(CASES)}
ROUTED = dict(reversed(ROUTES))


@pytest.mark.parametrize("op_name", sorted({op for row in BRIDGES for op in row.bridge.fl_operators()}))
def test_a_wrong_implementation_changes_what_a_layer_gives(op_name: str) -> None:
    seed(op_name)
    get_default_manager().ensure_initialized()
    run: Callable[[], Any]
    if op_name == "fused_moe":
        experts = moe_layer()
        bridge_of(experts)
        calls = dispatched(normal(TOKENS, MOE_HIDDEN))
        run = lambda: experts.quant_method.apply(experts, calls)
    elif op_name in ROUTED:
        router, scores = topk_layer(**ROUTED[op_name]), logits(TOKENS)
        bridge_of(router)
        run = lambda: router(normal(TOKENS, 8), scores)
    else:
        case = SIMPLEST[op_name]
        layer = case.build(F32)
        bridge_of(layer)
        args, given = case.calls(F32)["several tokens"]
        run = lambda: layer(*args_of(args), **given)
    register_wrong(op_name)
    with policy_context(order(op_name, "reference")):
        right = results(run())[0]
    with policy_context(order(op_name, "impl:vendor.wrong")):
        wrong = results(run())[0]
    torch.testing.assert_close(wrong, right + 1)


# -- what a bridge keeps ----------------------------------------------------------------------------------------------


def test_weights_are_read_at_each_call() -> None:
    layer = randomized(in_tree("RMSNorm")(HIDDEN))
    bridge_of(layer)
    x = normal(TOKENS, HIDDEN)
    before = layer(x)
    layer.weight.mul_(2.0)
    torch.testing.assert_close(layer(x), 2 * before)
    layer.weight = nn.Parameter(layer.weight * 2.0)
    torch.testing.assert_close(layer(x), 4 * before)


def test_a_rotary_table_that_grew_is_used() -> None:
    seed("grow")
    case = rotary("RotaryEmbedding")
    layer: Any = case.build(F32)
    bridge_of(layer)
    layer(*case.calls(F32)["several tokens"][0])
    layer._ensure_cos_sin_cache_length(POSITIONS + 10)
    query, key = normal(1, HEADS * HEAD_DIM), normal(1, KV_HEADS * HEAD_DIM)
    args = (torch.tensor([POSITIONS + 5]), query, key)
    compare(layer(*args_of(args)), native(layer, args, {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rotary_table_in_float32_is_used_as_it_is(dtype: torch.dtype) -> None:
    from sglang.srt.environ import envs

    seed("wide table")
    case = rotary("RotaryEmbedding")
    with envs.SGLANG_ROPE_CACHE_FP32.override(True):
        layer: Any = case.build(dtype)
    table = layer.cos_sin_cache
    assert table.dtype is F32
    bridge_of(layer)
    tolerance = OPERATORS["rotary_embedding"].tolerances[dtype]
    args, _ = case.calls(dtype)["several tokens"]
    compare(layer(*args_of(args)), native(layer, args, {}), rtol=tolerance.rtol, atol=tolerance.atol)
    assert layer.cos_sin_cache is table


def test_a_rotary_embedding_takes_an_empty_batch() -> None:
    """SGLang's own forward does not."""
    for case in (rotary("RotaryEmbedding"), rotary("MRotaryEmbedding", axes=3, mrope_section=[4, 6, 6])):
        layer = case.build(F32)
        bridge_of(layer)
        positions = torch.empty((3, 0) if "axes" in case.name else (0,), dtype=torch.int64)
        query, key = normal(0, HEADS * HEAD_DIM), normal(0, KV_HEADS * HEAD_DIM)
        assert [x.shape for x in layer(positions, query, key)] == [query.shape, key.shape]


def test_a_rotation_is_in_place() -> None:
    """Llama 4 reads the rotated parts from the projection; SGLang's own forward, which is not in place, leaves it."""
    seed("in place")
    layer = rotary("RotaryEmbedding").build(F32)
    bridge_of(layer)
    projection, positions = normal(TOKENS, 2 * HEADS * HEAD_DIM), torch.arange(TOKENS)
    expected = native(layer, (positions, *projection.chunk(2, dim=-1)), {})
    layer(positions, *projection.chunk(2, dim=-1))
    compare(projection.chunk(2, dim=-1), expected, rtol=2e-5, atol=2e-6)


def test_one_tensor_as_query_and_key_is_turned_once() -> None:
    """Sparse attention passes its key as both, where it needs no query."""
    seed("alias")
    layer = rotary("RotaryEmbedding").build(F32)
    bridge_of(layer)
    key, positions = normal(TOKENS, HEAD_DIM), torch.arange(TOKENS)
    expected = native(layer, (positions, key, key), {})
    compare(layer(positions, key, key), expected, rtol=2e-5, atol=2e-6)


def test_deepseeks_rotation_in_halves_keeps_the_shape() -> None:
    """SGLang's own forward adds a dimension of one here."""
    seed("deepseek")
    case = rotary("DeepseekScalingRotaryEmbedding", heads=True, scaling_factor=4.0)
    layer = case.build(F32)
    bridge_of(layer)
    args, given = case.calls(F32)["several tokens"]
    ours = layer(*args_of(args), **given)
    assert [x.shape for x in ours] == [x.shape for x in args[1:]]
    compare(ours, [x.squeeze(0) for x in native(layer, args, given)], rtol=2e-5, atol=2e-6)


def test_axes_that_are_interleaved_as_in_glm_follow_sglangs_map() -> None:
    """SGLang's own forward does not know this order; its GPU kernel reads it from this map."""
    seed("glm")
    sections = [2, 8, 6]
    case = rotary(
        "MRotaryEmbedding", axes=3, mrope_section=sections, mrope_interleaved=True, mrope_interleaved_glm=True
    )
    layer: Any = case.build(F32)
    bridge_of(layer)
    (positions, query, key), _ = case.calls(F32)["several tokens"]
    plain: Any = rotary("RotaryEmbedding").build(F32)
    chosen = positions[layer.axis_map].t()  # the position that turns each frequency of each token
    cos, sin = plain.cos_sin_cache.chunk(2, dim=-1)
    frequencies = torch.arange(FREQUENCIES)
    plain.cos_sin_cache = torch.cat((cos[chosen, frequencies], sin[chosen, frequencies]), dim=-1)
    expected = native(plain, (torch.arange(TOKENS), query, key), {})
    compare(layer(positions, query.clone(), key.clone()), expected, rtol=2e-5, atol=2e-6)
    assert not torch.allclose(native(layer, (positions, query, key), {})[0], expected[0])


def test_bailings_axes_are_ernies_with_positions_that_start_below_zero() -> None:
    """On several axes SGLang has only a GPU kernel, the one of Ernie."""
    seed("bailing")
    options = {"is_neox_style": False}
    case = rotary("BailingMRotaryEmbedding", axes=3, mrope_section=[4, 6, 6], video_rope=True, **options)
    layer: Any = case.build(F32)
    bridge_of(layer)
    ernie: Any = rotary("Ernie4_5_VLRotaryEmbedding", axes=3, mrope_section=[6, 6, 4], **options).build(F32)
    ernie.cos_sin_cache = layer.cos_sin_cache
    (positions, query, key), _ = case.calls(F32)["several tokens"]
    positions = positions - POSITIONS // 4
    expected = native(ernie, (positions - layer.position_start, query, key), {})
    compare(layer(positions, query.clone(), key.clone()), expected, rtol=2e-5, atol=2e-6)


def test_the_first_position_without_a_row_for_short_texts_moves_a_step_to_the_table_for_long_ones() -> None:
    """SGLang's own class moves it one position later, and turns that one by row 0 of the second table."""
    seed("long")
    case = next(case for case in CASES if case.name.startswith("Phi3LongRoPE"))
    layer: Any = case.build(F32)
    bridge_of(layer)
    short = layer.original_max_position_embeddings
    (_, query, key), _ = case.calls(F32)["several tokens"]
    before = torch.tensor([0, 1, 2, 3, 4, 5, short - 1])[-TOKENS:]
    compare(layer(*args_of((before, query, key))), native(layer, (before, query, key), {}), rtol=2e-5, atol=2e-6)
    further = torch.tensor([0, 1, 2, 3, 4, short, short + 1])[-TOKENS:]
    right = native(layer, (further, query, key), {})
    found = layer(*args_of((further[:-1], query[:-1], key[:-1])))
    compare(found, tuple(part[:-1] for part in right), rtol=2e-5, atol=2e-6)


# -- SGLang's own choice among backends --------------------------------------------------------------------------------


def backends() -> Any:
    from sglang.kernels.spec import KernelBackend

    return KernelBackend


@pytest.mark.parametrize("name", ["TORCH", "TRITON", "TORCH_COMPILE"])
def test_a_call_that_names_a_backend_is_refused_where_our_operator_runs(name: str) -> None:
    layer, x = in_tree("SiluAndMul")(), normal(TOKENS, HIDDEN)
    backend = backends()[name]
    expected = layer(x, backend=backends().TORCH)  # as long as the layer is SGLang's
    bridge_of(layer)
    torch.testing.assert_close(layer(x, backend=None), expected)
    with pytest.raises(ValueError, match=rf"SiluAndMul\(.*{name}.*SGLANG_FL_PER_OP"):
        layer(x, backend=backend)
    assert calls_of("silu_and_mul") == 1


def test_a_call_that_names_a_backend_is_sglangs_where_its_own_code_runs() -> None:
    from sglang_fl.layers import classes

    layer, x = in_tree("RMSNorm")(HIDDEN, var_hidden_size=32), normal(TOKENS, HIDDEN)
    classes.prepare(nn.ModuleDict({"layer": layer}))
    torch.testing.assert_close(layer(x, backend=backends().TORCH), native(layer, (x,), {}))


def test_a_backend_for_all_layers_is_refused_wherever_it_is_imported_from() -> None:
    from sglang.kernels import fused_op

    from sglang import kernels

    for module in (kernels, fused_op):
        module.set_fused_op_backend(None)
        with pytest.raises(ValueError, match=r"set_fused_op_backend\(.*TORCH.*SGLANG_FL_PER_OP"):
            module.set_fused_op_backend(backends().TORCH)
    assert fused_op.get_fused_op_backend() is None


def test_a_model_that_calls_the_native_forward_itself_runs_our_operator() -> None:
    """As OLMo 2 does with its norms of queries and keys."""
    layer, x = randomized(in_tree("RMSNorm")(HIDDEN)), normal(TOKENS, HIDDEN)
    bridge_of(layer)
    compare(layer.forward_native(x), native(layer, (x,), {}), rtol=2e-5, atol=2e-6)
    assert calls_of("rms_norm") == 1


def test_a_copy_of_a_bridged_layer_has_its_own_weight() -> None:
    layer, x = randomized(in_tree("RMSNorm")(HIDDEN)), normal(TOKENS, HIDDEN)
    bridge_of(layer)
    copied = copy.deepcopy(layer)
    copied.weight.mul_(2.0)
    torch.testing.assert_close(copied(x), 2 * layer(x))
    torch.testing.assert_close(copied.forward_native(x), 2 * layer(x))
    assert calls_of("rms_norm") == 4


def test_sglangs_choice_is_told_beside_ours() -> None:
    from sglang_fl.layers import classes

    scaled, pinned = in_tree("RMSNorm")(HIDDEN, var_hidden_size=32), in_tree("RMSNorm")(HIDDEN, force_native=True)
    norms = [in_tree("RMSNorm")(HIDDEN) for _ in range(2)]
    survey = classes.prepare(nn.ModuleList([*norms, scaled, pinned, in_tree("XIELU")(dtype=F32)]))
    assert set(survey.choices) == {
        LayerChoice("RMSNorm", 2, ("rms_norm",), "forward_native"),
        LayerChoice("RMSNorm", 1, ("rms_norm",), "forward_native", "the mean over a part of the row"),
        LayerChoice("RMSNorm", 1, ("rms_norm",), "forward_native", "its constructor has pinned it"),
        LayerChoice("XIELU", 1, ("xielu",), "forward"),
    }


# -- what stays with SGLang -------------------------------------------------------------------------------------------


def make(name: str, *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: in_tree(name)(*args, **options)


def shared_topk(**shared: Any) -> Any:
    """A router of a model whose shared experts are among the routed ones."""
    from sglang.srt.configs.shared_experts import SharedExpertsConfig
    from sglang.srt.runtime_context import get_model

    with get_model().override(shared_experts=SharedExpertsConfig(**shared)):
        return topk_layer()


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (make("RMSNorm", HIDDEN, var_hidden_size=32), "a part of the row"),
        (make("Gemma4RMSNorm", HIDDEN, scale_shift=0.5), r"0\.5 \+ weight"),
        (make("TopK", 2, layer_id=0, custom_routing_function=print), "own function"),
        (make("TopK", 2, layer_id=0, scoring_func="sqrtsoftplus"), "sqrtsoftplus"),
        (lambda: shared_topk(num_fused_shared_experts=1), "shared experts"),
        (lambda: shared_topk(num_fused_shared_experts=1, use_waterfill=True), "shared experts"),
        (lambda: moe_layer(activation="situ"), "activation 'situ'"),
        (lambda: moe_layer(gemm1_alpha=1.5, gemm1_clamp_limit=7.0), "factor 1.5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_layer_that_computes_something_else_stays_sglangs(build: Callable[[], Any], reason: str) -> None:
    from sglang_fl.layers import classes

    layer = build()
    target = getattr(layer, "quant_method", layer)
    row = bridges.find(type(target))
    assert row is not None
    with pytest.raises(Unbridged, match=reason):
        row.bridge(target, target.forward_native)
    survey = classes.prepare(nn.ModuleDict({"layer": layer}))
    assert survey.native == {type(target).__name__: 1}
    assert target._forward_method.__name__ in ("forward_native", "forward_cpu")


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ({"no_combine": True, "inplace": False}, "not summed"),
        ({"swiglu_limit": 10.0}, "limited SwiGLU"),
        ({"gemm1_clamp_limit": 7.0}, "limited SwiGLU"),
        ({**GPT_OSS, "gate_up_interleaved": False}, "scaled SwiGLU"),
        ({**GPT_OSS, "gemm1_beta": 0.5}, "scaled SwiGLU"),
        ({"activation": "situ", "routed_scaling_factor": 2.5}, "scaled by 2.5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_experts_that_sglang_would_compute_wrong_are_refused(options: dict[str, Any], feature: str) -> None:
    with pytest.raises(ValueError, match=feature):
        bridge_of(moe_layer(**options))


@pytest.mark.parametrize(
    ("build", "args", "given", "reason"),
    [
        (
            make("RMSNorm", HIDDEN),
            (torch.ones(2, HIDDEN, dtype=BF16), torch.ones(2, HIDDEN)),
            {"post_residual_addition": torch.ones(2, HIDDEN)},
            "a residual of another type",
        ),
        (
            make("RMSNorm", HIDDEN, fp32_residual=True),
            (torch.ones(2, HIDDEN, dtype=BF16), torch.ones(2, HIDDEN, dtype=BF16)),
            {},
            "returned in float32",
        ),
        (make("RMSNorm", HIDDEN, override_orig_dtype=F32), (torch.ones(2, HIDDEN, dtype=BF16),), {}, "a result"),
        (
            make("RMSNorm", HIDDEN, cast_x_before_out_mul=True, weight_dtype=F32),
            (torch.ones(2, HIDDEN, dtype=BF16),),
            {},
            "a result",
        ),
        (make("GemmaRMSNorm", HIDDEN), (torch.ones(2, HIDDEN), torch.ones(2, HIDDEN, dtype=BF16)), {}, "another type"),
        (make("Gemma3RMSNorm", HIDDEN), (torch.ones(2, HIDDEN), torch.ones(2, HIDDEN, dtype=BF16)), {}, "another type"),
        (
            make("TopK", 2, layer_id=0, scoring_func="sigmoid"),
            (torch.ones(3, 8), torch.rand(3, 8)),
            {"dynamic_expert_bias": torch.rand(3, 8)},
            "a bias for each token",
        ),
        (
            make("TopK", 5, layer_id=0, use_grouped_topk=True, num_expert_group=4, topk_group=1),
            (torch.ones(3, 8), torch.rand(3, 16)),
            {},
            "than its groups have",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_call_that_no_operator_takes_runs_sglangs_own_forward_and_is_counted(
    build: Callable[[], Any], args: tuple[Any, ...], given: dict[str, Any], reason: str
) -> None:
    layer = build()
    bridge = bridge_of(layer)
    ours, theirs = layer(*args_of(args), **given), native(layer, args, given)
    compare(ours, theirs, rtol=0, atol=0)
    for actual, expected in zip(results(ours), results(theirs), strict=True):
        assert actual.dtype is expected.dtype
    ((name, said),) = bridges.fallen_through
    assert (name, bridges.fallen_through[name, said]) == (type(layer).__name__, 1)
    assert reason in said
    assert calls_of(bridge.fl_operator) == 0


@pytest.mark.parametrize("name", ["RotaryEmbedding", "MRotaryEmbedding"])
def test_a_rotation_that_also_writes_the_cache_is_left_to_sglang(name: str) -> None:
    case = rotary(name)
    layer = case.build(F32)
    bridge_of(layer)
    with pytest.raises(AssertionError, match="not supported"):  # what SGLang says
        layer(*case.calls(F32)["one token"][0], fused_set_kv_buffer_arg=object())
    assert sum(bridges.fallen_through.values()) == 1
