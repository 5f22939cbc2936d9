"""Real engines hand KV caches over, behind the proxy and without it, and lose no request when one of them ends."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, RUNNERS, start_features
from p2p_serving import (
    BLOCK,
    HOST,
    TWO,
    Server,
    ask,
    counts,
    end,
    gained,
    get,
    hand_over,
    serve,
    start,
    transfer,
    wait_for,
    wait_until_healthy,
)

from fl_transfer.p2p.protocol.route import Address, Route
from processes import free_port
from sampling import drawn

TOO_LONG = [(3 * token) % 400 + 5 for token in range(490)]
"""The writing engine has no memory for its cache, which comes in eight parts."""
BLOCK_BYTES = 12288
"""A block's bytes in the small Qwen3: three layers, two heads, 32 numbers a key and a value, in float32."""
LONG = 200
"""Tokens of an answer: two requests with such do not fit into an engine's blocks (``BLOCKS`` of ``p2p_serving``)."""
ROOM = 520_000
"""Bytes for caches that wait: seven parts of four blocks, which take 64 KiB each, and some smaller ones."""
WAYS: dict[str, dict[str, Any]] = {"PUT": {}, "spoiled": {"spoil": True}, "GET": {"until": "GET.taken"}, "left": {}}
"""How readers without a proxy hand over, one after the other; the last one ends before anybody asks it."""


@dataclass
class Together:
    """A reading and a writing engine behind a proxy, and readers in a process of their own that knows no proxy."""

    proxy: Server
    reader: Server
    writer: Server
    writer_zmq: Address
    readers_zmq: Address
    folder: Path
    readers: list[Future[dict[str, Any]]]
    routes: dict[str, list[Route]]
    taken: dict[str, tuple[list[list[int]], dict[str, float]]] = field(default_factory=dict)

    def ask(self, prompt: list[int], salt: str, server: Server | None = None, *route: Route, **more: Any) -> list[int]:
        return ask(prompt, salt, server or self.proxy, *route, **more)

    def counts(self) -> dict[str, float]:
        return counts(self.writer)

    def gained(self, before: Mapping[str, float]) -> dict[str, float]:
        return gained(self.writer, before)

    def metric(self, name: str) -> float:
        """One of the writing engine's own numbers."""
        found = re.search(rf"^vllm:{name}{{.*}} (\S+)$", get(f"{self.writer.url}/metrics"), re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def _has_read(self, way: str) -> bool:
        for reader in self.readers:
            if reader.done():
                reader.result()  # raises what has ended it
        return (self.folder / f"{way}.ready").exists()

    def take_over(self, way: str) -> tuple[list[list[int]], dict[str, float]]:
        """The writing engine's tokens for prompts that a reader without a proxy has read, and the growth of its counts.

        The readers go one way after the other, so those before it come first.
        """
        for earlier in [one for one in WAYS if one not in self.taken][: list(WAYS).index(way) + 1 - len(self.taken)]:
            before = self.counts()
            (self.folder / f"{earlier}.go").touch()
            wait_for(lambda way=earlier: self._has_read(way), [])
            if earlier == "left":
                self.readers[1].result()
            asked = zip(TWO, self.routes[earlier], strict=True)
            written = [self.ask(prompt, earlier, self.writer, route) for prompt, route in asked]
            (self.folder / f"{earlier}.taken").touch()
            self.taken[earlier] = written, self.gained(before)
        return self.taken[way]


@pytest.fixture(scope="module", params=drawn(("V1 reads", "V2 reads"), 1, "P2P"))
def together(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Together]:
    """All of them, with the two model runners of vLLM on either side."""
    folder, model = tmp_path_factory.mktemp("p2p"), checkpoint("qwen3")
    reads, writes = ("V1", "V2") if request.param == "V1 reads" else ("V2", "V1")
    clients, heartbeats = free_port(), free_port()
    proxy = start(
        folder / "proxy.txt", clients, {}, "-c", "from fl_dispatch.cli import main; main()", "p2p-proxy",
        "--port", str(clients), "--proxy-port", str(heartbeats),
    )  # fmt: skip

    known = {"heartbeats": heartbeats, "kv_buffer_size": "1e1"}
    reader, _ = serve(folder / "reader.txt", model, "kv_producer", RUNNERS[reads], **known)
    known = {"heartbeats": heartbeats, "kv_buffer_size": str(ROOM), "mem_pool_size_gb": 0}
    writer, writer_zmq = serve(folder / "writer.txt", model, "kv_consumer", RUNNERS[writes], **known)
    pushes, readers_zmq = (Address(HOST, free_port()) for _ in range(2))
    pushed = ("PUT", "spoiled")
    routes = {way: [Route.between(pushes if way in pushed else readers_zmq, writer_zmq) for _ in TWO] for way in WAYS}

    def read(way: str) -> dict[str, Any]:
        files = {"ready": f"{way}.ready", "after": f"{way}.go", **WAYS[way]}
        places = {name: str(folder / file) for name, file in files.items() if name != "spoil"}
        requests = {str(route): prompt for route, prompt in zip(routes[way], TWO, strict=True)}
        return {"do": "read_for", "requests": requests, "salt": way, **WAYS[way], **places}

    def engine(send_type: str, port: int) -> dict[str, Any]:
        return {"kv_transfer_config": transfer("kv_producer", port, send_type=send_type), "block_size": BLOCK}

    jobs = (
        (model, [read(way) for way in pushed], engine("PUT", pushes.port)),
        (model, [read("GET"), read("left")], engine("GET", readers_zmq.port)),
    )
    readers = [start_features(job, VLLM_HOST_IP=HOST, **RUNNERS[reads]) for job in jobs]
    servers = [proxy, reader, writer]
    try:
        wait_for(lambda: all(json.loads(get(f"{proxy.url}/health")).values()), servers)
        yield Together(proxy, reader, writer, writer_zmq, readers_zmq, folder, readers, routes)
    finally:
        for way in WAYS:  # readers that still wait end, too
            (folder / f"{way}.go").touch()
            (folder / f"{way}.taken").touch()
        end(servers)


def test_the_proxy_gives_hugging_faces_tokens_and_the_writing_engine_computes_no_prompt(
    together: Together, expected: Callable[[str], list[list[int]]]
) -> None:
    before, sent = together.counts(), counts(together.reader)
    assert [together.ask(prompt, "proxied") for prompt in PROMPTS] == expected("qwen3")
    gained = together.gained(before)
    travelled = sum(-(-len(prompt) // BLOCK) for prompt in PROMPTS if len(prompt) > 1)
    assert gained["received_blocks"] == travelled
    assert gained["received_bytes"] == travelled * BLOCK_BYTES
    assert gained["loaded_blocks"] == sum(-(-(len(prompt) - 1) // BLOCK) for prompt in PROMPTS)
    assert gained["external_kv_transfer"] == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert gained["local_compute"] == len(PROMPTS), "the last token of each prompt"
    assert counts(together.reader)["sent_blocks"] - sent.get("sent_blocks", 0) == travelled


def test_answers_are_streamed_through_the_proxy(together: Together, expected: Callable[[str], list[list[int]]]) -> None:
    before = together.counts()
    assert together.ask(PROMPTS[1], "streamed", stream=True) == expected("qwen3")[1]
    assert together.gained(before)["loaded_blocks"] == 2


def test_several_answers_to_one_prompt_load_it_once(together: Together) -> None:
    before, prompt = together.counts(), [(3 * token) % 400 + 5 for token in range(100)]
    assert together.ask(prompt, "several", n=3, temperature=1)
    gained = together.gained(before)
    assert gained["loaded_blocks"] == 7
    assert gained["local_compute"] <= 1 + 2 * BLOCK, "the others compute their last block"


@pytest.mark.parametrize("way", ["PUT", "GET"])
def test_a_cache_is_pushed_or_fetched(way: str, together: Together, expected: Callable[[str], list[list[int]]]) -> None:
    written, gained = together.take_over(way)
    assert written == expected("qwen3")[1:3]
    assert gained["loaded_blocks"] == sum(-(-(len(prompt) - 1) // BLOCK) for prompt in TWO)
    assert gained["local_compute"] == len(TWO)


def test_a_wrong_transfer_gives_wrong_tokens(together: Together, expected: Callable[[str], list[list[int]]]) -> None:
    written, _ = together.take_over("spoiled")
    for tokens, right in zip(written, expected("qwen3")[1:3], strict=True):
        assert tokens != right


def test_a_cache_whose_engine_has_ended_is_computed_anew(
    together: Together, expected: Callable[[str], list[list[int]]]
) -> None:
    written, gained = together.take_over("left")
    assert written == expected("qwen3")[1:3]
    assert gained["local_compute"] == sum(len(prompt) for prompt in TWO)
    assert gained["lost_transfers"] == len(TWO)
    assert together.writer.said(f"because the engine at {together.readers_zmq} does not answer")


def test_a_cache_that_does_not_fit_is_computed_anew(together: Together) -> None:
    before = together.counts()
    written = together.ask(TOO_LONG, "too long")
    gained = together.gained(before)
    assert gained["local_compute"] == len(TOO_LONG)
    assert gained["lost_transfers"] == 1
    assert written == together.ask(TOO_LONG, "alone", together.writer)
    assert together.writer.said("its KV cache does not come, because the receiver's buffer")


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(together: Together) -> None:
    with socket.create_server((HOST, 0)) as silent:
        route = Route.between(Address(HOST, silent.getsockname()[1]), together.writer_zmq)
        before = together.counts()
        with pytest.raises(TimeoutError):
            together.ask(TWO[0], "aborted", together.writer, route, within=1.0)
    wait_for(lambda: together.metric("num_requests_waiting") == 0, [together.writer])
    assert together.metric("num_requests_running") == together.metric("kv_cache_usage_perc") == 0
    assert together.counts() == before, "it was neither computed nor lost"


def test_preempted_requests_write_the_same(together: Together) -> None:
    prompts = [[(start * token) % 400 + 5 for token in range(200)] for start in (5, 7)]
    alone = [together.ask(prompt, "alone", together.writer, max_tokens=LONG) for prompt in prompts]
    preempted, before = together.metric("num_preemptions_total"), together.counts()
    with ThreadPoolExecutor(2) as clients:
        written = list(clients.map(lambda prompt: together.ask(prompt, "beside", max_tokens=LONG), prompts))
    assert written == alone
    assert together.metric("num_preemptions_total") > preempted
    assert together.gained(before)["loaded_blocks"] == 26
    assert together.metric("kv_cache_usage_perc") == 0


def test_after_the_reading_engine_is_killed_no_request_is_lost(
    together: Together, expected: Callable[[str], list[list[int]]]
) -> None:
    together.reader.kill()
    before = together.counts()
    assert [together.ask(prompt, "killed") for prompt in PROMPTS] == expected("qwen3")
    assert together.gained(before)["local_compute"] == sum(map(len, PROMPTS))
    assert json.loads(get(f"{together.proxy.url}/health"))["prefill"] == []
    together.writer.kill()
    with pytest.raises(urllib.error.HTTPError, match="503"):
        together.ask(PROMPTS[1], "nobody")


@pytest.fixture(scope="module", params=drawn(("tensor", "pipeline"), 1, "P2P of two ranks"))
def divided(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """Engines of two ranks or two stages each, and one of a single rank that reads: name → server and address."""
    folder, model = tmp_path_factory.mktemp("divided"), checkpoint("qwen3")
    two = f"--{request.param}-parallel-size 2"
    started = {
        "two read": serve(folder / "two read.txt", model, "kv_producer", {}, two),
        "one reads": serve(folder / "one reads.txt", model, "kv_producer", {}),
        "writes": serve(folder / "two write.txt", model, "kv_consumer", {}, two),
    }
    servers = [server for server, _ in started.values()]
    try:
        wait_until_healthy(*servers)
        yield started
    finally:
        end(servers)


def test_each_rank_hands_its_part_to_the_same_rank(
    divided: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    written, gained_ = hand_over(divided, "two read")
    assert written == expected("qwen3")[1:3]
    assert gained_["received_blocks"] == 2 * sum(-(-len(prompt) // BLOCK) for prompt in TWO)
    assert gained_["received_bytes"] == gained_["received_blocks"] * BLOCK_BYTES / 2
    assert gained_["local_compute"] == len(TWO)


def test_a_cache_of_another_number_of_ranks_is_refused_and_computed(
    divided: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    written, gained_ = hand_over(divided, "one reads")
    assert written == expected("qwen3")[1:3]
    assert gained_["local_compute"] == sum(len(prompt) for prompt in TWO)
    assert divided["one reads"][0].said("its blocks have another form: another model, dtype, block size or number of")


@pytest.fixture(scope="module")
def linked(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Two engines that can make links, over gloo: name → server and address."""
    folder, model = tmp_path_factory.mktemp("linked"), checkpoint("qwen3")
    plugin = {"VLLM_FL_PLUGIN_MODULES": "gloo_wires"}
    started = {
        "reads": serve(folder / "reads.txt", model, "kv_producer", plugin, transport="auto"),
        "writes": serve(folder / "writes.txt", model, "kv_consumer", plugin, transport="auto"),
    }
    servers = [server for server, _ in started.values()]
    try:
        wait_until_healthy(*servers)
        yield started
    finally:
        end(servers)


def test_keys_and_values_go_by_a_link_until_its_engine_is_killed(
    linked: dict[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    (reads, _), (writes, _) = linked.values()
    right = expected("qwen3")[1:3]
    written, _ = hand_over(linked, "reads")
    assert written == right
    wait_for(lambda: reads.said("from device to device, by gloo"), [reads, writes])
    written, gained_ = hand_over(linked, "reads", "by the link")
    assert written == right
    assert gained_["received_direct_bytes"] == gained_["received_bytes"] > 0
    assert gained_["local_compute"] == len(TWO)
    reads_at, writes_at = (address for _, address in linked.values())
    reads.kill()
    before = counts(writes)
    killed = [ask(prompt, "killed", writes, Route.between(reads_at, writes_at)) for prompt in TWO]
    assert killed == right
    assert gained(writes, before)["local_compute"] == sum(len(prompt) for prompt in TWO)
