"""Device time and host time of a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..devices import device_of

Call = Callable[[], Any]
Round = Callable[[], float]

WARMUPS = 3
HOST_CALLS = 64  # few enough that the device's queue never fills and the host never waits
LEAST_ROUNDS = 7


@dataclass(frozen=True)
class Timing:
    """Seconds per call.

    Args:
        median: median of the rounds.
        low, high: the 10th and 90th percentile.
        rounds: number of rounds.
        how: ``graph`` (replays between events), ``events`` (launches between events) or ``wall`` (the wall clock).
    """

    median: float
    low: float
    high: float
    rounds: int
    how: str

    @classmethod
    def of(cls, seconds: Sequence[float], how: str) -> Timing:
        """Return statistics of the seconds per call, one value for each round."""
        ordered = sorted(seconds)
        last = len(ordered) - 1
        ends = ordered[round(last * 0.1)], ordered[round(last * 0.9)]
        return cls(statistics.median(ordered), *ends, len(ordered), how)


class Clock:
    """Times calls on one device.

    On a device with graphs, all calls of a round are captured in one graph and its replays are timed with events: host
    time does not count, and each call's results have separate memory. Calls that cannot be captured are launched
    between events, and may reuse the memory of earlier results. On other devices a round is a sequence of calls timed
    by the wall clock.

    Args:
        device: the device of the calls.
        seconds: how long to measure each list of calls.
    """

    def __init__(self, device: torch.device, seconds: float = 0.05) -> None:
        self.device, self.seconds = device, seconds
        self.spec = device_of(device.type)
        self._module: Any = self.spec.module()
        self.graphs = self.spec.graphs and self.spec.refuse_waits is not None

    def time(self, calls: Sequence[Call]) -> Timing:
        """Return the time of one call, over rounds that make each of ``calls`` once."""
        round_, how = self.prepared(calls)
        seconds: list[float] = []
        while len(seconds) < LEAST_ROUNDS or sum(seconds) * len(calls) < self.seconds:
            seconds.append(round_())
        return Timing.of(seconds, how)

    def prepared(self, calls: Sequence[Call], eager: bool = False) -> tuple[Round, str]:
        """Return a round that makes each of ``calls`` once and returns the seconds per call, and how it is timed.

        Args:
            calls: the calls to time.
            eager: whether to use the wall clock, as for a step outside graphs: the host's time counts if it is longer.
        """
        for call in calls[:WARMUPS]:
            call()
        self.synchronize()
        if eager or not self.graphs:
            return lambda: self._by_wall(calls) / len(calls), "wall"
        graph = self._captured(calls)
        if graph is None:
            return lambda: self._by_events(calls) / len(calls), "events"
        graph.replay()
        self.synchronize()
        return lambda: self._by_events([graph.replay]) / len(calls), "graph"

    def warm_up(self, call: Call, seconds: float = 0.5) -> None:
        """Repeat a call until the device's clocks have risen."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            call()
            self.synchronize()

    def host(self, call: Call) -> Timing:
        """Return the time that a call occupies the host; without an accelerator, the time of the call.

        A round has fewer calls if they are slow, for example because they wait for the device.
        """
        probes = []
        for _ in range(WARMUPS):
            self.synchronize()
            started = time.perf_counter()
            call()
            probes.append(time.perf_counter() - started)
        calls = max(1, min(HOST_CALLS, int(self.seconds / max(min(probes), 1e-9))))
        seconds = []
        for _ in range(LEAST_ROUNDS):
            self.synchronize()
            started = time.perf_counter()
            for _ in range(calls):
                call()
            seconds.append((time.perf_counter() - started) / calls)
        self.synchronize()
        return Timing.of(seconds, "wall")

    def synchronize(self) -> None:
        """Wait for all launched work."""
        self.spec.synchronize()

    def _captured(self, calls: Sequence[Call]) -> Any:
        """Return all calls in one graph, or ``None`` if a call waits for the device, so that no graph can hold it."""
        assert self.spec.refuse_waits is not None
        try:
            with self.spec.refuse_waits():
                calls[0]()
        except RuntimeError:
            return None
        names = self.spec.stream_names()
        graph = names["CUDAGraph"]()
        results = []  # alive until all calls are captured, so that results do not share memory
        with names["graph"](graph):
            for call in calls:
                results.append(call())
        return graph

    def _by_events(self, calls: Sequence[Call]) -> float:
        begin, end = self._module.Event(enable_timing=True), self._module.Event(enable_timing=True)
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _by_wall(self, calls: Sequence[Call]) -> float:
        started = time.perf_counter()
        for call in calls:
            call()
        self.synchronize()
        return time.perf_counter() - started
