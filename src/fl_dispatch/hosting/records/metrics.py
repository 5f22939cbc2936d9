"""Choices, bans and findings of an engine's workers, in the ``/metrics`` of the host's front end.

Workers are separate processes, so the front end reads their records (:mod:`~fl_dispatch.hosting.records.runs`) on
request. A record follows its worker within :data:`~fl_dispatch.hosting.records.runs.PAUSE` seconds. Nothing is counted
per call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from . import runs

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

LABELS = ("operator", "implementation", "rank")
Values = dict[tuple[str, str, str], float]
"""Operator, implementation and rank → number."""

_joined: weakref.WeakSet[CollectorRegistry] = weakref.WeakSet()


def join(registry: CollectorRegistry) -> CollectorRegistry:
    """Add our metrics to a registry, once; return the registry."""
    if registry not in _joined:
        _joined.add(registry)
        registry.register(RunCollector())
    return registry


class RunCollector:
    """A Prometheus collector over the records of this front end's workers."""

    def describe(self) -> list[Metric]:
        """Return the metrics without values, so that registration reads no record."""
        return list(_metrics([]))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their values."""
        return _metrics(runs.of_engine())


def _metrics(found: Iterable[runs.Run]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    selected: Values = {}
    fallbacks: Values = {}
    bans: Values = {}
    compared: Values = {}
    differences: Values = {}
    time = GaugeMetricFamily(
        "fl_shadow_time_ratio", "The share of its time that a rank spent on comparing.", labels=["rank"]
    )
    damage = CounterMetricFamily(
        "fl_damage", "Watched steps with NaN or infinity that began in a layer.", labels=[*LABELS[:2], "layer", "rank"]
    )
    for run in found:
        rank, choices = str(run.rank), run.choices
        for op_name in runs.used(run):
            selected[op_name, runs.chosen(run, op_name), rank] = 1
        for failed in choices.get("failed", ()):
            key = failed["operator"], failed["implementation"], rank
            bans[key] = bans.get(key, 0) + 1
            fallbacks[key] = fallbacks.get(key, 0) + failed["fallbacks"]
        for *origin, times in choices.get("damage", ()):
            damage.add_metric([*origin, rank], times)
        if shadow := choices.get("shadow"):
            for pair, calls in shadow["compared"].items():
                op_name, _, impl_id = pair.partition(" ")
                compared[op_name, impl_id, rank] = calls
                differences[op_name, impl_id, rank] = 0
            for finding in shadow["findings"]:
                key = finding["operator"], finding["implementation"], rank
                differences[key] = differences.get(key, 0) + finding["calls"]
            time.add_metric([rank], shadow["share_of_time"])
    gauges = [
        ("fl_selected_implementation", "1 for the implementation that a rank runs for an operator.", selected),
        ("fl_bans", "Kinds of arguments for which an implementation is banned.", bans),
    ]
    counters = [
        ("fl_fallbacks", "Calls that failed and that another implementation took over.", fallbacks),
        ("fl_shadow_calls", "Calls that shadow mode compared with a second implementation.", compared),
        ("fl_shadow_differences", "Compared calls with a result outside the operator's tolerance.", differences),
    ]
    for kind, families in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, text, values in families:
            metric = kind(name, text, labels=LABELS)
            for key, value in values.items():
                metric.add_metric(key, value)
            yield metric
    yield time
    yield damage
