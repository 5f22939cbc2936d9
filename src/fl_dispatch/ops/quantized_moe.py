"""Mixtures of experts with quantized weights: the products of :mod:`.quantization`, expert by expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .declaration import Sample, Work
from .inputs import mixtures, shapes
from .inputs.mixtures import Mixture
from .moe import PLAIN_ACTIVATIONS, Product, experts, mixture, read_experts
from .quantization import FP4, FP8, ROW, TENSOR, quantize, rounded, scaled_linear, weight_only_linear

ScaledLinear = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, str, int], Tensor]
"""A function with the signature of the operator ``scaled_linear``."""
NARROW_PAIRS = 32
"""(token, choice) pairs for each expert beyond which matrix units may sum the first bfloat16 product with blocks in
fewer bits."""
QUANTIZED_OTHERWISE = 2**15
"""Tolerance for intermediates of such a sum that round to another quantized number, as narrow terms (together 1/16).
On an H100 with 512 and 4,096 tokens of DeepSeek-V2-Lite's shape, results had errors of 0.0044 of their root mean
square, and at most 0.085; the quantization itself has an error of 0.044."""


def _work(
    hidden_states: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    expert_map: Tensor | None,
) -> Work:
    chosen, distinct = read_experts(topk_ids, expert_map)
    (_, rows, _), hidden = w13.shape, hidden_states.shape[1]
    numbers = rows * hidden + hidden * (rows if activation in PLAIN_ACTIVATIONS else rows // 2)
    expert = sum(part[0].nbytes for part in (w13, w13_scale, w2, w2_scale) if len(part))
    moved = 2 * hidden_states.nbytes
    choices = topk_ids.numel() * (topk_weights.element_size() + topk_ids.element_size())
    return Work(moved + choices + expert * distinct, 2 * numbers * chosen)


def _sampler(arguments: Callable[[Mixture], tuple[Any, ...]], kind: str) -> Callable[..., Sample]:
    def sample(label: str, *sizes: Any, serving: bool = True, **rest: Any) -> Sample:
        return Sample(f"{kind}, {label}", arguments(Mixture(*sizes, **rest)), serving)

    return sample


# -- rows quantized too -----------------------------------------------------------------------------------------------


def _scaled_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    def source(kind: torch.dtype, named: str = "", **rest: Any) -> Callable[..., Sample]:
        name = str(kind).removeprefix("torch.")
        return _sampler(mixtures.scaled(dtype, device, generator, kind, **rest), f"{name}{named}")

    for kind in (torch.int8, FP8):
        sample = source(kind)
        yield sample("decode, 16 tokens, 32 experts", 16, 32, 4, 128, 24)
        yield sample("prefill, 40 tokens, 8 experts", 40, 8, 2, 128, 112, out=True)
        yield sample("one token", 1, 8, 2, 256, 64)
        yield sample("half of the experts is here", 20, 32, 4, 96, 64, local=range(16, 32))
        yield sample("no gate, biases", 9, 8, 4, 90, 64, "relu2_no_mul", biases=True, serving=False)
        yield sample("weights on the input, odd sizes", 5, 5, 2, 67, 33, on_input=True, serving=False)
        yield sample("padding tokens with out", 8, 6, 2, 64, 32, padding=3, out=True, serving=False)
        yield sample("empty rank: no expert is here", 1, 8, 1, 64, 32, local=[], serving=False)
        yield sample("empty batch", 0, 8, 2, 64, 32, serving=False)
        yield source(kind, ", scales of the rows given", static=True)("9 tokens", 9, 8, 2, 64, 32)
    blocks = source(FP8, " in blocks of 128", block=128)
    yield blocks("17 tokens", 17, 8, 2, 256, 128)
    yield source(FP8, " in blocks of 32", block=32)("many tokens of two experts", 40, 2, 2, 96, 64, serving=False)
    yield source(FP8, " in blocks of 32", block=32)(
        "short last ones, biases", 5, 4, 2, 72, 48, biases=True, serving=False
    )


def sums_narrow(dtype: torch.dtype, pairs: int, experts: int, block_size: int) -> bool:
    """Whether the first fp8 product, too, may be summed with fewer bits than float32 has.

    Args:
        dtype: dtype of ``hidden_states``.
        pairs: (token, choice) pairs; a kernel may count the tokens rounded up to a power of two.
        experts: number of experts on all ranks.
    """
    return block_size > 0 and dtype is torch.bfloat16 and pairs > NARROW_PAIRS * experts


def _fp8_terms(
    hidden_states: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor, expert_map: Tensor | None, block_size: int
) -> int:
    """Return the narrow terms of the second product.

    The first product's results are near float32; if a kernel sums them narrowly, some are quantized to another number.
    """
    if w2.dtype is not FP8:
        return 0
    experts = len(w13) if expert_map is None else len(expert_map)
    narrow = sums_narrow(
        hidden_states.dtype, 2 * topk_ids.numel(), experts, block_size
    )  # the most tokens that a kernel counts
    return w2.shape[2] + narrow * QUANTIZED_OTHERWISE


def scaled_experts(multiply: ScaledLinear) -> Callable[..., Tensor]:
    """Return the operator ``scaled_moe`` with another product of an expert."""

    def scaled_moe(
        hidden_states: Tensor,
        w13: Tensor,
        w13_scale: Tensor,
        w2: Tensor,
        w2_scale: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: str = "silu",
        apply_router_weight_on_input: bool = False,
        expert_map: Tensor | None = None,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        x13_scale: Tensor | None = None,
        x2_scale: Tensor | None = None,
        block_size: int = 0,
        out: Tensor | None = None,
    ) -> Tensor:
        """:data:`fused_moe` with quantized products: :data:`quantize` of the rows, then :data:`scaled_linear`.

        Intermediates are at least float32, because rounding to a half type would change their quantization. Matrix
        units may sum fp8 with fewer bits in the second product, and in the first one if :func:`sums_narrow` allows it.

        Args:
            hidden_states: ``[tokens, hidden]``, floating point.
            w13: ``[local experts, 2 * inner, hidden]``, int8 or float8_e4m3fn, to which rows are quantized, too; ``[..,
                inner, ..]`` without a gate.
            w13_scale: ``[local experts, rows of w13, 1]``, float32; with blocks ``[local experts, ceil(rows /
                block_size), ceil(hidden / block_size)]``.
            w2: ``[local experts, hidden, inner]``, dtype of ``w13``.
            w2_scale: the scale of ``w2``, in the form of ``w13_scale``.
            topk_weights: see ``fused_moe``.
            topk_ids: see ``fused_moe``.
            activation: see ``fused_moe``.
            apply_router_weight_on_input: see ``fused_moe``.
            expert_map: see ``fused_moe``.
            w13_bias: ``[local experts, rows of w13]``, floating point, or ``None``.
            w2_bias: ``[local experts, hidden]``, floating point, or ``None``.
            x13_scale: ``[local experts]``, float32: a given scale of the first product's rows; with ``None`` each row,
                or each ``block_size`` elements, get a scale. Only without blocks.
            x2_scale: the scale of the second product's rows, in the form of ``x13_scale``.
            block_size: see ``scaled_linear``.
            out: see ``fused_moe``.

        Returns:
            Shape and dtype of ``hidden_states``: ``out`` if given. With several ranks a partial sum.
        """
        kind = "int8" if w13.dtype is torch.int8 else "float8_e4m3fn"  # verification widens what is not integer

        def product(weight: Tensor, scale: Tensor, bias: Tensor | None, given: Tensor | None) -> Product:
            def of(expert: int, x: Tensor) -> Tensor:
                if given is None:
                    rows = quantize.reference(x, kind, block_size or ROW)
                else:
                    rows = quantize.reference(x, kind, TENSOR, given[expert : expert + 1])
                added = None if bias is None else bias[expert]
                return multiply(*rows, weight[expert], scale[expert], added, "float32", block_size)

            return of

        routing = (topk_weights, topk_ids, activation, apply_router_weight_on_input, expert_map, out)
        first, second = product(w13, w13_scale, w13_bias, x13_scale), product(w2, w2_scale, w2_bias, x2_scale)
        return mixture(hidden_states, w13.shape[0], *routing, first, second)

    return scaled_moe


scaled_moe = experts(
    weights=("w13", "w13_scale", "w2", "w2_scale"),
    samples=_scaled_samples,
    shapes=shapes.scaled_mixture,
    aliases=("w8a8_moe", "fused_moe_w8a8", "block_scaled_moe"),
    narrow_terms=_fp8_terms,
    work=_work,
)(scaled_experts(scaled_linear.reference))


# -- weights alone quantized ------------------------------------------------------------------------------------------


def _weight_only_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Sample]:
    def source(named: str, bits: int, group: int, zeros: bool = False) -> Callable[..., Sample]:
        arguments = mixtures.weight_only(dtype, device, generator, bits, group, zeros)
        return _sampler(arguments, f"{bits} bits, {named}")

    for bits in (4, 8):
        sample = source("groups of 32", bits, 32)
        yield sample("decode, 16 tokens, 32 experts", 16, 32, 4, 128, 32)
        yield sample("prefill, 40 tokens, 8 experts", 40, 8, 2, 128, 96, out=True)
        yield sample("half of the experts is here", 20, 32, 4, 96, 64, local=range(16, 32))
        yield sample("swigluoai, biases", 9, 8, 4, 96, 64, "swigluoai", biases=True, serving=False)
        yield sample("weights on the input, biases", 5, 8, 2, 64, 32, on_input=True, biases=True, serving=False)
        yield sample("padding tokens with out", 8, 6, 2, 64, 32, padding=3, out=True, serving=False)
        yield sample("empty rank: no expert is here", 1, 8, 1, 64, 32, local=[], serving=False)
        yield sample("empty batch", 0, 8, 2, 64, 32, serving=False)
        yield source("zero points, groups of 16", bits, 16, True)("9 tokens", 9, 8, 2, 64, 48)
        yield source("one scale a column", bits, 64)("one token", 1, 8, 2, 64, 64)
    sample = _sampler(mixtures.weight_only(dtype, device, generator, 4, 32, kind=FP4), "float4, groups of 32")
    yield sample("decode, 16 tokens, 32 experts, as gpt-oss has them", 16, 32, 4, 128, 32, "swigluoai", biases=True)
    yield sample("prefill, 40 tokens, 8 experts", 40, 8, 2, 128, 96, out=True)
    yield sample("half of the experts is here", 20, 32, 4, 96, 64, local=range(16, 32))
    groups = _sampler(mixtures.weight_only(dtype, device, generator, 4, 16, kind=FP4), "float4, groups of 16")
    yield groups("9 tokens", 9, 8, 2, 64, 48)
    sample = _sampler(mixtures.weight_only(dtype, device, generator, 8, 32, kind=FP8), "float8, groups of 32")
    yield sample("decode, 16 tokens, 32 experts", 16, 32, 4, 128, 32)
    yield sample("half of the experts is here", 20, 32, 4, 96, 64, local=range(16, 32))
    for rounding, bits, group, kind in (
        ("int8", 4, 32, torch.int8),
        ("mxfp4", 4, 32, FP4),
        ("mxfp8", 8, 32, FP8),
        ("nvfp4", 4, 16, FP4),
    ):
        arguments = mixtures.weight_only(dtype, device, generator, bits, group, kind=kind, rounding=rounding)
        sample = _sampler(arguments, f"rows of {rounding}")
        # A row's largest magnitude is -127.5 if it is negative, and a sum's last bit decides between -127 and -128.
        activation = "relu2_no_mul" if rounding == "int8" else "silu"
        yield sample("9 tokens", 9, 8, 2, 64, 96, activation)
        yield sample("one token, half of the experts is here", 1, 16, 4, 96, 64, local=range(8, 16))
        yield sample(
            "weights on the input, biases", 5, 4, 2, 64, 32, activation, on_input=True, biases=True, serving=False
        )
        yield sample("no gate, padding tokens with out", 8, 6, 2, 64, 32, "relu2_no_mul", padding=3, out=True)


@experts(
    work=_work,
    weights=("w13", "w13_scale", "w2", "w2_scale", "w13_zero", "w2_zero"),
    samples=_weight_only_samples,
    shapes=shapes.packed_mixture,
    aliases=("wna16_moe", "w4a16_moe", "fused_moe_wna16"),
    later=("x13_factor", "x2_factor", "rounding"),
)
def weight_only_moe(
    hidden_states: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    expert_map: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    w13_zero: Tensor | None = None,
    w2_zero: Tensor | None = None,
    out: Tensor | None = None,
    x13_factor: Tensor | None = None,
    x2_factor: Tensor | None = None,
    rounding: str = "",
) -> Tensor:
    """:data:`fused_moe` with weights, scales and zero points of :data:`weight_only_linear`.

    With ``rounding`` the rows of each product are first rounded as by quantization; the second product's rows are at
    least float32, because a half type would change their rounding.

    Args:
        hidden_states: ``[tokens, hidden]``, floating point.
        w13: ``[local experts, 2 * inner, hidden / 2]``, uint8 or float4_e2m1fn_x2, or ``[.., hidden]``, int8 or
            float8_e4m3fn; ``[.., inner, ..]`` without a gate.
        w13_scale: ``[local experts, rows of w13, groups]``, dtype of ``hidden_states``.
        w2: ``[local experts, hidden, inner / 2]`` or ``[.., inner]``, dtype of ``w13``.
        w2_scale: ``[local experts, hidden, groups]``, dtype of ``w13_scale``.
        topk_weights: see ``fused_moe``.
        topk_ids: see ``fused_moe``.
        activation: see ``fused_moe``.
        apply_router_weight_on_input: see ``fused_moe``.
        expert_map: see ``fused_moe``.
        w13_bias: see ``fused_moe``.
        w2_bias: see ``fused_moe``.
        w13_zero: shape of ``w13_scale``, int8, or ``None``, see ``weight_only_linear``.
        w2_zero: shape of ``w2_scale``, int8, or ``None``, see ``weight_only_linear``.
        out: see ``fused_moe``.
        x13_factor: ``[local experts]``, float32, or ``None``: factor of the first product's rows before they are
            rounded to NVFP4; the scales of its weights include the inverse.
        x2_factor: the same for the second product.
        rounding: ``"int8"``, ``"mxfp4"``, ``"mxfp8"`` or ``"nvfp4"``, see
            :func:`~fl_dispatch.ops.quantization.rounded`; or empty for no rounding.

    Returns:
        Shape and dtype of ``hidden_states``: ``out`` if given. With several ranks a partial sum.
    """

    def product(
        weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, factor: Tensor | None
    ) -> Product:
        def of(expert: int, x: Tensor) -> Tensor:
            zeros, added = (None if one is None else one[expert] for one in (zero, bias))
            if rounding:
                x = rounded(x, rounding, None if factor is None else factor[expert : expert + 1])
            return weight_only_linear.reference(x, weight[expert], scale[expert], zeros, added)

        return of

    routing = (topk_weights, topk_ids, activation, apply_router_weight_on_input, expert_map, out)
    first = product(w13, w13_scale, w13_zero, w13_bias, x13_factor)
    second = product(w2, w2_scale, w2_zero, w2_bias, x2_factor)
    return mixture(hidden_states, w13.shape[0], *routing, first, second)
