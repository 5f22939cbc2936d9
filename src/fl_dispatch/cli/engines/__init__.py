"""A host's engine as commands use it: one protocol, and one implementation a host."""

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
        host: which one.
        model: the checkpoint.
        eager: nothing is compiled or captured.
        ranks: tensor-parallel.
        dtype: as hosts call it; ``auto`` for the checkpoint's.
        length: most tokens of a request; 0 for the model's.
        arguments: of the host's own class (``LLM``, ``Engine``); they count before the others.
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
        tokens: of the prompt.
        new: tokens to generate.
        top: most likely tokens in each row; ``None`` for no rows.
        scored: return rows and scores of the prompt, too; a host then leaves its prefix cache alone.
        forced: tokens that an engine of :mod:`fl_dispatch.cli.bisect` generates, one a step.
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
        tokens: the generated ones.
        scores: log-probability of each token of the prompt but the first, if it is scored.
        rows: the most likely tokens in the place of each token of the prompt but the first, if it is scored, and then
            of each generated one.
    """

    tokens: list[int]
    scores: list[float]
    rows: list[Row]


class Engine(Protocol):
    """An engine of a host, in this process and those that it starts."""

    seconds: float
    """The wall time of the last requests in the host."""

    def count(self) -> None:
        """Count calls of operators from now on."""

    def generate(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Run requests at once; return their results in the same order."""

    def close(self) -> list[dict[str, Any]]:
        """End the engine; return each rank's report: the implementations that ran, and their calls if counted."""


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
