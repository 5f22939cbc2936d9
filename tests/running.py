"""What tests of real engines share, whatever the host: processes of their own, and what they should generate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPTS = [[(7 * row + column) % 400 + 5 for column in range(length)] for row, length in enumerate((7, 27, 331, 1))]
MAX_TOKENS = 16

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
"""Processes of pytest that share the machine."""

AT_ONCE = max(1, 2 // WORKERS)  # processes; an engine needs a core of its own
pool = ThreadPoolExecutor(AT_ONCE)


@dataclass(frozen=True)
class Finished:
    """A process that ended."""

    returncode: int
    log: str

    @property
    def last_line(self) -> str:
        """The last line that it wrote, usually the error."""
        return self.log.strip().rpartition("\n")[2]


def python(*arguments: str, environment: Mapping[str, str], timeout: float = 300) -> Finished:
    """Run Python in a process of its own; if its time is up, or the test is interrupted, its children end with it."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return Finished(process.returncode, output)


def finish(script: Path, job: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a script on a job; its result, with the log."""
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder, "job.json"), Path(folder, "result.json")
        request.write_text(json.dumps(job))
        ended = python(str(script), str(request), str(answer), environment=environment, timeout=600)
        if ended.returncode != 0 or not answer.exists():
            raise AssertionError(f"the engine ended with {ended.returncode}:\n{ended.log[-8000:]}")
        return {**json.loads(answer.read_text()), "log": ended.log}


def reference_network(model: Path, dtype: Any) -> Any:
    """Hugging Face's network of a checkpoint, which computes what the engine should."""
    import torch
    from transformers import AutoModelForCausalLM

    # "eager" is the arithmetic as the model defines it; PyTorch's attention would leave a soft cap out.
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager").eval()
    for module in network.modules():
        if type(module).__name__ == "BloomMLP":  # vLLM's Bloom has GELU itself, Hugging Face's its tanh form
            module.gelu_impl = torch.nn.GELU()
    return network


def expected_tokens(model: Path) -> list[list[int]]:
    """What Hugging Face transformers generates greedily for the standard prompts, and that no choice was close."""
    import torch

    network = reference_network(model, torch.float32)
    tokens = []
    for prompt in PROMPTS:
        output = network.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        tokens.append(output.sequences[0, len(prompt) :].tolist())
        for scores in output.scores:
            best, second = scores[0].topk(2).values.tolist()
            assert best - second > 1e-3, "the checkpoint's choices are too close to compare"
    return tokens


def ran(result: Mapping[str, Any], operator: str) -> set[str]:
    """The implementations of an operator that the engine's process called."""
    pairs = (key.split(" ") for key in result["report"]["counts"])
    return {impl_id for name, impl_id in pairs if name == operator}
