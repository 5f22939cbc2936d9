"""LoRA adapters with quantized weights: each request gets its own adapter, and the dequantized network's products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import quantized_checkpoints as checkpoints
import variants
from fl_dispatch.cli import small_model
from host_engines import Engine, Host, Pass, Scenario, Served, clean, ran
from quantized_engines import QuantizedModels, Run
from quantized_network import adapted, computed, distance, network, scores
from running import MAX_TOKENS, PROMPTS

FEW = PROMPTS[:2]
NAMES = ("one", "two", None)
"""Adapters of a prompt's requests."""


class QuantizedAdapters(Scenario):
    """Each run's engine answers each of a few prompts with two adapters and with none, in one batch."""

    RUNS: ClassVar[Sequence[Run]]
    OPERATORS: ClassVar[Sequence[str]] = ()
    """Operators of the host's adapters, with counted calls unless the model is compiled."""

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {"run,adapter": [(run, name) for run in self.RUNS for name in NAMES], "run": self.RUNS}

    @pytest.fixture(scope="class")
    def adapters(self, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
        folder = tmp_path_factory.mktemp("adapters")
        named = enumerate(filter(None, NAMES), 1)
        return {name: variants.adapter(small_model.CHECKPOINT, folder / name, seed) for seed, name in named}

    @pytest.fixture(scope="class")
    def served(
        self, host: Host, adapters: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
    ) -> Callable[[Run], Served]:
        folder = tmp_path_factory.mktemp("quantized")
        asked = Pass([prompt for prompt in FEW for _ in NAMES], scores=True, adapters=NAMES * len(FEW))

        def engine(number: int, run: Run) -> Engine:
            written = checkpoints.write_checkpoint(folder / str(number), run.made)
            return Engine(written, [asked], run.engine, adapters)

        started = dict(zip(self.RUNS, host.serve(*(engine(*each) for each in enumerate(self.RUNS))), strict=True))
        return lambda run: started[run].result()

    def test_each_request_has_its_own_adapter(
        self, run: Run, adapter: str | None, served: Callable[[Run], Served], adapters: Mapping[str, Path]
    ) -> None:
        numbers = slice(NAMES.index(adapter), None, len(NAMES))
        texts, got = served(run).answers[0].of(numbers).scored()
        path = adapter and adapters[adapter]
        right = computed(adapted(network(run.made), path), texts)
        assert distance(got, right.scores) <= right.rounding
        assert distance(got, scores(adapted(network(None), path), texts)) > right.rounding
        assert right.decides(FEW, MAX_TOKENS)

    def test_our_operators_compute_the_products_and_the_adapters(
        self, run: Run, host: Host, served: Callable[[Run], Served]
    ) -> None:
        for report in served(run).reports:
            assert clean(report, host)
            assert report["layers"][host.layers.get(run.scheme, run.made.layer)] == QuantizedModels.PRODUCTS
            assert all(ran(report).get(operator) for operator in run.made.operators)
            if (compiled := report.get("compiled")) is None:
                assert all(ran(report).get(operator) for operator in self.OPERATORS)
            else:  # the graph contains the adapters' operators, and their calls are not counted
                assert compiled["graphs"] + compiled["loaded"] >= 1
