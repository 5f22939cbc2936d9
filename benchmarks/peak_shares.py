"""Shares of a GPU's peak that kernels, steps and engines reached: the table of docs/measured/gpu.md.

    python benchmarks/peak_shares.py

A row reads committed results and is bound by memory or by the matrix units. Its share is the time at the data sheet's
rate divided by the measured time. A memory-bound engine counts its weights once for each token; a
matrix-bound one counts its products and its causal attention. No GPU is needed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shapes import SHAPES

RESULTS = Path(__file__).parent / "results"
GPUS = ("H100", "H200")
BANDWIDTH: Mapping[str, float] = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes a second, by NVIDIA's data sheets of the SXM modules."""
MATRIX: Mapping[int, float] = {2: 989e12, 1: 1979e12}
"""Operations a second without sparsity, of both GPUs, by the bytes of a number: bfloat16, and fp8 or int8."""
SHAPE, PROMPT = "llama-3.1-8b", 2048


@cache
def _load(name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((RESULTS / name).read_text())
    return found


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A row of ``fl bench``; ``matrix`` is the bytes of a multiplied number, or None where memory is the bound."""

    op: str
    tokens: int
    width: int
    label: str = ""
    impl: str = "default.triton"
    matrix: int | None = None

    def share(self, file: str, gpu: str) -> float:
        names = {"op_name": self.op, "impl_id": self.impl, "label": self.label}
        wanted = {**names, "tokens": self.tokens, "width": self.width}
        (row,) = (row for row in _load(file)["results"] if wanted.items() <= row.items())
        seconds: float = row["device_us"]["median"] / 1e6
        if self.matrix is None:
            return row["bytes_moved"] / BANDWIDTH[gpu] / seconds
        return row["operations"] / MATRIX[self.matrix] / seconds


@dataclass(frozen=True, kw_only=True)
class Step:
    """A decoding step of ``decode_step.py``: its floor has the bytes, by the copy rate of the same run."""

    numbers: str
    form: str

    def share(self, file: str, gpu: str) -> float:
        found = _load(file)
        step = found["steps"][self.numbers]
        rate = found["copy_TB_per_s"] * 1e12 / BANDWIDTH[gpu]
        share: float = step["floor_us"] * rate / statistics.median(step["times_us"][self.form])
        return share


def _attention_of(config: Mapping[str, Any]) -> int:
    """Return the numbers of a layer's attention weights."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" not in config:
        return int(hidden * config["head_dim"] * 2 * (heads + config["num_key_value_heads"]))
    rank, plain, rotary, value = (
        config[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    query = hidden * heads * (plain + rotary)
    return int(query + hidden * (rank + rotary) + rank * heads * (plain + value) + heads * value * hidden)


def _mlp_of(config: Mapping[str, Any], layer: int) -> tuple[int, int]:
    """Return the numbers of a layer's MLP that one token reads: of products, and of the router."""
    hidden, experts = config["hidden_size"], config.get("num_experts", config.get("n_routed_experts", 0))
    if not experts or layer < config.get("first_k_dense_replace", 0):
        return 3 * hidden * config["intermediate_size"], 0
    read = config["num_experts_per_tok"] + config.get("n_shared_experts", 0)
    return 3 * hidden * config["moe_intermediate_size"] * read, hidden * experts


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A workload of an engine; ``width`` is the bytes of a weight's number, its scales included.

    With ``context``, a token also reads the keys and values of so many tokens before it, in bfloat16.
    """

    workload: str
    width: float = 2.0
    matrix: int | None = None
    kind: str = ""
    shape: str = SHAPE
    cell: str = ""
    context: int = 0

    def share(self, file: str, gpu: str) -> float:
        found = _load(file)
        measured = found["formats"][self.kind] if self.kind else found
        cells = measured["compared"][self.workload]
        usual = ("shipped" if "shipped" in cells else "single") if self.kind else "plugin_shipped"
        rate: float = cells[self.cell or usual]["tokens_per_s"]
        config = SHAPES[self.shape].config
        mlps = [_mlp_of(config, layer) for layer in range(found["machine"]["layers"])]
        products = len(mlps) * _attention_of(config) + sum(product for product, _ in mlps)
        if self.matrix is None:
            plain = sum(router for _, router in mlps) + config["vocab_size"] * config["hidden_size"]
            cached = self.context and len(mlps) * self.context * 2 * config["num_key_value_heads"] * config["head_dim"]
            return rate * (products * self.width + (plain + cached) * 2) / BANDWIDTH[gpu]
        # Both products of attention, over half of the keys by the mean.
        attention = 4 * config["num_attention_heads"] * config["head_dim"] * PROMPT / 2
        return rate * (2 * products / MATRIX[self.matrix] + len(mlps) * attention / MATRIX[2])


FP8 = {"H100": "serve_quantized-fp8-h100-2026-11-26.json", "H200": "serve_quantized-fp8-h200-2026-11-26.json"}
TUNED = {"H100": "serve_vllm-tuned-h100-2026-11-26.json", "H200": "serve_vllm-tuned-h200-2026-11-26.json"}
BYTES, QUANTIZED = {"H200": "2026-11-22-h200-bytes-bfloat16.json"}, {"H100": "operators_quantized-h100-2026-11-26.json"}
NORMS, ATTENTION = {"H200": "2026-11-22-h200-norms-bfloat16.json"}, {"H200": "2026-11-22-h200-attention-bfloat16.json"}
EXPERTS, PRODUCTS = {"H200": "2026-11-22-h200-moe-mla-bfloat16.json"}, {"H200": "2026-11-22-h200-linear-bfloat16.json"}
STEP = {"H100": "decode_step-fused-h100-2026-11-26.json"}
SERVE, SERVE_QUANTIZED = "serve_vllm.py --cells plugin_single", "serve_quantized.py --cells single --formats"
BENCH, FL_BENCH = "kernels_gpu.py bench --op", "fl bench --quick --op"
STEPS, QUANTIZED_STEPS = "serve_vllm.py --cells plugin_steps", "serve_quantized.py --cells steps --formats"
NARROW = "serve_quantized-w4a16-sliced-h200-2026-12-01.json"
FP8_ROW = "serve_quantized-fp8-row-h200-2026-11-30.json"
LONG = "serve_vllm-long-qwen3-8b-h200-2026-11-30.json"
OTHERS = (
    (
        *("Llama-3.1-8B", "llama-3.1-8b", "bf16", 2.0, "", "plugin_steps", ", up to eight steps"),
        *("serve_vllm-steps-llama-3.1-8b-h200-2026-11-30.json", STEPS),
    ),
    (
        *("Llama-3.1-8B", "llama-3.1-8b", "4 bits", 0.5 + 2 / 128, "w4a16", "steps", ", up to eight steps"),
        *(NARROW, f"{QUANTIZED_STEPS} w4a16"),
    ),
    (
        *("Llama-3.2-1B", "llama-3.2-1b", "bf16", 2.0, "", "plugin_shipped", ""),
        *("serve_vllm-steps-llama-3.2-1b-h200-2026-11-28.json", SERVE),
    ),
    (
        *("Llama-3.2-1B", "llama-3.2-1b", "bf16", 2.0, "", "plugin_steps", ", up to eight steps"),
        *("serve_vllm-steps-llama-3.2-1b-h200-2026-11-28.json", STEPS),
    ),
    (
        *("Qwen3-0.6B", "qwen3-0.6b", "bf16", 2.0, "", "plugin_steps", ", up to eight steps"),
        *("serve_vllm-steps-qwen3-0.6b-h200-2026-11-28.json", STEPS),
    ),
    (
        *("Qwen3-8B", "qwen3-8b", "bf16", 2.0, "", "plugin_steps", ", up to eight steps"),
        *("serve_vllm-steps-qwen3-8b-h200-2026-11-29.json", STEPS),
    ),
    (
        *("DeepSeek-V2-Lite", "deepseek-v2-lite", "bf16", 2.0, "", "plugin_shipped", ""),
        *("serve_vllm-deepseek-v2-lite-h200-2026-11-22.json", SERVE),
    ),
    (
        *("DeepSeek-V2-Lite", "deepseek-v2-lite", "fp8 in blocks", 1 + 4 / 128**2, "fp8_blocks", "", ""),
        *("serve_quantized-blocks-deepseek-v2-lite-h100-2026-11-28.json", f"{SERVE_QUANTIZED} fp8_blocks"),
    ),
    (
        *("Qwen3-30B-A3B", "qwen3-30b-a3b", "bf16", 2.0, "", "plugin_shipped", ""),
        *("serve_vllm-qwen3-30b-a3b-h200-2026-11-22.json", SERVE),
    ),
    (
        *("Qwen3-30B-A3B", "qwen3-30b-a3b", "bf16", 2.0, "", "plugin_steps", ", up to eight steps"),
        *("serve_vllm-steps-qwen3-30b-a3b-h200-2026-11-30.json", STEPS),
    ),
    (
        *("Qwen3-30B-A3B", "qwen3-30b-a3b", "fp8", 1.0, "fp8", "shipped", ", up to eight steps"),
        *("serve_quantized-fp8-qwen3-30b-a3b-h200-2026-11-30.json", f"{QUANTIZED_STEPS} fp8"),
    ),
)
"""Engines of other shapes: name, shape, numbers, bytes of one, format, cell, steps, file and command."""
ROWS: tuple[tuple[str, Kernel | Step | Engine, Mapping[str, str], str], ...] = (
    ("engine, bf16, decode, batch 1", Engine(workload="decode, batch 1"), TUNED, SERVE),
    (
        "engine, fp8, decode, batch 1",
        Engine(workload="decode, batch 1", width=1, kind="fp8"),
        {**FP8, "H200": FP8_ROW},
        f"{SERVE_QUANTIZED} fp8",
    ),
    (
        "engine, int8, decode, batch 1",
        Engine(workload="decode, batch 1", width=1, kind="int8"),
        {"H100": "serve_quantized-int8-h100-2026-11-26.json"},
        f"{SERVE_QUANTIZED} int8",
    ),
    (
        "engine, fp8 in blocks, decode, batch 1",
        Engine(workload="decode, batch 1", width=1 + 4 / 128**2, kind="fp8_blocks"),
        {"H100": "serve_quantized-fp8-blocks-fours-h100-2026-11-27.json"},
        f"{SERVE_QUANTIZED} fp8_blocks",
    ),
    (
        "engine, 4 bits, decode, batch 1",
        Engine(workload="decode, batch 1", width=0.5 + 2 / 128, kind="w4a16"),
        {"H100": "serve_quantized-w4a16-h100-2026-11-26.json", "H200": NARROW},
        f"{SERVE_QUANTIZED} w4a16",
    ),
    *(
        (
            f"{name}, {numbers}, decode, batch 1{steps}",
            Engine(workload="decode, batch 1", width=width, kind=kind, shape=shape, cell=cell),
            {file.split("-20")[0].rpartition("-")[2].upper(): file},
            f"{command} --shape {shape}",
        )
        for name, shape, numbers, width, kind, cell, steps, file, command in OTHERS
    ),
    *(
        (
            f"Qwen3-8B, bf16, decode at {context:,} tokens, batch 1",
            Engine(workload=f"long decode, {context}", shape="qwen3-8b", context=context),
            {"H200": LONG},
            f"{SERVE} --shape qwen3-8b --workloads long",
        )
        for context in (32_768, 131_072)
    ),
    ("engine, bf16, prefill, 64 × 2048", Engine(workload="prefill, 64 x 2048", matrix=2), TUNED, SERVE),
    (
        "engine, fp8, prefill, 64 × 2048",
        Engine(workload="prefill, 64 x 2048", matrix=1, kind="fp8"),
        {"H200": FP8["H200"]},
        f"{SERVE_QUANTIZED} fp8",
    ),
    (
        "engine, fp8, prefill, 8 × 2048",
        Engine(workload="prefill, 8 x 2048", matrix=1, kind="fp8"),
        {"H100": FP8["H100"]},
        f"{SERVE_QUANTIZED} fp8",
    ),
    ("step of one token, bf16", Step(numbers="bfloat16", form="fused"), STEP, "decode_step.py --constants"),
    ("step of one token, fp8", Step(numbers="fp8", form="no norms: (2, 2048, 2)"), STEP, "decode_step.py --constants"),
    (
        "`silu_and_mul`, 16,384 × 8192",
        Kernel(op="silu_and_mul", tokens=16384, width=8192),
        BYTES,
        f"{BENCH} silu_and_mul",
    ),
    (
        "`gelu_and_mul`, 16,384 × 8192",
        Kernel(op="gelu_and_mul", tokens=16384, width=8192),
        BYTES,
        f"{BENCH} gelu_and_mul",
    ),
    (
        "`rms_norm` with residual, 16,384 × 8192",
        Kernel(op="rms_norm", tokens=16384, width=8192, label="with residual"),
        NORMS,
        f"{BENCH} rms_norm",
    ),
    (
        "`gemma_rms_norm` with residual, 16,384 × 8192",
        Kernel(op="gemma_rms_norm", tokens=16384, width=8192, label="with residual"),
        NORMS,
        f"{BENCH} gemma_rms_norm",
    ),
    (
        "`rotary_embedding`, 16,384 × 8192",
        Kernel(op="rotary_embedding", tokens=16384, width=8192),
        BYTES,
        f"{BENCH} rotary_embedding",
    ),
    (
        "`kv_cache_write`, 16,384 × 1024",
        Kernel(op="kv_cache_write", tokens=16384, width=1024),
        BYTES,
        f"{BENCH} kv_cache_write",
    ),
    (
        "`rms_norm_quantize`, 16,384 × 4096",
        Kernel(op="rms_norm_quantize", tokens=16384, width=4096),
        QUANTIZED,
        f"{FL_BENCH} rms_norm_quantize",
    ),
    (
        "`linear`, 1 row, 28672 × 4096",
        Kernel(op="linear", tokens=1, width=4096, label="28672 columns"),
        PRODUCTS,
        f"{BENCH} linear",
    ),
    *(
        (
            f"`scaled_linear`, {name}, 1 row, 28672 × 4096",
            Kernel(op="scaled_linear", tokens=1, width=4096, label=f"{name}, 28672 columns"),
            QUANTIZED,
            f"{FL_BENCH} scaled_linear",
        )
        for name in ("fp8", "int8", "fp8 blocks")
    ),
    (
        "`weight_only_linear`, 4 bits, 1 row, 28672 × 4096",
        Kernel(op="weight_only_linear", tokens=1, width=4096, label="4 bits, 28672 columns"),
        QUANTIZED,
        f"{FL_BENCH} weight_only_linear",
    ),
    *(
        (
            f"`scaled_linear`, {name}, 4,096 rows, 4096 × 14336, CUTLASS",
            Kernel(
                op="scaled_linear",
                impl="vendor.cuda.cutlass",
                tokens=4096,
                width=14336,
                label=f"{name}, 4096 columns",
                matrix=1,
            ),
            QUANTIZED,
            f"{FL_BENCH} scaled_linear",
        )
        for name in ("fp8", "int8", "fp8 blocks")
    ),
    (
        "`weight_only_linear`, 4 bits, 4,096 rows, 4096 × 14336",
        Kernel(op="weight_only_linear", tokens=4096, width=14336, label="4 bits, 4096 columns", matrix=2),
        QUANTIZED,
        f"{FL_BENCH} weight_only_linear",
    ),
    (
        "`paged_attention`, decode, 128 × 4096 keys",
        Kernel(op="paged_attention", tokens=128, width=4096, label="decode, 128 requests"),
        ATTENTION,
        f"{BENCH} paged_attention",
    ),
    *(
        (
            f"`paged_attention`, prefill, 1 × 8192, {name}",
            Kernel(op="paged_attention", impl=impl, tokens=8192, width=8192, label="prefill, 1 requests", matrix=2),
            ATTENTION,
            f"{BENCH} paged_attention",
        )
        for name, impl in (("ours", "default.triton"), ("FlashAttention 3", "vendor.vllm.fa3"))
    ),
    (
        "`mla_decode`, 16 heads, 128 × 2048 keys",
        Kernel(op="mla_decode", tokens=128, width=2048, label="decode, 16 heads, 128 requests"),
        EXPERTS,
        f"{BENCH} mla_decode",
    ),
    (
        "`mla_decode`, 128 heads, 128 × 2048 keys",
        Kernel(op="mla_decode", tokens=128, width=2048, label="decode, 128 heads, 128 requests", matrix=2),
        EXPERTS,
        f"{BENCH} mla_decode",
    ),
    (
        "`fused_moe`, Qwen3-30B-A3B, 16 tokens",
        Kernel(op="fused_moe", tokens=16, width=2048, label="Qwen3-30B-A3B"),
        EXPERTS,
        f"{BENCH} fused_moe",
    ),
    (
        "`fused_moe`, Qwen3-30B-A3B, 16,384 tokens",
        Kernel(op="fused_moe", tokens=16384, width=2048, label="Qwen3-30B-A3B", matrix=2),
        EXPERTS,
        f"{BENCH} fused_moe",
    ),
    (
        "`scaled_moe`, int8, DeepSeek-V2-Lite, 4,096 tokens",
        Kernel(op="scaled_moe", tokens=4096, width=2048, label="int8, DeepSeek-V2-Lite", matrix=1),
        QUANTIZED,
        f"{FL_BENCH} scaled_moe",
    ),
)
"""What was measured, by GPU the result's file, and the command that measures it again."""


def table() -> list[str]:
    """Return the lines of the Markdown table; a GPU without a result has a blank cell."""
    lines = ["| | bound | H100 | H200 | command |", "|---|---|---|---|---|"]
    for name, measured, files, command in ROWS:
        bound = "matrix units" if getattr(measured, "matrix", None) else "memory"
        cells = [
            f"[{measured.share(files[gpu], gpu):.2f}](../../benchmarks/results/{files[gpu]})" if gpu in files else ""
            for gpu in GPUS
        ]
        shown = command if command.startswith("fl ") else f"benchmarks/{command}"
        lines.append(f"| {' | '.join((name, bound, *cells, f'`{shown}`'))} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
