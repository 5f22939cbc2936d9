"""What overlapping launches gain: the layers of a decoding step as one CUDA graph, with them and without.

A step has the norms, products, rotary embedding, cache write, attention and activations of a dense model of 32 layers,
all but the products in our Triton kernels. In *opaque* only those overlap that compiled code calls whole (attention
and the cache), as in an engine with ``torch.compile``; in *all* every small kernel does, as in an eager one. Graphs of
the same kernels differ in time too, for their buffers lie elsewhere, so of each mode there are several, captured in
turns; all graphs take turns as well, so that a change of the clock hits all alike. Results must be equal, bit for bit.

    python benchmarks/overlap.py [--graphs 4] [--rounds 20] [--json FILE]

Needs an NVIDIA GPU since Hopper and its Triton. ``VLLM_FL_CHIP_FEATURES=0`` is the switch that a server has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from fl_dispatch.backends.triton.impl import activation, attention, cache, launch, normalization, rotary
from fl_dispatch.backends.triton.impl.launch import Launcher
from fl_dispatch.backends.triton.impl.overlap import overlaps

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, SLOTS = 32, 4096, 14336, 32, 8, 128, 16
QKV = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
EPSILON = 1e-6
BATCHES = ((1, 1024), (32, 1024), (256, 512))
"""Requests, and the tokens that each has in the cache."""


def launchers(*modules: Any) -> set[Launcher]:
    """Those of the modules whose kernels can overlap."""
    return {found for module in modules for found in vars(module).values() if isinstance(found, Launcher)}


OPAQUE = launchers(attention, cache)
MODES = {"none": set[Launcher](), "opaque": OPAQUE, "all": OPAQUE | launchers(normalization, rotary, activation)}


@contextmanager
def only(chosen: set[Launcher]) -> Iterator[None]:
    """Within it kernels of no other launcher overlap."""
    call = Launcher.__call__

    def watched(self: Launcher, *args: Any, **kwargs: Any) -> None:
        launch.overlaps = overlaps if self in chosen else lambda device: False  # type: ignore[assignment]
        call(self, *args, **kwargs)

    Launcher.__call__ = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        Launcher.__call__, launch.overlaps = call, overlaps  # type: ignore[method-assign]


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16)


def weights() -> list[dict[str, Tensor]]:
    """Of each layer its own, so that they are read from memory, not from the cache."""
    sizes = {"qkv": (HIDDEN, sum(QKV)), "o": (HIDDEN, HIDDEN), "gate_up": (HIDDEN, 2 * INNER), "down": (INNER, HIDDEN)}
    norms = ("before", "after")
    return [
        {name: normal(*size, scale=0.02) for name, size in sizes.items()} | {name: normal(HIDDEN) for name in norms}
        for _ in range(LAYERS)
    ]


def step(layers: list[dict[str, Tensor]], batch: int, context: int) -> Callable[[], Tensor]:
    """All layers of a decoding step, for so many requests of so many tokens."""
    pages = -(-context // SLOTS)
    both = normal(batch * pages, KV_HEADS, SLOTS, 2 * HEAD_DIM).transpose(1, 2)
    keys, values = both[..., :HEAD_DIM], both[..., HEAD_DIM:]
    table = torch.arange(batch * pages, device="cuda", dtype=torch.int32).view(batch, pages)
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    slots = table[:, -1].long() * SLOTS + (context - 1) % SLOTS
    cos, sin = normal(2 * context, HEAD_DIM // 2), normal(2 * context, HEAD_DIM // 2)
    positions = torch.full((batch,), context - 1, device="cuda")
    x, residual = normal(batch, HIDDEN), normal(batch, HIDDEN)

    def run() -> Tensor:
        hidden, total = x.clone(), residual.clone()
        for layer in layers:
            hidden, total = normalization.rms_norm(hidden, total, layer["before"], EPSILON)
            q, k, v = (part.view(batch, -1, HEAD_DIM) for part in (hidden @ layer["qkv"]).split(QKV, -1))
            rotary.rotary_embedding(q, k, cos, sin, positions)
            cache.kv_cache_write(k, v, keys, values, slots)
            attended = attention.paged_attention(q, keys, values, table, starts, lengths, 1, context, HEAD_DIM**-0.5)
            hidden = attended.view(batch, HIDDEN) @ layer["o"]
            hidden, total = normalization.rms_norm(hidden, total, layer["after"], EPSILON)
            hidden = activation.silu_and_mul(hidden @ layer["gate_up"]) @ layer["down"]
        return hidden

    return run


def measure(
    layers: list[dict[str, Tensor]], batch: int, context: int, rounds: int, graphs: int
) -> dict[str, dict[str, Any]]:
    """Mode → microseconds a step: the median of each graph, and the median of these.

    Raises:
        RuntimeError: two modes compute different values.
    """
    run = step(layers, batch, context)
    captured: list[tuple[str, torch.cuda.CUDAGraph]] = []
    expected: Tensor | None = None
    for _ in range(graphs):
        for mode, chosen in MODES.items():
            with only(chosen):
                run()  # compiles
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = run()
            graph.replay()
            captured.append((mode, graph))
            expected = out.clone() if expected is None else expected
            if not torch.equal(out, expected):
                raise RuntimeError(f"'{mode}' computes other values with batch {batch}")
    times: list[list[float]] = [[] for _ in captured]
    for _ in range(rounds):
        for (_, graph), found in zip(captured, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            graph.replay()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 500)
    medians: dict[str, list[float]] = {mode: [] for mode in MODES}
    for (mode, _), found in zip(captured, times, strict=True):
        medians[mode].append(round(statistics.median(found), 1))
    return {mode: {"us": statistics.median(found), "graphs_us": found} for mode, found in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=4, help="of each mode")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available() or not overlaps(0):
        parser.error("kernels overlap on NVIDIA GPUs since Hopper, with VLLM_FL_CHIP_FEATURES on; not here")
    layers = weights()
    found: dict[str, Any] = {}
    for batch, context in BATCHES:
        name = f"{batch} requests, {context} tokens"
        found[name] = measure(layers, batch, context, options.rounds, options.graphs)
        for mode, row in found[name].items():
            gain = found[name]["none"]["us"] - row["us"]
            graphs = ", ".join(f"{one:.1f}" for one in row["graphs_us"])
            print(f"{name}: {mode:6} {row['us']:8.1f} us, gains {gain:+.1f}; graphs {graphs}", flush=True)
    if options.json:
        machine = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "triton": triton.__version__}
        data = {"machine": machine, "date": time.strftime("%Y-%m-%d"), "rounds": options.rounds, "measured": found}
        options.json.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
