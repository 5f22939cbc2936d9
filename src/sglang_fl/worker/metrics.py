"""Our metrics in SGLang's ``/metrics``."""

from __future__ import annotations

from typing import Any

from fl_dispatch.hosting.records import metrics

PATH = "/metrics"


def join_metrics(result: None, app: Any) -> None:
    """After SGLang has mounted ``/metrics``: mount it again over a registry that has ours too.

    SGLang makes a registry of what its processes leave in files, keeps it to itself, and has no place for a collector.
    """
    from prometheus_client import CollectorRegistry, make_asgi_app, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    metrics.join(registry)
    route = next(route for route in reversed(app.routes) if getattr(route, "path", None) == PATH)
    route.app = make_asgi_app(registry=registry)
