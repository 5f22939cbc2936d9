"""Messages between engines and to the proxy: two ZMQ frames, a header and the data.

A header is a small MessagePack map, checked field by field; no message is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, overload

import msgspec
from msgspec import Meta

HEADER_BYTES = 4096
"""The longest header. Names, addresses and reasons are bounded so that each of our messages fits."""

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=300)]
AT_ONCE = 20
"""The most transfers that one message takes back, limited by the header; a socket queues 1,000 messages."""
Layout = Annotated[bytes, Meta(min_length=16, max_length=16)]
Count = Annotated[int, Meta(ge=1, lt=1 << 40)]
Data = bytes | memoryview


class Meet(msgspec.Struct, tag="meet", frozen=True, forbid_unknown_fields=True):
    """A sender's request for a link; an engine has one link from each ``sender``."""

    name: Name
    kind: Name
    sender: Name


class Ticket(msgspec.Struct, tag="ticket", frozen=True, forbid_unknown_fields=True):
    """A sender's ticket for an agreed link; the receiver's end needs the ``ticket``."""

    name: Name
    ticket: Annotated[bytes, Meta(min_length=1, max_length=1024)]


class Met(msgspec.Struct, tag="met", frozen=True, forbid_unknown_fields=True):
    """The answer to a :class:`Meet` or a :class:`Ticket`: the link is possible, or ``refused`` says why not."""

    name: Name
    refused: Text = ""


class Put(msgspec.Struct, tag="put", frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Some blocks of a prompt: ``count`` blocks of data from the prompt's block ``first`` on, of ``total``.

    With a ``link``'s name there is no data: the link carries it once the receiver answers :class:`Go`.
    """

    transfer: Name
    layout: Layout
    first: Annotated[int, Meta(ge=0, lt=1 << 40)]
    count: Count
    total: Count
    link: Annotated[str, Meta(max_length=128)] = ""


class Go(msgspec.Struct, tag="go", frozen=True, forbid_unknown_fields=True):
    """The answer to a :class:`Put` that names a link: the receiver is ready, or wants the data in a message."""

    transfer: Name
    first: Annotated[int, Meta(ge=0, lt=1 << 40)]
    by_message: bool = False


class Taken(msgspec.Struct, tag="taken", frozen=True, forbid_unknown_fields=True):
    """The answer to a :class:`Put`: the blocks from ``first`` on have arrived, or ``refused`` says why not."""

    transfer: Name
    first: Annotated[int, Meta(ge=0, lt=1 << 40)]
    refused: Text = ""


class Get(msgspec.Struct, tag="get", frozen=True, forbid_unknown_fields=True):
    """The question of an engine that awaits a prompt, repeated until the prompt arrives."""

    transfer: Name


class State(msgspec.Struct, tag="state", frozen=True, forbid_unknown_fields=True):
    """The answer to a :class:`Get`: the rest will come, or ``gone`` says why not."""

    transfer: Name
    gone: Text = ""


class Void(msgspec.Struct, tag="void", frozen=True, forbid_unknown_fields=True):
    """Notice that a sender takes transfers back: the received data is wrong, and no more comes. Without an answer."""

    transfers: Annotated[list[Name], Meta(min_length=1, max_length=AT_ONCE)]
    why: Text


class Heartbeat(msgspec.Struct, tag="heartbeat", frozen=True, forbid_unknown_fields=True):
    """Notice that an engine is alive: ``P`` reads prompts, ``D`` writes answers, ``PD`` both."""

    role: Literal["P", "D", "PD"]
    http: Name
    zmq: Name


Message = Meet | Ticket | Met | Put | Go | Taken | Get | State | Void | Heartbeat
One = TypeVar("One", bound=msgspec.Struct)
Other = TypeVar("Other", bound=msgspec.Struct)
Third = TypeVar("Third", bound=msgspec.Struct)
Fourth = TypeVar("Fourth", bound=msgspec.Struct)
Fifth = TypeVar("Fifth", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class BadMessage(ValueError):  # noqa: N818 - it is the message that is bad
    """Frames that are not one of these messages."""


def frames(message: Message, data: Data = b"") -> list[Data]:
    """Return the frames of a message."""
    return [_encoder.encode(message), data]


@overload
def read(frames: Sequence[Data], kind: type[One], /) -> tuple[One, memoryview]: ...


@overload
def read(
    frames: Sequence[Data], kind: type[One], other: type[Other], third: type[Third], /
) -> tuple[One | Other | Third, memoryview]: ...


@overload
def read(
    frames: Sequence[Data],
    kind: type[One],
    other: type[Other],
    third: type[Third],
    fourth: type[Fourth],
    fifth: type[Fifth],
    /,
) -> tuple[One | Other | Third | Fourth | Fifth, memoryview]: ...


def read(frames: Sequence[Data], /, *kinds: type[Any]) -> tuple[Any, memoryview]:
    """Read a message of one of these kinds, and its data.

    Raises:
        BadMessage: the frames are not such a message.
    """
    if len(frames) != 2:
        raise BadMessage(f"{len(frames)} frames, not 2")
    header, data = frames
    if len(header) > HEADER_BYTES:
        raise BadMessage(f"a header of {len(header)} bytes, at most {HEADER_BYTES} are read")
    try:
        message = _decoder.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"the header is wrong: {error}") from error
    if not isinstance(message, kinds):
        raise BadMessage(f"a {type(message).__name__} does not belong here")
    return message, memoryview(data)


def short(text: str) -> str:
    """Shorten a reason so that it fits into a message."""
    return text[:300]
