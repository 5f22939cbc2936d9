"""Counts of transfers, added by threads and shown in vLLM's log (``KV Transfer metrics``) and in ``/metrics``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from threading import Lock
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

NAMES = {
    "sent_blocks": "Blocks of KV cache that arrived at another engine.",
    "sent_bytes": "Bytes of KV cache that arrived at another engine.",
    "sent_direct_bytes": "Bytes of KV cache that arrived there from device to device.",
    "received_blocks": "Blocks of KV cache that arrived from another engine.",
    "received_bytes": "Bytes of KV cache that arrived from another engine.",
    "received_direct_bytes": "Bytes of KV cache that came from there from device to device.",
    "loaded_blocks": "Blocks that were loaded instead of computed.",
    "lost_transfers": "Prompts with a transfer that was given up.",
}
"""Name → meaning; ``/metrics`` shows each as ``vllm:fl_p2p_…``."""


class Tally:
    """The numbers of :data:`NAMES` since they were last taken, added by several threads."""

    def __init__(self) -> None:
        self._lock, self._numbers = Lock(), Counter[str]()

    def add(self, **numbers: int) -> None:
        """Add numbers to the counts."""
        with self._lock:
            self._numbers.update(numbers)

    def take(self) -> dict[str, int]:
        """Return the counts that are not zero, and reset them."""
        with self._lock:
            taken, self._numbers = dict(+self._numbers), Counter()
            return taken


@dataclass
class TransferCounts(KVConnectorStats):
    """The numbers of a worker, or of several, in one interval."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name.replace("_", " "): self.data[name] for name in NAMES if name in self.data}

    def is_empty(self) -> bool:
        return not self.data


class TransferMetrics(KVConnectorPromMetrics):
    """One counter for each number and each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self.fl_counters = {
            name: self._counter_cls(f"vllm:fl_p2p_{name}", meaning, labelnames=labelnames)
            for name, meaning in NAMES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, number in transfer_stats_data.items():
            self.fl_counters[name].labels(*self.per_engine_labelvalues[engine_idx]).inc(number)
