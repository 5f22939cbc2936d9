"""The connector in vLLM's scheduler: requests to await, load and send.

If another engine reads a request's prompt, its transfer is awaited from the request's arrival on. The request waits
without blocks until all workers have its KV cache in main memory. Then it is scheduled with all tokens of its prompt
except the last one as known, and the workers load them before that step. If the cache does not arrive, the request is
scheduled like any other, and computes its prompt. Several requests with one id and one prompt (``n`` > 1) load it once:
all except the first wait, and find its blocks in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from fl_dispatch.logger_manager import get_logger

from .engine.bounded_dict import BoundedDict
from .orders import Load, Orders, Outcomes, Send, TakeBack
from .protocol.route import Address, Route, transfer_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)

UNROUTED = 100
"""Requests without a route, from the start on, after which a receiving engine logs a warning."""


class _State(Enum):
    AWAITED = auto()
    READY = auto()
    DONE = auto()  # loaded, lost or unneeded: final


@dataclass
class _Arrival:
    transfer: str
    state: _State = _State.AWAITED
    workers: int = 0


@dataclass
class _Departure:
    transfer: str
    to: Address
    prompt: int
    total: int
    sent: int = 0
    ids: list[int] = field(default_factory=list)


class Scheduling:
    """The scheduler's half of one engine.

    Args:
        own: the address of the engine's first worker.
        produces, consumes: its role.
        block_size: tokens of a block.
        workers: the number of workers with a part of the cache.
    """

    def __init__(self, own: Address, produces: bool, consumes: bool, block_size: int, workers: int) -> None:
        self._own, self._produces, self._consumes = own, produces, consumes
        self._block_size, self._workers = block_size, workers
        self._arrivals: dict[str, _Arrival] = {}  # by request
        self._claimed: dict[str, str] = {}  # transfer → the request that has it
        self._followers: dict[str, str] = {}  # request → the transfer that another one has claimed
        self._departures: dict[str, _Departure] = {}  # by request
        self._departing: set[str] = set()  # their transfers
        self._left = BoundedDict[Address]()  # their receivers
        self._loaded = BoundedDict[list[int]]()  # transfer → the local blocks into which it was loaded
        self._routed, self._unrouted = False, 0
        self._orders = Orders()

    def arrived(self, request: Request) -> None:
        """Record a new request, and await its cache from now on, however long it waits to be scheduled."""
        if self._consumes and not self._produces:
            self._count_unrouted(request)
        found = self._transfer(request, consumed=True)
        if found is None:
            return
        name, route = found
        if name in self._claimed:
            self._followers[request.request_id] = name
            return
        arrival = self._arrivals[request.request_id] = _Arrival(name)
        self._claimed[name] = request.request_id
        if request.skip_reading_prefix_cache:  # it needs a result for each token, such as log-probabilities
            self._drop(arrival)
        else:
            self._orders.awaited.append((name, route.prefill, self._blocks_of(request)))

    def matched_tokens(self, request: Request, computed: int) -> int | None:
        """Return the tokens beyond the ``computed`` ones that can be loaded now; ``None`` if unknown yet."""
        wanted = request.num_prompt_tokens - 1 - computed
        followed = self._arrival(self._followers.get(request.request_id, ""))
        if followed is not None:
            return None if wanted > 0 and followed.state is not _State.DONE else 0
        arrival = self._arrivals.get(request.request_id)
        if arrival is None or arrival.state is _State.DONE:
            return 0
        if wanted <= 0:  # this engine's own prefix cache has them
            self._drop(arrival)
            return 0
        return wanted if arrival.state is _State.READY else None

    def allocated(self, request: Request, blocks: Callable[[], list[int]], loaded: int) -> None:
        """Record that a request has blocks, into which the last ``loaded`` of its known tokens are to be loaded."""
        self._note_departure(request)
        arrival = self._arrivals.get(request.request_id)
        if arrival is None or arrival.state is not _State.READY:
            return
        if loaded > 0:
            known = request.num_prompt_tokens - 1
            first, end = (known - loaded) // self._block_size, -(-known // self._block_size)
            self._loaded[arrival.transfer] = ids = blocks()[first:end]
            self._orders.loads.append(Load(arrival.transfer, first, ids))
            arrival.state = _State.DONE
        else:
            self._drop(arrival)

    def take_back(self, requests: Iterable[str] | None, why: str) -> None:
        """Inform receivers that data sent for these requests, or for all recent ones, is wrong."""
        receivers = dict(self._left) if requests is None else {}
        for request in self._departures if requests is None else requests:
            if (departure := self._departures.get(request)) is not None:
                departure.sent = departure.total  # the rest is not sent
                receivers[departure.transfer] = departure.to
        for transfer, to in receivers.items():
            self._left.pop(transfer, None)
            self._orders.taken_back.append(TakeBack(transfer, to, why))

    def spoiled(self, outcomes: Outcomes) -> dict[int, str]:
        """Return blocks with taken-back data, and why; once for each transfer.

        The request that loaded them may have ended; then other requests have them, or find them in the prefix cache.
        """
        taken = outcomes.taken_back.items()
        return {block: why for transfer, why in taken for block in self._loaded.pop(transfer, ())}

    def orders(self, step: SchedulerOutput) -> Orders:
        """Return the orders for the workers in this step."""
        for new in step.scheduled_new_reqs:
            departure = self._departures.get(new.req_id)
            if departure is not None:
                departure.ids = list(new.block_ids[0])
                self._send(departure, new.num_computed_tokens + step.num_scheduled_tokens[new.req_id])
        running = step.scheduled_cached_reqs
        for index, name in enumerate(running.req_ids):
            departure = self._departures.get(name)
            if departure is None:
                continue
            added = running.new_block_ids[index]
            if name in running.resumed_req_ids:
                departure.ids = []
            departure.ids.extend(added[0] if added is not None else ())
            self._send(departure, running.num_computed_tokens[index] + step.num_scheduled_tokens[name])
        orders, self._orders = self._orders, Orders()
        return orders

    def apply_outcomes(self, outcomes: Outcomes) -> None:
        """Process the workers' outcomes of awaited transfers."""
        for transfer, workers in outcomes.ready.items():
            arrival = self._arrival(transfer)
            if arrival is not None and arrival.state is _State.AWAITED:
                arrival.workers += workers
                if arrival.workers == self._workers:
                    arrival.state = _State.READY
        for transfer, why in {**outcomes.taken_back, **outcomes.lost}.items():
            arrival = self._arrival(transfer)
            if arrival is not None and arrival.state is not _State.DONE:
                logger.warning(
                    "P2P: request %s computes its prompt here: its KV cache does not come, because %s",
                    self._claimed[transfer],
                    why,
                )
                self._drop(arrival)

    def finished(self, request_id: str) -> None:
        """Record the end of a request, in any way."""
        self._followers.pop(request_id, None)
        departure = self._departures.pop(request_id, None)
        if departure is not None:
            self._departing.discard(departure.transfer)
            if departure.sent < departure.total:
                self._orders.ended.append(departure.transfer)
        arrival = self._arrivals.pop(request_id, None)
        if arrival is not None:
            self._claimed.pop(arrival.transfer, None)
            if arrival.state is not _State.DONE:
                self._drop(arrival)

    def _arrival(self, transfer: str) -> _Arrival | None:
        return self._arrivals.get(self._claimed.get(transfer, ""))

    def _drop(self, arrival: _Arrival) -> None:
        arrival.state = _State.DONE
        self._orders.dropped.append(arrival.transfer)

    def _transfer(self, request: Request, consumed: bool) -> tuple[str, Route] | None:
        """Return the name and the route of a request's transfer, if this engine receives or sends it.

        The route must name this engine: otherwise a foreign id could make it talk to any address.
        """
        if request.prompt_token_ids is None or not (self._consumes if consumed else self._produces):
            return None
        if request.num_prompt_tokens < 2:  # the last token's keys are never loaded
            return None
        route = Route.of(request.request_id)
        if route is None:
            return None
        if (route.decode if consumed else route.prefill) != self._own:
            return None
        return transfer_of(route.name, request), route

    def _note_departure(self, request: Request) -> None:
        if request.request_id in self._departures:
            return
        found = self._transfer(request, consumed=False)
        if found is None or found[0] in self._departing:  # for equal prompts in one request only one is sent
            return
        name, route = found
        total = self._blocks_of(request)
        self._departures[request.request_id] = _Departure(name, route.decode, request.num_prompt_tokens, total)
        self._departing.add(name)

    def _blocks_of(self, request: Request) -> int:
        return -(-request.num_prompt_tokens // self._block_size)

    def _count_unrouted(self, request: Request) -> None:
        if self._routed or Route.of(request.request_id) is not None:
            self._routed = True
            return
        self._unrouted += 1
        if self._unrouted == UNROUTED:
            logger.warning(
                "P2P: none of the first %d requests came under an id that the proxy wrote, so their prompts were "
                "computed here; clients must ask the proxy, and vLLM must keep the header X-Request-Id",
                UNROUTED,
            )

    def _send(self, departure: _Departure, computed: int) -> None:
        """Send the blocks that are complete after this step."""
        whole = departure.total if computed >= departure.prompt else computed // self._block_size
        if whole > departure.sent:
            ids = departure.ids[departure.sent : whole]
            self._orders.sends.append(Send(departure.transfer, departure.to, departure.sent, ids, departure.total))
            departure.sent = whole
            self._left[departure.transfer] = departure.to
