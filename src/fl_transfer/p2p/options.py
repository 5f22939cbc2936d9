"""The options that a user may give in ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fl_dispatch.errors import ConfigError

from .protocol.secret import Secret

SOURCE = "kv_connector_extra_config"
NOT_HERE = {
    "nccl_num_channels": "NCCL chooses its channels, within NCCL_MIN_NCHANNELS and NCCL_MAX_NCHANNELS; leave it out",
}
"""Options of vLLM's former connector, and why they have no effect here."""


class SendType(StrEnum):
    """How a prompt's cache leaves the engine that read it."""

    PUT = "PUT"
    """A cache is sent after each step; the step waits until it has arrived."""
    PUT_ASYNC = "PUT_ASYNC"
    """A thread sends a cache while the engine goes on."""
    GET = "GET"
    """A cache is kept until the engine that writes the answer asks for it."""


class Transport(StrEnum):
    """The carrier of keys and values."""

    AUTO = "auto"
    """NCCL between two engines that both support it, else main memory."""
    HOST = "host"
    """Main memory, and ZMQ over TCP."""
    NCCL = "nccl"
    """Like ``auto``, but this engine does not start without NCCL."""


class Options(BaseModel):
    """The options with their defaults. Numbers may be written as text, such as ``"8e9"``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    send_type: SendType = SendType.PUT_ASYNC
    """A setting of the engine that reads prompts; the other engine takes either."""
    transport: Transport = Transport.HOST
    """Links between devices must be requested, because NCCL's have run on no GPU yet."""
    proxy_ip: str = Field("", pattern=r"^[\w.:-]*$")
    """The proxy's address, for heartbeats; without it no proxy learns of this engine."""
    proxy_port: int = Field(30001, ge=1, le=65535)
    http_port: int = Field(8000, ge=1, le=65535)
    """The port of this engine's own HTTP server; heartbeats report it to the proxy."""
    kv_buffer_size: float = Field(1e9, ge=0, allow_inf_nan=False)
    """Bytes of each worker's main memory for waiting caches."""
    mem_pool_size_gb: float = Field(1, ge=0, allow_inf_nan=False)
    """Additional gigabytes for peaks. The system allocates memory on first write."""
    device_buffer_size: float = Field(5e8, ge=0, allow_inf_nan=False)
    """Bytes of each worker's device for waiting caches, from the first link between two devices on."""
    timeout_s: float = Field(30, gt=0)
    """Seconds without progress after which a transfer is given up, and the receiver computes the prompt."""
    secret_file: Path | None = None
    """A file with the secret of all engines and the proxy; with it they encrypt, and talk only to each other."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Return the user's options.

        Raises:
            ConfigError: a name or a value is wrong.
        """
        try:
            return cls(**given)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            problem = _unknown(key) if first["type"] == "extra_forbidden" else first["msg"]
            raise ConfigError(SOURCE, key, problem) from error

    @property
    def capacity(self) -> int:
        """Return the total number of bytes for waiting caches."""
        return int(self.kv_buffer_size + self.mem_pool_size_gb * 1e9)


def check(given: Mapping[str, Any]) -> None:
    """Check that a start with these options can succeed.

    Raises:
        ConfigError: an option is wrong, or the secret cannot be read.
    """
    Secret(Options.of(given).secret_file, SOURCE)


def _unknown(key: str) -> str:
    if key in NOT_HERE:
        return NOT_HERE[key]
    near = get_close_matches(key, Options.model_fields, 1)
    return f"unknown; did you mean '{near[0]}'?" if near else f"unknown; known: {', '.join(Options.model_fields)}"
