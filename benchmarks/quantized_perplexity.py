"""Perplexity of the small model in each quantized format: what a real engine finds, and what is right.

    python benchmarks/quantized_perplexity.py [SCHEME ...] [--work FOLDER] [--dtype float32]

Right is Hugging Face's network in float32 with the dequantized weights, whose inputs are quantized where the scheme
says so. Each checkpoint is written to a folder of ``--work``, where ``vllm serve`` takes it, and scored by
``fl perplexity``. A row of a Markdown table is printed for each. The last two columns are root mean squares of
distances of log-probabilities: by rounding alone, as the tests have it (``quantized_network``), and from the network
that is not quantized.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

import quantized_checkpoints as checkpoints  # noqa: E402 - lies with the tests
from fl_dispatch.cli import small_model  # noqa: E402
from quantized_network import computed, distance, network, right_perplexity, scores  # noqa: E402
from running import PROMPTS  # noqa: E402

UNQUANTIZED = "not quantized"


def engines_perplexity(checkpoint: Path, dtype: str) -> float:
    """By a real engine; the tolerance is left to the reader."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = ["-c", "from fl_dispatch.cli import main; main()", "perplexity", str(checkpoint)]
        options = ["--text", str(small_model.HELD_OUT), "--dtype", dtype, "--json", str(file)]
        ended = subprocess.run([sys.executable, *command, *options], capture_output=True, text=True, check=False)
        if ended.returncode:
            sys.exit(f"{checkpoint.name}: {ended.stdout}{ended.stderr}")
        return float(json.loads(file.read_text())["perplexity"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [UNQUANTIZED, *checkpoints.SCHEMES]
    parser.add_argument("schemes", nargs="*", default=names, metavar="SCHEME", help=f"of {', '.join(names)}")
    parser.add_argument("--work", type=Path, help="a folder that keeps the checkpoints")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    if unknown := [name for name in given.schemes if name not in names]:
        parser.error(f"no scheme {unknown[0]!r}; there are {', '.join(names)}")
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 1]
    original = scores(network(None), prompts)
    print(f"| checkpoint | right | vLLM, {given.dtype} | difference | rounding | quantization |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        work = given.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        for name in given.schemes:
            scheme = checkpoints.SCHEMES.get(name)
            place = work / name.replace(",", "").replace(" ", "-")
            if scheme is not None and not place.exists():
                checkpoints.write_checkpoint(place, scheme)
            right = right_perplexity(network(scheme))
            found = engines_perplexity(small_model.CHECKPOINT if scheme is None else place, given.dtype)
            answers = computed(network(scheme), prompts)
            cells = f"{right:.3f} | {found:.3f} | {found / right - 1:+.5f}"
            spread = f"{answers.rounding:.1e} | {distance(answers.scores, original):.1e}"
            print(f"| {name} | {cells} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
