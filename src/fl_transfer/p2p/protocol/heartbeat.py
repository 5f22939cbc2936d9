"""The heartbeat: an engine reports to the proxy as long as its own HTTP server answers."""

from __future__ import annotations

import socket
import time
from threading import Event, Thread

import zmq

from fl_dispatch.logger_manager import get_logger

from .messages import Heartbeat, frames
from .route import Address
from .secret import Secret

logger = get_logger(__name__)

EVERY = 3.0
"""Seconds between two heartbeats."""
STARTING = 0.5
"""Seconds between two checks of a server that does not answer yet."""
PATIENCE = 60.0
"""Seconds without a beat after which the log says, once, which side does not answer."""


class Heart:
    """A thread that sends heartbeats until :meth:`close`; a proxy that starts later gets later ones.

    Args:
        proxy: the proxy's address.
        role: see :class:`~fl_transfer.p2p.protocol.messages.Heartbeat`.
        http: the address of the engine's server.
        zmq_: the address of its first worker.
        secret: the proxy's secret.
    """

    def __init__(self, proxy: Address, role: str, http: Address, zmq_: Address, secret: Secret) -> None:
        self._proxy, self._http, self._secret = proxy, http, secret
        self._beat = Heartbeat(role, str(http), str(zmq_))  # type: ignore[arg-type] # its reader checks the role
        self._stop = Event()
        self._thread = Thread(target=self._run, name="fl-p2p-heart", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(EVERY)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as proxy:
            proxy.set(zmq.LINGER, 0)
            proxy.set(zmq.SNDHWM, 1)
            proxy.set(zmq.IMMEDIATE, 1)
            self._secret.call(proxy)
            proxy.connect(f"tcp://{self._proxy}")
            proxy.poll(round(STARTING * 1000), zmq.POLLOUT)
            wait, since, named = STARTING, time.monotonic(), set[str]()
            while not self._stop.wait(wait):
                missing = self._missing(proxy)
                wait = STARTING if missing else EVERY
                if not missing:
                    since = time.monotonic()
                elif missing not in named and time.monotonic() - since >= PATIENCE:
                    named.add(missing)
                    logger.warning("P2P: no proxy has heard of this engine for %g s: %s", PATIENCE, missing)

    def _missing(self, proxy: zmq.Socket[bytes]) -> str:
        """Send a heartbeat and return an empty text; or return which side does not answer."""
        try:
            socket.create_connection((self._http.host, self._http.port), 1.0).close()
        except OSError:
            return f"its HTTP server at {self._http} (http_port) does not answer"
        try:
            proxy.send_multipart(frames(self._beat), zmq.NOBLOCK)
        except zmq.Again:
            return f"no proxy answers at {self._proxy} (proxy_ip, proxy_port)"
        return ""
