"""The route of one prompt's KV cache, as the proxy wrote it into the request's id."""

from __future__ import annotations

import hashlib
import re
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

_ROUTE = re.compile(
    r"___prefill_addr_(?P<prefill>[^\s_]{1,255})___decode_addr_(?P<decode>[^\s_]{1,255})_(?P<name>[0-9a-f]{32})"
)


@dataclass(frozen=True)
class Address:
    """The address of a listening socket; ``host`` is a name or an IP address, without brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address ``host:port``; IPv6 is in brackets.

        Raises:
            ValueError: the text is not an address.
        """
        host, _, port = text.rpartition(":")
        found = re.fullmatch(r"([\w.-]+)|\[([0-9a-fA-F:.]+)\]", host, re.ASCII)
        if found is None or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} is no address of the form host:port")
        return cls(found[1] or found[2], int(port))

    def of_rank(self, rank: int) -> Address:
        """Return the address of a rank's worker; this address is the first worker's."""
        return Address(self.host, self.port + rank)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Route:
    """One request's route: the engine that reads its prompt, the one that writes its answer, and a unique name."""

    prefill: Address
    decode: Address
    name: str

    @classmethod
    def between(cls, prefill: Address, decode: Address) -> Route:
        """Make the route of a new request, with a name that cannot be guessed."""
        return cls(prefill, decode, uuid.uuid4().hex)

    @classmethod
    def of(cls, request_id: str) -> Route | None:
        """Return the route in a request's id, which vLLM extends (``_base_request_id``, ``assign_request_id``)."""
        found = _ROUTE.search(request_id)
        if found is None:
            return None
        try:
            return cls(Address.parse(found["prefill"]), Address.parse(found["decode"]), found["name"])
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"___prefill_addr_{self.prefill}___decode_addr_{self.decode}_{self.name}"


def transfer_of(name: str, request: Request) -> str:
    """Return the name of a prompt's transfer: the route's name, and a digest of all that its keys and values depend on.

    So two engines that interpret a request differently never exchange its cache.
    """
    lora = request.lora_request.lora_name if request.lora_request is not None else None
    beside = [lora, request.cache_salt, *((one.identifier, one.mm_position.offset) for one in request.mm_features)]
    return f"{name}-{digest(request.prompt_token_ids or (), repr(beside))}"


def digest(tokens: Sequence[int], beside: str = "") -> str:
    """Return 32 hexadecimal digits for tokens, and for everything else that their keys and values depend on."""
    hashed = hashlib.blake2b(struct.pack(f"<{len(tokens)}q", *tokens), digest_size=16)
    hashed.update(beside.encode())
    return hashed.hexdigest()
