"""The receiving half's state: arriving prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
from torch import Tensor

from fl_dispatch.logger_manager import get_logger

from ..counts import Tally
from ..memory.pool import BuddyPool, Piece, queues
from ..memory.stream_events import StreamEvent, record_event
from ..protocol.messages import Put
from ..protocol.route import Address
from .bounded_dict import BoundedDict

logger = get_logger(__name__)

LOADED = "it was loaded"
ASK_EVERY = 0.5
"""Seconds between two questions about one transfer."""


@dataclass
class _Arriving:
    touched: float  # time of the last part, or of the first request that awaits it
    producer: Address | None = None  # the engine to ask, once it is awaited
    last_heard: float = 0.0  # time of that engine's last sign of life
    ask_at: float = 0.0
    expected: int = 0  # blocks of the prompt that awaits it, once it is awaited
    total: int = 0  # 0: no part has arrived
    here: int = 0  # blocks that have arrived, from the first on
    parts: list[tuple[int, int, Piece]] = field(default_factory=list)  # first block, blocks, bytes

    @property
    def complete(self) -> bool:
        return 0 < self.total == self.here


class Inbox:
    """Arriving transfers, filled by the listening thread and emptied by the engine's thread.

    Args:
        pool: memory for arrived parts until they are loaded.
        layout: the layout of our blocks; others are refused.
        block_bytes: bytes of one block.
        timeout: seconds without progress after which a transfer is given up, or dropped if no request awaits it.
        silence: seconds without an answer after which an engine counts as dead.
        tally: counts blocks, bytes and losses.
    """

    def __init__(
        self, pool: BuddyPool, layout: bytes, block_bytes: int, timeout: float, silence: float, tally: Tally
    ) -> None:
        self._pool, self._layout, self.block_bytes, self._tally = pool, layout, block_bytes, tally
        self._timeout, self._silence = timeout, silence
        self._lock = Lock()
        self._arriving: dict[str, _Arriving] = {}
        self._gone = BoundedDict[str]()
        self._ready: list[str] = []
        self._lost: dict[str, str] = {}
        self._taken_back: dict[str, str] = {}
        self.read: StreamEvent = None
        """The moment from which the device has read all released pieces."""

    def put(self, message: Put, data: memoryview) -> str:
        """Store some blocks; return empty, or why they are refused, which loses the transfer.

        One thread calls this. Parts of a transfer arrive in order, because the sender waits for each answer.
        """
        piece, why = self.room(message, len(data))
        if piece is None:
            return why
        np.copyto(
            piece.bytes.numpy(), np.frombuffer(data, np.uint8)
        )  # outside the lock, so that no thread waits for the copy
        return self.keep(message, piece)

    def room(self, message: Put, size: int, device: BuddyPool | None = None) -> tuple[Piece | None, str]:
        """Take memory for a part of ``size`` bytes, for :meth:`keep` or :meth:`fail`; or return why it is refused.

        If the ``device`` has no room, return neither: the part must go to main memory.
        """
        transfer, pool = message.transfer, device or self._pool
        with self._lock:
            if transfer in self._gone:
                return None, self._gone[transfer]
            arriving = self._arriving.get(transfer)
            if arriving is not None and arriving.complete:
                return None, "all of it is here"
            why = self._wrong(message, size, arriving)
            piece = None if why else pool.take(size)
            if piece is None and (why or device is None):
                why = why or f"the receiver's buffer of {self._pool.capacity} bytes is full"
                self._lose(transfer, why)
            return piece, why

    def keep(self, message: Put, piece: Piece, by_link: bool = False) -> str:
        """Store a part that has arrived in this memory; the answer is :meth:`put`'s."""
        transfer, size = message.transfer, piece.bytes.numel()
        with self._lock:
            arriving = self._arriving.get(transfer)
            why = self._gone.get(transfer) or self._wrong(message, size, arriving)
            if why:
                piece.give()
                return why
            now = time.monotonic()
            arriving = self._arriving.setdefault(transfer, _Arriving(now))
            arriving.total, arriving.touched, arriving.last_heard = message.total, now, now
            arriving.parts.append((message.first, message.count, piece))
            arriving.here += message.count
            self._tally.add(received_blocks=message.count, received_bytes=size, received_direct_bytes=size * by_link)
            if arriving.complete and arriving.producer is not None:
                self._ready.append(transfer)
            return ""

    def fail(self, message: Put, piece: Piece, why: str) -> None:
        """Free a part's memory because its bytes did not arrive; its transfer is lost."""
        with self._lock:
            piece.give()
            if message.transfer not in self._gone:
                self._lose(message.transfer, why)

    def await_(self, transfer: str, producer: Address, blocks: int) -> None:
        """Await a transfer of ``blocks`` blocks for a local request.

        :meth:`outcomes` reports once that it is ready or lost.
        """
        with self._lock:
            if transfer in self._gone:
                self._lost[transfer] = self._gone[transfer]
                return
            now = time.monotonic()
            arriving = self._arriving.setdefault(transfer, _Arriving(now))
            arriving.producer, arriving.expected = producer, blocks
            arriving.touched = arriving.last_heard = arriving.ask_at = now
            if arriving.total not in (0, blocks):
                self._lose(transfer, _other_length(arriving.total, blocks))
            elif arriving.complete:
                self._ready.append(transfer)

    def outcomes(self) -> tuple[list[str], dict[str, str]]:
        """Return awaited transfers that became ready, and lost ones with the reason, since the last call."""
        with self._lock:
            told = self._ready, self._lost
            self._ready, self._lost = [], {}
            return told

    def taken_back(self) -> dict[str, str]:
        """Return transfers that were ready and that senders have taken back since the last call, and why."""
        with self._lock:
            told, self._taken_back = self._taken_back, {}
            return told

    def load(self, transfer: str, write: Callable[[int, int, Tensor], None]) -> None:
        """Pass each part of a ready transfer (first block, blocks, bytes) to ``write``, and forget the transfer."""
        with self._lock:
            parts = self._arriving[transfer].parts
        for first, count, piece in parts:
            write(first, count, piece.bytes)
        with self._lock:
            self.read = next((record_event(piece.bytes) for *_, piece in parts if queues(piece.bytes)), self.read)
            self._forget(transfer, LOADED)

    def take_back(self, transfer: str, why: str) -> None:
        """Discard the received part of a transfer, because its sender says that it is wrong.

        If a local request may have it, :meth:`taken_back` reports it, and :meth:`load` or :meth:`drop` still follows.
        """
        with self._lock:
            arriving = self._arriving.get(transfer)
            told = arriving is not None and arriving.complete and arriving.producer is not None
            if self._gone.get(transfer) == LOADED or (told and transfer not in self._ready):
                self._taken_back[transfer] = why
            elif transfer not in self._gone:
                self._ready = [one for one in self._ready if one != transfer]
                self._lose(transfer, why)

    def drop(self, transfer: str) -> None:
        """Drop a transfer that no local request needs any more."""
        with self._lock:
            self._forget(transfer, "it is no longer needed")

    def questions(self) -> list[tuple[str, Address]]:
        """Return awaited transfers with the engines to ask for them now; give up transfers without progress."""
        now, asked = time.monotonic(), []
        with self._lock:
            for transfer, arriving in list(self._arriving.items()):
                producer = arriving.producer
                if producer is not None and arriving.complete:
                    continue
                if arriving.touched < now - self._timeout:
                    nothing = "no part of it came" if producer is not None else "no request asked for it"
                    self._lose(transfer, f"{nothing} for {self._timeout:g} s")
                elif producer is not None and arriving.last_heard < now - self._silence:
                    self._lose(transfer, f"the engine at {producer} does not answer")
                elif producer is not None and arriving.ask_at <= now:
                    arriving.ask_at = now + ASK_EVERY
                    asked.append((transfer, producer))
        return asked

    def answered(self, transfer: str, gone: str) -> None:
        """Record an engine's answer that the rest will come, or why not; or that it cannot be asked."""
        with self._lock:
            arriving = self._arriving.get(transfer)
            if arriving is None or arriving.producer is None or arriving.complete:
                return
            arriving.last_heard = time.monotonic()
            if gone:
                self._lose(transfer, gone)

    def _wrong(self, message: Put, size: int, arriving: _Arriving | None) -> str:
        """Return why a part cannot be the next one of this transfer; empty if it can."""
        if message.layout != self._layout:
            return "its blocks have another form: another model, dtype, block size or number of ranks or stages"
        if size != message.count * self.block_bytes:
            return f"{size} bytes are not {message.count} blocks of {self.block_bytes}"
        if arriving is not None and arriving.expected not in (0, message.total):
            return _other_length(message.total, arriving.expected)
        here, total = (arriving.here, arriving.total) if arriving is not None else (0, 0)
        if message.first != here or here + message.count > message.total or total not in (0, message.total):
            return "its parts contradict each other"
        return ""

    def _lose(self, transfer: str, why: str) -> None:
        arriving = self._arriving.get(transfer)
        if arriving is not None and arriving.producer is not None:
            self._lost[transfer] = why
        else:
            logger.warning("P2P: the KV cache of %s is thrown away, because %s", transfer, why)
        self._tally.add(lost_transfers=1)
        self._forget(transfer, why)

    def _forget(self, transfer: str, why: str) -> None:
        arriving = self._arriving.pop(transfer, None)
        for _, _, piece in arriving.parts if arriving is not None else ():
            piece.give()
        self._gone[transfer] = why


def _other_length(total: int, expected: int) -> str:
    return f"its sender says that it has {total} blocks, and the prompt has {expected}"
