"""The messages between gateways: msgpack, one packet in each NATS message.

A packet is [version, sender, messages]. A message is a list that begins with its kind. Decoding trusts nothing:
anything but a packet of this version, and one that is too large, raises `BadPacket`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from preble.core.types import TOKEN_BYTES, PeerId

VERSION = 1
MAX_PACKET_BYTES = 1024 * 1024
"""The default limit of a NATS server."""
Name = Annotated[str, Meta(min_length=1, max_length=512)]
Number = Annotated[int, Meta(ge=0, lt=2**53)]
Head = Annotated[bytes, Meta(max_length=16)]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages. `number`: of a request; the gateway that placed it counts its own."""


class Tokens(_Message, frozen=True, tag="t"):
    """A piece of a prompt that a later message names: see `PromptName`."""

    head: Head
    tail: bytes


class PlacedRequest(_Message, frozen=True, tag="p"):
    """The sender has placed a request. `matched_tokens`: None if it does not know."""

    number: Number
    replica: Name
    num_prompt_tokens: Number
    matched_tokens: Number | None
    head: Head
    tail: bytes
    namespace: Annotated[str, Meta(max_length=512)] = ""


class Held(_Message, frozen=True, tag="h"):
    """For a peer that the sender has just met: a replica without KV events has computed this prompt lately."""

    replica: Name
    head: Head
    tail: bytes
    namespace: Annotated[str, Meta(max_length=512)] = ""


class FirstToken(_Message, frozen=True, tag="f"):
    number: Number


class Ended(_Message, frozen=True, tag="e"):
    number: Number
    output_tokens: Number = 0
    cached_tokens: Number | None = None


class Beat(_Message, frozen=True, tag="b"):
    """The sender is alive. Of its requests before `next_number`, only `waiting` and `decoding` are in flight.

    `knows`: the peers that it hears, and that have its list of everything in flight.
    """

    next_number: Number
    waiting: tuple[Number, ...] = ()
    decoding: tuple[Number, ...] = ()
    knows: tuple[Name, ...] = ()


class Again(_Message, frozen=True, tag="a"):
    """The sender has missed these requests: it asks gateway `peer` to send them again."""

    peer: Name
    numbers: tuple[Number, ...]


class Unknown(_Message, frozen=True, tag="u"):
    """The sender does not know what these names stand for."""

    heads: tuple[Head, ...]


class Ejected(_Message, frozen=True, tag="x"):
    """The sender keeps its requests away from a replica that fails."""

    replica: Name


class Used(_Message, frozen=True, tag="s"):
    """What keys and tenants have used at the sender since its last `Used`.

    `keys`: names of keys, their requests and tokens (negative for tokens given back). `tenants`: seconds of GPU time.
    """

    keys: tuple[tuple[Name, Number, Annotated[int, Meta(gt=-(2**53), lt=2**53)]], ...] = ()
    tenants: tuple[tuple[Name, Annotated[float, Meta(ge=-1e6, le=1e6)]], ...] = ()


class Left(_Message, frozen=True, tag="l"):
    """The sender stops, and has nothing in flight any more."""


Message = Tokens | PlacedRequest | Held | FirstToken | Ended | Beat | Again | Unknown | Ejected | Used | Left


class Packet(msgspec.Struct, frozen=True, array_like=True):
    """What one gateway publishes at once. `sender`: see `preble.core.types.PeerId`; new at each start of a gateway."""

    version: int
    sender: Name
    messages: tuple[Message, ...]


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The part of a packet that every version has."""

    version: int


class BadPacket(ValueError):
    """What arrived is no packet that this gateway understands."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Packet)
_envelopes = msgspec.msgpack.Decoder(_Envelope)


def encode(sender: PeerId, messages: tuple[Message, ...]) -> bytes:
    """Return a packet, for `decode`."""
    return _encoder.encode(Packet(VERSION, sender, messages))


def decode(data: bytes) -> Packet:
    """Return the packet. Raises: BadPacket.

    >>> decode(encode(PeerId("east"), (FirstToken(7),))).messages
    (FirstToken(number=7),)
    """
    if len(data) > MAX_PACKET_BYTES:
        raise BadPacket(f"it has {len(data)} bytes; at most {MAX_PACKET_BYTES} are accepted")
    try:
        version = _envelopes.decode(data).version
        if version != VERSION:
            raise BadPacket(f"it is of version {version}; this gateway speaks version {VERSION}")
        packet = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadPacket(str(error)) from error
    for message in packet.messages:
        if isinstance(message, PlacedRequest | Held | Tokens) and len(message.tail) % TOKEN_BYTES:
            raise BadPacket(f"a prompt's tokens are no multiple of {TOKEN_BYTES} bytes")
    return packet
