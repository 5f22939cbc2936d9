"""Both hosts' engines with the same face: start, switch, run all requests, answer. They live in a driver's process."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...evidence.bisect.prompts import TOP, Request
from ...settings import load_settings
from ..hosts import Host

Row = dict[str, float]
PATIENCE = 60.0
"""Seconds that SGLang's ranks have for an answer, and its scheduler to notice that it is idle."""


@dataclass(frozen=True)
class Start:
    """How an engine is started.

    Args:
        host: which one.
        model: the checkpoint.
        eager: nothing is compiled or captured.
        ranks: tensor-parallel.
        dtype: as hosts call it; ``auto`` for the checkpoint's.
        length: most tokens of a request.
        arguments: further arguments of vLLM's ``LLM`` or SGLang's ``Engine``.
    """

    host: Host
    model: str
    eager: bool
    ranks: int
    dtype: str
    length: int
    arguments: Mapping[str, Any]


class HostEngine(Protocol):
    """An engine of a host."""

    def switch(self, config: str, seed: int | None, ranks: list[int] | None) -> str: ...

    def score(self, rounds: Sequence[Sequence[Request]]) -> dict[str, list[Row]]: ...

    def answers(self) -> list[dict[str, Any]]: ...

    def stop(self) -> None: ...


def policy_text(config: str) -> str:
    """The policy of a config file under this process's environment, as text."""
    return load_settings({**os.environ, "VLLM_FL_CONFIG": config}).policy.to_json()


class VllmEngine:
    """vLLM's ``LLM``."""

    def __init__(self, start: Start) -> None:
        from vllm import LLM

        doors = f"{__package__}.doors"
        self._llm = LLM(
            **{
                "model": start.model,
                "dtype": start.dtype,
                "tensor_parallel_size": start.ranks,
                "enforce_eager": start.eager,
                "max_model_len": start.length,
                "max_num_seqs": 8,
                "seed": 0,
                "disable_log_stats": True,
                **start.arguments,
                "max_logprobs": TOP,
                "worker_extension_cls": f"{doors}.BisectWorker",
                "logits_processors": [f"{doors}:ForcedTokens"],
            }
        )
        if start.eager:  # compiled code hides calls
            self._llm.collective_rpc("fl_set_counting", args=(True,))

    def switch(self, config: str, seed: int | None, ranks: list[int] | None) -> str:
        said = self._llm.collective_rpc("fl_bisect_switch", args=(policy_text(config), seed, ranks))
        return next(filter(None, said), "")

    def score(self, rounds: Sequence[Sequence[Request]]) -> dict[str, list[Row]]:
        self._llm.reset_prefix_cache()
        found: dict[str, list[Row]] = {}
        for requests in rounds:
            prompts = [{"prompt_token_ids": request.prompt} for request in requests]
            outputs = self._llm.generate(prompts, [self._sampling(one) for one in requests], use_tqdm=False)
            for request, output in zip(requests, outputs, strict=True):
                rows = [*(output.prompt_logprobs[1:] if request.prefill else ()), *output.outputs[0].logprobs]
                found[request.label] = [{str(token): entry.logprob for token, entry in row.items()} for row in rows]
        return found

    @staticmethod
    def _sampling(request: Request) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0.0,
            max_tokens=max(1, len(request.forced)),
            ignore_eos=True,
            logprobs=TOP,
            prompt_logprobs=TOP if request.prefill else None,
            extra_args={"fl_forced": request.forced} if request.forced else None,
            detokenize=False,
        )

    def answers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._llm.collective_rpc("fl_bisect_answer")
        return found

    def stop(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class SglangEngine:
    """SGLang's ``Engine``."""

    def __init__(self, start: Start) -> None:
        import sglang

        from .scheduler import forcing_processor

        eager = {"disable_cuda_graph": True} if start.eager else {}
        self._ranks, self._processor = start.ranks, forcing_processor()
        self._engine = sglang.Engine(
            **{
                "model_path": start.model,
                "dtype": start.dtype,
                "tp_size": start.ranks,
                "context_length": start.length,
                "max_total_tokens": 8 * start.length,
                "max_running_requests": 8,
                "grammar_backend": "none",
                "random_seed": 0,
                **eager,
                **start.arguments,
                "enable_custom_logit_processor": True,
            }
        )
        if start.eager:
            from sglang_fl import report

            report.set_counting(self._engine)

    def switch(self, config: str, seed: int | None, ranks: list[int] | None) -> str:
        self._flush()
        answers = self._collected({"policy": policy_text(config), "seed": seed, "ranks": ranks})
        return next(filter(None, (str(answer["refused"]) for answer in answers)), "")

    def score(self, rounds: Sequence[Sequence[Request]]) -> dict[str, list[Row]]:
        self._flush()
        found: dict[str, list[Row]] = {}
        for requests in rounds:
            outputs = self._engine.generate(
                input_ids=[request.prompt for request in requests],
                sampling_params=[self._sampling(request) for request in requests],
                return_logprob=[True] * len(requests),
                logprob_start_len=[0 if request.prefill else -1 for request in requests],
                top_logprobs_num=[TOP] * len(requests),
                custom_logit_processor=[self._processor] * len(requests),
            )
            for request, output in zip(requests, outputs, strict=True):
                meta = output["meta_info"]
                prompt = [_row(row) for row in meta["input_top_logprobs"][1:]] if request.prefill else []
                steps = [_row(row) for row in meta["output_top_logprobs"]]
                for row, token in zip(steps, request.forced, strict=False):
                    row.pop(str(token), None)
                found[request.label] = [*prompt, *steps]
        return found

    @staticmethod
    def _sampling(request: Request) -> dict[str, Any]:
        return {
            "temperature": 0.0,
            "max_new_tokens": max(1, len(request.forced)),
            "ignore_eos": True,
            "custom_params": {"fl_forced": request.forced},
        }

    def answers(self) -> list[dict[str, Any]]:
        return self._collected({"policy": None})

    def _collected(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's answer.

        Raises:
            RuntimeError: a rank did not answer in time.
        """
        with tempfile.TemporaryDirectory(prefix="fl-bisect-") as folder:
            self._engine.collective_rpc("fl_bisect", folder=folder, job=job)
            files, late = [Path(folder, f"{rank}.json") for rank in range(self._ranks)], time.monotonic() + PATIENCE
            while not all(file.exists() for file in files):
                if time.monotonic() > late:
                    raise RuntimeError(f"no answer came from a rank of {self._ranks} within {PATIENCE:.0f} s")
                time.sleep(0.01)
            return [json.loads(file.read_text(encoding="utf-8")) for file in files]

    def _flush(self) -> None:
        """Empty the cache, once the scheduler has noticed that it is idle.

        Raises:
            RuntimeError: it does not.
        """
        late = time.monotonic() + PATIENCE
        while not self._engine.flush_cache().success:
            if time.monotonic() > late:
                raise RuntimeError("SGLang's cache cannot be emptied: it does not become idle")
            time.sleep(0.1)

    def stop(self) -> None:
        self._engine.shutdown()


def _row(row: Any) -> Row:
    return {str(token): logprob for logprob, token, *_ in row}


ENGINES: Mapping[Host, Callable[[Start], HostEngine]] = {Host.VLLM: VllmEngine, Host.SGLANG: SglangEngine}
