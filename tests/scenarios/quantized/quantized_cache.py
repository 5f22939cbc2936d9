"""Engines with a quantized KV cache: the right results under every host, and wrong ones.

The right result is that of Hugging Face's network with rounded keys and values. Prompts are read in chunks, and a
second pass finds them in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import quantized_checkpoints as checkpoints
from fl_dispatch.cli import small_model
from host_engines import WRONG, Call, Engine, Host, Pass, Scenario, Served, clean, ran
from quantized_checkpoints import CACHE_SCALES, CACHE_SCHEME, SCHEMES, Scheme
from quantized_network import (
    Computed,
    computed,
    distance,
    is_as_near,
    network,
    scores,
    with_fp8_cache,
    with_int8_cache,
)
from running import MAX_TOKENS, PROMPTS

OPERATORS = ("kv_cache_write", "paged_attention")
ONES = ((1.0, 1.0),) * len(CACHE_SCALES)
Scales = Sequence[tuple[float, float]]


@dataclass(frozen=True, eq=False)
class Cache:
    """A checkpoint served with a quantized KV cache.

    Args:
        scheme: the checkpoint's scheme; ``None`` without quantization.
        owner: the module of a layer with the scales in the checkpoint, if any; ``{}`` is ``k`` or ``v``.
        int8: whether the cache is in int8, with a scale for each token and head; otherwise it is in fp8.
    """

    scheme: Scheme | None = None
    owner: str = ""
    int8: bool = False

    @property
    def scales(self) -> Scales:
        return CACHE_SCALES if self.owner else ONES

    def checkpoint(self, folder: Path | None = None) -> Path:
        """Return the package's own checkpoint, or write a quantized one into a new folder."""
        if self.scheme is None:
            return small_model.CHECKPOINT
        assert folder is not None
        return checkpoints.write_checkpoint(folder, self.scheme, self.owner)

    def right(self, scales: Scales, dtype: torch.dtype = torch.float32) -> Any:
        """Return Hugging Face's network with the cache; for fp8, with these scales."""
        made = network(self.scheme, dtype=dtype)
        return with_int8_cache(made) if self.int8 else with_fp8_cache(made, scales)

    def computed(self, texts: Sequence[Sequence[int]]) -> Computed:
        """Return the right network's answers with the checkpoint's scales."""
        return computed(self.right(self.scales), texts)

    def distances_of_others(self, texts: Sequence[Sequence[int]], got: Tensor) -> Mapping[str, float]:
        """Return an engine's distances from networks with other caches."""
        others = {"not quantized": network(self.scheme)}
        if self.int8:
            others["fp8"] = with_fp8_cache(network(self.scheme), ONES)
            others["numbers up to 120"] = with_int8_cache(network(self.scheme), 120)
        else:
            others["scales of 2"] = self.right(((2.0, 2.0),) * len(CACHE_SCALES))
        if self.owner:
            others["keys' and values' exchanged"] = self.right(tuple((v, k) for k, v in self.scales))
            others["scales of the layer before"] = self.right((self.scales[-1], *self.scales[:-1]))
        return {name: distance(got, scores(made, texts)) for name, made in others.items()}

    def is_as_near_in_bfloat16(self, texts: Sequence[Sequence[int]], got: Tensor) -> bool:
        """Whether an engine in bfloat16 is about as near to the network in float32 as Hugging Face's in bfloat16.

        The engine must also be nearer to that network than to the one with unrounded keys and values, except with int8,
        which rounds by about as little as bfloat16.
        """
        exact, half = self.computed(texts).scores, scores(self.right(self.scales, torch.bfloat16), texts)
        told_apart = self.int8 or distance(got, exact) < distance(got, scores(network(self.scheme), texts))
        return is_as_near(got, exact, half) and told_apart


PLAIN = Cache()
INT8 = Cache(int8=True)
_COMPRESSED = SCHEMES["compressed-tensors W4A16"]
COMPRESSED = Cache(
    Scheme({**_COMPRESSED.config, "kv_cache_scheme": CACHE_SCHEME}, _COMPRESSED.write, _COMPRESSED.layer), "self_attn"
)
"""A ``compressed-tensors`` checkpoint that requests the cache."""
HOSTS_NAMES = Cache(COMPRESSED.scheme, "self_attn.attn")
"""A checkpoint like :data:`COMPRESSED` with the scales' names from hosts' models."""
FP8 = Cache(SCHEMES["fp8"], "self_attn.{}_proj")
"""An ``fp8`` checkpoint with scales for the cache."""


@dataclass(frozen=True, eq=False)
class Run:
    """An engine with a quantized KV cache; ``engine``: further arguments of the host's engine."""

    name: str
    cache: Cache
    engine: Mapping[str, Any]

    def __str__(self) -> str:
        return self.name


WRONG_ORDER = tuple(reversed(OPERATORS))
"""A write that writes nothing comes after a wrong attention, to find wrong keys and values in the cache."""


class QuantizedCaches(Scenario):
    """Runs in float32 and in bfloat16, which start together; some have passes with wrong implementations too."""

    SINGLE: ClassVar[Sequence[Run]]
    HALVES: ClassVar[Sequence[Run]]
    ALONE: ClassVar[Sequence[Run]]
    """Runs with wrong passes, of those in float32."""
    SAME: ClassVar[bool] = True
    """Whether a prompt's answer is the same if the prompt is found in the prefix cache.

    On a GPU other kernels run for fewer new tokens, and another batch may round an element differently. So answers
    there equal the network's only if rounding cannot change them.
    """
    TOGETHER: ClassVar[bool] = True
    """Whether engines share a process if the host can."""

    def place(self, run: Run) -> Mapping[str, Any]:
        """Return further arguments of ``Host.serve``."""
        return {"plugins": ["wrong_plugin"], "deny": "wrong"}

    def cases(self) -> Mapping[str, Sequence[Any]]:
        operators = [(run, operator) for operator in OPERATORS for run in self.ALONE]
        runs = [*self.SINGLE, *self.HALVES]
        return {"run,operator": operators, "single": self.SINGLE, "half": self.HALVES, "run": runs}

    def calls(self) -> Sequence[Call]:
        """Return further requests after both right passes."""
        return ()

    @pytest.fixture(scope="class")
    def served(self, host: Host, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], Served]:
        """Serve a right pass, one with cached prompts, calls, and a pass for each wrong implementation."""
        folder, runs = tmp_path_factory.mktemp("cache"), [*self.SINGLE, *self.HALVES]
        wrong = [Pass(orders={operator: WRONG}) for operator in WRONG_ORDER]
        asked = {run: [Pass(scores=True), Pass(), *self.calls(), *(wrong if run in self.ALONE else ())] for run in runs}

        def engine(run: Run) -> Engine:
            return Engine(run.cache.checkpoint(folder / run.name.replace(" ", "-")), asked[run], run.engine)

        groups = [runs] if self.TOGETHER else [[run] for run in runs]
        started = [one for group in groups for one in host.serve(*map(engine, group), **self.place(group[0]))]
        return lambda run: started[runs.index(run)].result()

    @pytest.fixture(scope="class")
    def right(self, served: Callable[[Run], Served]) -> Callable[[Run], tuple[Tensor, Computed, list[list[int]]]]:
        """Return a run's log-probabilities, the network's answers, and the texts."""

        @cache
        def of(run: Run) -> tuple[Tensor, Computed, list[list[int]]]:
            texts, got = served(run).answers[0].scored()
            return got, run.cache.computed(texts), texts

        return of

    def test_it_computes_what_the_network_with_rounded_keys_and_values_does(
        self, single: Run, right: Callable[[Run], Any]
    ) -> None:
        got, there, texts = right(single)
        assert distance(got, there.scores) <= there.rounding
        for other, error in single.cache.distances_of_others(texts, got).items():
            assert error > there.rounding, other

    def test_its_tokens_are_the_networks_where_rounding_does_not_decide(
        self, single: Run, right: Callable[[Run], Any]
    ) -> None:
        _, there, _ = right(single)
        assert there.decides(PROMPTS, MAX_TOKENS)

    def test_in_bfloat16_it_is_as_near_as_hugging_faces_network(
        self, half: Run, served: Callable[[Run], Served]
    ) -> None:
        assert half.cache.is_as_near_in_bfloat16(*served(half).answers[0].scored())

    def test_a_prompt_found_in_the_cache_has_the_same_answer(self, run: Run, served: Callable[[Run], Served]) -> None:
        first, again = served(run).answers[:2]
        assert first.cached == [0] * len(PROMPTS)
        assert max(again.cached) >= 320
        if run not in self.HALVES:
            texts = [[*prompt, *tokens] for prompt, tokens in zip(again.prompts, again.tokens, strict=True)]
            assert again.tokens == first.tokens or not self.SAME
            assert self.SAME or run.cache.computed(texts).decides(PROMPTS, MAX_TOKENS)

    def test_the_operators_ran_on_a_quantized_cache(
        self, run: Run, host: Host, served: Callable[[Run], Served]
    ) -> None:
        for report in served(run).reports:
            assert all(ran(report).get(operator) for operator in OPERATORS)
            assert clean(report, host)

    def test_a_wrong_implementation_changes_the_tokens(
        self, run: Run, operator: str, served: Callable[[Run], Served]
    ) -> None:
        wrong = served(run).answers[WRONG_ORDER.index(operator) - len(WRONG_ORDER)]
        assert wrong.tokens != served(run).answers[0].tokens
        assert served(run).counted(operator) > 0
