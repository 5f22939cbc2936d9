"""Tokens per second of quantized models on a GPU: vLLM with its best kernels, the plugin, and the plugin in bf16.

The model has a shape of ``serve_vllm.py`` and random weights in a quantized format, without a checkpoint. Engines,
alternation and comparison are those of ``serve_vllm.py``. The cells:

- ``vanilla_*``: vLLM chooses its kernels for the format.
- ``ours``, ``vendor``: quantized rows and products by our Triton kernels, or by the vendor's if they run; the rest as
  shipped.
- ``shipped``: the shipped choices for everything. The cells below differ from it as stated.
- ``apart``: separate kernels quantize the results of norms and gated activations, as in ``ours`` and ``vendor``.
- ``no_prefetch``: products of one row do not prefetch the next weight, and other attention kernels read prompts.
- ``unfused``: products of one row are not fused with norms, gates or quantizations.
- ``by_rows``: our kernels for 4-bit weights with one row and with more than 256, Marlin for 2 to 256; Marlin keeps a
  second copy of each weight.
- ``deep_gemm``: DeepGEMM, which compiles its kernels, for more than 64 rows of fp8 in blocks.
- ``one_stream``: shared experts wait for the router.
- ``steps``: up to eight steps per scheduler call.
- ``vllm_sizes``: graphs are captured only for vLLM's batch sizes.
- ``bf16``, ``bf16_unfused``: the plugin with weights that are not quantized.

    python benchmarks/serve_quantized.py [--formats fp8,w4a16] [--cells vanilla_fa3,ours] [--rounds 5] [--layers 32]
        [--quick] [--json FILE] [--profile FILE] [--logs FOLDER]

``--quick``: 8 layers, two rounds and a short prefill, to check that everything runs. ``--profile``: the time of every
kernel, as in ``serve_vllm.py``, by format. Formats run one after the other.
Needs one GPU, vLLM with its compiled operators, and this package.
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

from serve_vllm import NAMED, SINGLE, STEPS, VANILLA, WORKLOADS, Cell, compare, measure, table
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
ROUTERS = r"re:.*\.mlp\.gate$"
"""Routers, as compressed-tensors names modules that are not quantized; published checkpoints leave them out."""
PRODUCTS = ("scaled_linear", "weight_only_linear", "scaled_moe", "weight_only_moe")
APART = {"fuse_norm_quant": False, "fuse_act_quant": False}
NO_PREFETCH = {"VLLM_FL_CHIP_FEATURES": "0"}
UNFUSED = {"VLLM_FL_FUSE_ONE_TOKEN": "0"}
ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "benchmarks" / "configs"
QUICK_LAYERS, QUICK_ROUNDS = 8, 2
QUICK_WORKLOADS = (*WORKLOADS[:3], NAMED[0])


def _chosen(first: str) -> dict[str, str]:
    """Return variables that put an implementation of the quantized operators first."""
    rest = [token for token in ("impl:default.triton", "vendor", "reference") if token != first]
    return {"VLLM_FL_PER_OP": ";".join(f"{op}={'|'.join((first, *rest))}" for op in ("quantize", *PRODUCTS))}


def cells_of(shape: Shape, unquantized: Path) -> dict[str, Cell]:
    """Return the engines of a format; ``unquantized`` is the folder of the model without quantization."""
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
        "single": Cell(SINGLE, change=change),
        "steps": Cell(STEPS, change=change),
        "bf16": Cell({}, {"model": str(unquantized)}),
        "bf16_unfused": Cell(UNFUSED, {"model": str(unquantized)}),
    }


def whole_blocks(quantization: Mapping[str, Any], shape: Shape) -> Mapping[str, Any]:
    """Return the format, without the shape's routers, and without its weights that do not consist of whole blocks."""
    if "weight_block_size" not in quantization:
        return {**quantization, "ignore": [*quantization["ignore"], ROUTERS]}
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(shape.config["num_hidden_layers"])]
    kept = quantization["modules_to_not_convert"]
    return {**quantization, "modules_to_not_convert": [*kept, *shape.odd, *routers]}


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
