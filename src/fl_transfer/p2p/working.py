"""The connector in a worker: an exchange at the worker's own KV cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from fl_dispatch.logger_manager import get_logger

from .counts import Tally
from .engine.exchange import SILENCE, Engine
from .engine.inbox import Inbox
from .engine.outbox import Outbox
from .links.link import Incoming, Outgoing
from .links.wires import wiring
from .memory.blocks import Blocks
from .memory.pool import BuddyPool
from .options import SOURCE, Options, SendType
from .orders import Load, Orders, Outcomes, Send
from .protocol.heartbeat import Heart
from .protocol.route import Address
from .protocol.secret import Secret

logger = get_logger(__name__)


class Working:
    """The connector in one worker, with a cache from :meth:`register` on.

    Args:
        own: the address of the engine's first worker.
        rank: this worker's rank.
        options: the user's options.
        produces, consumes: the engine's role.
        facts: values that must be equal in both engines, in addition to the cache's form.
    """

    def __init__(
        self, own: Address, rank: int, options: Options, produces: bool, consumes: bool, facts: Mapping[str, object]
    ) -> None:
        self._own, self._rank, self._options, self._facts = own, rank, options, facts
        self._produces, self._consumes = produces, consumes
        self._secret = Secret(options.secret_file, SOURCE)
        self.tally = Tally()
        self._blocks: Blocks | None = None
        self._inbox: Inbox | None = None
        self._outbox: Outbox | None = None
        self._engine: Engine | None = None
        self._heart: Heart | None = None
        self._incoming: Incoming | None = None

    def register(self, caches: Mapping[str, Tensor], number: int) -> None:
        """Begin to listen, with the caches of all layers; each has ``number`` blocks."""
        options, tally = self._options, self.tally
        blocks = self._blocks = Blocks(caches, number, rank=self._rank, **self._facts)
        share = options.capacity // (self._produces + self._consumes)
        timeout, address = options.timeout_s, self._own.of_rank(self._rank)
        wires, why = wiring(options, blocks.device, self._produces + self._consumes)
        incoming = self._incoming = Incoming(wires, SILENCE) if wires is not None and self._consumes else None
        outgoing = Outgoing(wires, address, SILENCE) if wires is not None and self._produces else None
        if self._consumes:
            self._inbox = Inbox(BuddyPool(share), blocks.layout, blocks.block_bytes, timeout, SILENCE, tally)
        if self._produces:
            on_demand = options.send_type is SendType.GET
            direct = outgoing.pool if outgoing is not None else None
            self._outbox = Outbox(BuddyPool(share), blocks.layout, on_demand, timeout, tally, direct)
        self._engine = Engine(
            address, self._inbox, self._outbox, self._secret, blocks.message_bytes, SILENCE, outgoing, incoming
        )
        if options.proxy_ip and self._rank == 0:
            role = ("P" if self._produces else "") + ("D" if self._consumes else "")
            proxy = Address(options.proxy_ip, options.proxy_port)
            self._heart = Heart(proxy, role, Address(self._own.host, options.http_port), self._own, self._secret)
        logger.info(
            "P2P: rank %d listens at %s; %s; %.1f GB for caches that wait",
            self._rank,
            address,
            f"sends by {options.send_type}" if self._produces else "takes prompts over",
            options.capacity / 1e9,
        )
        if wires is not None:
            logger.info("P2P: keys and values travel by %s where the other engine can, too", wires.kind.name)
        else:
            logger.info("P2P: keys and values travel through main memory, because %s", why)

    def started(self) -> None:
        """Allow links to use the device, because the model is tried and captured."""
        if self._incoming is not None:
            self._incoming.ready = True

    def begin(self, orders: Orders) -> None:
        """End, take back, await, drop and load transfers by the scheduler's orders, before a step's model runs.

        vLLM calls it this early in steps with loads, because its scheduler sets ``has_sync_kv_loads``.
        """
        if self._outbox is not None:
            for transfer in orders.ended:
                self._outbox.drop(transfer)
            for one in orders.taken_back:
                self._outbox.take_back(one.transfer, one.to.of_rank(self._rank), one.why)
        if self._inbox is None:
            return
        for transfer in orders.dropped:
            self._inbox.drop(transfer)
        for transfer, producer, count in orders.awaited:
            self._inbox.await_(transfer, producer.of_rank(self._rank), count)
        for load in orders.loads:
            self._load(self._inbox, load)

    def end(self, orders: Orders) -> None:
        """Send the blocks that a step's model has completed."""
        for send in orders.sends:
            self._send(send)

    def outcomes(self) -> Outcomes | None:
        """Return awaited transfers that have arrived, are lost or were taken back since the last call."""
        if self._inbox is None:
            return None
        (ready, lost), taken_back = self._inbox.outcomes(), self._inbox.taken_back()
        return Outcomes(Counter(ready), lost, taken_back) if ready or lost or taken_back else None

    def close(self) -> None:
        """End all threads."""
        for part in (self._heart, self._engine):
            if part is not None:
                part.close()
        self._heart = self._engine = None

    def _load(self, inbox: Inbox, load: Load) -> None:
        blocks = self._blocks
        assert blocks is not None
        begin, end, written = load.first, load.first + len(load.ids), 0

        def write(first: int, count: int, data: Tensor) -> None:
            nonlocal written
            start, stop = max(first, begin), min(first + count, end)
            if start < stop:
                blocks.write(load.ids[start - begin : stop - begin], data, start - first, count)
                written += stop - start

        inbox.load(load.transfer, write)
        assert written == len(load.ids), f"{written} of {len(load.ids)} blocks of {load.transfer} were loaded"
        self.tally.add(loaded_blocks=len(load.ids))
        logger.debug("P2P: %d blocks of %s were loaded", len(load.ids), load.transfer)

    def _send(self, send: Send) -> None:
        blocks, outbox = self._blocks, self._outbox
        assert blocks is not None
        assert outbox is not None
        to = send.to.of_rank(self._rank)
        for begin in range(0, len(send.ids), blocks.at_once):
            ids = send.ids[begin : begin + blocks.at_once]
            size = len(ids) * blocks.block_bytes
            first = send.first + begin
            outbox.add(send.transfer, to, first, len(ids), send.total, size, partial(blocks.read, ids))
            if self._options.send_type is SendType.PUT:
                outbox.wait_until_sent(send.transfer)
