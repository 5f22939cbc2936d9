"""The interface of scenarios to a host: engines with several requests each, and the names in its reports and options.

The fixture ``host`` in each host's folder is a :class:`Host`, so a scenario runs under every host.
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
"""Arguments of ``Host.serve`` to run only our kernels on a GPU."""


@dataclass(frozen=True)
class Pass:
    """Greedy tokens after prompts.

    Args:
        scores: whether the answer has the log-probabilities of prompts and tokens.
        orders: operator → the first implementation in the pass's policy; the prefix cache is emptied.
        prefer: preference of that policy; the default if empty.
        adapters: the name of each prompt's adapter, or null.
        kernel: the operator of ``npu::`` with a wrong kernel, on the emulated NPU.
        samples: number of sampled answers to each prompt, with the settings in ``sampling``; 0 for greedy tokens.
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
    """A call of a method of the host's engine, or of a step of its program, that generates no tokens."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Encode:
    """A request for vectors of texts, one row per text in ``returned``.

    Args:
        classes: whether the vectors are of classes.
        orders: as in :class:`Pass`; other operators run references.
    """

    texts: Sequence[str]
    classes: bool = False
    orders: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Engine:
    """An engine with a checkpoint, and its requests.

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
        rows: the log-probabilities of each text after its first token, if they were requested; else those of its answer
            alone, if the host has them.
        cached: number of tokens of each prompt that were found in the cache.
        kernels: number of calls of the emulated NPU's kernels, by name, if counted.
        waits: number of the emulated NPU's waits, by kind.
        drafts: numbers of accepted and of drafted tokens so far.
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
        """Return the answer to some of the prompts."""
        return Answer(self.prompts[numbers], self.tokens[numbers], self.cached[numbers], self.rows[numbers])

    def scored(self) -> tuple[list[list[int]], Tensor]:
        """Return the texts, each a prompt with its tokens, and all their log-probabilities in one row."""
        texts = [[*prompt, *tokens] for prompt, tokens in zip(self.prompts, self.tokens, strict=True)]
        assert [len(row) for row in self.rows] == [len(text) - 1 for text in texts]
        return texts, torch.tensor([score for row in self.rows for score in row])


def rows_of_vllm(prompts: Sequence[Sequence[int]], outputs: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Return the ``rows`` of an :class:`Answer` from the outputs that programs with vLLM's engines write."""
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
        """Return the number of an implementation's calls in the first rank."""
        return int(self.reports[0]["counts"].get(f"{operator} {impl_id}", 0))


def ran(report: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return operator → the implementations that a rank called, without wrong ones."""
    found: dict[str, set[str]] = {}
    for operator, impl_id in (key.split(" ") for key in report["counts"]):
        found.setdefault(operator, set()).update({impl_id} - {WRONG})
    return found


class Scenario:
    """The tests of a subject; a subclass in a host's folder has the cases."""

    def cases(self) -> Mapping[str, Sequence[Any]]:
        """Return comma-separated arguments of tests → values; a test takes the first entry that fits its arguments."""
        return {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for names, values in self.cases().items():
            if {*names.split(",")} <= {*metafunc.fixturenames}:
                metafunc.parametrize(names, values, ids=str)
                return


class Host(Protocol):
    """A host, or a host on a chip.

    Args:
        name: the host's name in commands.
        plugin: our package's name in refusals.
        unwanted: parts of a report that must be empty.
        layers: scheme → the name of its layers in a report, if it differs from the kernel's.
    """

    name: str
    plugin: str
    unwanted: Sequence[str]
    layers: Mapping[str, str]

    def serve(
        self, *engines: Engine, plugins: Sequence[str] = (), deny: str = "", **variables: str
    ) -> Sequence[Future[Served]]:
        """Start engines; the error of a failed future contains the log.

        Args:
            engines: the engines and their requests.
            plugins: modules of ``tests/plugins``.
            deny: a vendor that runs only if a pass names it.
            variables: environment variables; an empty value removes a variable that the host would set.
        """


class Programs(Host, Protocol):
    """A host that also runs other programs.

    Args:
        folder: the folder of its tests and scripts.
    """

    folder: Path

    def environment(self, **variables: str) -> dict[str, str]:
        """Return a program's environment, with only these of our variables."""


class NamesOfVLLM:
    """The names of vLLM as a :class:`Host`, and in its reports."""

    name = "vllm"
    plugin = "vllm_fl"
    unwanted: Sequence[str] = ("native_layers", "failed")
    layers: Mapping[str, str] = {}


class NamesOfSGLang:
    """The names of SGLang as a :class:`Host`, and in its reports."""

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
