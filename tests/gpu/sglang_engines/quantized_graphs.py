"""The rules for quantized models in SGLang on a GPU beside those of every host: graphs, our kernels, and the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from sglang_on_gpu import NEUTRAL, OURS, replayed

from host_engines import Call, Pass, Served, ran
from quantized_engines import QuantizedEngines, Run
from quantized_network import computed, network
from running import MAX_TOKENS, PROMPTS


class QuantizedGraphs(QuantizedEngines):
    """A mixin of a kind of models."""

    ALONE = ()
    ATTENTION: ClassVar[Sequence[str]] = ("paged_attention",)
    """Operators of attention."""
    PLACE: ClassVar[Mapping[str, Any]] = {**NEUTRAL, "SGLANG_FL_PLUGIN_MODULES": ""}

    def attention(self, run: Run) -> Sequence[str]:
        """Return a run's operators of attention."""
        return self.ATTENTION

    def calls(self, run: Run) -> Sequence[Pass | Call]:
        return [Pass()]

    def operators(self, run: Run) -> Sequence[str]:
        return (*super().operators(run), *run.made.operators)

    def test_answers_to_prompts_that_are_in_the_cache_are_the_networks_too(
        self, run: Run, served: Callable[[Run], Served], models: Callable[[Run], Path]
    ) -> None:
        """Other kernels read fewer new tokens, so rounding may decide otherwise than in the first pass."""
        again = served(run).answers[1]
        assert max(again.cached) > 0
        texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, again.tokens, strict=True)]
        right = network(run.made, model=models(run), absorbed=self.ABSORBED)
        assert computed(right, texts, self.UNIT).decides(PROMPTS, MAX_TOKENS)

    def test_our_kernels_ran(self, run: Run, served: Callable[[Run], Served]) -> None:
        found = ran(served(run).reports[0])
        assert all(found[operator] == OURS for operator in (*self.operators(run), *self.attention(run)))

    def test_decoding_replays_graphs_of_what_was_met_before(self, run: Run, served: Callable[[Run], Served]) -> None:
        report, log = served(run).reports[0], served(run).log
        assert replayed(report, 2 * (MAX_TOKENS - 1))
        assert " of products" in log
        assert ", 0 of products" not in log
        assert all("default.triton" in str(report["manifest"]["choices"][operator]) for operator in self.operators(run))
