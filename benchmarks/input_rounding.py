"""The effect of quantized inputs on log-probabilities: against the format's own library, by rounding, by powers of two.

    python benchmarks/input_rounding.py [--json FILE]

Three tables, all for the small model's prompts and in float32 by PyTorch, without engines and kernels.

- *library*: the network of ``quantized_network`` against the forward pass of ``compressed-tensors`` in
  Transformers, for the same checkpoint.
- *rounding*: the distance of log-probabilities if each product has an error as large as a sum's in float32.
- *powers of two*: the network with scales of inputs rounded up to powers of two (``"scale_fmt": "ue8m0"``) against
  the network with unrounded scales.

Distances are root mean squares and largest values. Run it in the environment with vLLM, which has the library.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / room) for room in ("support", "scenarios", "scenarios/quantized")]

import quantized_checkpoints as checkpoints  # noqa: E402 - lies with the tests
from fl_dispatch.evidence.origin import machine, write  # noqa: E402
from quantized_checkpoints import FP8, SCHEMES, STATIC, Scheme, eight_bits, nearest, rows_of, symmetric  # noqa: E402
from quantized_network import computed, distance, network, right_perplexity, scores  # noqa: E402
from running import PROMPTS  # noqa: E402

TEXTS = [prompt for prompt in PROMPTS if len(prompt) > 1]
SCALES = {"q_proj": 0.05, "k_proj": 0.02, "v_proj": 0.1}
"""Scales of inputs of merged products; other products have the scales of the tests."""
BLOCKS = "fp8, blocks of 128"
LIBRARY, INT8 = "compressed-tensors W8A8 fp8", "compressed-tensors W8A8 int8"


def static(scale: float) -> Scheme:
    """Return ``fp8`` of ``compressed-tensors`` with one scale for each weight, and one for its input."""
    per_tensor = checkpoints.whole("float", "tensor")
    config = checkpoints.compressed("float-quantized", per_tensor, {**per_tensor, "dynamic": False})
    return Scheme(config, eight_bits(FP8, "tensor", scale), "Fp8Layer", rows_of(FP8, scale=scale))


@dataclass(frozen=True)
class ThreeScales(Scheme):
    """Static ``fp8`` with separate scales for ``q_proj``, ``k_proj`` and ``v_proj``."""

    def of(self, name: str) -> Scheme:
        part = name.removesuffix(".weight").rpartition(".")[2]
        return static(SCALES.get(part, STATIC))


def by_half_the_range(x: Tensor) -> Tensor:
    """Quantize inputs to int8 as the library does: -128 to 127, scale: a row's largest magnitude over 127.5."""
    units = symmetric(x, 127.5)
    return (x / units).round().clamp(-128, 127) * units


ONE = static(STATIC)
THREE = ThreeScales(ONE.config, ONE.write, ONE.layer, ONE.rows)
COMPARED: Mapping[str, Scheme] = {
    f"{LIBRARY}, static": ONE,
    f"{LIBRARY}, static, q, k and v apart": THREE,
    LIBRARY: SCHEMES[LIBRARY],
    INT8: SCHEMES[INT8],
    f"{INT8}, with the library's scales of inputs": replace(SCHEMES[INT8], rows=by_half_the_range),
}
ROUNDED: Mapping[str, Scheme] = {
    f"{LIBRARY}, static": ONE,
    LIBRARY: SCHEMES[LIBRARY],
    BLOCKS: SCHEMES[BLOCKS],
    INT8: SCHEMES[INT8],
    "compressed-tensors W8A16 fp8": SCHEMES["compressed-tensors W8A16 fp8"],
    "compressed-tensors W4A16": SCHEMES["compressed-tensors W4A16"],
}


def apart(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """Return the distance of log-probabilities."""
    return {"root mean square": distance(ours, theirs), "largest": float((ours - theirs).abs().max())}


def of_the_library(scheme: Scheme, folder: Path) -> Tensor:
    """Return the log-probabilities of the library's own forward pass for a checkpoint of a scheme."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    checkpoint = checkpoints.write_checkpoint(folder, scheme)
    whole = CompressedTensorsConfig(run_compressed=False)
    made = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, quantization_config=whole, attn_implementation="eager"
    )
    quantizes = [module for module in made.modules() if getattr(module, "quantization_scheme", None) is not None]
    if not all(module.quantization_scheme.input_activations for module in quantizes) or not quantizes:
        raise SystemExit("the library read a checkpoint whose inputs it does not quantize")
    return scores(made.eval(), TEXTS)


def by_powers_of_two(x: Tensor) -> Tensor:
    """Quantize inputs with one scale for 128 elements, rounded up to a power of two."""
    inner = x.shape[-1]
    parts = functional.pad(x, (0, -inner % 128)).unflatten(-1, (-1, 128))
    units = torch.exp2(torch.ceil(torch.log2(symmetric(parts, 448.0))))
    return (nearest(parts / units, FP8).float() * units).flatten(-2)[..., :inner]


def measure(folder: Path) -> dict[str, Any]:
    library = {
        name: apart(scores(network(scheme), TEXTS), of_the_library(scheme, folder / str(number)))
        for number, (name, scheme) in enumerate(COMPARED.items())
    }
    rounding = {}
    for name, scheme in ROUNDED.items():
        found = computed(network(scheme), TEXTS)
        rounding[name] = {"root mean square": found.rounding, "largest": found.largest}
    plain, as_served = SCHEMES[BLOCKS], scores(network(SCHEMES[BLOCKS]), TEXTS)
    rounded, original = replace(plain, rows=by_powers_of_two), scores(network(None), TEXTS)
    as_trained = scores(network(rounded), TEXTS)
    powers: dict[str, Any] = {
        "scales as they are, beside powers of two": apart(as_served, as_trained),
        "scales as they are, beside no quantization": apart(as_served, original),
        "powers of two, beside no quantization": apart(as_trained, original),
    }
    perplexities = {
        "scales as they are": right_perplexity(network(plain)),
        "powers of two": right_perplexity(network(rounded)),
    }
    return {"library": library, "rounding": rounding, "powers of two": powers, "perplexity": perplexities}


def here() -> dict[str, Any]:
    """Return the machine, the date, and the versions."""
    found = machine(torch.device("cpu"))
    named = {name: metadata.version(name) for name in ("transformers", "compressed-tensors")}
    return {**found, "versions": {**found["versions"], **named}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="a file for everything")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    for title in ("library", "rounding", "powers of two"):
        print(f"| {title} | root mean square | largest |\n|---|---|---|")
        for name, row in found[title].items():
            print(f"| {name} | {row['root mean square']:.1e} | {row['largest']:.1e} |")
        print()
    print(", ".join(f"perplexity, {name}: {value:.3f}" for name, value in found["perplexity"].items()))
    if given.json:
        write(given.json, {"machine": here(), **found})


if __name__ == "__main__":
    main()
