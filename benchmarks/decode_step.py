"""One decoding step of one request as one CUDA graph of our Triton kernels, without an engine: what a step can reach.

A step runs every layer of Llama-3.1-8B's shape with random weights, and the head. The floor is the time to read every
weight once at the rate of a large copy. Variants are captured too: one kernel for the rotation and the write of keys
and values, fp8 products without prefetch of the next weight, and other launch constants. Replays of all graphs
alternate. ``same bits``: whether the logits equal those of the unchanged step.

    python benchmarks/decode_step.py [--layers N] [--formats bfloat16,fp8] [--context 1024] [--rounds 15]
        [--constants] [--ahead] [--json FILE]

Needs a GPU, and this package. ``--constants``: also try other constants of the products. ``--ahead``: also try other
sizes of the prefetch of fp8 products, and other numbers of programs.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from shapes import SHAPES
from torch import Tensor

from fl_dispatch import successors
from fl_dispatch.backends.triton.impl.attention import cache, paged
from fl_dispatch.backends.triton.impl.fusion import fused_linear, quantized_rows, rotary_cache
from fl_dispatch.backends.triton.impl.products import linear, prefetch, scaled_linear
from fl_dispatch.backends.triton.impl.rows import activation, normalization, quantization, rotary
from fl_dispatch.cli.output import print_table
from fl_dispatch.evidence.intervals import interval
from fl_dispatch.evidence.origin import write
from fl_dispatch.evidence.rates import Yardstick
from fl_dispatch.evidence.timing import Clock

SHAPE = "llama-3.1-8b"
AS_IT_IS, AT_ONCE, NOTHING = "as it is", "rotation and write at once", "nothing asked for"
FUSED = frozenset({"norm", "gate", "row"})
"""Parts fused into products in a step: norms before them, gates after them, rows without quantization."""
FP8, BLOCK_SIZE = "float8_e4m3fn", 16
EPSILON = 1e-5
REPLAYS = 20
CONSTANTS: Mapping[bool, tuple[Mapping[str, Any], ...]] = {
    False: (
        {"AT_ONCE": 2048},
        {"COLUMNS": 2, "AT_ONCE": 2048},
        {"COLUMNS": 1, "AT_ONCE": 8192},
        {"ENOUGH": 1024},
    ),
    True: (
        {"FP8_ROW": scaled_linear.Row(4, 2048, 2), "ENOUGH": 1024},
        {"FP8_ROW": scaled_linear.Row(2, 4096, 4)},
        {"FP8_ROW": scaled_linear.Row(1, 4096, 4)},
        {"FP8_ROW": scaled_linear.Row(2, 2048, 2)},
    ),
}
"""Quantized or not → launch constants of products of one row."""
FUSED_FORMS: Mapping[bool, Mapping[bool, tuple[tuple[int, int, int], ...]]] = {
    False: {True: ((4, 4096, 8), (4, 4096, 4), (4, 8192, 8), (2, 8192, 8), (8, 4096, 8), (4, 2048, 2))},
    True: {
        False: (
            (4, 2048, 4), (4, 2048, 2), (4, 1024, 2), (4, 1024, 1), (2, 2048, 1), (4, 4096, 4), (2, 4096, 4),
            (2, 4096, 2), (8, 1024, 2), (8, 1024, 1), (1, 4096, 2), (1, 4096, 4),
        ),
        True: ((4, 4096, 4), (4, 2048, 2), (4, 1024, 1), (2, 2048, 2)),
    },
}  # fmt: skip
"""Quantized or not → normalized or not → columns, bytes at once and warps of other forms of fused products."""
FUSED_ENOUGH = 1536
"""Fewest programs with several columns in these forms."""
AHEAD: tuple[Mapping[str, int], ...] = (
    *({"BYTES": mib << 20} for mib in (1, 2, 4, 6, 8, 16)),
    *({"ASKING": programs} for programs in (1, 8)),
)
"""Constants of ``ahead``, which has 3 MiB and two programs."""

Patches = tuple[tuple[Any, str, Any], ...]


class Step:
    """Weights of a model, and a step of it.

    ``at_once``: one kernel rotates and writes. ``fused``: what products do besides.

    Args:
        shape: as in ``shapes.py``, of a dense model.
        quantized: whether the weights of layers are fp8, with a scale a column.
    """

    at_once = False
    fused: frozenset[str] = frozenset()

    def __init__(self, shape: Mapping[str, Any], layers: int, context: int, quantized: bool) -> None:
        self.hidden, self.inner = shape["hidden_size"], shape["intermediate_size"]
        self.heads, self.kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        self.dim, self.quantized, self.context = shape["head_dim"], quantized, context
        width, kv_width = self.heads * self.dim, self.kv_heads * self.dim
        sizes = {
            "qkv": (width + 2 * kv_width, self.hidden),
            "o": (self.hidden, width),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }
        torch.manual_seed(0)
        self.layers = [{name: self._weight(*size) for name, size in sizes.items()} for _ in range(layers)]
        self.norms = [[self._random(self.hidden) + 1 for _ in range(2)] for _ in range(layers + 1)]
        self.head = self._random(shape["vocab_size"], self.hidden)
        blocks = -(-(context + 1) // BLOCK_SIZE)
        self.caches = [
            tuple(self._random(blocks, BLOCK_SIZE, self.kv_heads, self.dim) for _ in range(2)) for _ in range(layers)
        ]
        self.table = torch.arange(blocks, dtype=torch.int32, device="cuda")[None]
        self.starts = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        self.lengths = torch.tensor([context + 1], dtype=torch.int32, device="cuda")
        self.slot = torch.tensor([context], dtype=torch.int64, device="cuda")
        self.position = torch.tensor([context], dtype=torch.int64, device="cuda")
        angles = torch.outer(torch.arange(context + 1), 500_000.0 ** -torch.arange(0, 1, 2 / self.dim)).cuda()
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.token = self._random(1, self.hidden) * 50

    @staticmethod
    def _random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02

    def _weight(self, columns: int, inner: int) -> tuple[Tensor, ...]:
        weight = self._random(columns, inner)
        return quantization.quantize(weight, FP8) if self.quantized else (weight,)

    def bytes_of_weights(self) -> int:
        tensors = [tensor for layer in self.layers for weight in layer.values() for tensor in weight]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*tensors, self.head))

    def _product(self, x: tuple[Tensor, ...], weight: tuple[Tensor, ...]) -> Tensor:
        return scaled_linear.scaled_linear(*x, *weight) if self.quantized else linear.linear(*x, *weight)

    def _normalized(self, x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the sum, and the argument of the next product."""
        if self.quantized:
            made = quantized_rows.rms_norm_quantize(x, FP8, residual, weight, EPSILON)
        else:
            found = normalization.rms_norm(x, residual, weight, EPSILON)
            made = (found[1], found[0]) if isinstance(found, tuple) else (found,)
        return (x, made) if residual is None else (made[0], made[1:])

    def _from_norm(
        self, x: Tensor, residual: Tensor | None, norm: Tensor, weight: tuple[Tensor, ...], gated: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the product of a normalized row, gated if asked for, and the sum of the row and the residual."""
        scale = weight[1] if self.quantized else None
        gate_too = gated and "gate" in self.fused
        norm_too = fused_linear.FORMS[weight[0].element_size(), True] is not None and residual is not None
        if "norm" in self.fused and norm_too:
            y, residual = fused_linear.fused_linear(x, weight[0], scale, None, None, norm, residual, EPSILON, gate_too)
        elif ("row" in self.fused and self.quantized) or gate_too:
            found = normalization.rms_norm(x, residual, norm, EPSILON)
            x, residual = found if isinstance(found, tuple) else (found, x)
            y, _ = fused_linear.fused_linear(x, weight[0], scale, None, None, None, None, EPSILON, gate_too)
        else:
            residual, argument = self._normalized(x, residual, norm)
            y = self._product(argument, weight)
        return y, residual

    def _of_row(self, x: Tensor, weight: tuple[Tensor, ...]) -> Tensor:
        if self.quantized and "row" in self.fused:
            return fused_linear.fused_linear(x, *weight)[0]
        return self._product(quantization.quantize(x, FP8) if self.quantized else (x,), weight)

    def __call__(self) -> Tensor:
        """Return the logits of the next token."""
        x, residual = self.token.clone(), None
        for weights, (first, second), (keys, values) in zip(self.layers, self.norms, self.caches, strict=False):
            qkv, residual = self._from_norm(x, residual, first, weights["qkv"])
            qkv = qkv.view(1, -1, self.dim)
            query, key, value = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            tables = self.cos, self.sin, self.position
            if self.at_once:
                query, _ = rotary_cache.rotary_embedding_kv_cache_write(
                    query, key, value, *tables, keys, values, self.slot
                )
            else:
                query, rotated = rotary.rotary_embedding(query, key, *tables)
                assert rotated is not None
                cache.kv_cache_write(rotated, value, keys, values, self.slot)
            seen = paged.paged_attention(
                query, keys, values, self.table, self.starts, self.lengths, 1, self.context + 1, self.dim**-0.5
            ).view(1, -1)
            x = self._of_row(seen, weights["o"])
            up, residual = self._from_norm(x, residual, second, weights["gate_up"], gated=True)
            if "gate" in self.fused:
                x = self._of_row(up, weights["down"])
            elif self.quantized and "row" not in self.fused:
                x = self._product(quantized_rows.silu_and_mul_quantize(up, FP8), weights["down"])
            else:
                x = self._of_row(activation.silu_and_mul(up), weights["down"])
        found = normalization.rms_norm(x, residual, self.norms[-1][0], EPSILON)
        return linear.linear(found[0] if isinstance(found, tuple) else found, self.head)


def ways(quantized: bool, constants: bool, amounts: bool) -> dict[str, Patches]:
    """Return names of ways to launch a step → the patches for each."""
    found: dict[str, Patches] = {AS_IT_IS: (), AT_ONCE: ((Step, "at_once", True),)}
    whole: Patches = ((Step, "fused", FUSED),)
    silent: Patches = ((prefetch, "BYTES", 0),)
    if quantized:
        found[NOTHING] = silent
        found["rows as they are"] = ((Step, "fused", frozenset({"row"})),)
        found["gates and rows"] = ((Step, "fused", frozenset({"gate", "row"})),)
        found["fused, nothing asked for"] = (*whole, *silent)
        found["fused"] = whole
        other: Patches = whole
    else:
        found["norms"] = ((Step, "fused", frozenset({"norm"})), *silent)
        found["gates"] = ((Step, "fused", frozenset({"gate"})), *silent)
        found["fused"] = (*whole, *silent)
        found["fused, asked for"] = whole
        other = (*whole, *silent)
    found["fused, rotation and write at once"] = (*other, (Step, "at_once", True))
    for normalized, forms in (FUSED_FORMS[quantized] if constants else {}).items():
        for numbers in forms:
            key, form = (1 if quantized else 2, normalized), fused_linear.Form(*numbers, FUSED_ENOUGH)
            parts = FUSED if normalized else FUSED - {"norm"}
            patches = (Step, "fused", parts), (fused_linear, "FORMS", {**fused_linear.FORMS, key: form})
            found[f"{'norms' if normalized else 'no norms'}: {numbers}"] = (*other, *patches)
    products = scaled_linear if quantized else linear
    others = [(products, values) for values in CONSTANTS[quantized] if amounts]
    others += [(prefetch, values) for values in AHEAD if quantized and amounts]
    for target, values in others:
        label = ", ".join(f"{name} {value}" for name, value in values.items())
        found[label] = tuple((target, name, value) for name, value in values.items())
    return found


@contextlib.contextmanager
def patched(patches: Patches) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for target, name, value in patches:
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def captured(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Return a graph of a step, and the tensor that it writes the logits to."""
    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    return graph, logits


def compare(step: Step, chosen: Mapping[str, Patches], rounds: int) -> tuple[dict[str, list[float]], dict[str, bool]]:
    """Return microseconds of a step in each way, by round, and whether its logits equal those of the first way."""
    with successors.recorded(), patched(() if step.quantized else ((Step, "fused", FUSED),)):
        step()
    graphs, logits = {}, {}
    for name, patches in chosen.items():
        with patched(patches):
            graphs[name], logits[name] = captured(step)
        print(f"captured: {name}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds):
        for name in random.Random(turn).sample(list(graphs), len(graphs)):
            graph = graphs[name]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / REPLAYS * 1e3)
    return times, {name: torch.equal(found, logits[AS_IT_IS]) for name, found in logits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--formats", type=lambda text: text.split(","), default=["bfloat16", "fp8"])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--constants", action="store_true")
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = SHAPES[SHAPE].config
    layers = options.layers or shape["num_hidden_layers"]
    rate = Yardstick(Clock(torch.device("cuda")), torch.bfloat16).rates.copy_bytes_per_s
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "shape": SHAPE, "layers": layers, "context": options.context, "copy_TB_per_s": rate / 1e12, "steps": {},
    }  # fmt: skip
    for name in options.formats:
        step = Step(shape, layers, options.context, name == "fp8")
        floor = step.bytes_of_weights() / rate * 1e6
        chosen = ways(step.quantized, options.constants, options.ahead)
        times, same = compare(step, chosen, options.rounds)
        del step
        torch.cuda.empty_cache()
        first = times[AS_IT_IS]
        rows = []
        for way, found in times.items():
            ratios = [one / other for one, other in zip(first, found, strict=True)]
            low, high = interval(ratios)
            median, faster = statistics.median(found), statistics.median(ratios)
            rows.append(
                [way, f"{median:.0f}", f"{floor / median:.3f}", f"{faster:.3f} [{low:.3f}, {high:.3f}]", same[way]]
            )
        title = f"{name}, {layers} layers; reading the weights at {rate / 1e12:.2f} TB/s takes {floor:.0f} us"
        print_table(title, ["way", "us", "floor / time", "times as fast", "same bits"], rows)
        result["steps"][name] = {"floor_us": floor, "times_us": times, "same_bits": same}
        if options.json:
            write(options.json, result)


if __name__ == "__main__":
    main()
