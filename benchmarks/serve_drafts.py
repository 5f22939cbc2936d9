"""Tokens per second with drafts on a GPU: a quantized model with an EAGLE-3 head and without, and vLLM with one.

The target has the shape of Qwen3-8B in fp8, and the drafter that of its published EAGLE-3 heads: one layer and a
vocabulary of 32,000. Weights are random, so vLLM's synthetic verification decides the number of accepted drafts:
``--accepted`` tokens per step on average, at most one of them by chance. Drafting and verification still run, so a step
costs the same as with trained weights. The engines' counters give the accepted drafts. Engines, alternation and
intervals are those of ``serve_vllm.py``. The cells are ``vanilla_drafts``, ``drafts`` and ``plain``, the plugin without
drafts. ``--profile`` gives times per token.

    python benchmarks/serve_drafts.py [--format fp8] [--cells vanilla_drafts,drafts,plain] [--rounds 5] [--drafted 3]
        [--accepted 2.8] [--layers 36] [--json FILE] [--profile FILE] [--logs FOLDER]

Needs one GPU, vLLM with its compiled operators, and this package.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

import kernel_trace
from serve_quantized import FORMATS
from serve_vllm import SINGLE, VANILLA, Cell, Workload, compare, measure, table
from shapes import QWEN3_EAGLE3, SHAPES

SHAPE = "qwen3-8b"
WORKLOADS = (Workload("decode, batch 1", 1, 128, 1024), Workload("decode, batch 8", 8, 128, 1024))
DRAFTS, PLAIN = "drafts", "plain"
CHANGE = "fill_quantized"


def cells_of(drafter: Path, accepted: float, drafted: int) -> dict[str, Cell]:
    """Return the engines; ``drafter``: the folder of the drafter's configuration."""
    speculation = {
        "method": "eagle3",
        "model": str(drafter),
        "num_speculative_tokens": drafted,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": accepted,
    }
    counted = {"disable_log_stats": False}
    drafting = {"speculative_config": speculation, **counted}
    return {
        f"{VANILLA}_drafts": Cell({"VLLM_PLUGINS": ""}, drafting, CHANGE),
        DRAFTS: Cell({}, drafting, CHANGE),
        PLAIN: Cell(SINGLE, counted, CHANGE),
    }


def tokens_a_step(counters: Mapping[str, float]) -> float | None:
    """Return the tokens per step with drafts, from an engine's counters."""
    steps = counters.get("vllm:spec_decode_num_drafts", 0)
    return 1 + counters["vllm:spec_decode_num_accepted_tokens"] / steps if steps else None


def over_plain(rates: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Return workload → speed-up of the plugin by drafts: median of the rounds, and interval."""
    from fl_dispatch.evidence.intervals import interval

    result = {}
    for work, cells in rates.items():
        if DRAFTS in cells and PLAIN in cells:
            ratios = [fast / slow for fast, slow in zip(cells[DRAFTS], cells[PLAIN], strict=True)]
            low, high = interval(ratios)
            result[work] = {"ratio": statistics.median(ratios), "low": low, "high": high}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = cells_of(Path(), 1, 3)
    parser.add_argument("--format", choices=FORMATS, default="fp8")
    parser.add_argument("--cells", default=",".join(known))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafted", type=int, default=3, metavar="TOKENS", help="drafts a step")
    parser.add_argument("--accepted", type=float, default=2.8, metavar="TOKENS", help="tokens that a step gives")
    parser.add_argument("--layers", type=int, default=SHAPES[SHAPE].layers, help="fewer than the model has")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="time of each kernel, as JSON; printed too")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "serve_drafts")
    given = parser.parse_args()
    names = given.cells.split(",")
    if unknown := set(names) - set(known):
        parser.error(f"no cell {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    import torch

    import vllm

    shape = SHAPES[SHAPE]
    shape = dataclasses.replace(shape, config={**shape.config, "quantization_config": FORMATS[given.format]})
    with tempfile.TemporaryDirectory() as name:
        target, drafter = Path(name) / "target", Path(name) / "drafter"
        for place in (target, drafter, given.logs):
            place.mkdir(parents=True, exist_ok=True)
        (drafter / "config.json").write_text(json.dumps(QWEN3_EAGLE3))
        made = cells_of(drafter, given.accepted, given.drafted)
        cells = {cell: made[cell] for cell in names}
        profiled = given.profile is not None
        found = measure(
            shape, cells, WORKLOADS, given.rounds, given.layers, target, given.logs, profiled, 1, given.json
        )
    found["compared"] = compare(found["rates"])
    found["over_plain"] = over_plain(found["rates"])
    found["tokens_a_step"] = {cell: tokens_a_step(counters) for cell, counters in found.pop("counters").items()}
    found["machine"] = {
        "gpu": torch.cuda.get_device_name(0),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "shape": f"{SHAPE}, {given.format}, EAGLE-3 with {given.drafted} drafts",
        "accepted": given.accepted,
        "layers": given.layers,
        "rounds": given.rounds,
    }
    profiles = found.pop("profiles")
    if given.profile:
        given.profile.write_text(json.dumps(profiles, indent=1))
        for cell, works in profiles.items():
            for work, traced in works.items():
                print(f"\n{cell}, {work}: {kernel_trace.table(traced, traced['steps'])}")
    if given.json:
        from fl_dispatch.evidence.origin import write  # late: a vanilla engine's process imports this file too

        write(given.json, found)
    print(table(found["compared"]))
    for work, row in found["over_plain"].items():
        print(f"{work}: with drafts {row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}] of the same without")
    print("tokens a step:", found["tokens_a_step"])
    print("compiled after the start:", found["late_compilations"])


if __name__ == "__main__":
    main()
