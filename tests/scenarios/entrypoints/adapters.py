"""Engines with LoRA adapters: tokens equal those of weights merged with each adapter, alone and mixed in one batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from host_engines import Call, Engine, Host, Pass, Scenario, Served, clean, ran
from running import PROMPTS

MIXED = ("one", "two", None)
MIX = Pass([prompt for prompt in PROMPTS for _ in MIXED], adapters=MIXED * len(PROMPTS))
"""Each prompt with two adapters and with none."""
Wanted = Callable[[str | None], list[list[int]]]
"""An adapter, or none → Hugging Face's tokens of the standard prompts by the merged weights."""


@dataclass(frozen=True, eq=False)
class Run:
    """An engine: its name, further arguments of the host's, and variables of the environment."""

    name: str
    engine: Mapping[str, Any]
    variables: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def alone(name: str) -> Pass:
    """Return a pass over the standard prompts, all with one adapter."""
    return Pass(adapters=[name] * len(PROMPTS))


def mixed(wanted: Wanted) -> list[list[int]]:
    """Return the expected tokens for :data:`MIX`."""
    weights = [wanted(name) for name in MIXED]
    return [tokens[place] for place in range(len(PROMPTS)) for tokens in weights]


class Adapters(Scenario):
    """Each run's engine has passes with one adapter, with two and none in one batch, and the host's own requests."""

    RUNS: ClassVar[Sequence[Run]]
    OPERATORS: ClassVar[Sequence[str]]
    """Operators around adapted products, with counted calls."""
    PLACE: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of ``Host.serve``."""

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {"run": self.RUNS}

    def more(self, adapter: Callable[[str], Path]) -> Sequence[Pass | Call]:
        """Return further requests."""
        return ()

    def known(self) -> Sequence[str]:
        """Return the adapters that an engine has from its start."""
        return [name for name in MIXED if name]

    @pytest.fixture(scope="class")
    def served(
        self, host: Host, checkpoint: Callable[[str], Path], adapter: Callable[[str], Path]
    ) -> Callable[[Run], Served]:
        asked = [alone("one"), MIX, *self.more(adapter)]
        adapters = {name: adapter(name) for name in self.known()}
        engines = [(run, Engine(checkpoint("qwen3"), asked, run.engine, adapters)) for run in self.RUNS]
        started = {run: host.serve(engine, **self.PLACE, **run.variables)[0] for run, engine in engines}
        return lambda run: started[run].result()

    def test_an_adapter_gives_the_tokens_of_the_merged_weights(
        self, run: Run, served: Callable[[Run], Served], adapted: Wanted
    ) -> None:
        assert served(run).answers[0].tokens == adapted("one")
        different = [adapted(name) for name in {*MIXED, *self.known()}]
        assert all(one != other for place, one in enumerate(different) for other in different[:place])

    def test_adapters_and_none_mix_in_one_batch(
        self, run: Run, served: Callable[[Run], Served], adapted: Wanted
    ) -> None:
        assert served(run).answers[1].tokens == mixed(adapted)

    def test_our_operators_ran_around_the_adapted_projections(
        self, run: Run, host: Host, served: Callable[[Run], Served]
    ) -> None:
        for report in served(run).reports:
            assert all(ran(report).get(operator) for operator in self.operators(report))
            assert clean(report, host)

    def operators(self, report: Mapping[str, Any]) -> Sequence[str]:
        """Return the operators with calls counted by a rank."""
        return self.OPERATORS


class AdaptersOfSGLang(Adapters):
    """Adapters under SGLang, one of them loaded while the engine serves."""

    def more(self, adapter: Callable[[str], Path]) -> Sequence[Pass | Call]:
        return [Call("load_lora_adapter", {"lora_name": "late", "lora_path": str(adapter("late"))}), alone("late")]

    def test_an_adapter_is_loaded_while_the_engine_serves(
        self, run: Run, served: Callable[[Run], Served], adapted: Wanted
    ) -> None:
        assert served(run).answers[3].tokens == adapted("late")
        assert adapted("late") not in map(adapted, MIXED)

    def test_requests_are_answered_together(self, run: Run, served: Callable[[Run], Served]) -> None:
        assert max(map(int, re.findall(r"Prefill batch, #new-seq: (\d+)", served(run).log))) > 1
