"""Small models in half precision on the emulated NPU, compared with Hugging Face.

The chip's kernels take float16 and bfloat16 and heads of 128, so the families have these sizes here. Half precision may
change a close choice. So two things are compared: the log-probabilities at every generated token, by the bounds of
:mod:`fl_dispatch.cli.half_precision`, and the tokens before the first choice of Hugging Face's float32 model that half
precision could change. Such a choice leads by less than twice the effect of half precision on its logits.

Quantized checkpoints are those of the package's small model, which also has heads of 128. The distance is between the
log-probabilities of all tokens of a text and those of the dequantized network in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import half_types
from fl_dispatch.cli import small_model
from fl_dispatch.cli.half_precision import LARGEST, MEAN, table
from quantized_checkpoints import SCHEMES, Scheme
from quantized_network import network, scores
from running import MAX_TOKENS, PROMPTS, reference_network

FEW = 4
"""Tokens that an engine with a wrong kernel generates for each prompt."""
LISTED_PROMPTS = [*PROMPTS, *([(11 * row + 3 * column) % 400 + 5 for column in range(3)] for row in range(24))]
LISTED_TOKENS = 40
"""Number of tokens for a model that lists tokens. If rounding changes a list or an expert, a token may be at any
distance, so 64 tokens are too few: with them references on a CPU and the chip's kernels had 0.6 to 1.5 of Hugging
Face's mean distance, and with 1,200 tokens 0.86 to 1.06. A text lists all of its first 20 tokens, so 16 showed no wrong
lists."""
HEADS: Mapping[str, Any] = {"head_dim": 128}
LATENT: Mapping[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "head_dim": 64,
    "qk_head_dim": 192,
    "n_routed_experts": 16,
}
"""Four experts per group, because the chip's routing takes three or more."""
SPARSE: Mapping[str, Any] = {**LATENT, "index_head_dim": 128}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "qwen3": HEADS,
    "llama": HEADS,
    "qwen3_moe": HEADS,
    "gemma3": {**HEADS, "query_pre_attn_scalar": 128},
    "deepseek_v3": LATENT,
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": SPARSE,
}
"""Family → fields that differ from its small checkpoint."""
DTYPES = {
    "qwen3": "float16",
    "llama": "float16",
    "qwen3_moe": "float16",
    "gemma3": "bfloat16",
    "deepseek_v3": "bfloat16",
    "deepseek_v32": "bfloat16",
    "glm_moe_dsa": "bfloat16",
}
"""vLLM refuses float16 for Gemma 3; the chip's kernel for the prefill of latent attention takes bfloat16 alone."""

W8A8 = "compressed-tensors W8A8 int8"
INTEGER_SCHEMES = [
    name for name, scheme in SCHEMES.items() if not scheme.layer.startswith(("Fp8", "Mxfp8", "Float4")) and name != W8A8
]
"""The other checkpoints with integer weights, because the chip has no fp8."""


EXPERTS = (W8A8, "compressed-tensors W4A16", "compressed-tensors W8A16 int8", "gptq", "gptq, 8 bits")
"""Schemes with experts that the chip's grouped products take."""


REFUSED_EXPERTS = {
    "compressed-tensors W4A8 int8": "rows are rounded to int8",
    "compressed-tensors W4A8 int8, packed": "rows are rounded to int8",
    "compressed-tensors W4A16, zero points": "zero points in groups",
    "compressed-tensors W8A16 int8, groups": "8 bits in groups",
    "awq": "zero points in groups",
    "compressed-tensors W8A8 int8, static": "scales of rows are given",
}
"""Integer scheme → the reason for which both hosts refuse its experts."""


def expert_kernels(scheme: str) -> tuple[str, ...]:
    """Return the chip's kernels that compute a scheme's experts."""
    return (
        ("npu_grouped_matmul",) if SCHEMES[scheme].rows is None else ("npu_dequant_swiglu_quant", "npu_grouped_matmul")
    )


def quantized_kernels(scheme: str) -> tuple[str, ...]:
    """Return the chip's kernels that a scheme's operators run, in the same order."""
    if "scaled_linear" not in SCHEMES[scheme].operators:
        return ("npu_weight_quant_batchmatmul",)
    return "npu_quantize" if scheme.endswith("static") else "npu_dynamic_quant", "npu_quant_matmul"


def as_near_as_dequantized(
    scheme: Scheme,
    texts: Sequence[Sequence[int]],
    got: torch.Tensor,
    model: Path = small_model.CHECKPOINT,
    compared: float = 1.0,
) -> bool:
    """Whether an engine's float16 log-probabilities are as near to the dequantized float32 network as Hugging Face's in
    float16, and nearer than to the network without quantization; of the nearest share ``compared`` of the tokens."""
    single, half = (scores(network(scheme, 1, dtype, model), texts) for dtype in (torch.float32, torch.float16))
    plain = scores(network(None, model=model), texts)

    def off(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        rows = found - exact  # of each token
        return rows[rows.abs().argsort()[: round(compared * len(rows))]]

    ours, theirs, others = off(got, single), off(half, single), off(got, plain)
    mean = ours.abs().mean() <= MEAN * theirs.abs().mean()
    largest = ours.square().mean().sqrt() <= LARGEST * theirs.square().mean().sqrt()
    return bool(mean) and bool(largest) and bool(ours.square().mean() < others.square().mean())


def asked(family: str) -> Mapping[str, Any]:
    """Return prompts and the number of tokens by which a family is compared."""
    if family in half_types.SPARSE:
        return {"prompts": LISTED_PROMPTS, "max_tokens": LISTED_TOKENS}
    return {"prompts": PROMPTS, "max_tokens": MAX_TOKENS}


def as_near_as_hugging_face(
    family: str, model: Path, prompts: Sequence[list[int]], step: Mapping[str, Any], dtype: str
) -> bool:
    """Whether the log-probabilities at the generated tokens are as near to float32 as Hugging Face's in this dtype."""
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, step["tokens"], strict=True)]
    less = [len(prompt) - 1 for prompt in prompts]
    return half_types.as_near_as_hugging_face(family, model, texts, table(step["rows"]), dtype, less)


def clear_tokens(model: Path, prompts: Sequence[list[int]], tokens: int, dtype: str) -> list[list[int]]:
    """Return Hugging Face's greedy tokens in float32 before the first one that half precision could change."""
    single, half = (reference_network(model, kind) for kind in (torch.float32, getattr(torch, dtype)))
    clear = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        sequence = single.generate(ids, attention_mask=torch.ones_like(ids), **options)
        with torch.inference_mode():
            logits, other = (network(sequence).logits[0, len(prompt) - 1 : -1].float() for network in (single, half))
        best, second = logits.topk(2).values.unbind(-1)
        decided = best - second >= 2 * (logits - other).abs().amax(-1)
        length = int(decided.long().cumprod(0).sum())
        clear.append(sequence[0, len(prompt) : len(prompt) + length].tolist())
    return clear
