"""Orders of the connector's scheduler half to its workers in each step, and their answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from .protocol.route import Address


@dataclass(frozen=True)
class Send:
    """Blocks ``ids`` hold a prompt's blocks from ``first`` on, complete after this step; the prompt has ``total``."""

    transfer: str
    to: Address
    first: int
    ids: list[int]
    total: int


@dataclass(frozen=True)
class Load:
    """An arrived prompt to load into blocks ``ids``, from its block ``first`` on."""

    transfer: str
    first: int
    ids: list[int]


@dataclass(frozen=True)
class TakeBack:
    """Notice that the sent part of a transfer is wrong."""

    transfer: str
    to: Address
    why: str


@dataclass
class Orders(KVConnectorMetadata):
    """The orders of one step; addresses are those of first ranks."""

    awaited: list[tuple[str, Address, int]] = field(default_factory=list)
    """Transfers with the engines that have them, and the blocks that each must have."""
    dropped: list[str] = field(default_factory=list)
    """Transfers that no local request needs any more."""
    ended: list[str] = field(default_factory=list)
    """Transfers that end early: the rest is not sent."""
    loads: list[Load] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    taken_back: list[TakeBack] = field(default_factory=list)


@dataclass
class Outcomes(KVConnectorWorkerMetadata):
    """Arrived transfers with their number of workers; lost and taken-back transfers with a reason."""

    ready: Counter[str] = field(default_factory=Counter)
    lost: dict[str, str] = field(default_factory=dict)
    taken_back: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Outcomes:
        assert isinstance(other, Outcomes)
        taken_back = {**other.taken_back, **self.taken_back}
        return Outcomes(self.ready + other.ready, {**other.lost, **self.lost}, taken_back)
