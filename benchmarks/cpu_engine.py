"""One engine in a separate process that answers requests on its standard input.

``serve_cpu.py --vanilla`` starts such processes for vLLM's CPU platform and ours, and alternates between them every few
steps. The scheduler and the model run in this process, so a step is one call, with the processor time of the process.
A request and its answer are one line of JSON each: ``{"do": "steps", "count": 5}`` → ``[[0.041, 0.042], …]``, processor
and wall seconds of each step.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

PROMPTS, PROMPT = 4, 512
"""Prompts of the prefill and their tokens."""
CACHED = 128
"""Tokens of a decode's prompt: a whole block of either engine's, so the prefix cache has it after the first time."""
WORKLOADS = {f"prefill {PROMPTS} x {PROMPT}": 0, "decode, batch 1": 1, "decode, batch 8": 8}
"""Workload → requests of a decode; 0 for the prefill."""
UNTIMED = 3
"""Steps of a decode before the timed ones."""


class Engine:
    """vLLM with the platform that ``VLLM_PLUGINS`` allows.

    Args:
        options: further arguments of ``vllm.LLM``.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(
            max_model_len=1024,
            max_num_seqs=8,
            max_num_batched_tokens=PROMPTS * PROMPT,
            kv_cache_memory_bytes=1 << 30,
            disable_log_stats=True,
            **options,
        )
        self.engine = self.llm.llm_engine
        self.random, self.served = random.Random(0), 0
        self.vocabulary = self.llm.model_config.get_vocab_size()
        self.cached = [self._prompt(CACHED) for _ in range(8)]

    def _prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(10, self.vocabulary) for _ in range(tokens)]

    def _add(self, prompts: list[list[int]], tokens: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for ids in prompts:
            self.served += 1
            self.engine.add_request(str(self.served), {"prompt_token_ids": ids}, sampling)

    def begin(self, requests: int, count: int) -> None:
        """Begin a decode with ``count`` steps to time, after ending the previous one."""
        self.end()
        self._add(self.cached[:requests], UNTIMED + count + 1)
        self.steps(UNTIMED)

    def end(self) -> None:
        """End the running requests."""
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def steps(self, count: int) -> list[tuple[float, float]]:
        """Return processor and wall seconds of each of ``count`` steps."""
        found = []
        for _ in range(count):
            processor, wall = time.process_time(), time.perf_counter()
            self.engine.step()
            found.append((time.process_time() - processor, time.perf_counter() - wall))
        return found

    def prefill(self) -> list[tuple[float, float]]:
        """Return the same for one step over new prompts."""
        self.end()
        self._add([self._prompt(PROMPT) for _ in range(PROMPTS)], 1)
        return self.steps(1)

    def profile(self, count: int) -> str:
        """Return a table of operators by their own processor time in ``count`` steps of the decode; 0: in a prefill."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as found:
            self.steps(count) if count else self.prefill()
        return found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)

    def facts(self) -> dict[str, Any]:
        """Return the platform and settings that the engine reports."""
        from vllm.platforms import current_platform

        config = self.llm.llm_engine.vllm_config
        (parameters,) = self.llm.collective_rpc(_parameters)
        (threads,) = self.llm.collective_rpc(_threads)
        return {
            "platform": type(current_platform).__name__
            if not isinstance(current_platform, type)
            else str(current_platform),
            "model_runner": "V2" if config.use_v2_model_runner else "V1",
            "compilation": config.compilation_config.mode.name,
            "block_size": config.cache_config.block_size,
            "threads": threads,
            "parameters": parameters,
        }


def _parameters(worker: Any) -> int:
    return sum(part.numel() for part in worker.get_model().parameters())


def _threads(worker: Any) -> int:
    import torch

    return torch.get_num_threads()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engine's log must not mix with the answers
    engine = Engine(json.loads(sys.argv[1]))
    print(json.dumps(engine.facts()), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(engine, request.pop("do"))(**request)
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
