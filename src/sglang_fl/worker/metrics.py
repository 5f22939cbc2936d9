"""Our metrics in SGLang's ``/metrics``."""

from __future__ import annotations

from typing import Any

from fl_dispatch.hosting.records import metrics

PATH = "/metrics"


def join_metrics(result: None, app: Any) -> None:
    """Mount ``/metrics`` again after SGLang has mounted it, over a registry that includes our metrics.

    SGLang makes a registry from files of its processes, keeps it private, and has no interface for a collector.
    """
    from prometheus_client import CollectorRegistry, make_asgi_app, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    metrics.join(registry)
    route = next(route for route in reversed(app.routes) if getattr(route, "path", None) == PATH)
    route.app = make_asgi_app(registry=registry)
