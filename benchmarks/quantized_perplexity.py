"""Perplexity of the small model in each quantized format: of real engines, and the right value.

    python benchmarks/quantized_perplexity.py [SCHEME ...] [--dtypes NAME,…] [--work FOLDER] [--json FILE]

The right value is that of Hugging Face's network in float32 with the dequantized weights, and with inputs quantized as
the scheme says. Each checkpoint is written to a folder of ``--work`` for a server, and scored by an engine of the
installed host in each dtype. Each result is a row of a Markdown table. The last two columns are root mean squares of
distances of log-probabilities: by rounding alone, as in the tests (``quantized_network``), and from the network without
quantization.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / room) for room in ("support", "scenarios", "scenarios/quantized")]

import quantized_checkpoints as checkpoints  # noqa: E402 - lies with the tests
import scoring  # noqa: E402
from fl_dispatch.cli import small_model  # noqa: E402
from fl_dispatch.cli.hosts import Host, installed_host  # noqa: E402
from fl_dispatch.evidence.origin import machine, write  # noqa: E402
from quantized_network import computed, distance, network, right_perplexity, scores  # noqa: E402
from running import PROMPTS  # noqa: E402

UNQUANTIZED = "not quantized"


def engines_perplexities(host: Host, checkpoint: Path, dtypes: Sequence[str]) -> dict[str, float]:
    """Return dtype → the perplexity from a real engine; no tolerance is checked."""
    sys.path.insert(0, str(ROOT / "tests" / host.value))
    if host is Host.VLLM:
        from engines import start_features

        engine = {"max_num_batched_tokens": 1024, "enable_prefix_caching": False}
        engines = [(checkpoint, [scoring.step()], {**engine, "dtype": dtype}) for dtype in dtypes]
        answers = start_features(*engines).result()["runs"]
        return {dtype: scoring.found(run["steps"][0]) for dtype, run in zip(dtypes, answers, strict=True)}
    from serving import start

    step = {**scoring.SGLANG_STEP, "prompts": scoring.rows()}
    started = {dtype: start(checkpoint, step, engine={"dtype": dtype}) for dtype in dtypes}
    return {dtype: scoring.found_by_sglang(run.result()["steps"][0]) for dtype, run in started.items()}


def here(host: Host) -> dict[str, Any]:
    """Return the machine, the date, and the versions."""
    found = machine(torch.device("cpu"))
    named = ("transformers", *(["sglang"] if host is Host.SGLANG else []))
    return {**found, "versions": {**found["versions"], **{name: metadata.version(name) for name in named}}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [UNQUANTIZED, *checkpoints.SCHEMES]
    parser.add_argument("schemes", nargs="*", default=names, metavar="SCHEME", help=f"of {', '.join(names)}")
    parser.add_argument("--dtypes", default="float32,float16,bfloat16", metavar="NAME,…")
    parser.add_argument("--work", type=Path, help="a folder that keeps the checkpoints")
    parser.add_argument("--json", type=Path, help="a file for everything")
    given = parser.parse_args()
    if unknown := [name for name in given.schemes if name not in names]:
        parser.error(f"no scheme {unknown[0]!r}; there are {', '.join(names)}")
    host, dtypes = installed_host(), given.dtypes.split(",")
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 1]
    original = scores(network(None), prompts)
    heads = [f"{host.product}, {dtype} | difference" for dtype in dtypes]
    print(f"| checkpoint | right | {' | '.join(heads)} | rounding | quantization |")
    print("|" + "---|" * (4 + 2 * len(heads)), flush=True)
    found: dict[str, Any] = {"machine": here(host), "host": host.value, "schemes": {}}
    with tempfile.TemporaryDirectory() as folder:
        work = given.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        for name in given.schemes:
            scheme = checkpoints.SCHEMES.get(name)
            place = work / name.replace(",", "").replace(" ", "-")
            if scheme is None:
                place = small_model.CHECKPOINT
            elif not place.exists():
                checkpoints.write_checkpoint(place, scheme)
            right = right_perplexity(network(scheme))
            engines = engines_perplexities(host, place, dtypes)
            answers = computed(network(scheme), prompts)
            apart = distance(answers.scores, original)
            found["schemes"][name] = {
                "right": right,
                "engines": engines,
                "differences": {dtype: value / right - 1 for dtype, value in engines.items()},
                "rounding": answers.rounding,
                "quantization": apart,
            }
            cells = [f"{value:.3f} | {value / right - 1:+.1e}" for value in engines.values()]
            print(f"| {name} | {right:.3f} | {' | '.join(cells)} | {answers.rounding:.1e} | {apart:.1e} |", flush=True)
            if given.json:  # after each scheme, because a later one may be cut off
                write(given.json, found)


if __name__ == "__main__":
    main()
