"""Times forms of a kernel beside its present one and the vendor's, and compares each with float64.

A candidate takes the place of constants of the kernel's module, as in ``quantized_tiles.py``. Routing is that of 128
experts of which 8 are chosen, products are those of Llama-3.1-8B in fp8. Times are the device's, in graphs, over inputs
that do not fit the cache together; each line has them in microseconds, and ``WRONG`` behind a form that is not right.

    python benchmarks/kernel_candidates.py [--only routing,row,rows] [--seconds 70] [--json FILE]

Needs an NVIDIA GPU. After ``--seconds`` no other case is begun.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from quantized_tiles import WEIGHTS, arguments, microseconds, rivals

from fl_dispatch import get_default_manager, prepared
from fl_dispatch.backends.triton.impl import routing, scaled
from fl_dispatch.evidence.bench import machine
from fl_dispatch.evidence.timing import Clock
from fl_dispatch.ops import OPERATORS

TOKENS, EXPERTS, CHOSEN = (1, 256, 4096, 16384), 128, 8
SOME = (16, 64)
NEAR = 0.01
"""Bound of a product's errors, as a share of the largest result: the chip sums with 14 bits and rounds to bfloat16."""
Constants = Mapping[str, Any]
Case = tuple[str, str, Any, tuple[Any, ...], list[Constants]]


def routing_cases() -> Iterator[Case]:
    """Tokens of a step; logits of bfloat16 and, as some routers give them, float32."""
    tiles: list[Constants] = [
        {"BY_KEY": True, "KEY_TILE": tile} for tile in ((4, 4), (8, 4), (16, 4), (1, 1), (2, 1), (4, 1))
    ]
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in TOKENS:
            order = torch.rand(tokens, EXPERTS, device="cuda").argsort(-1)  # no two are equal
            logits = ((order - EXPERTS // 2) / 16).to(dtype)
            name = f"{tokens} tokens, {str(dtype).removeprefix('torch.')}"
            few = tokens < routing.MANY_TOKENS
            yield name, "topk_softmax", routing, (logits, CHOSEN, True, None), tiles[:1] if few else tiles


def row_cases() -> Iterator[Case]:
    """One row."""
    forms: list[Constants] = [
        {"ROW_WARPS": warps, "ROW_STAGES": stages, "ROW_COLUMNS": columns, "ENOUGH": 0, "ROW_INNER": inner}
        for warps, stages, columns, inner in (
            (4, 1, 2, 4096), (4, 1, 8, 2048), (2, 1, 4, 1024), (8, 1, 4, 4096), (2, 1, 8, 1024), (4, 2, 4, 2048),
            (4, 3, 4, 2048), (2, 3, 4, 1024), (2, 4, 8, 1024), (1, 4, 8, 512), (4, 2, 8, 2048),
        )
    ]  # fmt: skip
    for name, (columns, inner) in WEIGHTS.items():
        yield name, "scaled_linear", scaled, arguments("fp8", 1, columns, inner), forms


def rows_cases() -> Iterator[Case]:
    """Some rows: other tiles where there are many columns, shared ones where there are few."""
    wide = ((128, 128, 4, 4), (128, 128, 8, 4), (128, 256, 8, 2), (256, 128, 8, 3), (64, 128, 4, 6), (128, 128, 4, 3))
    narrow = ((64, 128, 4, 8), (64, 128, 4, 4), (32, 256, 4, 4))
    tables: list[Constants] = [{"NARROW": tile, "WIDE": tile} for tile in wide]
    shared: list[Constants] = [{"NARROW": tile, "WIDE": tile, "PARTS": parts} for tile in narrow for parts in (2, 4)]
    for rows in SOME:
        for name, (columns, inner) in reversed(WEIGHTS.items()):
            forms = tables if name == "gate_up" else shared
            yield f"{rows} rows, {name}", "scaled_linear", scaled, arguments("fp8", rows, columns, inner), forms


def right_routing(found: tuple[torch.Tensor, torch.Tensor], logits: torch.Tensor, *_: object) -> bool:
    """Whether these are the best experts, in order, and their weights."""
    best = logits.double().softmax(-1).topk(CHOSEN)
    weights = best.values / best.values.sum(-1, keepdim=True)
    return bool((found[1] == best.indices).all()) and bool(((found[0] - weights).abs() < 1e-6).all())


def right_product(found: torch.Tensor, x: Any, x_scale: Any, weight: Any, weight_scale: Any, *_: object) -> bool:
    """Whether the product is near that of float64."""
    wanted = (x.float().double() * x_scale) @ (weight.float().double() * weight_scale).t()
    return bool((found.double() - wanted).abs().max() < NEAR * wanted.abs().max())


GROUPS: dict[str, tuple[Callable[[], Iterator[Case]], Callable[..., bool]]] = {
    "routing": (routing_cases, right_routing),
    "row": (row_cases, right_product),
    "rows": (rows_cases, right_product),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(GROUPS))
    parser.add_argument("--seconds", type=float, default=70.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    end = time.perf_counter() + given.seconds
    get_default_manager().ensure_initialized()
    clock, made = Clock(torch.device("cuda"), 0.02), []
    clock.warm_up(partial(torch.mm, *(torch.randn(4096, 4096, device="cuda") for _ in range(2))))
    for group in given.only:
        cases, right = GROUPS[group]
        for name, op_name, module, given_args, candidates in cases():
            if time.perf_counter() > end:
                print(f"{group}, {name}: no time left", flush=True)
                break
            operator = OPERATORS[op_name]
            args = operator.bind(given_args, {})
            prepared.declare_all(operator.stay(args))
            assert operator.work is not None
            moved, times, wrong = operator.work(*args).bytes_moved, {}, []
            forms = [("as it is", {}, getattr(module, op_name))]
            forms += [(", ".join(f"{k} {v}" for k, v in each.items()), each, forms[0][2]) for each in candidates]
            forms += [(impl_id, {}, function) for impl_id, function in rivals(op_name, args)]
            for label, constants, function in forms:
                with mock.patch.multiple(module, **constants) if constants else nullcontext():
                    try:
                        if not right(function(*args), *args):
                            wrong.append(label)
                        times[label] = microseconds(clock, function, args, moved)
                    except (RuntimeError, triton.runtime.errors.OutOfResources, triton.CompilationError) as error:
                        print(f"{group}, {name}: {label}: {str(error).splitlines()[0]}", flush=True)
            print(f"{group}, {name}:", flush=True)
            for label in sorted(times, key=times.__getitem__):
                rate = moved / times[label] / 1e6
                print(f"  {times[label]:8.2f} us  {rate:5.2f} TB/s  {label}{'  WRONG' * (label in wrong)}", flush=True)
            made.append({"group": group, "case": name, "us": times, "wrong": wrong})
            if given.json:
                given.json.write_text(json.dumps({"machine": machine(clock.device), "cases": made}, indent=1) + "\n")


if __name__ == "__main__":
    main()
