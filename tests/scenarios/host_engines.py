"""What a scenario asks of a host: engines, each asked several times, and which words its reports and options have.

The fixture ``host`` of a host's folder is a :class:`Host`, so that a scenario runs under all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from running import MAX_TOKENS, PROMPTS

WRONG = "vendor.wrong"
"""The implementations of ``wrong_plugin``."""
ON_GPU: Mapping[str, Any] = {
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 256 << 20,
    "max_num_batched_tokens": 256,
}
"""Arguments of vLLM's engine on a GPU."""
OURS = {"deny": "cuda", "USE_FLAGGEMS": "0"}
"""Arguments of ``Host.serve`` for kernels of ours alone there."""


@dataclass(frozen=True)
class Pass:
    """Greedy tokens after prompts.

    Args:
        scores: whether the answer has the log-probabilities of prompts and tokens.
        orders: operator → the implementation that a policy names for it first, with an emptied prefix cache.
        prefer: of that policy; the policy's own if empty.
        adapters: the name of each prompt's adapter, or null.
        kernel: the operator of ``npu::`` whose kernel is wrong, on the emulated NPU.
        samples: how often each prompt is answered, if tokens are drawn; ``sampling`` says how.
        drafts: whether the answer counts drafts.
    """

    prompts: Sequence[Sequence[int]] = field(default_factory=lambda: PROMPTS)
    max_tokens: int = MAX_TOKENS
    scores: bool = False
    orders: Mapping[str, str] = field(default_factory=dict)
    prefer: str = "reference"
    adapters: Sequence[str | None] = ()
    kernel: str = ""
    samples: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    drafts: bool = False


@dataclass(frozen=True)
class Call:
    """A method of the host's engine, or a step of its program, which is not about tokens."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Encode:
    """Vectors of texts, a row each in ``returned``.

    Args:
        classes: whether they are of classes.
        orders: as of a :class:`Pass`, beside references.
    """

    texts: Sequence[str]
    classes: bool = False
    orders: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Engine:
    """An engine with a checkpoint, and what it is asked.

    Args:
        options: further arguments of the host's engine.
        adapters: name → folder.
    """

    model: Path
    asked: Sequence[Pass | Call | Encode]
    options: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The answer to a :class:`Pass`, or in ``returned`` to a :class:`Call` or :class:`Encode`.

    Args:
        rows: the log-probabilities of each text after its first token, if they were asked for; else those of its answer
            alone, where the host has them.
        cached: how many tokens of each prompt were found in the cache.
        kernels: how often kernels of the emulated NPU were called, by name, where that is counted.
        waits: what the emulated NPU waited for.
        drafts: how many drafted tokens were accepted so far, and how many were made.
    """

    prompts: Sequence[Sequence[int]] = ()
    tokens: Sequence[Sequence[int]] = ()
    cached: Sequence[int] = ()
    rows: Sequence[Sequence[float]] = ()
    returned: Any = None
    kernels: Mapping[str, int] | None = None
    waits: Mapping[str, int] = field(default_factory=dict)
    drafts: tuple[int, int] | None = None

    def of(self, numbers: slice) -> Answer:
        """The answer to some of the prompts."""
        return Answer(self.prompts[numbers], self.tokens[numbers], self.cached[numbers], self.rows[numbers])

    def scored(self) -> tuple[list[list[int]], Tensor]:
        """The texts, prompts and tokens, and their log-probabilities in a row."""
        texts = [[*prompt, *tokens] for prompt, tokens in zip(self.prompts, self.tokens, strict=True)]
        assert [len(row) for row in self.rows] == [len(text) - 1 for text in texts]
        return texts, torch.tensor([score for row in self.rows for score in row])


def rows_of_vllm(prompts: Sequence[Sequence[int]], outputs: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """The ``rows`` of an :class:`Answer` from what programs with vLLM's engines write of its outputs."""
    rows = []
    for prompt, output in zip(prompts, outputs, strict=True):
        (tokens,), (steps,) = output["tokens"], output["logprobs"]
        if scored := output["prompt_logprobs"][1:]:
            tokens, steps = [*prompt[1:], *tokens], [*scored, *steps]
        rows.append([step[str(token)] for token, step in zip(tokens, steps, strict=True)])
    return rows


@dataclass(frozen=True)
class Served:
    """An engine's answers, the report of each of its ranks, and its log."""

    answers: Sequence[Answer]
    reports: Sequence[Mapping[str, Any]]
    log: str = ""

    def counted(self, operator: str, impl_id: str = WRONG) -> int:
        """How often an implementation ran in the first rank."""
        return int(self.reports[0]["counts"].get(f"{operator} {impl_id}", 0))


def ran(report: Mapping[str, Any]) -> dict[str, set[str]]:
    """Operator → the implementations that a rank called, but for wrong ones."""
    found: dict[str, set[str]] = {}
    for operator, impl_id in (key.split(" ") for key in report["counts"]):
        found.setdefault(operator, set()).update({impl_id} - {WRONG})
    return found


class Scenario:
    """A subject's rules; a subclass in a host's folder has the cases."""

    def cases(self) -> Mapping[str, Sequence[Any]]:
        """Arguments of rules → their values; more than one argument with commas between. The first that fits counts."""
        return {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for names, values in self.cases().items():
            if {*names.split(",")} <= {*metafunc.fixturenames}:
                metafunc.parametrize(names, values, ids=str)
                return


class Host(Protocol):
    """A host, or a host on a chip.

    Args:
        name: its own, as commands have it.
        plugin: the package of ours, as refusals have it.
        unwanted: parts of a report that are empty where all is well.
        layers: scheme → the name of its layers in a report, where that is not the kernel's.
    """

    name: str
    plugin: str
    unwanted: Sequence[str]
    layers: Mapping[str, str]

    def serve(
        self, *engines: Engine, plugins: Sequence[str] = (), deny: str = "", **variables: str
    ) -> Sequence[Future[Served]]:
        """Start engines; a future that failed has the log in its error.

        Args:
            engines: what they are asked.
            plugins: modules of ``tests/plugins``.
            deny: a vendor that is chosen only where a pass names it.
            variables: of the environment; an empty one takes a variable away that the host would set.
        """


class Programs(Host, Protocol):
    """A host that is asked for further programs than engines.

    Args:
        folder: of its tests, which has its scripts.
    """

    folder: Path

    def environment(self, **variables: str) -> dict[str, str]:
        """The environment of a program: nothing of ours is set but these variables."""


class NamesOfVLLM:
    """What a :class:`Host` that is vLLM is called, and its reports' words."""

    name = "vllm"
    plugin = "vllm_fl"
    unwanted: Sequence[str] = ("native_layers", "failed")
    layers: Mapping[str, str] = {}


class NamesOfSGLang:
    """As :class:`NamesOfVLLM`, for SGLang."""

    name = "sglang"
    plugin = "sglang_fl"
    unwanted: Sequence[str] = ("native_layers", "fallen_through", "undispatched", "failed")
    layers: Mapping[str, str] = {
        **dict.fromkeys(("gptq", "gptq, 2 bits", "gptq, 3 bits", "gptq, 8 bits", "auto-round"), "GptqLayer"),
        "awq": "AwqLayer",
    }


def clean(report: Mapping[str, Any], host: Host) -> bool:
    """Whether nothing in a rank's report is unwanted."""
    assert {name: report[name] for name in host.unwanted} == {name: {} for name in host.unwanted}
    return True
