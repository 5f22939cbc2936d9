"""An engine in a separate process that times workloads one after the other.

The command's argument is JSON with the arguments of vLLM's ``LLM``. Each line of the input is ``[requests, tokens of
each prompt, tokens to generate]``. Each answer is one number: the seconds of the start, then of each workload.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

from ..hosts import Host
from . import Prompt, Start, start

VOCABULARY = 1000
"""Upper bound of the token ids of prompts."""


def serve(model: str, **arguments: object) -> None:
    """Start the engine, then run the workload of each line of the input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engine's output goes to the log
    begun = time.perf_counter()
    engine = start(Start(Host.VLLM, model, arguments=arguments))
    answers.write(json.dumps(time.perf_counter() - begun) + "\n")
    draw = random.Random(0)
    for line in sys.stdin:
        batch, prompt, new = json.loads(line)
        engine.generate([Prompt(draw.choices(range(10, VOCABULARY), k=prompt), new) for _ in range(batch)])
        answers.write(json.dumps(engine.seconds) + "\n")


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
