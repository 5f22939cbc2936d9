"""Time candidates for the launch tables of the quantized Triton kernels, next to the vendor's kernels.

The products are those of Llama-3.1-8B, or of DeepSeek-V2-Lite. A candidate replaces a constant of the kernel's module
during its timed calls. Times are device times in graphs, over copies of the weight that together exceed the cache. Copy
the fastest into the tables by hand: NARROW, MIDDLE, WIDE, TILES, those of blocks, constants of one row, of words.

    python benchmarks/quantized_tiles.py [--kinds fp8,int8,blocks,w4] [--rows 1 8 16 32 64 256 4096] [--as-it-is]
        [--model deepseek-v2-lite] [--json FILE]

``--as-it-is``: no candidates, only the current tables next to the vendor's kernels.

Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from fl_dispatch import get_default_manager, weight_forms
from fl_dispatch.backends.triton.impl.products import scaled_linear, weight_only_linear
from fl_dispatch.evidence.bench import calls_of, rotated
from fl_dispatch.evidence.origin import write
from fl_dispatch.evidence.timing import Clock
from fl_dispatch.ops import OPERATORS
from fl_dispatch.ops.named import of_arguments

WEIGHTS = {
    "llama-3.1-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "deepseek-v2-lite": {
        "q": (3072, 2048), "kv_a": (576, 2048), "o": (2048, 2048), "gate_up": (5632, 2048), "down": (2048, 2816),
    },
}  # fmt: skip
"""Model → columns and inner sizes; a mixture's are those of its shared experts."""
KINDS = {"fp8": "scaled_linear", "int8": "scaled_linear", "blocks": "scaled_linear", "w4": "weight_only_linear"}
BLOCK = 128
SOME = (
    (32, 128, 4, 6), (32, 512, 4, 4), (64, 128, 4, 8), (64, 256, 4, 4), (64, 512, 4, 3), (128, 128, 4, 6),
    (128, 256, 8, 2),
)  # fmt: skip
BLOCKS_SOME = (
    (16, 256, 4, 6), (16, 512, 4, 4), (32, 128, 4, 8), (32, 256, 4, 6), (32, 256, 8, 4), (32, 512, 4, 3),
    (32, 512, 8, 3), (64, 128, 4, 8), (64, 256, 4, 4), (64, 256, 4, 6), (64, 256, 8, 4), (64, 512, 4, 3),
    (128, 128, 4, 6),
)  # fmt: skip
"""Columns, elements, warps and stages for some rows."""
WORD_SOME = (
    (64, 4, 4, 1), (64, 4, 4, 3), (64, 4, 4, 5), (64, 4, 6, 3), (128, 4, 3, 2), (128, 4, 3, 3), (128, 4, 4, 3),
    (128, 8, 3, 2), (128, 8, 4, 1), (128, 8, 4, 3),
)  # fmt: skip
"""Columns, warps, stages and programs a processor for some rows of 4 bits."""
AS_IT_IS = "as it is"
Constants = Mapping[str, Any]


def arguments(kind: str, rows: int, columns: int, inner: int) -> tuple[Any, ...]:
    """Return random arguments with products near one."""

    def scales(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, device="cuda") + 0.5) * (inner**-0.25 / 32)

    if kind == "w4":
        weight = torch.randint(0, 256, (columns, inner // 2), device="cuda", dtype=torch.uint8)
        scale = scales(columns, inner // BLOCK).bfloat16()
        return torch.randn(rows, inner, device="cuda").bfloat16(), weight, scale, None, None
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    x, weight = (
        (torch.randn(count, inner, device="cuda") * 32).clamp(-127, 127).to(dtype) for count in (rows, columns)
    )
    across, down = (inner // BLOCK, -(-columns // BLOCK)) if kind == "blocks" else (1, columns)
    block = BLOCK if kind == "blocks" else 0
    return x, scales(rows, across), weight, scales(down, across), None, "bfloat16", block


def candidates(kind: str, rows: int) -> Iterator[Constants]:
    """Yield constants of a module; an empty one leaves the tables unchanged."""
    yield {}
    if kind == "w4":
        if rows == 1:
            for columns, warps in product((16, 32, 64), (2, 4, 8, 16)):
                for ahead in (0, 1 << 20):
                    part = {"SLICED_FROM": 0, "SLICED_COLUMNS": columns, "SLICED_WARPS": (warps, warps)}
                    yield {**part, "SLICED_AHEAD": ahead}
            for tile in (
                (4, 512, 4), (8, 512, 8), (8, 256, 4), (16, 128, 4), (16, 256, 4), (16, 256, 8), (4, 256, 2),
            ):  # fmt: skip
                yield {"SLICED_FROM": 1 << 40, "WORD_ROW": tile, "WORD_ENOUGH": 0}
            for tile in WORD_SOME:
                yield {"WORD_FROM": 1, "WORD_TILES": {1: tile}}
        elif rows <= max(weight_only_linear.WORD_TILES):
            for tile in WORD_SOME:
                yield {"WORD_TILES": {rows: tile}}
        elif rows <= 256:
            yield {"WORD_TILES": {rows: (64, 8, 3, 1)}}
        else:
            yield {"DEQUANTIZED": (8, 512, 4)}
    elif rows == 1:
        for part in product((1, 2, 4), (1024, 2048, 4096, 8192), (1, 2, 4, 8)):
            yield {"FP8_ROW" if kind == "fp8" else "ROW": scaled_linear.Row(*part), "ENOUGH": 0}
    elif rows <= scaled_linear.SOME_ROWS:
        for some in BLOCKS_SOME if kind == "blocks" else SOME:
            names = ("BLOCKS_NARROW", "BLOCKS_MIDDLE") if kind == "blocks" else ("NARROW", "MIDDLE", "WIDE")
            yield dict.fromkeys(names, some)
    else:
        for tile in (
            (128, 256, 128, 8, 3), (256, 128, 128, 8, 3), (128, 128, 128, 8, 4), (128, 128, 128, 4, 3),
            (64, 128, 128, 4, 4), (64, 256, 128, 8, 3), (128, 64, 128, 4, 4), (64, 64, 128, 4, 5), (64, 64, 256, 4, 3),
        ):  # fmt: skip
            yield {"BLOCKS_TILES" if kind == "blocks" else "TILES": (scaled_linear.Tile(*tile),)}


def microseconds(clock: Clock, function: Any, args: tuple[Any, ...], moved: int) -> float:
    """Return the device time of a call."""
    return clock.time(calls_of(function, rotated(args, moved, clock), clock)).median * 1e6


def rivals(op_name: str, args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the vendor's kernels that take these arguments."""
    manager = get_default_manager()
    manager.ensure_initialized()
    for impl in manager.registry.get_implementations(op_name):
        there = impl.impl_id.startswith("vendor.cuda") and (impl.available is None or impl.available())
        if there and (
            impl.supports is None or of_arguments(impl.supports, OPERATORS[op_name].parameters)(*args) is True
        ):
            yield impl.impl_id, impl.fn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 256, 4096])
    parser.add_argument("--model", choices=WEIGHTS, default="llama-3.1-8b")
    parser.add_argument("--as-it-is", action="store_true", help="no candidates")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    clock, found = Clock(torch.device("cuda")), []
    clock.warm_up(partial(torch.mm, *(torch.randn(4096, 4096, device="cuda") for _ in range(2))))
    for kind in given.kinds:
        operator = OPERATORS[KINDS[kind]]
        module: Any = weight_only_linear if kind == "w4" else scaled_linear
        for rows in given.rows:
            for name, (columns, inner) in WEIGHTS[given.model].items():
                args = operator.bind(arguments(kind, rows, columns, inner), {})
                weight_forms.declare_all(operator.stay(args))
                assert operator.work is not None
                moved, times = operator.work(*args).bytes_moved, {}
                for impl_id, function in rivals(operator.name, args):
                    try:
                        times[impl_id] = microseconds(clock, function, args, moved)
                    except (RuntimeError, ImportError, AssertionError) as error:
                        print(f"{kind}, {rows} rows, {name}: {impl_id}: {error}", flush=True)
                for constants in [{}] if given.as_it_is else candidates(kind, rows):
                    label = ", ".join(f"{key} {value}" for key, value in constants.items()) or AS_IT_IS
                    with mock.patch.multiple(module, **constants) if constants else nullcontext():
                        try:
                            times[label] = microseconds(clock, getattr(module, operator.name), args, moved)
                        except (RuntimeError, triton.runtime.errors.OutOfResources, triton.CompilationError) as error:
                            print(f"{kind}, {rows} rows, {name}: {label}: {str(error).splitlines()[0]}", flush=True)
                best = sorted(times, key=times.__getitem__)
                found.append({"kind": kind, "rows": rows, "product": name, "us": times})
                shown = "; ".join(f"{label} {times[label]:.1f}" for label in best[:4])
                print(
                    f"{kind}, {rows} rows, {name}: as it is {times.get(AS_IT_IS, 0.0):.1f} us; best {shown}", flush=True
                )
                if given.json:
                    machine = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
                    machine["triton"] = triton.__version__
                    write(given.json, {"machine": machine, "products": found})


if __name__ == "__main__":
    main()
