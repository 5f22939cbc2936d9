"""Measure an implementation's device and host time against the rates of this device in the same run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .. import weight_forms
from ..errors import text_of
from ..manager import OpManager
from ..ops import OPERATORS
from ..run.direct import direct_function, why_declined
from ..types import OpImpl
from .arguments import Arguments, copied
from .cases import Case
from .rates import Yardstick, sets_to_rotate
from .timing import LEAST_ROUNDS, Call, Clock, Timing
from .weights import PLAIN, PREPARED, are_prepared, refusals_counted

SLOW_SECONDS = 0.25
"""Seconds of all calls of a round beyond which it makes fewer calls."""
LIKELY_SHARE = 0.1
"""Share of the floor that an implementation is expected to reach, for an estimate."""
CALL_SECONDS = 2e-5
"""Least seconds of a call, for an estimate."""
MAKING_FACTOR = 8
"""Time to make arguments, as a multiple of the time to copy them, for an estimate."""
OVERHEAD_SECONDS = 0.02
"""Seconds that a row takes besides its calls and arguments, for an estimate."""


@dataclass(frozen=True)
class Result:
    """Figures of one implementation on one case.

    Args:
        op_name, impl_id, dtype, label, tokens, width: what was measured.
        device: time of a call on the device, inputs rotated past its cache.
        host: time that a call occupies the host, or ``None`` if it equals the device time.
        bytes_moved, operations: the least work of the operator.
        floor: seconds at the measured rates; no implementation is faster.
        copy: seconds of a copy that moves ``bytes_moved``.
        weights: ``prepared`` if the implementation had prepared a form of a weight; ``plain`` in such an
            implementation's second result, with undeclared weights; else empty.
        note: why there is no time, or empty.
    """

    op_name: str
    impl_id: str
    dtype: str
    label: str
    tokens: int
    width: int
    device: Timing | None
    host: Timing | None
    bytes_moved: int
    operations: int
    floor: float
    copy: float
    weights: str = ""
    note: str = ""

    @property
    def share(self) -> float | None:
        """Return the floor over the device time; for an operator that moves bytes, its share of a large copy's rate."""
        return None if self.device is None else self.floor / self.device.median

    @property
    def share_of_copy(self) -> float | None:
        """Time of a copy of ``bytes_moved`` over the device time: the speed-up left for a memory-bound operator."""
        return None if self.device is None else self.copy / self.device.median

    def as_data(self) -> dict[str, Any]:
        """Return plain data; times in microseconds."""
        row = {key: value for key, value in asdict(self).items() if key not in TIMES}
        for name, timing in (("device_us", self.device), ("host_us", self.host)):
            row[name] = None if timing is None else _microseconds(timing)
        row["floor_us"], row["copy_us"] = round(self.floor * 1e6, 3), round(self.copy * 1e6, 3)
        for name, share in (("share_of_floor", self.share), ("share_of_copy", self.share_of_copy)):
            row[name] = None if share is None else round(share, 4)
        return row


TIMES = ("device", "host", "floor", "copy")


def _microseconds(timing: Timing) -> dict[str, Any]:
    values = {name: round(getattr(timing, name) * 1e6, 3) for name in ("median", "low", "high")}
    return {**values, "rounds": timing.rounds, "how": timing.how}


def bench(manager: OpManager, impl: OpImpl, case: Case, dtype: torch.dtype, yardstick: Yardstick) -> list[Result]:
    """Measure one implementation on one case; if it declines or fails, return a result with a note.

    Weights are declared, like a model's. For an implementation that prepares them, a second result has plain weights.
    """
    with refusals_counted():
        first = _measured(manager, impl, case, dtype, yardstick, declared=True)
        if first.weights != PREPARED:
            return [first]
        return [first, _measured(manager, impl, case, dtype, yardstick, declared=False)]


def _measured(
    manager: OpManager, impl: OpImpl, case: Case, dtype: torch.dtype, yardstick: Yardstick, declared: bool
) -> Result:
    clock, operator = yardstick.clock, OPERATORS[case.op_name]
    function = direct_function(manager.state, impl)
    device: Timing | None = None
    host: Timing | None = None
    args = operator.bind(case.make(), {})
    weights = operator.stay(args)
    if declared:
        weight_forms.declare_all(weights)
    assert operator.work is not None
    work = operator.work(*args)
    note = ""
    try:
        note = why_declined(manager.state, impl, args)
        if not note:
            calls = calls_of(function, rotated(args, work.bytes_moved, clock), clock)
            device = clock.time(calls)
            if clock.spec.accelerator:
                host = clock.host(calls[0])
    except Exception as error:  # foreign code: a row without a time gives the reason
        note = text_of(error)
    return Result(
        case.op_name,
        impl.impl_id,
        str(dtype).removeprefix("torch."),
        case.label,
        case.tokens,
        case.width,
        device,
        host,
        work.bytes_moved,
        work.operations,
        yardstick.rates.floor_s(work.bytes_moved, work.operations),
        yardstick.copy(work.bytes_moved),
        PLAIN if not declared else PREPARED if are_prepared(weights) else "",
        note,
    )


def expected_seconds(case: Case, yardstick: Yardstick) -> float:
    """Return about how long measuring one implementation on a case takes, at a typical share of the device's rates."""
    work, size = case.least
    rates = yardstick.rates
    call = CALL_SECONDS + rates.floor_s(work.bytes_moved, work.operations) / LIKELY_SHARE
    sets = max(1, min(sets_to_rotate(yardstick.clock.device, min(work.bytes_moved, size)), int(SLOW_SECONDS / call)))
    rounds = max(yardstick.clock.seconds, LEAST_ROUNDS * sets * call)
    return rounds + MAKING_FACTOR * sets * size / rates.copy_bytes_per_s + OVERHEAD_SECONDS


def rotated(args: Arguments, bytes_moved: int, clock: Clock) -> Iterator[Arguments]:
    """Yield the arguments, then copies, until all sets together exceed the cache.

    A call may read a small part of large arguments, so the bytes that it moves count.
    """
    seen = {arg.untyped_storage().data_ptr(): arg.untyped_storage().nbytes() for arg in args if isinstance(arg, Tensor)}
    yield args
    for _ in range(sets_to_rotate(clock.device, min(bytes_moved, sum(seen.values()))) - 1):
        yield copied(args)


def calls_of(function: Callable[..., Any], sets: Iterable[Arguments], clock: Clock) -> list[Call]:
    """Make one call for each set of arguments, or for the first few sets if a call is slow.

    Each call was made once before, so that weights are prepared before timing and outside captured graphs.
    """

    def call(given: Arguments) -> Call:
        return lambda: function(*given)

    turn = iter(sets)
    calls = [call(next(turn))]
    calls[0]()
    clock.synchronize()
    started = time.perf_counter()
    calls[0]()
    clock.synchronize()
    most = max(1, int(SLOW_SECONDS / (time.perf_counter() - started)))
    calls += [call(given) for given in itertools.islice(turn, most - 1)]
    for other in calls[1:]:
        other()
    return calls
