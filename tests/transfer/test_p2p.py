"""The parts of the P2P connector: each keeps its rule whatever comes, also over real sockets between two engines."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

from fl_dispatch.errors import ConfigError
from fl_transfer.p2p.counts import Tally
from fl_transfer.p2p.engine import exchange as engine_module
from fl_transfer.p2p.engine.bounded_dict import LAST, BoundedDict
from fl_transfer.p2p.engine.exchange import Engine
from fl_transfer.p2p.engine.inbox import Inbox
from fl_transfer.p2p.engine.outbox import Outbox
from fl_transfer.p2p.memory.blocks import Blocks
from fl_transfer.p2p.memory.pool import BuddyPool, Piece
from fl_transfer.p2p.options import Options, SendType, check
from fl_transfer.p2p.orders import Orders, Outcomes, TakeBack
from fl_transfer.p2p.protocol.messages import HEADER_BYTES, BadMessage, Get, Heartbeat, Put, State, Taken, frames, read
from fl_transfer.p2p.protocol.route import Address, Route, transfer_of
from fl_transfer.p2p.protocol.secret import Secret
from fl_transfer.p2p.scheduling import UNROUTED, Scheduling
from processes import free_port

UNIT = 64
HERE = Address("127.0.0.1", 21001)
LAYOUT = bytes(16)
SOON = 10.0


def eventually(happens: Callable[[], Any], within: float = SOON) -> Any:
    deadline = time.monotonic() + within
    while not (found := happens()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


# -- the pool ---------------------------------------------------------------------------------------------------------


@given(
    st.integers(0, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 20 * UNIT), st.integers(0, 99)), max_size=60)
)
def test_pieces_never_overlap_and_all_memory_comes_back(units: int, steps: list[tuple[bool, int, int]]) -> None:
    pool = BuddyPool(units * UNIT + 3, UNIT)
    taken: list[Piece] = []
    for gives, size, which in steps:
        if gives and taken:
            pool.give(taken.pop(which % len(taken)))
        elif (piece := pool.take(size)) is not None:
            assert piece.bytes.numel() == size
            taken.append(piece)
        spans = sorted((piece.begin, piece.begin + (1 << piece.order)) for piece in taken)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert all(begin >= 0 and end <= units for begin, end in spans)
        assert pool.taken == sum(end - begin for begin, end in spans) * UNIT
    for piece in taken:
        pool.give(piece)
    largest = 1 << (units.bit_length() - 1) if units else 0
    assert pool.take(largest * UNIT) is not None or not units
    assert pool.take(UNIT * (units + 1)) is None


def test_a_piece_is_memory_of_its_own() -> None:
    pool = BuddyPool(8 * UNIT, UNIT)
    pieces = [pool.take(2 * UNIT) for _ in range(4)]
    for value, piece in enumerate(pieces):
        assert piece is not None
        piece.bytes.fill_(value)
    assert [int(piece.bytes.sum()) for piece in pieces if piece is not None] == [0, 128, 256, 384]


# -- messages ---------------------------------------------------------------------------------------------------------

DEEP = b"\x82\xa1a" + b"\x91" * 4000 + b"\xc0" + msgspec.msgpack.encode("type") + msgspec.msgpack.encode("heartbeat")
"""A header whose first value is nested deeper than its reader goes."""

names = st.text("abcdef0123456789-", min_size=1, max_size=128)
counts = st.integers(1, 1 << 30)
messages = st.one_of(
    st.builds(Put, names, st.binary(min_size=16, max_size=16), st.integers(0, 1 << 30), counts, counts),
    st.builds(Taken, names, st.integers(0, 1 << 30), st.text(max_size=300)),
    st.builds(Get, names),
    st.builds(State, names, st.text(max_size=300)),
    st.builds(Heartbeat, st.sampled_from(["P", "D", "PD"]), names, names),
)


@given(messages, st.binary(max_size=200))
def test_a_message_is_read_as_it_was_written(message: Any, data: bytes) -> None:
    got, found = read(frames(message, data), type(message))
    assert (got, bytes(found)) == (message, data)
    assert len(frames(message)[0]) <= HEADER_BYTES


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_arbitrary_frames_are_a_bad_message_or_one_of_ours(given_: list[bytes]) -> None:
    try:
        message, _ = read(given_, Put, Get)
    except BadMessage:
        return
    assert isinstance(message, (Put, Get))


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (msgspec.msgpack.encode({"type": "get", "transfer": "x" * 129}), "length <= 128"),
        (msgspec.msgpack.encode({"type": "get", "transfer": ""}), "length >= 1"),
        (msgspec.msgpack.encode({"type": "get", "transfer": "x", "more": 1}), "unknown field"),
        (msgspec.msgpack.encode({"type": "run", "transfer": "x"}), "Invalid value 'run'"),
        (msgspec.msgpack.encode({"type": "state", "transfer": "x"}), "a State does not belong here"),
        (b"x" * (HEADER_BYTES + 1), "a header of 4097 bytes"),
        (b"", "truncated"),
        (DEEP, "recursion"),
    ],
)
def test_a_bad_header_says_why(header: bytes, said: str) -> None:
    with pytest.raises(BadMessage, match=said):
        read([header, b""], Put, Get)


# -- routes and options -----------------------------------------------------------------------------------------------


def test_a_route_is_found_in_the_id_of_the_hosts_page() -> None:
    written = "cmpl-___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_93923d63113b4b338973f24d19d4bf11-0"
    route = Route.of(written)
    assert route == Route(Address("10.0.1.2", 21001), Address("10.0.1.3", 22001), "93923d63113b4b338973f24d19d4bf11")
    assert str(route) in written


@pytest.mark.parametrize("host", ["10.0.1.2", "node-1.example.org", "fe80::1"])
def test_a_route_survives_its_id(host: str) -> None:
    route = Route.between(Address(host, 1), Address(host, 65535))
    assert Route.of(f"chatcmpl-{route}-3-1a2b") == route


@pytest.mark.parametrize(
    "address", ["", "host", "host:", "host:0", "host:65536", "ho st:1", "tcp://host:1", "::1:5", "host:１"]
)
def test_what_is_no_address_is_no_route(address: str) -> None:
    with pytest.raises(ValueError, match="no address"):
        Address.parse(address)
    assert Route.of(f"___prefill_addr_{address}___decode_addr_10.0.1.3:22001_{'0' * 32}") is None


def ask(name: str, prompt: list[int], route: Route | None, **more: Any) -> Any:
    """A request of vLLM's, as far as the scheduler's half reads it."""
    beside = {"lora_request": None, "cache_salt": None, "mm_features": [], "skip_reading_prefix_cache": False, **more}
    tokens = {"prompt_token_ids": prompt, "num_prompt_tokens": len(prompt)}
    return SimpleNamespace(request_id=f"cmpl-{route}-{name}", **tokens, **beside)


def test_a_transfer_is_named_by_all_that_its_cache_depends_on() -> None:
    picture = SimpleNamespace(identifier="picture", mm_position=SimpleNamespace(offset=1))
    requests = [
        ask("a", [1, 2], None),
        ask("a", [1, 3], None),
        ask("a", [1, 2], None, cache_salt="salt"),
        ask("a", [1, 2], None, lora_request=SimpleNamespace(lora_name="adapter")),
        ask("a", [1, 2], None, mm_features=[picture]),
    ]
    assert len({transfer_of("name", request) for request in requests}) == len(requests)
    assert transfer_of("name", ask("a", [1, 2], None)) == transfer_of("name", ask("b", [1, 2], None))


def test_options_are_those_of_the_hosts_page() -> None:
    given = {"proxy_ip": "10.0.1.1", "proxy_port": "30001", "http_port": "20001", "kv_buffer_size": "8e9"}
    options = Options.of({**given, "send_type": "GET", "mem_pool_size_gb": 2})
    assert (options.proxy_port, options.http_port, options.send_type) == (30001, 20001, SendType.GET)
    assert options.capacity == 10_000_000_000


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"send_typ": "PUT"}, "send_typ: unknown; did you mean 'send_type'"),
        ({"send_type": "PUSH"}, "send_type: Input should be 'PUT', 'PUT_ASYNC' or 'GET'"),
        ({"http_port": 0}, "http_port: Input should be greater"),
        ({"nccl_num_channels": "16"}, "nccl_num_channels: NCCL chooses its channels"),
        ({"proxy_ip": "tcp://proxy"}, "proxy_ip: String should match"),
        ({"kv_buffer_size": "inf"}, "kv_buffer_size: Input should be a finite number"),
        ({"kv_buffer_size": "much"}, "kv_buffer_size: Input should be a valid number"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Options.of(given)


def test_a_secret_comes_from_a_file_that_has_one(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(ConfigError, match="secret_file: .* cannot be read"):
        check({"secret_file": str(file)})
    file.write_text(" \n")
    with pytest.raises(ConfigError, match="secret_file: .* is empty"):
        check({"secret_file": str(file)})
    file.write_text("open sesame\n")
    check({"secret_file": str(file)})


@pytest.mark.parametrize(
    ("host", "shared", "warns"),
    [("127.0.0.1", False, False), ("::1", False, False), ("0.0.0.0", False, True), ("0.0.0.0", True, False)],
)
def test_a_listener_that_others_reach_without_a_secret_says_so(
    host: str, shared: bool, warns: bool, secret: Callable[[str], Secret], caplog: pytest.LogCaptureFixture
) -> None:
    address = Address(host, free_port())
    Engine(address, None, None, secret("sesame") if shared else Secret(), 1024).close()
    assert (f"whoever reaches {address} can fill this process's memory" in caplog.text) == warns


# -- blocks -----------------------------------------------------------------------------------------------------------


def caches(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Two layers of six blocks: one strided, one with two rows for each block, and a name that shares the first."""
    torch.manual_seed(seed)
    first = torch.randn(6, 4, 2, 8).to(dtype).permute(0, 2, 1, 3)
    return {"a": first, "b": torch.randn(12, 1, 3, 4).to(dtype), "shares a": first}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_blocks_are_the_same_elsewhere(dtype: torch.dtype) -> None:
    ours, theirs = Blocks(caches(0, dtype), 6), Blocks(there := caches(1, dtype), 6)
    before = {name: cache.clone() for name, cache in there.items()}
    data = torch.empty(3 * ours.block_bytes, dtype=torch.uint8)
    ours.read([5, 0, 3], data)
    theirs.write([1, 2], data, 1, 3)
    here = caches(0, dtype)
    for name, rows in (("a", 1), ("b", 2)):
        moved, source = (tensors[name].unflatten(0, (6, rows)) for tensors in (there, here))
        assert torch.equal(moved[1], source[0])
        assert torch.equal(moved[2], source[3])
        assert torch.equal(moved[[0, 3, 4, 5]], before[name].unflatten(0, (6, rows))[[0, 3, 4, 5]])


def test_a_cache_whose_blocks_are_not_on_its_first_axis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"first axis of the KV cache of a, \[2, 6, 4\], is no multiple of 6 blocks"):
        Blocks({"a": torch.empty(2, 6, 4)}, 6)


def test_another_form_has_another_layout() -> None:
    layouts = [
        Blocks(caches(0), 6).layout,
        Blocks(caches(0, torch.bfloat16), 6).layout,
        Blocks({"a": caches(0)["a"]}, 6).layout,
        Blocks(caches(0), 6, rank=1).layout,
    ]
    assert len(set(layouts)) == len(layouts)
    assert Blocks(caches(1), 6).layout == layouts[0]


# -- the two halves without sockets -----------------------------------------------------------------------------------


def inbox(capacity: int = 64 * UNIT, block_bytes: int = 4, timeout: float = 60.0, silence: float = 60.0) -> Inbox:
    return Inbox(BuddyPool(capacity, UNIT), LAYOUT, block_bytes, timeout, silence, Tally())


def part(first: int, count: int = 1, total: int = 3, transfer: str = "t", layout: bytes = LAYOUT) -> Put:
    return Put(transfer, layout, first, count, total)


def data(*blocks: int) -> memoryview:
    return memoryview(b"".join(bytes([block] * 4) for block in blocks))


@pytest.mark.parametrize("when", range(4))
def test_parts_are_ready_once_all_are_here_and_loaded_as_they_were(when: int) -> None:
    box, got = inbox(), {}
    parts = [(0, 2), (2, 1), (3, 3)]
    for number, (first, count) in enumerate(parts):
        if number == when:
            box.await_("t", HERE, 6)
        assert box.outcomes() == ([], {})
        assert box.put(part(first, count, 6), data(*range(first, first + count))) == ""
    if when == 3:
        box.await_("t", HERE, 6)
    assert box.outcomes() == (["t"], {})
    assert box.outcomes() == ([], {})
    box.load("t", lambda first, count, loaded: got.update({first: (count, loaded.tolist())}))
    assert got == {first: (count, list(data(*range(first, first + count)))) for first, count in parts}
    assert box._pool.taken == 0


@pytest.mark.parametrize(
    ("second", "bytes_", "why"),
    [
        (part(1, layout=bytes(15) + b"x"), data(1), "another form"),
        (part(1, 2), data(1), "4 bytes are not 2 blocks of 4"),
        (part(1, 3), data(1, 2, 3), "contradict"),
        (part(1, total=4), data(1), "its sender says that it has 4 blocks, and the prompt has 3"),
        (part(2), data(2), "contradict"),
        (part(0), data(0), "contradict"),
    ],
)
def test_a_part_that_does_not_fit_ends_its_transfer_only(second: Put, bytes_: memoryview, why: str) -> None:
    box = inbox()
    box.await_("t", HERE, 3)
    assert box.put(part(0), data(0)) == box.put(part(0, transfer="other"), data(0)) == ""
    assert why in box.put(second, bytes_)
    ready, lost = box.outcomes()
    assert not ready
    assert why in lost["t"]
    assert why in box.put(part(1), data(1)), "a later part is refused for the same reason"
    assert box.put(part(1, transfer="other"), data(1)) == ""


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("total", [1, 4])
def test_a_transfer_of_another_length_than_the_prompt_is_lost(early: bool, total: int) -> None:
    box, why = inbox(), f"its sender says that it has {total} blocks, and the prompt has 3"
    if not early:
        box.await_("t", HERE, 3)
    assert box.put(part(0, total=total), data(0)) == ("" if early else why)
    if early:
        box.await_("t", HERE, 3)
    assert box.outcomes() == ([], {"t": why})
    assert box._pool.taken == 0


def test_a_part_too_much_changes_nothing_that_is_ready() -> None:
    box = inbox()
    box.await_("t", HERE, 3)
    assert box.put(part(0, 3), data(0, 1, 2)) == ""
    assert box.put(part(0, 3), data(9, 9, 9)) == "all of it is here"
    assert box.outcomes() == (["t"], {})
    got: list[int] = []
    box.load("t", lambda first, count, loaded: got.extend(loaded.tolist()))
    assert got == list(data(0, 1, 2))


def test_a_full_buffer_refuses_and_gives_back_what_it_had_of_the_transfer() -> None:
    box = inbox(capacity=2 * UNIT)
    box.await_("t", HERE, 3)
    assert box.put(part(0), data(0)) == box.put(part(1), data(1)) == ""
    assert "buffer of 128 bytes is full" in box.put(part(2), data(2))
    assert "is full" in box.outcomes()[1]["t"]
    assert box._pool.taken == 0


def test_whoever_awaits_asks_until_it_is_there_and_gives_up_in_the_end() -> None:
    box = inbox(silence=0.05)
    box.await_("t", HERE, 3)
    assert box.questions() == [("t", HERE)]
    assert box.questions() == []
    time.sleep(0.06)
    assert box.questions() == []
    assert box.outcomes() == ([], {"t": f"the engine at {HERE} does not answer"})
    assert "does not answer" in box.put(part(0), data(0)), "it comes too late"


def test_an_engine_that_answers_but_sends_nothing_is_given_up_too() -> None:
    box = inbox(timeout=0.05)
    box.await_("t", HERE, 3)
    time.sleep(0.06)
    box.answered("t", "")
    box.questions()
    assert box.outcomes() == ([], {"t": "no part of it came for 0.05 s"})


def test_what_nobody_awaits_is_thrown_away() -> None:
    box = inbox(timeout=0.05)
    assert box.put(part(0, 3), data(0, 1, 2)) == ""
    time.sleep(0.06)
    box.questions()
    assert box._pool.taken == 0
    box.await_("t", HERE, 3)
    assert box.outcomes() == ([], {"t": "no request asked for it for 0.05 s"})


def test_what_is_ready_stays_until_it_is_loaded_or_dropped() -> None:
    box = inbox(timeout=0.01, silence=0.01)
    for name in ("t", "u"):
        box.await_(name, HERE, 3)
        assert box.put(part(0, 3, transfer=name), data(0, 1, 2)) == ""
    time.sleep(0.02)
    assert box.questions() == []
    assert box.outcomes() == (["t", "u"], {})
    box.load("t", lambda *_: None)
    box.drop("u")
    assert box._pool.taken == 0


@pytest.mark.parametrize("when", ["on its way", "here", "awaited", "told", "loaded"])
def test_what_is_taken_back_is_thrown_away_or_named_if_a_request_may_have_it(when: str) -> None:
    box, moment = inbox(), ["on its way", "here", "awaited", "told", "loaded"].index(when)
    assert box.put(part(0, 3 if moment else 2), data(*range(3 if moment else 2))) == ""
    if moment > 1:
        box.await_("t", HERE, 3)
    if moment > 2:
        assert box.outcomes() == (["t"], {})
    if moment > 3:
        box.load("t", lambda *_: None)
    box.take_back("t", "it is wrong")
    assert box.taken_back() == ({"t": "it is wrong"} if moment > 2 else {})
    if when == "told":
        box.drop("t")
    if moment < 2:
        box.await_("t", HERE, 3)
    assert box.outcomes() == ([], {"t": "it is wrong"} if moment < 3 else {})
    assert box.put(part(2), data(2)) != "", "a late part is refused"
    assert box._pool.taken == 0


def outbox(on_demand: bool = False, capacity: int = 64 * UNIT, timeout: float = 60.0) -> Outbox:
    return Outbox(BuddyPool(capacity, UNIT), LAYOUT, on_demand, timeout, Tally())


def put_out(box: Outbox, first: int, total: int = 2, transfer: str = "t", size: int = 4) -> None:
    box.add(transfer, HERE, first, 1, total, size, lambda into: into.fill_(first))


def test_parts_leave_in_order_and_transfers_take_turns() -> None:
    box = outbox()
    for transfer in ("t", "u"):
        for first in range(2):
            put_out(box, first, transfer=transfer)
    left = []
    while (leaving := box.next(0)) is not None:
        left.append((leaving.transfer, leaving.first, leaving.piece.bytes.tolist()))
        box.sent(leaving)
    assert left == [("t", 0, [0] * 4), ("u", 0, [0] * 4), ("t", 1, [1] * 4), ("u", 1, [1] * 4)]
    assert box._pool.taken == 0
    assert box.asked("t") == "all of it was sent"


def test_on_demand_nothing_leaves_before_it_is_asked_for() -> None:
    box = outbox(on_demand=True)
    put_out(box, 0)
    assert box.next(0) is None
    assert box.asked("another") == "nothing is known of it"
    assert box.asked("t") == ""
    for _ in range(2):
        leaving = box.next(0)
        assert leaving is not None
        box.sent(leaving)
        put_out(box, 1)
    assert box.asked("t") == "all of it was sent"


def test_a_full_outbox_ends_the_transfer_and_never_waits() -> None:
    box = outbox(capacity=UNIT)
    put_out(box, 0)
    put_out(box, 1)
    assert "buffer of 64 bytes is full" in box.asked("t")
    assert box.next(0) is None
    assert box._pool.taken == 0


def test_what_nobody_asks_for_leaves_the_outbox() -> None:
    box = outbox(on_demand=True, timeout=0.02)
    put_out(box, 0)
    time.sleep(0.03)
    assert box.next(0) is None
    assert "no engine asked" in box.asked("t")
    assert box._pool.taken == 0


def test_a_transfer_that_failed_takes_no_more_parts() -> None:
    box = outbox()
    put_out(box, 0)
    leaving = box.next(0)
    assert leaving is not None
    box.failed(leaving, "it is refused")
    put_out(box, 1)
    box.wait_until_sent("t")
    assert box.next(0) is None
    assert (box.asked("t"), box._pool.taken) == ("it is refused", 0)


def test_the_rest_of_a_dropped_transfer_does_not_come() -> None:
    box = outbox()
    put_out(box, 0)
    box.drop("t")
    put_out(box, 1)
    box.drop("another")
    assert box.next(0) is None
    assert box._pool.taken == 0
    assert box.asked("t") == box.asked("another") == "its request has ended before its prompt was read"


def test_parts_beyond_a_transfers_length_are_given_back() -> None:
    box = outbox()
    for _ in range(3):
        put_out(box, 0, total=1)
    leaving = box.next(0)
    assert leaving is not None
    box.sent(leaving)
    assert box.next(0) is None
    assert box._pool.taken == 0


def test_a_step_waits_no_longer_than_the_time_limit() -> None:
    box = outbox(timeout=0.05)
    put_out(box, 0)
    leaving = box.next(0)
    assert leaving is not None
    began = time.monotonic()
    box.wait_until_sent("t")
    assert 0.05 <= time.monotonic() - began < SOON
    assert box.asked("t") == "it was not sent within 0.05 s"
    box.failed(leaving, "it is refused")
    assert box._pool.taken == 0


def test_a_busy_engine_gets_no_second_part() -> None:
    box = outbox()
    put_out(box, 0)
    assert box.next(0, busy={HERE}) is None
    assert box.next(0, busy={Address("127.0.0.1", 1)}) is not None


def test_only_the_last_transfers_are_remembered() -> None:
    remembered = BoundedDict[str]()
    for number in range(LAST + 2):
        remembered[str(number)] = "gone"
    assert (len(remembered), "1" in remembered, "2" in remembered) == (LAST, False, True)


# -- two engines over sockets -----------------------------------------------------------------------------------------


@contextmanager
def pair(
    on_demand: bool = False,
    silence: float = SOON,
    secrets: tuple[Secret, Secret] = (Secret(), Secret()),
    host: str = "127.0.0.1",
    **receiving: Any,
) -> Iterator[Any]:
    """An engine that sends and one that receives, with their boxes."""
    out, box = outbox(on_demand), inbox(silence=silence, **receiving)
    places = [Address(host, free_port()) for _ in range(2)]
    sender = Engine(places[0], None, out, secrets[0], 1024, silence)
    receiver = Engine(places[1], box, None, secrets[1], 1024, silence)
    try:
        yield SimpleNamespace(out=out, box=box, sender=sender, receiver=receiver)
    finally:
        sender.close()
        receiver.close()


def send_all(two: Any, transfer: str = "t", to: Address | None = None) -> None:
    for first in range(3):
        two.out.add(transfer, to or two.receiver.address, first, 1, 3, 4, lambda into, value=first: into.fill_(value))


def arrived(two: Any, transfer: str = "t") -> list[int]:
    told = eventually(lambda: two.box.outcomes()[0])
    assert told == [transfer]
    got: list[int] = []
    two.box.load(transfer, lambda first, count, loaded: got.extend(loaded.tolist()))
    return got


@pytest.fixture
def secret(tmp_path: Path) -> Callable[[str], Secret]:
    def of(content: str) -> Secret:
        file = tmp_path / content
        file.write_text(content)
        return Secret(file)

    return of


@pytest.mark.parametrize("on_demand", [False, True], ids=["put", "get"])
@pytest.mark.parametrize("shared", [False, True], ids=["open", "secret"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_prompt_travels(on_demand: bool, shared: bool, host: str, secret: Callable[[str], Secret]) -> None:
    secrets = (secret("sesame"), secret("sesame")) if shared else (Secret(), Secret())
    with pair(on_demand, secrets=secrets, host=host) as two:
        send_all(two)
        two.box.await_("t", two.sender.address, 3)
        assert arrived(two) == list(data(0, 1, 2))
        assert two.box._pool.taken == 0
        assert eventually(lambda: two.out._pool.taken == 0), "once it is told that all has come"


@pytest.mark.parametrize(("ours", "theirs"), [("", "theirs"), ("ours", ""), ("ours", "theirs")])
def test_without_the_same_secret_nothing_travels(ours: str, theirs: str, secret: Callable[[str], Secret]) -> None:
    secrets = tuple(secret(content) if content else Secret() for content in (theirs, ours))
    with pair(silence=0.3, secrets=secrets) as two:  # type: ignore[arg-type]
        send_all(two)
        two.box.await_("t", two.sender.address, 3)
        assert eventually(lambda: "does not answer" in two.out.asked("t"))
        assert eventually(lambda: two.box.outcomes()[1]) == {"t": f"the engine at {two.sender.address} does not answer"}
        assert two.box._pool.taken == 0


def test_what_the_sender_does_not_know_is_lost_at_once() -> None:
    with pair() as two:
        two.box.await_("t", two.sender.address, 3)
        assert eventually(lambda: two.box.outcomes()[1]) == {"t": "nothing is known of it"}


def test_a_refusal_reaches_the_sender() -> None:
    with pair(block_bytes=8) as two:
        send_all(two)
        assert eventually(lambda: "4 bytes are not 1 blocks of 8" in two.out.asked("t"))


def test_an_engine_that_is_gone_is_noticed_by_both_and_waited_for_once() -> None:
    with pair(silence=0.2) as two:
        nobody = Address("127.0.0.1", free_port())
        send_all(two, to=nobody)
        two.box.await_("t", nobody, 3)
        assert eventually(lambda: two.box.outcomes()[1]) == {"t": f"the engine at {nobody} does not answer"}
        assert eventually(lambda: "does not answer" in two.out.asked("t"))
        send_all(two, "u", to=nobody)
        assert eventually(lambda: two.out.asked("u") == "its engine did not answer a moment ago")


def test_a_silent_engine_holds_nobody_else_up() -> None:
    with pair(silence=SOON) as two, socket.create_server(("127.0.0.1", 0)) as silent:
        send_all(two, "stuck", to=Address("127.0.0.1", silent.getsockname()[1]))
        send_all(two)
        two.box.await_("t", two.sender.address, 3)
        began = time.monotonic()
        assert arrived(two) == list(data(0, 1, 2))
        assert time.monotonic() - began < SOON / 2
        assert two.out.asked("stuck") == "", "it is still being tried"


@pytest.mark.parametrize("sent", [1, 3])
def test_a_receiver_is_told_what_its_sender_takes_back(sent: int) -> None:
    with pair() as two:
        for first in range(sent):
            two.out.add("t", two.receiver.address, first, 1, 3, 4, lambda into: into.fill_(0))
        if sent == 3:
            assert eventually(lambda: two.out.asked("t") == "all of it was sent")
        two.out.take_back("t", two.receiver.address, "it is wrong")
        assert eventually(lambda: two.box._gone.get("t") == "it is wrong")
        two.box.await_("t", two.sender.address, 3)
        assert two.box.outcomes() == ([], {"t": "it is wrong"})
        assert two.out.asked("t") == "it is wrong"
        assert eventually(lambda: two.out._pool.taken == two.box._pool.taken == 0)


def test_a_receiver_is_told_of_all_that_are_remembered_at_once() -> None:
    names = [f"{number:0128}" for number in range(LAST)]
    with pair() as two:
        for name in names:
            two.out.take_back(name, two.receiver.address, "ü" * 300)
        assert eventually(lambda: set(names) == set(two.box._gone))


def test_what_a_full_socket_has_no_room_for_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, refused = Engine._peer, []

    class Full:
        def send_multipart(self, *message: Any) -> None:
            refused.append(message)
            raise zmq.Again

    def peer(self: Engine, *of: Any) -> Any:
        return asked(self, *of) if len(refused) == 3 else Full()

    with pair() as two:
        monkeypatch.setattr(Engine, "_peer", peer)
        two.out.take_back("t", two.receiver.address, "it is wrong")
        assert eventually(lambda: two.box._gone.get("t") == "it is wrong")
    assert len(refused) == 3


def test_garbage_and_strangers_change_nothing() -> None:
    with pair() as two, zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.set(zmq.LINGER, 0)
        stranger.connect(f"tcp://{two.receiver.address}")
        for garbage in (
            [b""],
            [b"x"] * 9,
            [b"cos\nsystem\n", b""],
            [DEEP, b""],
            frames(Get("t")),
            frames(State("t", "forged")),
        ):
            stranger.send_multipart(garbage)
        with socket.create_connection((two.receiver.address.host, two.receiver.address.port)) as raw:
            raw.sendall(os.urandom(4096))
        send_all(two)
        two.box.await_("t", two.sender.address, 3)
        assert arrived(two) == list(data(0, 1, 2))


def test_a_message_that_is_too_large_is_not_read() -> None:
    with pair(block_bytes=1 << 20) as two, zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.set(zmq.LINGER, 0)
        stranger.connect(f"tcp://{two.receiver.address}")
        stranger.send_multipart(frames(part(0, 1, 1, "large"), bytes(1 << 20)))
        time.sleep(0.3)
        assert two.box._pool.taken == 0
        two.box.await_("t", two.sender.address, 3)
        assert eventually(lambda: two.box.outcomes()[1]) == {"t": "nothing is known of it"}, "it goes on"


def test_an_error_in_a_thread_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as two:
        real, failures = two.box.put, iter([RuntimeError("planted")])

        def put(*arguments: Any) -> str:
            for error in failures:
                raise error
            return real(*arguments)

        monkeypatch.setattr(two.box, "put", put)
        monkeypatch.setattr(two.sender, "_silence", 0.2)
        send_all(two, "first")
        assert eventually(lambda: "does not answer" in two.out.asked("first"))
        time.sleep(0.25)
        send_all(two)
        two.box.await_("t", two.sender.address, 3)
        assert arrived(two) == list(data(0, 1, 2))


def test_sockets_to_engines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PEERS", 3)
    with pair(silence=0.2) as two:
        for port in (*range(1, 9), 65536):
            two.box.await_(str(port), Address("127.0.0.1", port), 3)
        assert eventually(lambda: len(two.box.outcomes()[1]) > 0)
        assert len(two.receiver._asked) <= 3


def test_an_address_that_cannot_be_asked_holds_no_other_transfer_up() -> None:
    with pair(on_demand=True) as two:
        send_all(two)
        with two.box._lock:  # both are due in one turn
            arriving = two.box._arriving
        two.box.await_("bad", Address("-", 1), 3)
        two.box.await_("t", two.sender.address, 3)
        with two.box._lock:
            due = time.monotonic()
            for one in arriving.values():
                one.ask_at = due
        ready, lost = [], {}

        def both_are_known() -> bool:
            more_ready, more_lost = two.box.outcomes()
            ready.extend(more_ready)
            lost.update(more_lost)
            return bool(ready and lost)

        began = time.monotonic()
        assert eventually(both_are_known)
        assert time.monotonic() - began < SOON / 2
        assert ready == ["t"]
        assert list(lost) == ["bad"]
        assert "the engine at -:1 cannot be asked: " in lost["bad"]


def test_an_engine_that_has_a_part_on_its_way_keeps_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PEERS", 2)
    with pair(silence=1.0) as two, socket.create_server(("127.0.0.1", 0)) as silent:
        send_all(two, "stuck", to=Address("127.0.0.1", silent.getsockname()[1]))
        boxes = [inbox() for _ in range(4)]
        others = [Engine(Address("127.0.0.1", free_port()), box, None, Secret(), 1024) for box in boxes]
        try:
            for number, other in enumerate(others):
                send_all(two, f"t{number}", to=other.address)
                assert eventually(lambda name=f"t{number}": two.out.asked(name) == "all of it was sent")
        finally:
            for other in others:
                other.close()
        assert eventually(lambda: "does not answer" in two.out.asked("stuck"))
        send_all(two)
        two.box.await_("t", two.sender.address, 3)
        assert arrived(two) == list(data(0, 1, 2))
        assert len(two.sender._peers) <= 2
        assert two.out._pool.taken == 0


def test_a_busy_port_is_one_clear_error() -> None:
    with pair() as two, pytest.raises(OSError, match="cannot listen at .*choose another kv_port"):
        Engine(two.sender.address, None, None, Secret(), 1024)


# -- the scheduler's half ---------------------------------------------------------------------------------------------

BLOCK = 4
ROUTE = Route(HERE, Address("127.0.0.1", 22001), "0" * 32)
PROMPT = list(range(11))


def step(
    new: dict[str, Any] | None = None, running: dict[str, Any] | None = None, resumed: tuple[str, ...] = ()
) -> Any:
    """A step of vLLM's scheduler: request → blocks, known tokens, tokens of this step."""
    new, running = new or {}, running or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=known)
            for name, (blocks, known, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(running),
            resumed_req_ids=set(resumed),
            new_block_ids=[(blocks,) if blocks else None for blocks, _, _ in running.values()],
            num_computed_tokens=[known for _, known, _ in running.values()],
        ),
        num_scheduled_tokens={name: tokens for name, (_, _, tokens) in {**new, **running}.items()},
    )


def writer(workers: int = 1) -> Scheduling:
    return Scheduling(ROUTE.decode, False, True, BLOCK, workers)


def test_a_request_waits_until_every_worker_has_its_cache_and_loads_all_but_the_last_token() -> None:
    half, request = writer(workers=2), ask("a", PROMPT, ROUTE)
    name = transfer_of(ROUTE.name, request)
    half.arrived(request)
    assert half.orders(step()) == Orders(awaited=[(name, HERE, 3)]), "before it can be scheduled"
    assert half.matched_tokens(request, 4) is None
    half.apply_outcomes(Outcomes({name: 1}))  # type: ignore[arg-type]
    assert half.matched_tokens(request, 4) is None
    half.apply_outcomes(Outcomes({name: 1}))  # type: ignore[arg-type]
    assert half.matched_tokens(request, 4) == 6
    half.allocated(request, lambda: [7, 8, 9], 6)
    (load,) = half.orders(step()).loads
    assert (load.transfer, load.first, load.ids) == (name, 1, [8, 9])
    assert half.matched_tokens(request, 0) == 0, "after a preemption it is computed"
    half.finished(request.request_id)
    assert half.orders(step()) == Orders()


def test_a_request_whose_cache_is_lost_is_computed_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    half, request = writer(), ask("a", PROMPT, ROUTE)
    name = transfer_of(ROUTE.name, request)
    half.arrived(request)
    assert half.matched_tokens(request, 0) is None
    half.orders(step())
    half.apply_outcomes(Outcomes(lost={name: "the engine is gone"}))
    assert half.matched_tokens(request, 0) == 0
    assert half.orders(step()) == Orders(dropped=[name])
    assert "computes its prompt here: its KV cache does not come, because the engine is gone" in caplog.text


@pytest.mark.parametrize("ready", [False, True])
def test_a_request_that_ends_while_it_waits_leaves_nothing(ready: bool) -> None:
    half, request = writer(), ask("a", PROMPT, ROUTE)
    name = transfer_of(ROUTE.name, request)
    half.arrived(request)
    half.orders(step())
    if ready:
        half.apply_outcomes(Outcomes({name: 1}))  # type: ignore[arg-type]
    half.finished(request.request_id)
    assert half.orders(step()).dropped == [name]
    assert (half._arrivals, half._claimed) == ({}, {})


def test_a_cache_that_is_not_needed_is_dropped() -> None:
    half, known, whole = writer(), ask("a", PROMPT, ROUTE), ask("b", PROMPT[:7], ROUTE, skip_reading_prefix_cache=True)
    half.arrived(known)
    half.arrived(whole)
    assert half.matched_tokens(known, 10) == half.matched_tokens(whole, 0) == 0
    assert half.orders(step()).dropped == [transfer_of(ROUTE.name, one) for one in (whole, known)]
    assert half.matched_tokens(known, 0) == 0, "what was dropped does not come"


EMBEDDED = ask("a", PROMPT, ROUTE)
EMBEDDED.prompt_token_ids = None


@pytest.mark.parametrize(
    "request_", [ask("a", PROMPT, None), ask("a", [1], ROUTE), EMBEDDED], ids=["no route", "one token", "embeddings"]
)
def test_other_requests_are_left_alone(request_: Any) -> None:
    half = writer()
    half.arrived(request_)
    assert half.matched_tokens(request_, 0) == 0
    half.allocated(request_, lambda: [1], 0)
    half.finished(request_.request_id)
    assert half.orders(step()) == Orders()


@pytest.mark.parametrize("end", ["loaded", "lost", "gone"])
def test_of_two_requests_for_one_transfer_one_loads_it_and_the_other_waits_so_long(end: str) -> None:
    half, (first, second) = writer(), [ask(name, PROMPT, ROUTE) for name in "01"]
    name = transfer_of(ROUTE.name, first)
    for request in (first, second):
        half.arrived(request)
    assert half.orders(step()).awaited == [(name, HERE, 3)]
    assert [half.matched_tokens(request, 0) for request in (first, second)] == [None, None]
    assert half.matched_tokens(second, 10) == 0, "its prompt is known"
    if end == "gone":
        half.finished(first.request_id)
    elif end == "lost":
        half.apply_outcomes(Outcomes(lost={name: "the engine is gone"}))
    else:
        half.apply_outcomes(Outcomes({name: 1}))  # type: ignore[arg-type]
        assert [half.matched_tokens(request, 0) for request in (first, second)] == [10, None]
        half.allocated(first, lambda: [1, 2, 3], 10)
    assert half.matched_tokens(second, 8 if end == "loaded" else 0) == 0
    half.allocated(second, lambda: [1, 2, 4], 0)
    assert len(half.orders(step()).loads) == (end == "loaded")
    half.finished(second.request_id)
    assert half.orders(step()) == Orders()
    assert half._followers == {}


def test_of_two_equal_prompts_in_one_request_one_is_sent() -> None:
    half, requests = Scheduling(HERE, True, False, BLOCK, 1), [ask(name, PROMPT, ROUTE) for name in "01"]
    for request in requests:
        half.allocated(request, list, 0)
    orders = half.orders(step(new={one.request_id: ([1, 2, 3], 0, 11) for one in requests}))
    assert [(send.first, send.total) for send in orders.sends] == [(0, 3)]
    for request in requests:
        half.finished(request.request_id)
    assert half.orders(step()) == Orders()
    assert half._departing == set()


@pytest.mark.parametrize(("before", "warns"), [(None, True), (ROUTE, False)])
def test_an_engine_that_no_route_reaches_says_so_once(
    before: Route | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    half = writer()
    for route in (before, *[None] * (2 * UNROUTED)):
        half.arrived(ask("a", PROMPT, route))
    assert caplog.text.count("came under an id that the proxy wrote") == warns


def test_blocks_are_sent_as_soon_as_they_are_complete_and_once() -> None:
    half, request = Scheduling(HERE, True, False, BLOCK, 1), ask("a", PROMPT, ROUTE)
    name = request.request_id
    half.arrived(request)
    assert half.matched_tokens(request, 0) == 0
    half.allocated(request, list, 0)
    sent = []
    for told in (
        step(new={name: ([5, 6], 0, 6)}),
        step(running={name: ([], 6, 1)}),
        step(running={name: ([2], 7, 2)}),
        step(running={name: ([9, 8, 7], 0, 9)}, resumed=(name,)),
        step(running={name: ([], 9, 2)}),
        step(running={name: ([], 11, 1)}),
    ):
        sent.append([(send.first, send.ids, send.total, send.to) for send in half.orders(told).sends])
    to = ROUTE.decode
    assert sent == [[(0, [5], 3, to)], [], [(1, [6], 3, to)], [], [(2, [7], 3, to)], []]
    half.finished(name)
    assert half.orders(step()) == Orders()


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("everything", [False, True])
def test_what_was_sent_is_taken_back_once_and_nothing_more_is_sent(everything: bool, ended: bool) -> None:
    half, request = Scheduling(HERE, True, False, BLOCK, 1), ask("a", PROMPT, ROUTE)
    name, transfer = request.request_id, transfer_of(ROUTE.name, request)
    half.allocated(request, list, 0)
    half.orders(step(new={name: ([5, 6], 0, 6)}))
    if ended:
        half.finished(name)
    half.take_back(None if everything else [name], "it is wrong")
    told = [TakeBack(transfer, ROUTE.decode, "it is wrong")] if everything or not ended else []
    orders = half.orders(step() if ended else step(running={name: ([9, 8, 7], 0, 11)}, resumed=(name,)))
    assert (orders.taken_back, orders.sends) == (told, [])
    half.take_back(None, "it is wrong")
    assert len(half.orders(step()).taken_back) == (1 - len(told) if ended else 1)
    half.finished(name)
    assert half.orders(step()) == Orders()


@pytest.mark.parametrize("when", ["ready", "loaded", "ended"])
def test_blocks_with_what_was_taken_back_are_named_once_even_if_their_request_has_ended(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    half, (first, second) = writer(), [ask(name, PROMPT, ROUTE) for name in "01"]
    name = transfer_of(ROUTE.name, first)
    for request in (first, second):
        half.arrived(request)
    half.apply_outcomes(Outcomes({name: 1}))  # type: ignore[arg-type]
    half.orders(step())
    if when != "ready":
        half.allocated(first, lambda: [1, 2, 3], 6)
        half.orders(step())
    if when == "ended":
        half.finished(first.request_id)
    told = Outcomes(taken_back={name: "it is wrong"})
    assert half.spoiled(told) == ({} if when == "ready" else dict.fromkeys((2, 3), "it is wrong"))
    assert half.spoiled(told) == {}, "another worker heard of it later"
    half.apply_outcomes(told)
    assert half.orders(step()).dropped == ([name] if when == "ready" else [])
    assert half.matched_tokens(first, 0) == 0
    assert ("its KV cache does not come, because it is wrong" in caplog.text) == (when == "ready")


def test_a_prompt_that_ends_before_it_is_read_is_not_waited_for() -> None:
    half, request = Scheduling(HERE, True, False, BLOCK, 1), ask("a", PROMPT, ROUTE)
    half.allocated(request, list, 0)
    assert len(half.orders(step(new={request.request_id: ([5, 6], 0, 6)})).sends) == 1
    half.finished(request.request_id)
    assert half.orders(step()).ended == [transfer_of(ROUTE.name, request)]


@pytest.mark.parametrize(("produces", "consumes"), [(True, True), (True, False), (False, True)])
def test_an_engine_takes_only_routes_that_name_itself(produces: bool, consumes: bool) -> None:
    for own, reads in ((ROUTE.prefill, True), (ROUTE.decode, False), (Address("127.0.0.1", 9), None)):
        half, request = Scheduling(own, produces, consumes, BLOCK, 1), ask("a", PROMPT, ROUTE)
        half.arrived(request)
        assert half.matched_tokens(request, 0) == (None if reads is False and consumes else 0)
        half.allocated(request, list, 0)
        orders = half.orders(step(new={request.request_id: ([1, 2, 3], 0, 11)}))
        assert bool(orders.sends) == (reads is True and produces)
        assert bool(orders.awaited) == (reads is False and consumes)
