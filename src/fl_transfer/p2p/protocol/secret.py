"""A secret of the engines and the proxy: with it, sockets encrypt, and talk to no peer without it.

The protocol is CurveZMQ, with a key pair for the server. Here the pair is derived from the secret, so the public key is
secret, too, and a client needs it to connect. A peer without the secret is rejected before a message is stored.
"""

from __future__ import annotations

import hashlib
import ipaddress
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from fl_dispatch.errors import ConfigError
from fl_dispatch.logger_manager import get_logger

from .route import Address

logger = get_logger(__name__)

OVERHEAD = 64
"""Bytes by which encryption makes a frame longer, at most."""


class Secret:
    """The content of a file; without a file sockets are open to every peer.

    Args:
        file: the file with the secret; surrounding white space is ignored.
        source: the source of the option that names the file, for errors.

    Raises:
        ConfigError: the file cannot be read or is empty, or this ZMQ cannot encrypt.
    """

    def __init__(self, file: Path | None = None, source: str = "secret_file") -> None:
        self._private = self._public = b""
        if file is None:
            return
        try:
            content = file.read_bytes().strip()
        except OSError as error:
            raise ConfigError(source, "secret_file", f"{file} cannot be read: {error.strerror}") from error
        if not content:
            raise ConfigError(source, "secret_file", f"{file} is empty")
        if not zmq.has("curve"):
            raise ConfigError(source, "secret_file", "this build of libzmq cannot encrypt (CURVE)")
        self._private = z85.encode(hashlib.blake2b(content, digest_size=32, person=b"fl-p2p").digest())
        self._public = zmq.curve_public(self._private)

    def listen(self, socket: zmq.Socket[Any], address: Address) -> None:
        """Make a socket that will be bound to an address accept only peers with the secret."""
        if self._private:
            socket.set(zmq.CURVE_SERVER, 1)
            socket.set(zmq.CURVE_SECRETKEY, self._private)
        elif not _own_machines(address.host):
            logger.warning(
                "P2P: whoever reaches %s can fill this process's memory and forge messages, because no secret is set "
                "(secret_file)",
                address,
            )

    def call(self, socket: zmq.Socket[Any]) -> None:
        """Make a socket that will be connected talk only to peers with the secret."""
        if self._private:
            public, private = zmq.curve_keypair()
            socket.set(zmq.CURVE_SERVERKEY, self._public)
            socket.set(zmq.CURVE_PUBLICKEY, public)
            socket.set(zmq.CURVE_SECRETKEY, private)


def _own_machines(host: str) -> bool:
    """Whether only this machine can reach a socket at this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
