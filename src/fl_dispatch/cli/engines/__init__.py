"""A host's engine for commands: one protocol, with one implementation per host."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...errors import DispatchError
from ..hosts import Host

Row = dict[str, float]
"""Token as a string → its log-probability."""


@dataclass(frozen=True)
class Start:
    """Settings of an engine.

    Args:
        host: the engine's host.
        model: the checkpoint.
        eager: compile and capture nothing.
        ranks: number of tensor-parallel ranks.
        dtype: the hosts' name of the dtype; ``auto`` for the checkpoint's.
        length: largest number of tokens of a request; 0 for the model's.
        arguments: arguments of the host's class (``LLM``, ``Engine``); they override the other settings.
    """

    host: Host
    model: str
    eager: bool = True
    ranks: int = 1
    dtype: str = "auto"
    length: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """A request for greedy generation.

    Args:
        tokens: tokens of the prompt.
        new: number of tokens to generate.
        top: number of most likely tokens in each row; ``None`` for no rows.
        scored: return rows and scores of the prompt, too; the host then does not use its prefix cache.
        forced: tokens that an engine of :mod:`fl_dispatch.cli.bisect` generates, one per step.
    """

    tokens: Sequence[int]
    new: int = 1
    top: int | None = None
    scored: bool = False
    forced: Sequence[int] = ()


@dataclass(frozen=True)
class Answer:
    """The result of a request.

    Args:
        tokens: the generated tokens.
        scores: log-probability of each token of a scored prompt except the first.
        rows: the most likely tokens at each position: those of a scored prompt except the first, then those of the
            generated tokens.
    """

    tokens: list[int]
    scores: list[float]
    rows: list[Row]


class Engine(Protocol):
    """An engine of a host, in this process and its child processes."""

    seconds: float
    """The wall time that the host took for the last requests."""

    def count(self) -> None:
        """Count calls of operators from now on."""

    def generate(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Run requests in one batch; return their results in the same order."""

    def close(self) -> list[dict[str, Any]]:
        """End the engine; return each rank's report, with the implementations that ran and their counted calls."""


def start(settings: Start) -> Engine:
    """Start an engine in this process.

    Raises:
        DispatchError: the host cannot be imported.
    """
    host = settings.host
    try:
        importlib.import_module(host.value)
    except ImportError as error:
        also = "" if host is Host.VLLM else f" HOST={host.value}"
        raise DispatchError(f"{host.product} is not installed here ({error}); `make demo{also}` installs it") from error
    from . import sglang, vllm

    engines: dict[Host, Callable[[Start], Engine]] = {Host.VLLM: vllm.HostEngine, Host.SGLANG: sglang.HostEngine}
    return engines[host](settings)
