"""Engines for investigations in a driver process, one class per host."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ...evidence.bisect.prompts import TOP, Request
from ...settings import load_settings
from ..engines import Engine, Prompt, Row, Start, sglang, vllm
from ..hosts import Host

PATIENCE = 60.0
"""Time limit in seconds for an answer of SGLang's ranks, and for its scheduler to notice that it is idle."""


class HostEngine(Protocol):
    """An engine of a host."""

    def switch(self, config: str, seed: int | None, ranks: list[int] | None) -> str: ...

    def score(self, rounds: Sequence[Sequence[Request]]) -> tuple[dict[str, list[Row]], list[float]]: ...

    def watch(self, operator: str) -> None: ...

    def answers(self) -> list[dict[str, Any]]: ...

    def stop(self) -> None: ...


def settings_text(config: str) -> str:
    """Return the settings of a config file in this process's environment, as text."""
    return load_settings({**os.environ, "VLLM_FL_CONFIG": config}).to_json()


class Clocked(Engine, Protocol):
    """An engine with the processor times of its ranks, or an empty list if these do not measure the work."""

    def processor(self) -> list[float]: ...


def scores(engine: Clocked, rounds: Sequence[Sequence[Request]]) -> tuple[dict[str, list[Row]], list[float]]:
    """Run rounds of requests; return the rows of each request by its label, and the engine's seconds for each round.

    A time is the ranks' processor time if they compute on the CPU, because other processes change it less. Otherwise it
    is the wall clock's.
    """
    rows, seconds = dict[str, list[Row]](), list[float]()
    for requests in rounds:
        prompts = [
            Prompt(request.prompt, max(1, len(request.forced)), TOP, request.prefill, request.forced)
            for request in requests
        ]
        before = engine.processor()
        answers = engine.generate(prompts)
        seconds.append(sum(engine.processor()) - sum(before) if before else engine.seconds)
        rows |= {request.label: answer.rows for request, answer in zip(requests, answers, strict=True)}
    return rows, seconds


class VllmEngine(vllm.HostEngine):
    """vLLM's engine, with the hooks of :mod:`.engine_hooks` in its ranks."""

    def __init__(self, start: Start) -> None:
        engine_hooks = f"{__package__}.engine_hooks"
        super().__init__(
            replace(start, arguments={"max_num_seqs": 8, **start.arguments}),
            max_logprobs=TOP,
            worker_extension_cls=f"{engine_hooks}.BisectWorker",
            logits_processors=[f"{engine_hooks}:ForcedTokens"],
        )
        if start.eager:  # compiled code hides calls
            self.count()

    def switch(self, config: str, seed: int | None, ranks: list[int] | None) -> str:
        said = self.llm.collective_rpc("fl_bisect_switch", args=(settings_text(config), seed, ranks))
        return next(filter(None, said), "")

    def score(self, rounds: Sequence[Sequence[Request]]) -> tuple[dict[str, list[Row]], list[float]]:
        self.llm.reset_prefix_cache()
        return scores(self, rounds)

    def processor(self) -> list[float]:
        return [seconds for seconds in self.llm.collective_rpc("fl_bisect_processor") if seconds is not None]

    def watch(self, operator: str) -> None:
        self.llm.collective_rpc("fl_bisect_watch", args=(operator,))

    def answers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.llm.collective_rpc("fl_bisect_answer")
        return found

    def stop(self) -> None:
        self.end()


class SglangEngine(sglang.HostEngine):
    """SGLang's engine, with the hooks in its scheduler."""

    def __init__(self, start: Start) -> None:
        from .scheduler import forcing_processor

        self._ranks, self._processor = start.ranks, forcing_processor()
        given = {"max_total_tokens": 8 * start.length, "max_running_requests": 8, **start.arguments}
        super().__init__(replace(start, arguments=given), enable_custom_logit_processor=True)
        if start.eager:
            self.count()

    def asked(self, requests: int) -> dict[str, Any]:
        return {"custom_logit_processor": [self._processor] * requests}

    def switch(self, config: str, seed: int | None, ranks: list[int] | None) -> str:
        self._flush()
        answers = self._collected({"settings": settings_text(config), "seed": seed, "ranks": ranks})
        return next(filter(None, (str(answer["refused"]) for answer in answers)), "")

    def score(self, rounds: Sequence[Sequence[Request]]) -> tuple[dict[str, list[Row]], list[float]]:
        self._flush()
        return scores(self, rounds)

    def processor(self) -> list[float]:
        seconds = [answer["seconds"] for answer in self._collected({"clock": True})]
        return [] if None in seconds else seconds

    def watch(self, operator: str) -> None:
        self._collected({"settings": None, "watch": operator})

    def answers(self) -> list[dict[str, Any]]:
        return self._collected({"settings": None})

    def _collected(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a job to every rank and return their answers.

        Raises:
            RuntimeError: a rank did not answer in time.
        """
        with tempfile.TemporaryDirectory(prefix="fl-bisect-") as folder:
            self.engine.collective_rpc("fl_bisect", folder=folder, job=job)
            files, late = [Path(folder, f"{rank}.json") for rank in range(self._ranks)], time.monotonic() + PATIENCE
            while not all(file.exists() for file in files):
                if time.monotonic() > late:
                    raise RuntimeError(f"no answer came from a rank of {self._ranks} within {PATIENCE:.0f} s")
                time.sleep(0.01)
            return [json.loads(file.read_text(encoding="utf-8")) for file in files]

    def _flush(self) -> None:
        """Empty the cache; wait until the scheduler notices that it is idle.

        Raises:
            RuntimeError: the scheduler does not become idle in time.
        """
        late = time.monotonic() + PATIENCE
        while not self.engine.flush_cache().success:
            if time.monotonic() > late:
                raise RuntimeError("SGLang's cache cannot be emptied: it does not become idle")
            time.sleep(0.1)

    def stop(self) -> None:
        self.engine.shutdown()


ENGINES: Mapping[Host, Callable[[Start], HostEngine]] = {Host.VLLM: VllmEngine, Host.SGLANG: SglangEngine}
