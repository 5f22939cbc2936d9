"""Milliseconds of one prefill step on a GPU: alone, and in a batch with decoding requests.

A prompt with more tokens than the largest captured graph runs outside graphs. So these steps show the host's share, and
the client's wait for the first token. The plugin captures larger graphs than vLLM if they are faster. One engine runs
in this process; run the benchmark once for each setting and compare.

    python benchmarks/serve_steps.py [--vanilla] [--shape llama-3.1-8b] [--format fp8_blocks] [--layers 32]
        [--beside 16] [--graphs 1,16] [--largest-graph 512] [--profile] [--host FILE]

The model has a published shape and random weights, in bfloat16 or in a format of ``serve_quantized.py``. ``--host``
writes a Python profile of ten steps of one prompt. Needs vLLM, and for the plugin this package.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serve_quantized import FORMATS, whole_blocks
from shapes import SHAPES

MOST = 8192
"""Tokens of the longest prompt, and of the largest batch."""
ALONE = (64, 300, 513, 601, 1001, 1500, 2048, 3001, 6001, MOST)
BESIDE = (300, 700, 1001, 1500)
HOST_TOKENS = 1001
REPEATS = 9
CONTEXT = 900
"""Tokens of the prompts of decoding requests."""


class Steps:
    """An engine with timed steps; a step's time includes the device's work."""

    def __init__(self, model: Path, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.engine = LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=MOST + 64,
            max_num_batched_tokens=MOST,
            gpu_memory_utilization=0.2,
            kv_cache_memory_bytes=4 << 30,  # not measured at the start, so two engines may start at once
            enable_prefix_caching=False,
            async_scheduling=False,
            **arguments,
        ).llm_engine
        self.random, self.added = random.Random(0), 0

    def add(self, tokens: int, answer: int) -> None:
        """Add a request."""
        from vllm import SamplingParams

        self.added += 1
        prompt = [self.random.randrange(10, 20_000) for _ in range(tokens)]
        sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.added), {"prompt_token_ids": prompt}, sampling)

    def step(self) -> float:
        """Run one step; return its milliseconds."""
        import torch

        torch.cuda.synchronize()
        began = time.perf_counter()
        self.engine.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3

    def prompt(self, tokens: int, answer: int) -> float:
        """Return the milliseconds of a new prompt's prefill step; then run the steps for the rest of its answer."""
        self.add(tokens, answer)
        took = self.step()
        for _ in range(answer - 1):
            self.step()
        return took


def profiled(steps: Steps, file: Path) -> None:
    """Write a profile of the host's time in ten steps of one prompt, by function."""
    found = cProfile.Profile()
    for _ in range(10):
        found.runcall(steps.prompt, HOST_TOKENS, 1)
    with file.open("w") as out:
        for order in ("tottime", "cumtime"):
            pstats.Stats(found, stream=out).sort_stats(order).print_stats(70)


def _median(measure: Callable[[], float]) -> str:
    return f"{statistics.median(measure() for _ in range(REPEATS)):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vanilla", action="store_true", help="vLLM without the plugin, with FlashAttention 3")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--format", choices=FORMATS, help="of the weights; else bfloat16")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--beside", type=int, default=16, metavar="REQUESTS", help="that decode meanwhile")
    parser.add_argument(
        "--profile", action="store_true", help="print the host's and the device's time of each operator"
    )
    parser.add_argument("--graphs", metavar="TOKENS,…", help="capture graphs of these sizes alone, to be ready sooner")
    parser.add_argument("--largest-graph", type=int, metavar="TOKENS", help="vLLM's sizes of graphs, up to this one")
    parser.add_argument("--host", type=Path, metavar="FILE", help="the functions that take the host's time")
    given = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_FL_STEPS": "1"}
    if given.vanilla:
        os.environ["VLLM_PLUGINS"] = ""
    shape = SHAPES[given.shape]
    config = dict(shape.config)
    if given.layers:
        config["num_hidden_layers"] = given.layers
    if given.format:
        config["quantization_config"] = whole_blocks(FORMATS[given.format], shape)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        arguments: dict[str, Any] = {"attention_backend": shape.vanilla["fa3"]} if given.vanilla else {}
        if given.graphs:
            sizes = [int(size) for size in given.graphs.split(",")]
            arguments["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        if given.largest_graph:
            arguments["compilation_config"] = {"max_cudagraph_capture_size": given.largest_graph}
        steps = Steps(Path(folder), arguments)
        for tokens in ALONE[-3:]:
            steps.prompt(tokens, 1)
        for tokens in ALONE:
            print(f"prompt of {tokens}: {_median(lambda tokens=tokens: steps.prompt(tokens, 1))} ms", flush=True)
        for _ in range(given.beside):
            steps.add(CONTEXT, 500)
        for _ in range(4):
            steps.step()
        print(f"decode, batch {given.beside}: {_median(steps.step)} ms", flush=True)
        for tokens in BESIDE:
            took = _median(lambda tokens=tokens: steps.prompt(tokens, 2))
            print(f"prompt of {tokens} beside {given.beside}: {took} ms", flush=True)
        if given.host:
            profiled(steps, given.host)
        if given.profile:
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
                steps.prompt(BESIDE[2], 2)
            for order in ("self_cpu_time_total", "cuda_time_total"):
                print(found.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60))


if __name__ == "__main__":
    main()
