"""Tokens a second of quantized models on a GPU: vanilla vLLM with its best kernels, the plugin, and the plugin in bf16.

The model has the shape of ``serve_vllm.py`` and random weights in a quantized format, which no file has to bring; its
engines, its turns and its comparison are that benchmark's. ``vanilla_*`` chooses its own kernels for the format;
``ours`` takes the Triton kernels of this project for quantized rows and products, ``vendor`` the vendor's where they
run, and both the shipped choices for everything else; ``shipped`` takes those for all; ``apart`` does too, but
quantizes the results of norms and gated activations by kernels of their own, as ``ours`` and ``vendor`` do;
``no_prefetch`` does too, but its products of one row ask for nothing of the next weight, and its prompts are read by
other kernels of attention; ``unfused`` does too, but joins no product of one row with norms, gates or quantizations;
``by_rows`` takes ours for one row of 4 bits and for many, and Marlin for 2 to 256, which keeps a second copy of each
weight; ``deep_gemm`` takes DeepGEMM for more than 64 rows of fp8 in blocks, whose kernels it compiles; ``one_stream``
takes the shipped choices, but its shared experts wait for the router; ``vllm_sizes`` does too, but captures graphs of
batches of vLLM's sizes alone; ``bf16`` and ``bf16_unfused`` are the plugin with
weights that are not quantized.

    python benchmarks/serve_quantized.py [--formats fp8,w4a16] [--cells vanilla_fa3,ours] [--rounds 5] [--layers 32]
        [--quick] [--json FILE] [--profile FILE] [--logs FOLDER]

``--quick``: 8 layers, two rounds, and a short prefill, to see that everything runs. ``--profile``: the time of every
kernel, as in ``serve_vllm.py``, by format. Formats run one after the other.
Needs one GPU, vLLM with its compiled operators, and this package installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_vllm import NAMED, VANILLA, WORKLOADS, Cell, compare, measure, table
from shapes import SHAPES, Shape

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/scenarios/quantized"))

from quantized_checkpoints import FP8_CONFIG, TOKEN8, TOKEN_FP8, W4, compressed, whole

FORMATS: Mapping[str, Mapping[str, Any]] = {
    "fp8": compressed("float-quantized", whole("float", "channel"), TOKEN_FP8),
    "fp8_blocks": {**FP8_CONFIG, "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
    "w4a16": compressed("pack-quantized", {**W4, "group_size": 128}, None),
    "int8": compressed("int-quantized", whole("int", "channel"), TOKEN8),
}
"""Name → ``quantization_config``."""
PRODUCTS = ("scaled_linear", "weight_only_linear", "scaled_moe", "weight_only_moe")
APART = {"fuse_norm_quant": False, "fuse_act_quant": False}
NO_PREFETCH = {"VLLM_FL_CHIP_FEATURES": "0"}
UNFUSED = {"VLLM_FL_FUSE_ONE_TOKEN": "0"}
ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "benchmarks" / "configs"
QUICK_LAYERS, QUICK_ROUNDS = 8, 2
QUICK_WORKLOADS = (*WORKLOADS[:3], NAMED[0])


def _chosen(first: str) -> dict[str, str]:
    """The variables that put an implementation of the quantized operators first."""
    rest = [token for token in ("impl:default.triton", "vendor", "reference") if token != first]
    return {"VLLM_FL_PER_OP": ";".join(f"{op}={'|'.join((first, *rest))}" for op in ("quantize", *PRODUCTS))}


def cells_of(shape: Shape, unquantized: Path) -> dict[str, Cell]:
    """The engines of a format; ``unquantized``: the folder of the model without one."""
    change = "fill_quantized"
    vanilla = {
        f"{VANILLA}_{name}": Cell({"VLLM_PLUGINS": ""}, {"attention_backend": backend}, change)
        for name, backend in shape.vanilla.items()
    }
    return vanilla | {
        "ours": Cell(_chosen("impl:default.triton"), change=change),
        "vendor": Cell(_chosen("vendor"), change=change),
        "shipped": Cell({}, change=change),
        "no_prefetch": Cell(NO_PREFETCH, change=change),
        "apart": Cell({}, {"compilation_config": {"pass_config": APART}}, change),
        "unfused": Cell(UNFUSED, change=change),
        "by_rows": Cell({"VLLM_FL_CONFIG": str(CONFIGS / "w4a16-by-rows.yaml")}, change=change),
        "deep_gemm": Cell({"VLLM_FL_CONFIG": str(CONFIGS / "fp8-blocks-deep-gemm.yaml")}, change=change),
        "vllm_sizes": Cell({}, {"compilation_config": {"max_cudagraph_capture_size": 512}}, change),
        "one_stream": Cell({"VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1"}, change=change),
        "bf16": Cell({}, {"model": str(unquantized)}),
        "bf16_unfused": Cell(UNFUSED, {"model": str(unquantized)}),
    }


def whole_blocks(quantization: Mapping[str, Any], shape: Shape) -> Mapping[str, Any]:
    """The same format, but for weights of the shape that are no whole blocks."""
    if "weight_block_size" not in quantization:
        return quantization
    return {**quantization, "modules_to_not_convert": [*quantization["modules_to_not_convert"], *shape.odd]}


def run(shape: Shape, quantization: Mapping[str, Any], given: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """Measure one format."""
    with tempfile.TemporaryDirectory() as name:
        folder, unquantized = Path(name) / "quantized", Path(name) / "unquantized"
        for place in (folder, unquantized, logs):
            place.mkdir(parents=True, exist_ok=True)
        (unquantized / "config.json").write_text(json.dumps({**shape.config, "num_hidden_layers": given.layers}))
        known = cells_of(shape, unquantized)
        cells = {name: known[name] for name in given.cells or known}
        made = dataclasses.replace(
            shape, config={**shape.config, "quantization_config": whole_blocks(quantization, shape)}
        )
        found = measure(
            made, cells, given.workloads, given.rounds, given.layers, folder, logs, given.profile is not None, 1
        )
    del found["counters"]
    found["compared"] = compare(found["rates"])
    found["cells"] = {
        name: {key: value.removeprefix(f"{ROOT}/") for key, value in known[name].variables.items()}
        for name in found["started"]
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMATS), metavar="NAME,…")
    parser.add_argument("--cells", type=lambda text: text.split(","), metavar="NAME,…")
    parser.add_argument("--workloads", default="", metavar="TEXT,…", help="only those whose name has one of these")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_LAYERS} layers, {QUICK_ROUNDS} rounds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="time of each kernel, as JSON")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "serve_quantized")
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    if unknown := set(given.formats) - set(FORMATS):
        parser.error(f"no format {', '.join(sorted(unknown))}; there are {', '.join(FORMATS)}")
    if unknown := set(given.cells or ()) - set(cells_of(shape, Path())):
        parser.error(f"no cell {', '.join(sorted(unknown))}; there are {', '.join(cells_of(shape, Path()))}")
    given.layers = given.layers or (QUICK_LAYERS if given.quick else shape.layers)
    given.rounds = given.rounds or (QUICK_ROUNDS if given.quick else 5)
    texts = [text for text in given.workloads.split(",") if text]
    usual = QUICK_WORKLOADS if given.quick else WORKLOADS
    given.workloads = [
        work
        for work in (*WORKLOADS, *NAMED)
        if any(text in work.name for text in texts) or (not texts and work in usual)
    ]
    import torch

    import vllm

    machine = {
        "gpu": torch.cuda.get_device_name(0),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "shape": given.shape,
        "layers": given.layers,
        "rounds": given.rounds,
    }
    results: dict[str, Any] = {}
    profiles: dict[str, Any] = {}
    for name in given.formats:
        results[name] = run(shape, FORMATS[name], given, given.logs / name)
        print(f"\n{name}, {given.layers} layers\n{table(results[name]['compared'])}", flush=True)
        print("compiled after the start:", results[name]["late_compilations"], flush=True)
        profiles[name] = results[name].pop("profiles")
        if given.profile:
            given.profile.write_text(json.dumps(profiles, indent=1))
        if given.json:  # after each, because a later one may be cut off
            from fl_dispatch.evidence.origin import write  # late: a vanilla engine's process imports this file too

            write(given.json, {"machine": machine, "formats": results})


if __name__ == "__main__":
    main()
