"""One engine in a process of its own, which does what the lines on its standard input ask for.

``serve_cpu.py --vanilla`` starts two, vLLM's own CPU platform and ours, and lets them take turns. A request and its
answer are one line of JSON each: ``{"workload": "decode, batch 8"}`` → ``{"tokens_per_s": 201.3}``. The workload
``profile`` has a table of operators for an answer.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

PROMPTS, PROMPT, STEPS = 4, 512, 24
"""Prompts of the prefill and their tokens; tokens that each request of a decode generates."""
CACHED = 128
"""Tokens of a decode's prompt: a whole block of either engine's, so the prefix cache has it after the first time."""
WORKLOADS = {f"prefill {PROMPTS} x {PROMPT}": 0, "decode, batch 1": 1, "decode, batch 8": 8}
"""Workload → requests of a decode; 0 for the prefill."""

CLOCK = time.process_time if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" else time.perf_counter


class Engine:
    """vLLM under the platform that ``VLLM_PLUGINS`` leaves.

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
        self.random = random.Random(0)
        self.cached = [self._prompt(CACHED) for _ in range(8)]

    def _prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(10, 32_000) for _ in range(tokens)]

    def _seconds(self, prompts: list[list[int]], tokens: int) -> float:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        started = CLOCK()
        results = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        seconds = CLOCK() - started
        assert all(len(result.outputs[0].token_ids) == tokens for result in results)
        return seconds

    def speed(self, workload: str) -> float:
        """Tokens a second: of never seen prompts, or of what requests generate after the first token."""
        requests = WORKLOADS[workload]
        if not requests:
            return PROMPTS * PROMPT / self._seconds([self._prompt(PROMPT) for _ in range(PROMPTS)], 1)
        prompts = self.cached[:requests]
        first = self._seconds(prompts, 1)
        return requests * STEPS / (self._seconds(prompts, 1 + STEPS) - first)

    def profile(self) -> str:
        """A table of operators by their own processor time, in decode of 8 requests, where the engine is in-process."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as found:
            self._seconds(self.cached, STEPS)
        return found.key_averages().table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=60)

    def facts(self) -> dict[str, Any]:
        """The engine's platform and settings, as it says them."""
        from vllm.platforms import current_platform

        config = self.llm.llm_engine.vllm_config
        (parameters,) = self.llm.collective_rpc(_parameters)
        (threads,) = self.llm.collective_rpc(_threads)
        return {
            "platform": type(current_platform).__name__
            if not isinstance(current_platform, type)
            else str(current_platform),
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
    os.dup2(2, 1)  # the engine's log does not stand between the answers
    engine = Engine(json.loads(sys.argv[1]))
    print(json.dumps(engine.facts()), file=answers)
    for line in sys.stdin:
        workload = json.loads(line)["workload"]
        answer = {"profile": engine.profile()} if workload == "profile" else {"tokens_per_s": engine.speed(workload)}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
