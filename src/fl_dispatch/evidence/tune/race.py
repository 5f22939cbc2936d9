"""Prove all candidates at one shape, then time them alternately, as the engine would run them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ... import weight_forms
from ...errors import NotSupported, text_of
from ...hosting.memory.kv_layout import LAYOUT, KVLayout
from ...manager import OpManager
from ...ops import OPERATORS, Sample
from ...run.direct import direct_function, why_declined
from ...state import State
from ...types import OpImpl
from ..arguments import Arguments
from ..bench import calls_of, rotated
from ..cases import Case
from ..inputs import Inputs
from ..timing import Clock, Round
from ..verify import verify
from ..weights import refusals_counted

PROVEN = "with prepared weights and with plain ones"
"""How candidates that prepare weights are proven. A tuning proven differently is not resumed."""
REPEATS = 20
FIRST = 3
"""Repeats after which a slow candidate may be dropped."""
FAR_BEHIND = 3.0
"""Multiple of the fastest time from which on a candidate gets no further repeat."""
LEAST_SECONDS = 2e-3
"""Smallest duration of a repeat in seconds, because the clock and the host's scheduler are coarse."""
MOST_ROUNDS = 50

PROOF_CALLS = 8
"""Number of calls under load at the end of a proof."""
PROOF_SECONDS = 0.05
"""Seconds that these calls may take in all."""
PROOF_OPERATIONS = {True: 6e11, False: 4e9}
"""Most operations of a shape that is itself proven, on an accelerator and on a CPU: the reference computes in float64,
and keeps all scores of attention. For a larger one the largest provable shape of the same call is proven.
"""
PROOF_BYTES = {True: 3 << 29, False: 64 << 20}
"""Most bytes of the arguments of a shape that is itself proven."""


@dataclass
class Outcome:
    """One candidate on one shape.

    Args:
        seconds: seconds per call, one for each repeat.
        how: the kind of timing; see :class:`fl_dispatch.evidence.timing.Timing`.
        problem: why it must not win with this shape, or empty.
        proof: the shape at which it was compared with the reference, and the largest error as a share of what is
            accepted.
        prepared, plain: numbers of the proof's inputs with prepared weights, and with plain ones.
    """

    seconds: list[float] = field(default_factory=list)
    how: str = ""
    problem: str = ""
    proof: str = ""
    prepared: int = 0
    plain: int = 0

    def as_data(self) -> dict[str, Any]:
        """Return plain data; times in microseconds."""
        times = [float(f"{value * 1e6:.5g}") for value in self.seconds]
        proven = {"proof": self.proof, "prepared": self.prepared, "plain": self.plain}
        return {"us": times, "how": self.how, "problem": self.problem, **proven}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Outcome:
        """Return the outcome that :meth:`as_data` wrote."""
        proven = data["proof"], data.get("prepared", 0), data.get("plain", 0)
        return cls([value / 1e6 for value in data["us"]], data["how"], data["problem"], *proven)


def is_provable(case: Case, accelerator: bool) -> bool:
    """Whether the reference can compute a shape in float64 within a bounded time and memory."""
    work, size = case.least
    return work.operations <= PROOF_OPERATIONS[accelerator] and size <= PROOF_BYTES[accelerator]


def prove(
    manager: OpManager, candidates: Sequence[OpImpl], case: Case, dtype: torch.dtype, clock: Clock
) -> list[Outcome]:
    """Compare candidates with the reference at one shape; return an outcome for each, without times."""
    label, args = f"{case.tokens} tokens, width {case.width}", OPERATORS[case.op_name].bind(case.make(), {})
    inputs: dict[str, Inputs] = {}
    outcomes = []
    for impl in candidates:
        layout = required_layout(impl)
        if layout not in inputs:
            sample = Sample(label, laid_out(args, case.op_name, layout))
            inputs[layout] = Inputs(manager, case.op_name, dtype, clock.device, samples=[sample])
        given: dict[str, Any] = {"repeats": 2, "race_calls": PROOF_CALLS, "race_seconds": PROOF_SECONDS}
        found = verify(manager, impl, dtype, clock.device, inputs=inputs[layout], **given)
        if found.problems:
            outcomes.append(Outcome(problem=f"wrong: {found.problems[0]}"))
        elif not found.samples:
            outcomes.append(Outcome(problem=f"declines: {next(iter(found.declined.values()), 'nothing ran')}"))
        else:
            share = 0.0 if found.worst is None else found.worst.share
            proof = f"{label}: {share:.3f} of the tolerance"
            outcomes.append(Outcome(proof=proof, prepared=found.prepared, plain=found.plain))
    return outcomes


@refusals_counted()
def race(
    manager: OpManager,
    candidates: Sequence[OpImpl],
    outcomes: Sequence[Outcome],
    case: Case,
    clock: Clock,
    *,
    eager: bool,
    repeats: int = REPEATS,
) -> None:
    """Time the candidates without a problem alternately; their outcomes get the times, or a problem.

    Args:
        manager: the manager of the candidates.
        candidates, outcomes: in the same order.
        case: the shape.
        clock: the device's clock.
        eager: whether no graph holds the call, so that the host's time counts.
        repeats: number of repeats.
    """
    operator = OPERATORS[case.op_name]
    args = operator.bind(case.make(), {})
    weight_forms.declare_all(operator.stay(args))
    assert operator.work is not None
    moved = operator.work(*args).bytes_moved
    shared: dict[str, _Shared] = {}
    rounds: list[tuple[Outcome, Round]] = []
    for impl, outcome in zip(candidates, outcomes, strict=True):
        if outcome.problem:
            continue
        try:
            given = accepted(manager.state, impl, args)
        except NotSupported as refusal:
            outcome.problem = f"declines: {refusal}"
            continue
        except Exception as error:  # foreign code: whatever it raises is the finding
            outcome.problem = f"its 'supports' raised {text_of(error)}"
            continue
        sets = shared.setdefault(required_layout(impl), _Shared(given, moved, clock))
        try:
            calls = calls_of(direct_function(manager.state, impl), sets, clock)
            round_, outcome.how = clock.prepared(calls, eager)
            rounds.append((outcome, _long_enough(round_, len(calls))))
        except Exception as error:  # foreign code: whatever it raises is the finding
            outcome.problem = f"it raised {text_of(error)}"
            continue
        if outcome.how == "events" and not eager:
            outcome.problem = "no graph can hold it, because it waits for the device"
    for repeat in range(repeats):
        for place in range(len(rounds)):
            outcome, round_ = rounds[(place + repeat) % len(rounds)]
            if repeat < FIRST or not _is_far_behind(outcome, [one for one, _ in rounds]):
                outcome.seconds.append(round_())


class _Shared:
    """Argument sets that a race's candidates share, made on first use."""

    def __init__(self, args: Arguments, bytes_moved: int, clock: Clock) -> None:
        self._made: list[Arguments] = []
        self._more = rotated(args, bytes_moved, clock)

    def __iter__(self) -> Iterator[Arguments]:
        yield from list(self._made)
        for args in self._more:
            self._made.append(args)
            yield args


def required_layout(impl: OpImpl) -> str:
    """Return the layout of the KV cache that an implementation requires, or an empty text."""
    return str(impl.requires.get(LAYOUT, ""))


def accepted(state: State, impl: OpImpl, args: Arguments) -> Arguments:
    """Return a call's arguments for an implementation, with the KV cache in its required layout.

    Raises:
        NotSupported: the implementation declines them, and must not be called, because a compiled kernel may write
            anywhere.
    """
    given = laid_out(args, impl.op_name, required_layout(impl))
    if refusal := why_declined(state, impl, given):
        raise NotSupported(refusal)
    return given


def laid_out(args: Arguments, op_name: str, layout: str) -> Arguments:
    """Return a call's arguments with their KV cache in another layout; the same ones if none is required."""
    if not layout:
        return args
    values = dict(zip(OPERATORS[op_name].parameters, args, strict=True))
    key, value = values["key_cache"], values["value_cache"]
    blocks, slots, heads, size = key.shape
    memory = key.new_empty(blocks, slots * heads * (size + value.shape[3]))
    views = KVLayout.parse(layout).split(memory, slots, heads, size, value.shape[3])
    for view, old in zip(views, (key, value), strict=True):
        view.copy_(old)
    values["key_cache"], values["value_cache"] = views
    return tuple(values.values())


def _is_far_behind(outcome: Outcome, others: Sequence[Outcome]) -> bool:
    best = min(statistics.median(other.seconds) for other in others if other.seconds)
    return len(outcome.seconds) >= FIRST and statistics.median(outcome.seconds) > FAR_BEHIND * best


def _long_enough(round_: Round, calls: int) -> Round:
    """Return a repeat of several rounds if one is short."""
    once = calls * min(round_() for _ in range(2))
    count = max(1, min(MOST_ROUNDS, math.ceil(LEAST_SECONDS / max(once, 1e-9))))
    return lambda: statistics.fmean(round_() for _ in range(count))
