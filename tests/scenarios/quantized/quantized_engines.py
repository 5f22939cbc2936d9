"""The tests of every engine with a quantized checkpoint, for all hosts and schemes.

A test file has a subclass of :class:`QuantizedEngines` with its engines. For engines without a :class:`Host` it has a
fixture ``compared`` made by :func:`comparisons`, and a subclass of :class:`Rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor

import quantized_checkpoints as checkpoints
from fl_dispatch.cli import small_model
from fl_dispatch.cli.checkpoints import build_checkpoint
from host_engines import WRONG, Call, Engine, Host, Pass, Scenario, Served, clean, ran
from quantized_checkpoints import SCHEMES, Scheme
from quantized_network import UNIT, Comparison
from running import MAX_TOKENS, PROMPTS

FAMILIES = (
    "compressed-tensors W8A8 int8",
    "compressed-tensors W8A8 fp8",
    "compressed-tensors W4A16, zero points",
    "fp8, blocks of 128",
    "gptq",
    "awq",
)
"""One scheme for each kind of weights, from which other kinds of engines draw."""


@dataclass(frozen=True, eq=False)
class Run:
    """An engine with a checkpoint; ``engine``: further arguments of the host's engine."""

    scheme: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "one rank"

    @property
    def made(self) -> Scheme:
        return SCHEMES[self.scheme]

    @property
    def ranks(self) -> int:
        return int(self.engine.get("tensor_parallel_size", self.engine.get("tp_size", 1)))

    def __str__(self) -> str:
        return f"{self.scheme}, {self.kind}"


def divisible(folder: Path) -> Path:
    """Write a dense model of random weights with products that two ranks divide into whole blocks of 128."""
    heads = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    return build_checkpoint("llama", folder, **heads, **sizes)


def comparisons(
    answered: Callable[[Run], tuple[Sequence[Sequence[int]], Tensor]],
    model: Path = small_model.CHECKPOINT,
    unit: float = UNIT,
) -> Callable[[Run], Comparison]:
    """Return a function that compares a run with the dequantized network of its checkpoint.

    Args:
        answered: returns a run's texts and scores.
        model: the checkpoint before quantization.
        unit: the rounding unit of sums on the device.
    """
    return cache(lambda run: Comparison.of(*answered(run), run.made, run.ranks, model, unit))


class Rules:
    """Tests with ``run``, which subclasses parametrize."""

    def test_it_computes_what_the_dequantized_network_does(
        self, run: Run, compared: Callable[[Run], Comparison]
    ) -> None:
        assert compared(run).agrees

    def test_its_tokens_are_the_networks_where_rounding_does_not_decide(
        self, run: Run, compared: Callable[[Run], Comparison]
    ) -> None:
        assert compared(run).right.decides(PROMPTS, MAX_TOKENS)


class QuantizedEngines(Rules, Scenario):
    """Engines of a host with checkpoints of one model.

    A subclass has the runs. Runs of the same kind start together. Each run of ``ALONE`` also has a pass with a wrong
    implementation of each operator of ``wrong``, which requires choices that are not frozen.
    """

    RUNS: ClassVar[Sequence[Run]]
    ALONE: ClassVar[Sequence[Run]]
    NEVER: ClassVar[Sequence[str]] = ()
    """Operators that no run calls."""
    OPTIONS: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of every engine."""
    ABSORBED: ClassVar[bool] = False
    """Whether the host's latent attention is absorbed for prompts too."""
    UNIT: ClassVar[float] = UNIT
    """The rounding unit of sums on the device."""
    PLACE: ClassVar[Mapping[str, Any]] = {"plugins": ["wrong_plugin"], "deny": "wrong"}
    """Further arguments of ``Host.serve``."""

    def cases(self) -> Mapping[str, Sequence[Any]]:
        operators = [(run, operator) for run in self.ALONE for operator in self.wrong(run)]
        return {"run,operator": operators, "alone": self.ALONE, "run": self.RUNS}

    def model(self, run: Run, folder: Path) -> Path:
        """Return a run's model before quantization; write it to ``folder`` if necessary."""
        return small_model.CHECKPOINT

    def wrong(self, run: Run) -> Sequence[str]:
        """Return the operators with wrong implementations in a run's passes, in this order."""
        return run.made.operators

    def operators(self, run: Run) -> Sequence[str]:
        """Return the operators that a run calls."""
        return run.made.operators

    def counted(self, run: Run, host: Host) -> Mapping[str, int]:
        """Return our kernel → the number of layers with it."""
        raise NotImplementedError

    def served_runs(self) -> Sequence[Run]:
        """Return the served runs; runs of the same kind start together."""
        return self.RUNS

    def calls(self, run: Run) -> Sequence[Pass | Call]:
        """Return further requests between the right pass and the wrong ones."""
        return ()

    @pytest.fixture(scope="class")
    def models(self, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], Path]:
        folder = tmp_path_factory.mktemp("models")
        return cache(lambda run: self.model(run, folder))

    @pytest.fixture(scope="class")
    def served(
        self, host: Host, models: Callable[[Run], Path], tmp_path_factory: pytest.TempPathFactory
    ) -> Callable[[Run], Served]:
        """Return each run's answers: a right pass with scores, then ``calls``, then the wrong passes."""
        folder, found = tmp_path_factory.mktemp("quantized"), {}

        def written(run: Run) -> Path:
            place = folder / models(run).name / str(run).replace(" ", "-")
            return place if place.exists() else checkpoints.write_checkpoint(place, run.made, model=models(run))

        def engine(run: Run) -> Engine:
            wrong = [Pass(orders={operator: WRONG}) for operator in (self.wrong(run) if run in self.ALONE else ())]
            return Engine(written(run), [Pass(scores=True), *self.calls(run), *wrong], {**run.engine, **self.OPTIONS})

        for _, runs in groupby(self.served_runs(), lambda run: run.kind):
            together = list(runs)
            started = host.serve(*map(engine, together), **self.PLACE)
            found |= dict(zip(together, started, strict=True))
        return lambda run: found[run].result()

    @pytest.fixture(scope="class")
    def compared(self, served: Callable[[Run], Served], models: Callable[[Run], Path]) -> Callable[[Run], Comparison]:
        def of(run: Run) -> Comparison:
            answered = served(run).answers[0].scored()
            return Comparison.of(*answered, run.made, run.ranks, models(run), self.UNIT, self.ABSORBED)

        return cache(of)

    def test_its_layers_are_all_ours(self, run: Run, host: Host, served: Callable[[Run], Served]) -> None:
        expected = self.counted(run, host)
        for report in served(run).reports:
            assert {name: report["layers"].get(name) for name in expected} == expected
            assert clean(report, host)
            called = ran(report)
            assert [operator for operator in self.operators(run) if not called.get(operator)] == []
            assert not called.keys() & {*self.NEVER}

    def test_a_wrong_implementation_changes_what_it_computes(
        self, run: Run, operator: str, served: Callable[[Run], Served]
    ) -> None:
        first, *_ = served(run).answers
        wrong = served(run).answers[self.wrong(run).index(operator) - len(self.wrong(run))]
        assert wrong.tokens != first.tokens
        assert served(run).counted(operator) > 0


class QuantizedModels(QuantizedEngines):
    """The small model, or for two ranks a model with products that divide into whole blocks of 128."""

    DIVIDED: ClassVar[Sequence[Run]] = ()
    """Runs of the latter."""
    PRODUCTS = 4 * 4
    """Number of products in all layers of either model, merged as in hosts."""

    def model(self, run: Run, folder: Path) -> Path:
        place = folder / "divisible"
        return super().model(run, folder) if run not in self.DIVIDED else place if place.exists() else divisible(place)

    def counted(self, run: Run, host: Host) -> Mapping[str, int]:
        return {host.layers.get(run.scheme, run.made.layer): self.PRODUCTS}
