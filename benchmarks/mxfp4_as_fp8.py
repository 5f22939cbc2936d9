"""MXFP4 weights as in the checkpoint and as fp8 in blocks (``VLLM_FL_MXFP4_AS_FP8``), under vLLM on a CPU.

Both engines run at once in separate processes and alternate. Tokens and log-probabilities of a prompt's answer are
compared, and each round is compared with the other engine's in the same round.

    python benchmarks/mxfp4_as_fp8.py [--rounds 5] [--json FILE]

Run it in the environment with vLLM, because the checkpoint's writer is part of the tests and needs their libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"hidden_size": 1024, "intermediate_size": 3072}
PROMPT, NEW = 256, 16
SCHEME = "compressed-tensors MXFP4A16"
CELLS = {"mxfp4": {}, "fp8 in blocks": {"VLLM_FL_MXFP4_AS_FP8": "1"}}


def _stored(worker: Any) -> int:
    return sum(part.nbytes for name, part in worker.get_model().named_parameters() if "_proj" in name)


def serve(arguments: dict[str, Any]) -> None:
    """Run a cell's process: start the engine, then answer a prompt for each input line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engine's output goes to the log
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    answers.write(json.dumps(llm.collective_rpc(_stored)[0]) + "\n")
    sampling = {
        count: SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1) for count in (1, NEW)
    }
    for line in sys.stdin:
        prompt = {"prompt_token_ids": [5 + (json.loads(line) + 7 * at) % 400 for at in range(PROMPT)]}
        taken = []
        for count in (1, NEW):
            start = time.perf_counter()
            (found,) = llm.generate([prompt], sampling[count], use_tqdm=False)
            taken.append(time.perf_counter() - start)
        (answer,) = found.outputs
        numbers = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        answers.write(json.dumps([*taken, [*answer.token_ids], numbers]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(json.loads(options.serve))
        return
    sys.path[:0] = [str(ROOT / "tests" / room) for room in ("support", "scenarios", "scenarios/quantized")]
    from fl_dispatch.cli.checkpoints import build_checkpoint
    from fl_dispatch.evidence.child import Child
    from fl_dispatch.evidence.origin import write
    from quantized_checkpoints import SCHEMES, write_checkpoint

    fixed = {"VLLM_PLUGINS": "fl", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    fixed["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        plain = build_checkpoint("qwen3", Path(folder) / "plain", **SIZES)
        model = write_checkpoint(Path(folder) / "mxfp4", SCHEMES[SCHEME], model=plain)
        arguments = {
            "model": str(model),
            "dtype": "bfloat16",
            "max_model_len": 512,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 1 << 28,
        }
        command = [sys.executable, __file__, "--serve", json.dumps(arguments)]
        engines = {name: Child(name, command, {**os.environ, **fixed, **own}) for name, own in CELLS.items()}
        stored = {name: engine.answer() for name, engine in engines.items()}
        rounds = [
            {name: engine.ask(number) for name, engine in engines.items()} for number in range(options.rounds + 1)
        ]
        for engine in engines.values():
            engine.stop()
    first, second = CELLS
    ratios = {
        work: [one[first][at] / one[second][at] for one in rounds[1:]]  # the first round warms up
        for at, work in enumerate((f"prompt of {PROMPT}", f"prompt and {NEW} tokens"))
    }
    found = {
        "scheme": SCHEME,
        "sizes": SIZES,
        "bytes of products' weights and scales": stored,
        "tokens equal": all(one[first][2] == one[second][2] for one in rounds),
        "log-probabilities equal, bit for bit": all(one[first][3] == one[second][3] for one in rounds),
        "seconds": {name: [one[name][:2] for one in rounds[1:]] for name in CELLS},
        f"seconds of {first} over those of {second}": {
            work: {"median": statistics.median(each), "least": min(each), "most": max(each)}
            for work, each in ratios.items()
        },
    }
    print(json.dumps({name: value for name, value in found.items() if name != "seconds"}, indent=2))
    if options.json:
        write(options.json, found)


if __name__ == "__main__":
    main()
