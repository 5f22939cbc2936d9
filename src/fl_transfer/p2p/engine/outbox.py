"""The sending half's state: leaving prompts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from threading import Condition

from torch import Tensor

from fl_dispatch.logger_manager import get_logger

from ..counts import Tally
from ..memory.pool import BuddyPool, Piece
from ..memory.stream_events import StreamEvent, record_event
from ..protocol.route import Address
from .bounded_dict import BoundedDict

logger = get_logger(__name__)


@dataclass(frozen=True, eq=False)
class Part:
    """Some blocks of a prompt in flight; ``total`` is the prompt's number of blocks."""

    transfer: str
    to: Address
    layout: bytes
    first: int
    count: int
    total: int
    piece: Piece
    on_device: bool = False
    written: StreamEvent = None  # the moment from which the device has its bytes

    def in_main_memory(self) -> Tensor:
        """Return its bytes in main memory, copied if they are elsewhere."""
        if self.written is not None:
            self.written.synchronize()
        return self.piece.bytes.cpu()


@dataclass
class _Leaving:
    asked: bool
    unsent: int  # blocks that have not arrived
    touched: float
    here: int = 0  # parts that are waiting or on their way
    waiting: deque[Part] = field(default_factory=deque)


class Outbox:
    """Leaving transfers, filled by the engine's thread and emptied by the sending thread.

    Args:
        pool: memory for parts until they have arrived.
        layout: the layout of our blocks.
        on_demand: whether parts wait until an engine asks for the transfer.
        timeout: seconds after which a transfer is given up if no engine asks for it, or no step adds to it.
        tally: counts blocks, bytes and losses.
        direct: device memory for parts to an engine with a link, if there is one.
    """

    def __init__(
        self,
        pool: BuddyPool,
        layout: bytes,
        on_demand: bool,
        timeout: float,
        tally: Tally,
        direct: Callable[[Address], BuddyPool | None] | None = None,
    ) -> None:
        self._layout, self._direct = layout, direct
        self._pool, self._on_demand, self._timeout, self._tally = pool, on_demand, timeout, tally
        self._changed = Condition()
        self._leaving: dict[str, _Leaving] = {}
        self._gone = BoundedDict[str]()
        self._lent: dict[Part, bool] = {}  # whether this engine is done with it
        self._taken_back: dict[tuple[Address, str], list[str]] = {}

    def add(
        self, transfer: str, to: Address, first: int, count: int, total: int, size: int, fill: Callable[[Tensor], None]
    ) -> None:
        """Add some blocks of a prompt, which ``fill`` writes into ``size`` bytes.

        Without memory the transfer ends, and the receiver computes the prompt.
        """
        with self._changed:
            if transfer in self._gone:
                return
            device = self._direct(to) if self._direct is not None else None
            piece = (device.take(size) if device is not None else None) or self._pool.take(size)
            if piece is None:
                self._give_up(transfer, f"the sender's buffer of {self._pool.capacity} bytes is full")
                return
        fill(piece.bytes)
        written = record_event(piece.bytes)
        with self._changed:
            if transfer in self._gone:
                piece.give()
                return
            leaving = self._leaving.get(transfer)
            if leaving is None:
                leaving = self._leaving[transfer] = _Leaving(not self._on_demand, total, 0.0)
            leaving.touched = time.monotonic()
            leaving.here += 1
            leaving.waiting.append(
                Part(transfer, to, self._layout, first, count, total, piece, piece.home is device, written)
            )
            self._changed.notify_all()

    def asked(self, transfer: str) -> str:
        """Begin to send a transfer that an engine asks for; return empty, or why it is not sent."""
        with self._changed:
            if transfer in self._gone:
                return self._gone[transfer]
            leaving = self._leaving.get(transfer)
            if leaving is None:
                return "nothing is known of it"
            if not leaving.asked:
                leaving.asked = True
                self._changed.notify_all()
            return ""

    def next(self, timeout: float, busy: Container[Address] = ()) -> Part | None:
        """Wait up to ``timeout`` seconds for a part to send now to an engine that is not ``busy``.

        :meth:`sent` or :meth:`failed` follows.
        """
        with self._changed:
            self._expire()
            name = self._changed.wait_for(lambda: self._next_transfer(busy), timeout)
            if name is None:
                return None
            leaving = self._leaving[name] = self._leaving.pop(name)  # other engines come before it next time
            return leaving.waiting.popleft()

    def sent(self, part: Part, by_link: bool = False) -> None:
        """Record that a part has arrived."""
        with self._changed:
            self._give(part)
            size = part.piece.bytes.numel()
            self._tally.add(sent_blocks=part.count, sent_bytes=size, sent_direct_bytes=size * by_link)
            leaving = self._leaving.get(part.transfer)
            if leaving is not None:
                leaving.touched = time.monotonic()
                leaving.unsent -= part.count
                leaving.here -= 1
                if leaving.unsent <= 0:
                    del self._leaving[part.transfer]
                    for superfluous in leaving.waiting:
                        superfluous.piece.give()
                    self._gone[part.transfer] = "all of it was sent"
                    logger.debug("P2P: %d blocks of %s were sent to %s", part.total, part.transfer, part.to)
            self._changed.notify_all()

    def failed(self, part: Part, why: str) -> None:
        """Give up the transfer of a part that has not arrived."""
        with self._changed:
            self._give(part)
            self._give_up(part.transfer, why)

    def lend(self, part: Part) -> None:
        """Record that a device reads a part until :meth:`back`: its memory stays, even if the part is given up."""
        with self._changed:
            self._lent[part] = False

    def back(self, part: Part) -> None:
        """Record that the device has read a part, or was stopped."""
        with self._changed:
            if self._lent.pop(part):
                part.piece.give()

    def drop(self, transfer: str) -> None:
        """Drop the rest of a transfer."""
        with self._changed:
            self._give_up(transfer, "its request has ended before its prompt was read")

    def take_back(self, transfer: str, to: Address, why: str) -> None:
        """Stop sending a transfer, and make its receiver discard the received part, because it is wrong."""
        with self._changed:
            self._give_up(transfer, why)
            self._gone[transfer] = why  # all of it may have been sent
            self._taken_back.setdefault((to, why), []).append(transfer)

    def taken_back(self) -> dict[tuple[Address, str], list[str]]:
        """Return receivers to inform now, and why → the transfers."""
        with self._changed:
            told, self._taken_back = self._taken_back, {}
            return told

    def tell_later(self, to: Address, why: str, transfers: list[str]) -> None:
        """Store again a message to a receiver that had no room."""
        with self._changed:
            self._taken_back.setdefault((to, why), []).extend(transfers)

    def wait_until_sent(self, transfer: str) -> None:
        """Return when all parts of a transfer that were added have arrived, or it is given up."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: transfer not in self._leaving or not self._leaving[transfer].here, self._timeout
            )
            if not done:
                self._give_up(transfer, f"it was not sent within {self._timeout:g} s")

    def _give(self, part: Part) -> None:
        if part in self._lent:
            self._lent[part] = True
        else:
            part.piece.give()

    def _next_transfer(self, busy: Container[Address]) -> str | None:
        for name, leaving in self._leaving.items():
            if leaving.asked and leaving.waiting and leaving.waiting[0].to not in busy:
                return name
        return None

    def _expire(self) -> None:
        oldest = time.monotonic() - self._timeout
        for transfer in [name for name, leaving in self._leaving.items() if leaving.touched < oldest]:
            self._give_up(transfer, f"no engine asked for the rest of it for {self._timeout:g} s")

    def _give_up(self, transfer: str, why: str) -> None:
        if transfer in self._gone:
            return
        leaving = self._leaving.pop(transfer, None)
        for part in leaving.waiting if leaving is not None else ():
            part.piece.give()
        self._gone[transfer] = why
        self._tally.add(lost_transfers=1)
        logger.warning("P2P: the KV cache of %s is not handed over, because %s", transfer, why)
        self._changed.notify_all()
