"""Engines with drafts: tokens and distributions equal those without drafts, for every drafter and model.

The drafter is a model, a head, a predictor of one more token, or a look-up in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

import drafters
from host_engines import Call, Engine, Host, Pass, Scenario, Served, clean
from running import PROMPTS, expected_tokens, reference_network

SHORT, LONG = Pass(), Pass(drafters.TURNS, drafters.LONG)
SPREAD: Mapping[str, Any] = {"temperature": drafters.TEMPERATURE, "top_k": drafters.TOP}
NGRAM = "ngram"
LOOK_UP: Mapping[str, Any] = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
"""vLLM's further settings of a look-up."""


class Models(NamedTuple):
    """The network that an engine should compute, the served checkpoint, and the drafter's, if it has one."""

    plain: Path
    target: Path
    drafter: Path | None


class Drafting(Scenario):
    """Each run has an engine with drafts, and the same engine without drafts."""

    RUNS: ClassVar[Sequence[Any]]
    TOLD: ClassVar[Sequence[Any]] = ()
    """Runs with a network that gives the probability of each token, for comparison with samples."""
    JUDGED: ClassVar[Sequence[Any]] = ()
    """Runs with tokens judged by a network, because rounding changes close choices; both engines score their texts."""
    PASSES: ClassVar[int] = 1
    """Passes over the standard prompts; from the second one on they are in the prefix cache."""
    SAMPLES: ClassVar[int] = 1500
    ALONE: ClassVar[bool] = False
    """Whether both engines have separate processes, as frozen choices require."""
    PLACE: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of ``Host.serve``."""

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {
            "told": self.TOLD,
            "judged": self.JUDGED,
            "same": [run for run in self.RUNS if run not in self.JUDGED],
            "run": self.RUNS,
        }

    def models(self, run: Any, folder: Path) -> Models:
        """Write a run's checkpoints into a new folder."""
        raise NotImplementedError

    def options(self, run: Any, made: Models, drafts: bool) -> Mapping[str, Any]:
        """Return arguments of the host's engine."""
        raise NotImplementedError

    def network(self, run: Any, made: Models) -> Any:
        """Return the network that gives probabilities."""
        return reference_network(made.plain, torch.float32)

    def calls(self) -> Sequence[Call]:
        """Return calls for the engine with drafts, before and after all passes."""
        return ()

    def last(self, run: Any) -> Sequence[Pass]:
        """Return the last passes of the engine with drafts."""
        return ()

    def least(self, run: Any) -> int:
        """Return a number below the number of accepted drafts."""
        return 0

    @pytest.fixture(scope="class")
    def made(self, tmp_path_factory: pytest.TempPathFactory) -> Mapping[Any, Models]:
        folder = tmp_path_factory.mktemp("drafters")
        return {run: self.models(run, folder / str(index)) for index, run in enumerate(self.RUNS)}

    @pytest.fixture(scope="class")
    def served(self, host: Host, made: Mapping[Any, Models]) -> Callable[[Any], tuple[Served, Served]]:
        """Return a function: run → the results of its engines with and without drafts."""

        def begin(run: Any) -> Any:
            short, long = (replace(one, scores=run in self.JUDGED) for one in (SHORT, LONG))
            greedy = [short] * self.PASSES
            spread = Pass(PROMPTS[:1], 2, samples=self.SAMPLES, sampling=SPREAD)
            told = [spread] if run in self.TOLD else []
            asked = [*greedy, replace(long, drafts=True), *told]
            drafted = [*self.calls(), *asked, *self.calls(), *self.last(run)]
            pair = [
                Engine(made[run].target, drafted, self.options(run, made[run], True)),
                Engine(made[run].target, [*greedy, long], self.options(run, made[run], False)),
            ]
            groups = [[one] for one in pair] if self.ALONE else [pair]
            return [one for group in groups for one in host.serve(*group, **self.PLACE)]

        started = {run: begin(run) for run in self.RUNS}

        @cache
        def of(run: Any) -> tuple[Served, Served]:
            drafted, plain = (one.result() for one in started[run])
            return drafted, plain

        return of

    def greedy(self, served: Served) -> list[list[list[int]]]:
        """Return the tokens of all greedy passes."""
        passes = [answer for answer in served.answers if answer.tokens][: self.PASSES + 1]
        return [[*map(list, answer.tokens)] for answer in passes]

    def test_greedy_tokens_are_those_without_drafts(
        self, same: Any, served: Callable[[Any], tuple[Served, Served]]
    ) -> None:
        drafted, plain = served(same)
        assert self.greedy(drafted) == self.greedy(plain)
        assert {len(tokens) for tokens in self.greedy(drafted)[0]} == {SHORT.max_tokens}

    def test_drafts_are_accepted_and_rejected(self, run: Any, served: Callable[[Any], tuple[Served, Served]]) -> None:
        accepted, made = next(answer.drafts for answer in served(run)[0].answers if answer.drafts)
        assert self.least(run) < accepted < made

    def test_sampled_tokens_keep_the_networks_distribution(
        self, told: Any, made: Mapping[Any, Models], served: Callable[[Any], tuple[Served, Served]]
    ) -> None:
        sampled = [answer.tokens for answer in served(told)[0].answers if len(answer.tokens) == self.SAMPLES]
        drafters.check_pairs(self.network(told, made[told]), PROMPTS[0], sampled[0])

    def test_every_layer_is_ours(self, run: Any, host: Host, served: Callable[[Any], tuple[Served, Served]]) -> None:
        for engine in served(run):
            assert clean(engine.reports[0], host)
            assert engine.reports[0].get("model_runner", "V2") == "V2"
        drafter = served(run)[0].reports[0].get("drafter")
        assert drafter is None or not drafter["native_layers"]


class Run(NamedTuple):
    """A drafter for a plain model under vLLM.

    Args:
        name: the run's name.
        method: the drafting method; a key of :data:`drafters.TARGETS`, or :data:`NGRAM`.
        tokens: number of drafted tokens.
        graphs: whether the models are compiled.
        sampled: vLLM's sampling method for drafts, its default if empty.
        replayed: the drafters' graphs that must be replayed on a GPU.
    """

    name: str
    method: str
    tokens: int = 3
    graphs: bool = False
    sampled: str = ""
    replayed: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name


class DraftsForPlainModels(Drafting):
    """Drafts for plain models under vLLM; the tokens also equal Hugging Face's."""

    ENGINE: ClassVar[Mapping[str, Any]]

    @pytest.fixture(scope="class")
    def made(self, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[Any, Models]:
        pairs = drafters.pairs(checkpoint, tmp_path_factory.mktemp("drafters"))
        llama = checkpoint("llama")
        return {run: _models(*pairs.get(run.method, (llama, None))) for run in self.RUNS}

    def options(self, run: Run, made: Models, drafts: bool) -> Mapping[str, Any]:
        engine = {**self.ENGINE, "enforce_eager": not run.graphs}
        if not drafts:
            return engine
        who = LOOK_UP if made.drafter is None else {"model": str(made.drafter)}
        who = {**who, "draft_sample_method": run.sampled} if run.sampled else who
        method = drafters.METHODS.get(run.method, run.method)
        return {**engine, "speculative_config": {"method": method, "num_speculative_tokens": run.tokens, **who}}

    def test_greedy_tokens_equal_hugging_face(
        self,
        run: Run,
        served: Callable[[Any], tuple[Served, Served]],
        checkpoint: Callable[[str], Path],
        expected: Callable[[str], list[list[int]]],
    ) -> None:
        """Compare with the families' checkpoints: the networks choose the same tokens, and no choice is close."""
        short, long = self.greedy(served(run)[0])
        family = drafters.TARGETS.get(run.method, "llama")
        assert short == expected(family)
        assert long == expected_tokens(checkpoint(family), drafters.TURNS, drafters.LONG)


def _models(target: Path, drafter: Path | None) -> Models:
    return Models(target, target, drafter)
