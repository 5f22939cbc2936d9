"""Waiting times of a client of ``vllm serve`` under a mixed load, with and without the plugin.

Each cell is a separate server: vanilla vLLM, or the plugin with a choice of kernels (the cells of ``serve_vllm.py``).
All servers live at once; vLLM's own client, ``vllm bench serve``, loads them one after the other. Requests arrive at
random (a Poisson process) with prompts and answers of random lengths around the means. A round's requests are the same
for every cell. The table has medians over rounds of the time to the first token, the time between tokens and the tokens
per second, and their ratios to the better vanilla of the same round: for a time, below 1 is better.

    python benchmarks/serve_load.py [--shape llama-3.1-8b | --model FOLDER] [--cells vanilla_fa3,plugin_shipped]
        [--rate 8] [--requests 160] [--prompt 1024] [--answer 128] [--rounds 3] [--max-num-seqs 256] [--json FILE]
        [--logs FOLDER]

With ``--rate inf`` all requests arrive at once; if there are more than ``--max-num-seqs``, some wait for a place.
The model has a published shape and random weights, in bfloat16; ``--model`` takes a checkpoint. Needs vLLM with its
compiled operators for vanilla cells, and this package.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_vllm import VANILLA, Cell, cells_of
from shapes import SHAPES

STANDARD = ("vanilla_fa3", "plugin_shipped")
COMMAND = (sys.executable, "-m", "vllm.entrypoints.cli.main")
FIGURES: Mapping[str, str] = {
    "median_ttft_ms": "first token, p50, ms",
    "p99_ttft_ms": "first token, p99, ms",
    "median_itl_ms": "between tokens, p50, ms",
    "p99_itl_ms": "between tokens, p99, ms",
    "output_throughput": "tokens/s",
}
"""The client's names of the compared figures → the names here."""
SPREAD = 0.5
"""Lengths are drawn from the mean less this share to the mean plus this share."""
READY_WITHIN = 600.0
"""Seconds that a server may take until it answers."""


@dataclass(frozen=True)
class Load:
    """The client's requests: ``requests`` at ``rate`` a second, with tokens of prompts and answers on average."""

    rate: float
    requests: int
    prompt: int
    answer: int


def write_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer with the tokens ``t0`` to ``t<size - 1>``, so that lengths of texts are exact."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"t{number}": number for number in range(size)}, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


class Server:
    """A server in a separate process, with its log in ``logs``."""

    def __init__(self, name: str, cell: Cell, model: Path, port: int, options: Sequence[str], logs: Path) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_FL_", "VLLM_PLUGINS"))}
        fixed = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        caches = {"VLLM_CACHE_ROOT": str(logs / f"cache-{name}"), "TRITON_CACHE_DIR": str(logs / f"triton-{name}")}
        backend = [f"--{key.replace('_', '-')}={value}" for key, value in cell.engine.items()]
        self.name, self.address, self.log = name, f"http://127.0.0.1:{port}", logs / f"{name}.log"
        with self.log.open("w") as out:
            self._process = subprocess.Popen(
                [*COMMAND, "serve", str(model), f"--port={port}", *options, *backend],
                env={**kept, **fixed, **caches, **cell.variables},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> None:
        """Wait until the server answers; end the program if it does not."""
        deadline = time.monotonic() + READY_WITHIN
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.address}/health", timeout=2):
                return
            time.sleep(0.5)
        last = " ".join(self.log.read_text(errors="replace").strip().splitlines()[-1:])
        sys.exit(f"the server '{self.name}' did not start: {last} (its log: {self.log})")

    def stop(self) -> None:
        """End it as a user does at a keyboard, and by force if it takes too long."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def ask(address: str, model: Path, load: Load, turn: int) -> dict[str, float]:
    """The client's figures for one round."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "backend": "openai",
            "base-url": address,
            "model": model,
            "dataset-name": "random",
            "random-input-len": load.prompt,
            "random-output-len": load.answer,
            "random-range-ratio": SPREAD,
            "num-prompts": load.requests,
            "request-rate": load.rate,
            "seed": turn + 1,
            "percentile-metrics": "ttft,itl",
            "metric-percentiles": "50,99",
            "result-dir": folder,
            "result-filename": "result.json",
        }
        flags = ("--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm")
        named = (f"--{name}={value}" for name, value in arguments.items())
        client = subprocess.run(
            [*COMMAND, "bench", "serve", *named, *flags], capture_output=True, text=True, check=False
        )
        if client.returncode:
            sys.exit(
                f"vllm bench serve ended with {client.returncode}:\n{client.stdout[-2000:]}{client.stderr[-4000:]}"
            )
        found = json.loads((Path(folder) / "result.json").read_text())
    if found["completed"] != load.requests:
        first = next(filter(None, found["errors"]), "no reason given")
        sys.exit(f"{load.requests - found['completed']} of {load.requests} requests failed: {first}")
    return {name: float(found[name]) for name in FIGURES}


def compare(rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Cell → figure → its median over the rounds, and of its ratios to the better vanilla of the same round."""
    vanilla = [turns for name, turns in rounds.items() if name.startswith(VANILLA)]
    compared: dict[str, dict[str, dict[str, float]]] = {}
    for name, turns in rounds.items():
        compared[name] = {}
        for figure in FIGURES:
            better = max if figure == "output_throughput" else min
            row = {"median": statistics.median(turn[figure] for turn in turns)}
            if vanilla:
                best = [better(other[figure] for other in others) for others in zip(*vanilla, strict=True)]
                ratios = [turn[figure] / other for turn, other in zip(turns, best, strict=True)]
                row |= {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
            compared[name][figure] = row
    return compared


def table(compared: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The comparison as Markdown."""
    lines = ["| figure | cell | median | of the better vanilla |", "|---|---|---|---|"]
    for figure, words in FIGURES.items():
        for name, rows in compared.items():
            row = rows[figure]
            ratio = f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]" if "ratio" in row else ""
            lines.append(f"| {words} | {name} | {row['median']:,.1f} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a checkpoint in place of a shape")
    parser.add_argument("--cells", default=",".join(STANDARD), help=f"of {', '.join(cells_of(SHAPES['llama-3.1-8b']))}")
    parser.add_argument("--rate", type=float, default=8.0, metavar="REQUESTS", help="that arrive in a second")
    parser.add_argument("--requests", type=int, default=160, help="of a round")
    parser.add_argument("--prompt", type=int, default=1024, metavar="TOKENS", help="of a prompt on average")
    parser.add_argument("--answer", type=int, default=128, metavar="TOKENS", help="of an answer on average")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, metavar="REQUESTS", help="that a server runs at a time")
    parser.add_argument("--cache-gib", type=float, default=12.0, help="each server's KV cache")
    parser.add_argument("--port", type=int, default=8100, help="of the first server; the others follow")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path)
    options = parser.parse_args()
    load = Load(options.rate, options.requests, options.prompt, options.answer)
    known, names = cells_of(SHAPES[options.shape]), options.cells.split(",")
    if unknown := set(names) - set(known):
        parser.error(f"no cell {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        logs = options.logs or Path(temporary) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        model, arguments = options.model, [f"--kv-cache-memory-bytes={int(options.cache_gib * 2**30)}"]
        if model is None:
            model = Path(temporary) / "model"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(SHAPES[options.shape].config))
            write_tokenizer(model, SHAPES[options.shape].config["vocab_size"])
            arguments += ["--load-format=dummy"]
        # vLLM refuses texts of more letters than its longest token has, times the room for prompts; spaces count.
        longest = int((1 + SPREAD) * (load.prompt * 8 / 7 + load.answer)) + 16
        arguments += [f"--max-model-len={longest}", "--no-enable-prefix-caching", "--gpu-memory-utilization=0.3"]
        if options.max_num_seqs:
            arguments.append(f"--max-num-seqs={options.max_num_seqs}")
        begun, servers, ready = time.monotonic(), {}, {}
        for number, name in enumerate(names):
            servers[name] = Server(name, known[name], model, options.port + number, arguments, logs)
            stack.callback(servers[name].stop)
        for name in names:
            servers[name].wait()
            ready[name] = time.monotonic() - begun
            print(f"{name} is ready after {ready[name]:.0f} s", flush=True)
        machine = {**_machine(options, names), "ready after s, all begun at once": ready}
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for turn in range(-1, options.rounds):
            for place in range(len(names)):
                name = names[(place + turn) % len(names)]
                found = ask(servers[name].address, model, load, turn)
                if turn >= 0:  # the first round warms up
                    rounds[name].append(found)
                print(f"round {turn}, {name}: {found['median_ttft_ms']:.1f} ms to the first token", flush=True)
            if options.json and turn >= 0:  # after each round, because a later one may be cut off
                found = {"machine": machine, "rounds": rounds, "times": compare(rounds)}
                from fl_dispatch.evidence.origin import write  # late: a vanilla engine's process imports this file too

                write(options.json, found)
        print(table(compare(rounds)), flush=True)  # before servers end, which takes its time


def _machine(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    import torch

    import vllm

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    said = {key: str(value) for key, value in vars(options).items() if key not in ("json", "logs", "port")}
    return {"device": device, "vllm": vllm.__version__, "torch": torch.__version__, **said, "cells": list(names)}


if __name__ == "__main__":
    main()
