"""Models with layers that keep a state for each request: Hugging Face's tokens by our operators.

Prompts are read in chunks, several at once, and again from the prefix cache; the slots of their states contain values
of earlier requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from architectures import build_architecture
from host_engines import Engine, Host, Pass, Scenario, Served, clean, ran
from running import MAX_TOKENS, PROMPTS, expected_tokens

CONVOLUTION = ("causal_conv1d", "causal_conv1d_update")
DELTA_NET = (*CONVOLUTION, "gated_delta_rule", "gated_delta_rule_update")
SCAN = (*CONVOLUTION, "selective_scan", "selective_state_update")
OPERATORS: Mapping[str, Sequence[str]] = {
    "lfm2": CONVOLUTION,
    "lfm2_moe": CONVOLUTION,
    "qwen3_5": (*DELTA_NET, "rms_norm_gated"),
    "qwen3_5_moe": (*DELTA_NET, "rms_norm_gated"),
    "qwen3_next": (*DELTA_NET, "rms_norm_gated"),
    "granitemoehybrid": (*SCAN, "rms_norm_gated"),
    "falcon_h1": (*SCAN, "rms_norm_gated"),
    "nemotron_h": (*SCAN, "rms_norm_gated"),
    "mamba2": (*SCAN, "rms_norm_gated"),
    "mamba": SCAN,
    "falcon_mamba": SCAN,
}
"""Architecture → the operators of its layers with a state, those of the last tokens before those of others' norms."""
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5": {"full_attention_interval": 2},
    "qwen3_5_moe": {"full_attention_interval": 2},
    "qwen3_next": {"full_attention_interval": 2},
    "nemotron_h": {"hybrid_override_pattern": "M*-M", "layers_block_type": None, "mamba_n_groups": 2},
    "mamba2": {"intermediate_size": 128, "rms_norm": True},
}
"""Fields that published configurations have and hosts read, and that Transformers does not write."""
LAYERS: Mapping[str, int] = {"falcon_h1": 3, "mamba2": 4, "mamba": 4, "falcon_mamba": 4}
"""Number of layers with a state in each small model, if it is not two."""
RIGHT = {"rms_norm": "reference.torch"}
"""Orders that restore the default after other orders."""


def build(name: str, folder: Path, **sizes: Any) -> Path:
    """Write a checkpoint of one of :data:`OPERATORS` with a configuration as in published checkpoints."""
    config = build_architecture(name, folder, **sizes) / "config.json"
    given = {**json.loads(config.read_text()), **PUBLISHED.get(name, {}), **sizes}
    config.write_text(json.dumps({key: value for key, value in given.items() if value is not None}))
    return folder


class States(Scenario):
    """Each model has an engine with three right passes, a pass for each mistake, and a final right one."""

    MODELS: ClassVar[Sequence[str]]
    MISTAKES: ClassVar[Mapping[str, Sequence[Mapping[str, str]]]] = {}
    """Model → orders, each with a wrong implementation."""
    OPTIONS: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of the host's engine."""
    PLACE: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of ``Host.serve``."""

    def cases(self) -> Mapping[str, Sequence[Any]]:
        pairs = [(name, number) for name in self.MODELS for number in range(len(self.MISTAKES.get(name, ())))]
        return {"name,number": pairs, "name": self.MODELS}

    @pytest.fixture(scope="class")
    def models(self, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
        root = tmp_path_factory.mktemp("states")
        return {name: build(name, root / name) for name in self.MODELS}

    @pytest.fixture(scope="class")
    def expected(self, models: Mapping[str, Path]) -> Callable[[str], list[list[int]]]:
        return cache(lambda name: expected_tokens(models[name]))

    @pytest.fixture(scope="class")
    def served(self, host: Host, models: Mapping[str, Path]) -> Callable[[str], Served]:
        engines = {}
        for name, model in models.items():
            mistakes = [Pass(orders=orders) for orders in self.MISTAKES.get(name, ())]
            asked = [*3 * [Pass()], *mistakes, *([Pass(orders=RIGHT)] if mistakes else [])]
            engines[name] = host.serve(Engine(model, asked, self.OPTIONS), **self.PLACE)[0]
        return lambda name: engines[name].result()

    def test_tokens_equal_hugging_face_also_from_the_prefix_cache_and_again(
        self, name: str, served: Callable[[str], Served], expected: Callable[[str], list[list[int]]]
    ) -> None:
        passes = served(name).answers[:3]
        assert [one.tokens for one in passes] == [expected(name)] * 3
        longest = max(range(len(PROMPTS)), key=lambda index: len(PROMPTS[index]))
        assert [one.cached[longest] > 0 for one in passes] == [False, True, True]

    def test_every_operator_runs_once_a_layer_and_step_and_no_layer_is_the_hosts(
        self, name: str, host: Host, served: Callable[[str], Served]
    ) -> None:
        report, *others = served(name).reports
        for one in (report, *others):
            assert clean(one, host)
            assert {*OPERATORS[name]} <= {*ran(one)}
        calls = [sum(served(name).counted(one, impl) for impl in ran(report)[one]) for one in OPERATORS[name]]
        prompts, tokens = calls[:2]
        layers = LAYERS.get(name, 2)
        assert not prompts % layers
        assert tokens >= layers * 3 * (MAX_TOKENS - 1)

    def test_a_mistake_changes_the_tokens(
        self, name: str, number: int, served: Callable[[str], Served], expected: Callable[[str], list[list[int]]]
    ) -> None:
        ((operator, impl),) = self.MISTAKES[name][number].items()
        assert served(name).answers[3 + number].tokens != expected(name)
        assert served(name).counted(operator, impl) > 0

    def test_after_mistakes_the_tokens_are_right_again(
        self, name: str, served: Callable[[str], Served], expected: Callable[[str], list[list[int]]]
    ) -> None:
        assert served(name).answers[-1].tokens == expected(name)
