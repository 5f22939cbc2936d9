"""The registry behind vLLM's ``/metrics``, with the workers' calls and findings added."""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from fl_dispatch.hosting.records import metrics

ROUTER = "vllm.entrypoints.serve.instrumentator.metrics"
"""The module that takes the function by name when a server's routes are made; it may already be imported."""


def join_metrics() -> None:
    """Add our metrics to vLLM's registry for ``/metrics``, also the one for several servers. Idempotent.

    vLLM makes that registry in each server process, and plugins cannot register a collector.
    """
    from vllm.v1.metrics import prometheus

    original = prometheus.get_prometheus_registry
    if hasattr(original, "fl_joined"):
        return

    @wraps(original)
    def joined() -> Any:
        return metrics.join(original())

    joined.fl_joined = True  # type: ignore[attr-defined]
    prometheus.get_prometheus_registry = joined
    if ROUTER in sys.modules:
        sys.modules[ROUTER].get_prometheus_registry = joined  # type: ignore[attr-defined]
