"""The P2P proxy loses no request and no client's departure, whatever becomes of its engines.

The proxy is the real one. Servers that do what a test wants stand for the engines; real ones: ``test_p2p_engines.py``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from aiohttp import ClientError, ClientSession, web
from typer.testing import CliRunner

from fl_dispatch.cli import app as commands
from fl_dispatch.errors import ConfigError
from fl_transfer.p2p.protocol import heartbeat
from fl_transfer.p2p.protocol.heartbeat import Heart
from fl_transfer.p2p.protocol.messages import BadMessage, Heartbeat, frames
from fl_transfer.p2p.protocol.route import Address, Route
from fl_transfer.p2p.protocol.secret import Secret
from fl_transfer.p2p.proxy import instances as instances_module
from fl_transfer.p2p.proxy import server as proxy_module
from fl_transfer.p2p.proxy.instances import Instances
from fl_transfer.p2p.proxy.server import SERVING, Proxy
from processes import free_port

HOST = "127.0.0.1"
ASKED = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 5, "min_tokens": 5}
WITHIN = 10.0

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def eventually(happens: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN):
        while not happens():
            await asyncio.sleep(0.01)


@dataclass
class Standin:
    """A server in an engine's place."""

    http: Address
    zmq: Address
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # id and body of each request
    left: int = 0  # requests whose client went away

    def routes(self) -> list[Route | None]:
        return [Route.of(name) for name, _ in self.asked]


async def listen(runner: web.AppRunner) -> Address:
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, HOST, port).start()
    return Address(HOST, port)


@dataclass
class Scene:
    """A proxy, the engines behind it, and a client."""

    proxy: Proxy
    address: Address
    client: ClientSession
    open: list[web.AppRunner] = field(default_factory=list)

    async def engine(self, role: Any, answer: Answer) -> Standin:
        """An engine that the proxy has heard."""

        async def handle(request: web.Request) -> web.StreamResponse:
            form = request.content_type.startswith("multipart/")
            engine.asked.append((request.headers.get("X-Request-Id", ""), {} if form else await request.json()))
            try:
                return await answer(request)
            except (asyncio.CancelledError, ConnectionError):
                engine.left += 1
                raise

        app = web.Application()
        app.router.add_post("/{path:.*}", handle)
        self.open.append(web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1))
        engine = Standin(await listen(self.open[-1]), Address(HOST, free_port()))
        self.proxy.instances.note_heartbeat(Heartbeat(role, str(engine.http), str(engine.zmq)))
        return engine

    def post(self, path: str = "/v1/completions", **body: Any) -> Any:
        return self.client.post(f"http://{self.address}{path}", json={**ASKED, **body})

    def health(self) -> Any:
        return self.client.get(f"http://{self.address}/health")


@asynccontextmanager
async def scene(secret: Secret | None = None, heartbeats: int = 0) -> AsyncIterator[Scene]:
    proxy = Proxy(Address(HOST, heartbeats or free_port()), secret or Secret(), read_within=0.5)
    runner = web.AppRunner(proxy.app(), **SERVING, shutdown_timeout=0.1)
    address = await listen(runner)
    async with ClientSession() as client:
        scene = Scene(proxy, address, client)
        try:
            yield scene
        finally:
            for one in (runner, *scene.open):
                await one.cleanup()


async def well(request: web.Request) -> web.StreamResponse:
    return web.json_response({"answer": "well"})


async def badly(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": "out of order"}, status=500)


async def dies(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hangs(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(WITHIN)
    return web.Response()


async def streams(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for number in range(1000):
        await response.write(f"data: {number}\n\n".encode())
        await asyncio.sleep(0.01)
    return response


async def streams_and_dies(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 0\n\n")
    assert request.transport is not None
    request.transport.abort()
    return response


def run(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test whose body is a coroutine."""

    def synchronous() -> None:
        asyncio.run(asyncio.wait_for(test(), 3 * WITHIN))

    synchronous.__name__ = test.__name__
    return synchronous


@run
async def test_one_engine_reads_and_another_one_writes_under_an_id_that_names_both() -> None:
    async with scene() as here:
        prefill, decode = await here.engine("P", well), await here.engine("D", well)
        async with here.post(stream=True) as answer:
            assert await answer.json() == {"answer": "well"}
        ((name, read),), ((same, written),) = prefill.asked, decode.asked
        assert name == same
        route = Route.of(name)
        assert route is not None
        assert (route.prefill, route.decode) == (prefill.zmq, decode.zmq)
        assert (read["max_tokens"], read["stream"], "min_tokens" in read) == (1, False, False)
        assert written == {**ASKED, "stream": True}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/responses"])
@pytest.mark.parametrize("kind", ["application/json", "text/plain", ""])
def test_a_clients_own_id_never_says_where_caches_go(path: str, kind: str) -> None:
    async def test() -> None:
        async with scene() as here:
            decode = await here.engine("D", well)
            forged = str(Route.between(Address("10.0.0.1", 1), decode.zmq))
            kept = {**ASKED, "user": "request_id", "number": 1e-7, "text": "\u00e9\ud800"}
            body = json.dumps({"request_id": forged, **kept}).replace("request_id", "reque\\u0073t_id", 1)
            headers = {"X-Request-Id": forged, "Content-Type": kind}
            for _ in range(2):
                async with here.client.post(f"http://{here.address}{path}", data=body, headers=headers) as answer:
                    assert answer.status == 200
            assert [asked for _, asked in decode.asked] == [kept, kept]
            ids = {name for name, _ in decode.asked}
            assert len(ids) == 2, "each has an id of the proxy's"
            assert not any("_addr_" in name or not name for name in ids)

    run(test)()


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 100_000])
def test_a_body_in_which_an_id_cannot_be_looked_for_reaches_no_engine(body: bytes) -> None:
    async def test() -> None:
        async with scene() as here:
            prefill, decode = await here.engine("P", well), await here.engine("D", well)
            for path in ("/v1/completions", "/v1/responses"):
                async with here.client.post(f"http://{here.address}{path}", data=body) as answer:
                    assert answer.status == 400
                    assert "no JSON" in (await answer.json())["error"]["message"]
            assert prefill.asked == decode.asked == []

    run(test)()


@run
async def test_a_file_that_is_uploaded_stays_as_it_is() -> None:
    async with scene() as here:
        got: list[bytes] = []

        async def keeps(request: web.Request) -> web.StreamResponse:
            got.append(await request.read())
            return web.Response()

        await here.engine("D", keeps)
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        async with here.client.post(f"http://{here.address}/v1/files", data=b"--x\r\n", headers=kind) as answer:
            assert answer.status == 200
        assert got == [b"--x\r\n"]


@pytest.mark.parametrize("bad", [dies, hangs, badly])
def test_a_prompt_that_nobody_reads_is_read_where_it_is_written(bad: Answer) -> None:
    async def test() -> None:
        async with scene() as here:
            await here.engine("P", bad)
            decode = await here.engine("D", well)
            async with here.post() as answer:
                assert answer.status == 200
            assert decode.routes() == [None]
            async with here.health() as answer:
                assert bool((await answer.json())["prefill"]) == (bad is badly), "it answered, so it lives"

    run(test)()


@run
async def test_a_request_whose_writing_engine_dies_is_read_and_written_anew() -> None:
    async with scene() as here:
        prefill = await here.engine("P", well)
        dead, alive = await here.engine("D", dies), await here.engine("D", well)
        async with here.post() as answer:
            assert await answer.json() == {"answer": "well"}
        assert [route.decode for route in prefill.routes() if route] == [dead.zmq, alive.zmq]
        async with here.health() as answer:
            assert (await answer.json())["decode"] == [str(alive.http)]


@pytest.mark.parametrize("role", ["P", "D"])
def test_a_connection_that_was_just_closed_is_no_dead_engine(role: str) -> None:
    async def test() -> None:
        async with scene() as here:
            reached = 0

            async def dies_once(request: web.Request) -> web.StreamResponse:
                nonlocal reached
                reached += 1
                return await (dies if reached == 2 else well)(request)

            one, other = await here.engine(role, dies_once), await here.engine("D" if role == "P" else "P", well)
            for _ in range(2):
                async with here.post() as answer:
                    assert await answer.json() == {"answer": "well"}
            assert (len(one.asked), len(other.asked)) == (3, 2)
            assert None not in one.routes() + other.routes()
            assert len(here.proxy.instances.of(role)) == 1

    run(test)()


def test_an_unused_connection_is_closed_before_the_engine_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxy_module.IDLE < 5, "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
    monkeypatch.setattr(proxy_module, "IDLE", 0.1)

    async def test() -> None:
        async with scene() as here:
            callers = set()

            async def notes(request: web.Request) -> web.StreamResponse:
                assert request.transport is not None
                callers.add(request.transport.get_extra_info("peername"))
                return web.Response()

            await here.engine("D", notes)
            for pause in (0.0, 0.5):
                async with here.post() as answer:
                    await answer.read()
                await asyncio.sleep(pause)
            assert len(callers) == 1
            async with here.post() as answer:
                await answer.read()
            assert len(callers) == 2

    run(test)()


@run
async def test_an_engine_that_hangs_or_joins_does_not_get_all_requests() -> None:
    async with scene() as here:
        here.proxy._read_within = WITHIN
        stuck, prefill = await here.engine("P", hangs), await here.engine("P", well)
        await here.engine("D", well)

        async def ask() -> None:
            async with here.post() as answer:
                await answer.read()

        first = asyncio.create_task(ask())
        await eventually(lambda: len(stuck.asked) == 1)
        for _ in range(4):
            await ask()
        joined = await here.engine("P", well)
        for _ in range(4):
            await ask()
        first.cancel()
        assert (len(stuck.asked), len(prefill.asked), len(joined.asked)) == (1, 6, 2)


@run
async def test_engines_take_turns() -> None:
    async with scene() as here:
        prefills = [await here.engine("P", well) for _ in range(2)]
        decodes = [await here.engine("D", well) for _ in range(2)]
        for _ in range(4):
            async with here.post() as answer:
                await answer.read()
        assert [len(one.asked) for one in (*prefills, *decodes)] == [2] * 4


@run
async def test_a_stream_that_breaks_off_does_not_end_well() -> None:
    async with scene() as here:
        await here.engine("D", streams_and_dies)
        with pytest.raises(ClientError):
            async with here.post(stream=True) as answer:
                await answer.read()
        assert here.proxy.instances.of("D") == []


@pytest.mark.parametrize("answers", [streams, hangs])
@pytest.mark.parametrize("role", ["P", "D"])
def test_a_client_who_leaves_ends_the_request_and_no_engine(role: str, answers: Answer) -> None:
    async def test() -> None:
        async with scene() as here:
            here.proxy._read_within = WITHIN
            others = await here.engine("D", well) if role == "P" else None
            engine = await here.engine(role, answers)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3), here.post(stream=True) as answer:
                    await answer.read()
            await eventually(lambda: engine.left == 1)
            assert len(here.proxy.instances.of(role)) == 1
            assert others is None or others.asked == []

    run(test)()


@run
async def test_without_an_engine_that_writes_the_answer_is_503() -> None:
    async with scene() as here:
        await here.engine("P", well)
        for path in ("/v1/completions", "/tokenize"):
            async with here.post(path) as answer:
                assert (answer.status, (await answer.json())["error"]["type"]) == (503, "service_unavailable")
        async with here.health() as answer:
            assert answer.status == 503


@run
async def test_a_hundred_requests_and_more_are_served_at_a_time() -> None:
    async with scene() as here:
        all_here = asyncio.Event()

        async def waits(request: web.Request) -> web.StreamResponse:
            if len(decode.asked) == 130:
                all_here.set()
            await all_here.wait()
            return web.Response()

        decode = await here.engine("D", waits)

        async def ask() -> int:
            async with here.post() as answer:
                return int(answer.status)

        here.client.connector._limit = 0  # type: ignore[union-attr] # of the client's own
        assert await asyncio.gather(*(ask() for _ in range(130))) == [200] * 130


def test_a_heart_beats_for_a_server_that_answers_and_for_a_proxy_that_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "EVERY", 0.1)
    monkeypatch.setattr(heartbeat, "STARTING", 0.05)
    (tmp_path / "secret").write_text("sesame")
    secret, port, http = Secret(tmp_path / "secret"), free_port(), Address(HOST, free_port())
    beats = Heart(Address(HOST, port), "PD", http, Address(HOST, 1), secret)
    mute = Heart(Address(HOST, port), "PD", http, Address(HOST, 2), Secret())

    async def test() -> None:
        for _ in range(2):  # a proxy that has ended, and another one
            async with scene(secret, port) as here:
                assert here.proxy.instances.of("D") == []
                runner = web.AppRunner(web.Application())
                await runner.setup()
                await web.TCPSite(runner, HOST, http.port).start()
                await eventually(lambda: here.proxy.instances.of("D") != [])
                assert [one.zmq.port for one in here.proxy.instances.of("P")] == [1]
                await runner.cleanup()

    try:
        asyncio.run(test())
    finally:
        beats.close()
        mute.close()


@pytest.mark.parametrize(("serves", "missing"), [(False, "http_port"), (True, "proxy_ip")])
def test_a_heart_that_nobody_hears_says_once_who_is_missing(
    serves: bool, missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "STARTING", 0.02)
    monkeypatch.setattr(heartbeat, "PATIENCE", 0.1)
    with socket.create_server((HOST, 0)) as server:
        http = Address(HOST, server.getsockname()[1] if serves else free_port())
        heart = Heart(Address(HOST, free_port()), "P", http, Address(HOST, 1), Secret())
        try:
            asyncio.run(eventually(lambda: missing in caplog.text))
            time.sleep(0.3)
        finally:
            heart.close()
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert (str(http) in record.getMessage()) == (not serves)
    assert "no proxy has heard of this engine for 0.1 s" in record.getMessage()


def test_a_proxy_that_others_reach_without_a_secret_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        for host in (HOST, "0.0.0.0"):
            runner = web.AppRunner(Proxy(Address(host, free_port()), Secret(), 1.0).app())
            await runner.setup()
            await runner.cleanup()

    asyncio.run(test())
    assert caplog.text.count("can fill this process's memory") == 1


@run
async def test_garbage_does_not_keep_heartbeats_from_being_heard() -> None:
    port = free_port()
    async with scene(heartbeats=port) as here:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as somebody:
            somebody.connect(f"tcp://{HOST}:{port}")
            beat = Heartbeat("D", f"{HOST}:1", f"{HOST}:2")
            deep = b"\x82\xa1a" + b"\x91" * 4000 + b"\xc0\xa4type\xa9heartbeat"
            wrong = frames(Heartbeat("P", "evil/../:80", f"{HOST}:1"))
            for garbage in ([b""], [b"x"] * 5, [deep, b""], wrong, frames(beat)):
                await somebody.send_multipart(garbage)
            await eventually(lambda: len(here.proxy.instances.of("D")) == 1)
        assert here.proxy.instances.of("P") == []


def test_an_error_does_not_end_the_hearing_of_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()

    async def test() -> None:
        async with scene(heartbeats=port) as here:
            real, failures = here.proxy.instances.note_heartbeat, iter([RuntimeError("planted")])

            def hear(beat: Heartbeat) -> None:
                for error in failures:
                    raise error
                real(beat)

            monkeypatch.setattr(here.proxy.instances, "note_heartbeat", hear)
            with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as somebody:
                somebody.connect(f"tcp://{HOST}:{port}")
                for _ in range(2):
                    await somebody.send_multipart(frames(beat(10, "D")))
                await eventually(lambda: len(here.proxy.instances.of("D")) == 1)

    asyncio.run(test())


@pytest.mark.parametrize("busy", ["--port", "--proxy-port"])
def test_a_busy_port_is_one_clear_error(busy: str) -> None:
    ports = {"--port": free_port(), "--proxy-port": free_port()}
    with socket.create_server((HOST, ports[busy])):
        arguments = [text for name, port in ports.items() for text in (name, str(port))]
        result = CliRunner().invoke(commands, ["p2p-proxy", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert str(ports[busy]) in str(result.exception)
    assert busy in str(result.exception)


# -- the engines that it knows ----------------------------------------------------------------------------------------


def beat(port: int, role: Any = "P") -> Heartbeat:
    return Heartbeat(role, f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}")


def test_engines_come_take_turns_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Instances()
    for one in (beat(10), beat(20), beat(30, "D"), beat(40, "PD")):
        known.note_heartbeat(one)
    assert [one.http.port for one in known.of("D")] == [30, 40]
    for port in (10, 20, 40, 10):
        first = known.of("P")[0]
        assert first.http.port == port
        with known.serving(first):
            assert known.of("P")[-1] is first, "it is the busiest"
    known.failed(known.of("D")[0], "planted")
    assert [one.http.port for one in known.of("D")] == [40]
    monkeypatch.setattr(instances_module, "GONE_AFTER", -1.0)
    assert known.of("P") == []


def test_an_engine_that_failed_comes_back_later_and_is_the_last_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Instances()
    for one in (beat(10), beat(20)):
        known.note_heartbeat(one)
    failed, other = known.of("P")
    known.failed(failed, "planted")
    known.note_heartbeat(beat(10))
    assert known.of("P") == [other], "its heart still beats"
    failed.back_at = 0.0
    assert known.of("P") == [other], "not before it beats again"
    known.note_heartbeat(beat(10))
    with known.serving(other):
        assert known.of("P") == [other, failed]
        known.answered(failed)
        assert known.of("P") == [failed, other]


def test_a_heartbeat_with_a_wrong_address_or_too_many_of_them_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Instances()
    with pytest.raises(BadMessage, match="no address"):
        known.note_heartbeat(Heartbeat("P", "evil/../:80", "127.0.0.1:1"))
    monkeypatch.setattr(instances_module, "MOST", 1)
    known.note_heartbeat(beat(10))
    known.note_heartbeat(beat(10))
    with pytest.raises(BadMessage, match="more than 1 engines"):
        known.note_heartbeat(beat(20))
