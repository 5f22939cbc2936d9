"""Two engines on a CPU with default settings: fresh processes alternate, without variables, including the front end.

``serve_cpu.py --as-started`` runs this module. Each round starts both engines, one after the other, as ``vllm.LLM``
without settings for threads or compilation. The figures of a round are

- the seconds until the engine is ready, from the process's first instruction;
- tokens per second by the wall clock, for new prompts and for decoding;
- the resident memory of all its processes afterwards (PSS, so that a shared page counts once).

Each engine has its own cache of compiled code, empty before the first round, so the first round measures a cold start.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from in_turns import PYTHON, row

from fl_dispatch.evidence.child import Child

PROMPTS, PROMPT = 4, 512
"""Prompts of the prefill and their tokens."""
NEW, BATCHES = 64, (1, 8)
"""Generated tokens of each request, and the requests of each decode."""
WORKLOADS = {f"prefill {PROMPTS} x {PROMPT}": 0, **{f"decode, batch {batch}": batch for batch in BATCHES}}
"""Workload → requests of a decode; 0 for the prefill."""
REPEATS = 3
"""Timed turns of a workload in one process; their median counts."""
PLACE = 1 << 30
"""Bytes of the KV cache, the same for both engines: vLLM would take a share of the machine, which hides the weights."""
READY, FIRST, MEMORY = "seconds until ready", "seconds until ready, first start", "resident memory, MiB"
FEW = 8
"""Generated tokens before memory alone is measured."""
COSTS = (FIRST, READY, MEMORY)
"""Figures that are better if smaller."""


def engine(options: dict[str, Any]) -> None:
    """Run one engine: print a line when it is ready, then answer each input line with a workload's seconds."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engine's log must not mix with the answers
    import psutil

    from vllm import LLM, SamplingParams

    llm = LLM(max_model_len=1024, max_num_seqs=max(BATCHES), kv_cache_memory_bytes=PLACE, **options)
    drawn, vocabulary = random.Random(0), llm.model_config.get_vocab_size()
    print(json.dumps(time.time() - psutil.Process().create_time()), file=answers)

    def served(requests: int) -> float:
        """Return the seconds of new prompts, or of decoding alone: a request's time minus that of its first token."""
        count, length = (requests, 16) if requests else (PROMPTS, PROMPT)
        ids = [[drawn.randrange(10, vocabulary) for _ in range(length)] for _ in range(count)]
        spent = []
        for tokens in (NEW + 1, 1) if requests else (1,):
            asked = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            began = time.perf_counter()
            llm.generate([{"prompt_token_ids": one} for one in ids], asked, use_tqdm=False)
            spent.append(time.perf_counter() - began)
        return spent[0] - sum(spent[1:])

    for line in sys.stdin:
        requests = json.loads(line)
        if requests == MEMORY:
            ids = [drawn.randrange(10, vocabulary) for _ in range(PROMPT)]
            llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=FEW, ignore_eos=True), use_tqdm=False)
        if requests is None or requests == MEMORY:
            here = psutil.Process()
            whole = [here, *here.children(recursive=True)]
            answer = sum(process.memory_full_info().pss for process in whole) / 2**20
        else:
            served(requests)
            answer = statistics.median(served(requests) for _ in range(REPEATS))
        print(json.dumps(answer), file=answers)


def _round(
    name: str, own: Mapping[str, str], options: dict[str, Any], cache: Path, asked: str = ""
) -> dict[str, float]:
    """Return the figures of one process, or only the one that is asked for: :data:`READY` or :data:`MEMORY`."""
    variables = {key: value for key, value in own.items() if key != PYTHON}
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_FL_LOG_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    inherited = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    child = Child(
        name,
        [own.get(PYTHON, sys.executable), __file__, json.dumps(options)],
        {**inherited, **quiet, "HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(cache / name), **variables},
    )
    try:
        found = {READY: float(child.answer())}
        if asked:
            return found if asked == READY else {asked: float(child.ask(asked))}
        for workload, requests in WORKLOADS.items():
            tokens = requests * NEW or PROMPTS * PROMPT
            found[workload] = tokens / float(child.ask(requests))
        found[MEMORY] = float(child.ask(None))
    finally:
        child.stop()
    return found


def compare(pair: Mapping[str, Mapping[str, str]], model: Path, dtype: str, rounds: int) -> dict[str, Any]:
    """Run both engines in each round, in alternating order.

    Args:
        pair: engine → its variables; the ratio is the second engine's over the first one's.
        model: a checkpoint.
        dtype: dtype of the computation.
        rounds: number of rounds after the first, which compiles; the first one ends when the engine is ready.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in pair}
    with tempfile.TemporaryDirectory() as cache:
        for turn in range(rounds + 1):
            for name in list(pair)[:: -1 if turn % 2 else 1]:
                asked = "" if turn else READY
                found[name].append(_round(name, pair[name], {"model": str(model), "dtype": dtype}, Path(cache), asked))
                said = ", ".join(f"{key} {value:.1f}" for key, value in found[name][-1].items())
                print(f"round {turn} of {rounds}, {name}: {said}", file=sys.stderr, flush=True)
    measured = (*WORKLOADS, READY, MEMORY)
    figures = {key: {name: [one[key] for one in values[1:]] for name, values in found.items()} for key in measured}
    figures[FIRST] = {name: [values[0][READY]] for name, values in found.items()}
    rows = {key: row(values) for key, values in figures.items()}
    return {
        "dtype": dtype,
        "mode": "as started",
        "clock": "wall",
        "rounds": rounds,
        "results": {workload: rows[workload] for workload in WORKLOADS},
        "costs": {cost: rows[cost] for cost in COSTS},
        "each round": {name: [_rounded(one) for one in values] for name, values in found.items()},
    }


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in figures.items()}


def memory(engines: Mapping[str, Mapping[str, str]], model: Path, dtype: str) -> dict[str, Any]:
    """Start each engine once; return its resident memory after a prefill and a short decode.

    Args:
        engines: engine → its variables.
        model: a checkpoint.
        dtype: dtype of the computation.
    """
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as cache:
        for name, own in engines.items():
            platform, *_ = name.split(",")  # engines of one platform share compiled code
            found[name] = _round(platform, own, {"model": str(model), "dtype": dtype}, Path(cache), MEMORY)[MEMORY]
            print(f"{dtype}, {name}: {found[name]:.0f} MiB", file=sys.stderr, flush=True)
    first, *_ = found.values()
    rows = {name: {"MiB": round(value, 1), "ratio": round(value / first, 3)} for name, value in found.items()}
    return {"dtype": dtype, "mode": "memory", "clock": "none", "memory": rows}


def report(data: dict[str, Any]) -> None:
    """Print the results as a table."""
    from fl_dispatch.cli.output import print_table

    if "memory" in data:
        rows = [(name, *cells.values()) for name, cells in data["memory"].items()]
        print_table(f"Resident memory, {data['dtype']}, MiB", ("engine", "MiB", "ratio to the first"), rows)
        return
    speeds = {f"{workload}, tokens/s": cells for workload, cells in data["results"].items()}
    rows = [
        (figure, *values, ratio, f"{low} to {high}")
        for figure, cells in {**speeds, **data["costs"]}.items()
        for *values, ratio, (low, high) in [cells.values()]
    ]
    names = [name for name in data["costs"][READY] if name not in ("ratio", "interval")]
    print_table(
        f"As started, {data['dtype']}, wall clock, medians of {data['rounds']} rounds",
        ("figure", *names, "ratio", "95 % interval"),
        rows,
    )


if __name__ == "__main__":
    engine(json.loads(sys.argv[1]))
