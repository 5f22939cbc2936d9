"""Our point-to-point KV connector, offered to vLLM's factory under its own name and the one that vLLM's had."""

from __future__ import annotations

import importlib
from typing import Any

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
MODULE = "vllm_fl.p2p.connector"
CLASS = "P2pConnector"
NAMES = frozenset({CLASS, "P2pNcclConnector"})
_offered: set[str] = set()


def offer() -> None:
    """Register the connector. Idempotent; a connector of vLLM's own keeps its name. vLLM 0.26 lacks what ours needs."""
    factory: Any = importlib.import_module(FACTORY).KVConnectorFactory
    if not hasattr(importlib.import_module(BASE).KVConnectorBase_V1, "get_external_cache_hit_sources"):
        return
    for name in NAMES:
        if name not in factory._registry:
            factory.register_connector(name, MODULE, CLASS)
            _offered.add(name)


def is_ours(name: str | None, module: str | None = None) -> bool:
    """Whether vLLM's factory loads our connector under a name, for a user who names this module or none."""
    return module == MODULE if module else name in _offered
