"""Time candidates for the plans of ``scaled_moe`` with fp8 in blocks, next to vLLM's own kernel.

The experts are those of DeepSeek-V2-Lite, and tokens choose them at random. A candidate's two products are timed
separately, each with the summation of the plan that it replaces; copy the fastest into ``BLOCK_PLANS`` by hand. Also
shown: the time to copy the chosen experts' bytes, and the error of results if the first product is summed with fewer
bits, next to the error caused by quantized rows.

    python benchmarks/expert_tiles.py [--tokens 1 16 32 64 256 512 4096] [--as-it-is] [--json FILE]

``--as-it-is``: no candidates. Needs an NVIDIA GPU; vLLM's kernel needs vLLM, and VLLM_PLUGINS= for its own platform.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from fl_dispatch.backends.triton.impl.experts import quantized_moe
from fl_dispatch.backends.triton.impl.experts.fused_moe import Plan, Plans, Tile
from fl_dispatch.evidence.origin import write
from fl_dispatch.evidence.timing import Clock
from fl_dispatch.ops.quantization import FP8

EXPERTS, TOPK, HIDDEN, INNER, BLOCK = 64, 6, 2048, 1408, 128
TILES = (
    (64, 128, 2, 4), (64, 128, 4, 4), (64, 128, 4, 6), (128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 4, 5),
    (128, 128, 8, 3), (128, 128, 8, 4), (256, 128, 8, 3),
)  # fmt: skip
"""Columns, depth, warps and stages of a tile."""
TOGETHER = (1, 8)
COPIED = 1 << 29
"""Bytes of the copy that gives the rate."""
CALLS = 8
"""Calls in one measurement."""
Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def arguments(tokens: int) -> Arguments:
    """Return random arguments with results near one."""
    torch.manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return torch.stack([(torch.randn(shape[1:], device="cuda") * 32).to(FP8) for _ in range(shape[0])])

    def scales(*shape: int) -> Tensor:
        return (torch.rand(shape, device="cuda") + 0.5) / 1280

    logits = torch.randn(tokens, EXPERTS, device="cuda")
    weights, ids = torch.topk(torch.softmax(logits, -1), TOPK)
    return (
        torch.randn(tokens, HIDDEN, device="cuda").bfloat16(),
        weight(EXPERTS, 2 * INNER, HIDDEN),
        scales(EXPERTS, 2 * INNER // BLOCK, HIDDEN // BLOCK),
        weight(EXPERTS, HIDDEN, INNER),
        scales(EXPERTS, HIDDEN // BLOCK, INNER // BLOCK),
        weights,
        ids.int(),
    )


def ours(args: Arguments) -> Tensor:
    return quantized_moe.scaled_moe(*args, block_size=BLOCK)


def vllms(args: Arguments) -> Callable[[], Tensor]:
    """Return vLLM's Triton kernel, which vLLM takes for blocks on Hopper if all experts are on this device."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    x, w13, s13, w2, s2, weights, ids = args
    config = fp8_w8a8_moe_quant_config(w1_scale=s13, w2_scale=s2, block_shape=[BLOCK, BLOCK])

    def call() -> Tensor:
        with set_current_vllm_config(VllmConfig()):
            return fused_experts(x, w13, w2, weights, ids, quant_config=config)

    return call


def not_quantized(args: Arguments) -> Tensor:
    """Return the results of rows that are not quantized, in float32."""
    x, w13, s13, w2, s2, weights, ids = args

    def widened(numbers: Tensor, scale: Tensor) -> Tensor:
        return numbers.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)

    out = torch.zeros(x.shape, device="cuda")
    for expert in range(EXPERTS):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ widened(w13[expert], s13[expert]).T).chunk(2, -1)
        rows = (torch.nn.functional.silu(gate) * up) @ widened(w2[expert], s2[expert]).T
        out.index_add_(0, token, weights[token, choice][:, None] * rows)
    return out


def errors(args: Arguments) -> dict[str, float]:
    """Return errors in units of the results' root mean square."""
    found = ours(args).float()
    with mock.patch.object(quantized_moe, "sums_narrow", return_value=False):
        exact = ours(args).float()
    unit, plain = exact.pow(2).mean().sqrt(), not_quantized(args)

    def rms(a: Tensor, b: Tensor) -> float:
        return float((a - b).pow(2).mean().sqrt() / unit)

    return {
        "to exact sums": rms(found, exact),
        "to exact sums, at most": float((found - exact).abs().max() / unit),
        "to rows not quantized": rms(found, plain),
        "exact sums to rows not quantized": rms(exact, plain),
    }


def candidates(tokens: int) -> Iterator[tuple[str, Plans]]:
    """Yield plans of one tile each, by name."""
    pairs = tokens * TOPK / EXPERTS
    for rows in (16, 32) if pairs <= 16 else (32, 64) if pairs <= 64 else (64, 128):
        for tile in TILES:
            for together in TOGETHER if pairs > 16 else TOGETHER[:1]:
                if rows < 128 or tile[2] == 8:
                    chosen = Tile(*tile, together)
                    yield f"{rows} rows, {', '.join(map(str, chosen))}", Plans((), Plan(rows, chosen, chosen))


def products(args: Arguments, plans: Plans | None) -> list[Callable[[], None]]:
    """Return the two products of a call."""
    kept: list[tuple[Any, ...]] = []
    multiply = quantized_moe.multiply

    def keep(*given: Any) -> None:
        kept.append(given)
        multiply(*given)

    changed: dict[str, Any] = {"multiply": keep}
    if plans is not None:
        changed |= {"BLOCK_PLANS": plans, "EXACT_BLOCK_PLANS": plans}
    with mock.patch.multiple(quantized_moe, **changed):
        ours(args)
    return [partial(multiply, *given) for given in kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 32, 64, 256, 512, 4096])
    parser.add_argument("--as-it-is", action="store_true", help="no candidates")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    clock = Clock(torch.device("cuda"))
    clock.warm_up(partial(torch.mm, *(torch.randn(4096, 4096, device="cuda") for _ in range(2))))

    def microseconds(call: Callable[[], object]) -> float:
        return clock.time([call] * CALLS).median * 1e6

    source, target = (torch.empty(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2))
    rate = 2 * COPIED / microseconds(partial(target.copy_, source))
    found: list[dict[str, Any]] = []
    for tokens in given.tokens:
        args = arguments(tokens)
        chosen = len(args[-1].unique())
        one: dict[str, Any] = {
            "tokens": tokens,
            "experts": chosen,
            "bytes_us": chosen * (args[1][0].numel() + args[3][0].numel()) / rate,
            "us": {"as it is": microseconds(partial(ours, args))},
            "errors": errors(args),
        }
        try:
            one["us"]["vLLM's"] = microseconds(vllms(args))
        except (ImportError, RuntimeError, AssertionError) as error:
            print(f"vLLM's kernel: {error!r}", flush=True)
        up, down = (microseconds(product) for product in products(args, None))
        one["products"] = {"as it is": [up, down]}
        for label, plans in [] if given.as_it_is else candidates(tokens):
            try:
                one["products"][label] = [microseconds(product) for product in products(args, plans)]
            except (RuntimeError, triton.runtime.errors.OutOfResources, triton.CompilationError) as error:
                print(f"{label}: {error!r}", flush=True)
        found.append(one)
        times = ", ".join(f"{label} {us:.1f} us" for label, us in one["us"].items())
        print(f"{tokens} tokens, {chosen} experts: {times}; bytes at the copy's rate {one['bytes_us']:.1f} us")
        print("  errors: " + ", ".join(f"{label} {value:.5f}" for label, value in one["errors"].items()))
        for place, name in enumerate(("first product", "second product")):
            best = sorted(one["products"].items(), key=lambda item: item[1][place])[:4]
            shown = "; ".join(f"{label} {us[place]:.1f}" for label, us in best)
            print(f"  {name}: as it is {one['products']['as it is'][place]:.1f} us; best {shown}", flush=True)
        if given.json:
            machine = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "triton": triton.__version__}
            write(given.json, {"machine": machine, "calls": found})


if __name__ == "__main__":
    main()
