"""The HTTP server in front of engines: each request goes to a prefill engine, then to a decode engine.

The server knows the engines from their heartbeats. A request gets an id that names both engines, under which the second
one receives the prompt's KV cache from the first. If no engine reads prompts, or it fails, the writing engine also
reads.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio
from aiohttp import (
    ClientError,
    ClientOSError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ServerDisconnectedError,
    TCPConnector,
    web,
)

from fl_dispatch.logger_manager import get_logger

from ..protocol.messages import HEADER_BYTES, BadMessage, Heartbeat, read
from ..protocol.route import Address, Route
from ..protocol.secret import OVERHEAD, Secret
from .instances import Instance, Instances

logger = get_logger(__name__)

WRITING = ("/v1/completions", "/v1/chat/completions")
"""Routes with requests that one engine reads and another writes."""
BODY_BYTES = 256 << 20
PASSED_ON = ("Authorization", "Content-Type", "Accept")
"""Client headers that engines get. The id is never a client's, because it directs KV caches."""
FORMS = ("multipart/", "application/x-www-form-urlencoded")
"""Prefixes of the content types of bodies that are not JSON; vLLM reads no id from these."""
CONNECT_WITHIN = 5.0
IDLE = 2.0
"""Seconds after which an unused connection to an engine is closed; vLLM closes it after 5."""
CLOSED = (ServerDisconnectedError, ClientOSError)
"""Errors of a connection that the engine may just have closed as unused; they count only if they repeat."""
SERVING: dict[str, Any] = {"handler_cancellation": True, "access_log": None}
"""aiohttp's options: a handler ends with its client, so that engines end the request, too."""
ROLES = {"prefill": "P", "decode": "D"}


class _ClientGone(Exception):  # noqa: N818 - not our error
    """The client no longer reads the answer."""


class Proxy:
    """The server.

    Args:
        heartbeats: the address for heartbeats.
        secret: the engines' secret.
        read_within: seconds that an engine may take to read a prompt.
    """

    def __init__(self, heartbeats: Address, secret: Secret, read_within: float) -> None:
        self._heartbeats, self._secret, self._read_within = heartbeats, secret, read_within
        self.instances = Instances()

    def app(self) -> web.Application:
        """Return the application, to be served with the options :data:`SERVING`."""
        app = web.Application(client_max_size=BODY_BYTES)
        app.cleanup_ctx.append(self._running)
        app.router.add_get("/health", self._health)
        for route in WRITING:
            app.router.add_post(route, self._write)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        return app

    async def _running(self, app: web.Application) -> AsyncIterator[None]:
        timeout = ClientTimeout(total=None, sock_connect=CONNECT_WITHIN)
        connector = TCPConnector(limit=0, keepalive_timeout=IDLE)
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as listener:
            listener.set(zmq.LINGER, 0)
            listener.set(zmq.IPV6, int(":" in self._heartbeats.host))
            listener.set(zmq.MAXMSGSIZE, HEADER_BYTES + OVERHEAD)
            self._secret.listen(listener, self._heartbeats)
            try:
                listener.bind(f"tcp://{self._heartbeats}")
            except zmq.ZMQError as error:
                raise OSError(f"cannot listen at {self._heartbeats}: {error}") from error
            async with ClientSession(timeout=timeout, connector=connector) as self._session:
                hearing = asyncio.create_task(self._receive_heartbeats(listener))
                yield
                hearing.cancel()
                with suppress(asyncio.CancelledError):
                    await hearing

    async def _receive_heartbeats(self, listener: zmq.asyncio.Socket) -> None:
        while True:
            _, *heard = await listener.recv_multipart()
            try:
                beat, _ = read(heard, Heartbeat)
                self.instances.note_heartbeat(beat)
            except BadMessage as error:
                logger.warning("P2P: a message to the proxy is dropped: %s", error)
            except Exception:  # logged: one bad message must not end the task
                logger.exception("P2P: an error at %s, which goes on", self._heartbeats)

    async def _health(self, request: web.Request) -> web.Response:
        """Answer with the engines by role; status 503 without one that writes."""
        known = {name: [str(one.http) for one in self.instances.of(role)] for name, role in ROLES.items()}
        return web.json_response(known, status=200 if known["decode"] else 503)

    async def _write(self, request: web.Request) -> web.StreamResponse:
        body, headers = await _passed_on(request)
        for decode in self.instances.of("D"):
            with self.instances.serving(decode):
                route = await self._read(request.path, body, headers, decode)
                named = headers if route is None else {**headers, "X-Request-Id": str(route)}
                answer = await self._answer(request, decode, body, named)
            if answer is not None:
                return answer
        return _nobody()

    async def _read(self, path: str, body: bytes, headers: Mapping[str, str], decode: Instance) -> Route | None:
        """Let another engine read the prompt; return ``None`` if none did."""
        try:
            asked = json.loads(body)
            first = json.dumps(_first_token_of(asked)).encode()
        except (ValueError, TypeError):
            return None  # the writing engine reports the error
        timeout = ClientTimeout(total=self._read_within, sock_connect=CONNECT_WITHIN)
        for prefill in self.instances.of("P"):
            if prefill.http == decode.http:
                return None  # it does both, and it is its turn
            route = Route.between(prefill.zmq, decode.zmq)
            url, named = f"http://{prefill.http}{path}", {**headers, "X-Request-Id": str(route)}
            try:
                with self.instances.serving(prefill):
                    answer = await self._asked("POST", url, data=first, headers=named, timeout=timeout)
                    async with answer:
                        await answer.read()
            except (ClientError, TimeoutError) as error:
                self.instances.failed(prefill, f"{type(error).__name__}: {error}")
                continue
            self.instances.answered(prefill)
            if answer.status == 200:
                return route
            logger.warning("P2P: engine %s answered %d to a prompt", prefill.http, answer.status)
            return None
        return None

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """Pass any other request to an engine that writes."""
        body, headers = await _passed_on(request)
        for decode in self.instances.of("D"):
            with self.instances.serving(decode):
                answer = await self._answer(request, decode, body, headers)
            if answer is not None:
                return answer
        return _nobody()

    async def _answer(
        self, request: web.Request, decode: Instance, body: bytes, headers: Mapping[str, str]
    ) -> web.StreamResponse | None:
        """Pass on an engine's answer; return ``None`` if the engine failed before the client got a part of it."""
        response: web.StreamResponse | None = None
        url = f"http://{decode.http}{request.path_qs}"
        try:
            async with await self._asked(request.method, url, data=body, headers=headers) as answer:
                self.instances.answered(decode)
                kind = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
                if "event-stream" not in kind["Content-Type"]:
                    return web.Response(status=answer.status, headers=kind, body=await answer.read())
                response = web.StreamResponse(status=answer.status, headers=kind)
                await _stream(request, answer, response)
        except _ClientGone:
            logger.debug("P2P: a client has gone; its request at engine %s ends", decode.http)
        except (ClientError, TimeoutError) as error:
            self.instances.failed(decode, f"{type(error).__name__}: {error}")
            if response is not None and request.transport is not None:
                request.transport.abort()  # so that the client does not take this for the end of the answer
        return response

    async def _asked(self, method: str, url: str, **how: Any) -> ClientResponse:
        """Call an engine, leaving the answer's body unread; repeat a request on a closed connection."""
        try:
            return await self._session.request(method, url, **how)
        except CLOSED:
            return await self._session.request(method, url, **how)


async def _stream(request: web.Request, answer: ClientResponse, response: web.StreamResponse) -> None:
    """Stream an answer to the client; raise an engine's error unchanged.

    Raises:
        _ClientGone: the client's connection ended.
    """
    try:
        await response.prepare(request)
    except ConnectionError as error:
        raise _ClientGone from error
    async for chunk in answer.content.iter_any():
        try:
            await response.write(chunk)
        except ConnectionError as error:
            raise _ClientGone from error
    with suppress(ConnectionError):
        await response.write_eof()


async def _passed_on(request: web.Request) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a client's request for an engine, always with an id from the proxy.

    Raises:
        web.HTTPBadRequest: the body should be JSON but is not, so it may contain an id.
    """
    headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
    return _without_id(await request.read(), request.content_type), {**headers, "X-Request-Id": uuid.uuid4().hex}


def _without_id(body: bytes, kind: str) -> bytes:
    """Remove ``request_id`` from the body, because vLLM would use it as the request's id."""
    if not body or kind.startswith(FORMS):
        return body
    try:
        asked = json.loads(body)
        if isinstance(asked, dict):
            asked.pop("request_id", None)
        return json.dumps(asked).encode()
    except (ValueError, RecursionError) as error:
        message = json.dumps({"error": {"message": f"the body is no JSON: {error}", "type": "BadRequest", "code": 400}})
        raise web.HTTPBadRequest(text=message, content_type="application/json") from error


def _nobody() -> web.Response:
    error = {"message": "no engine that writes answers is there", "type": "service_unavailable", "code": 503}
    return web.json_response({"error": error}, status=503)


def _first_token_of(asked: Any) -> dict[str, Any]:
    """Limit a request to one token, so that its prompt is read and no answer written."""
    if not isinstance(asked, dict):
        raise TypeError("a request is an object")
    left_out = ("stream_options", "min_tokens", "best_of", "max_completion_tokens")
    kept = {name: value for name, value in asked.items() if name not in left_out}
    return {**kept, "max_tokens": 1, "n": 1, "stream": False}


def serve(host: str, port: int, heartbeats: int, secret: Secret, read_within: float) -> None:
    """Serve until the process is asked to end.

    Raises:
        OSError: another program listens at one of the ports.
    """
    app = Proxy(Address(host, heartbeats), secret, read_within).app()
    web.run_app(app, host=host, port=port, print=None, **SERVING)
