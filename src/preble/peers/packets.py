"""The messages between gateways: msgpack, one packet in each NATS message.

A packet is [version, MACs, body], and the body [sender, number, messages]. A message is a list that begins with its
kind. Decoding trusts nothing: anything but a packet of this version, and one that is too large, raises `BadPacket`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from preble.core.types import TOKEN_BYTES, PeerId
from preble.core.types.life import Ended, FirstToken, TransferFailed, Transferred

VERSION = 6
MAX_PACKET_BYTES = 1024 * 1024
"""The default limit of a NATS server."""
Name = Annotated[str, Meta(min_length=1, max_length=512)]
Number = Annotated[int, Meta(ge=0, lt=2**53)]
MOST_MACS, MAC_BYTES = 4, 16
Mac = Annotated[bytes, Meta(min_length=MAC_BYTES, max_length=MAC_BYTES)]
Head = Annotated[bytes, Meta(max_length=16)]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages. `number`: of a request; the gateway that placed it counts its own."""


class Tokens(_Message, frozen=True, tag="t"):
    """A piece of a prompt that a later message names: see `PromptName`."""

    head: Head
    tail: bytes


class PlacedRequest(_Message, frozen=True, tag="p"):
    """The sender has placed a request. `matched_tokens`: None if it does not know. `source`: the replica that computes
    the prompt for the other one."""

    number: Number
    replica: Name
    num_prompt_tokens: Number
    matched_tokens: Number | None
    head: Head
    tail: bytes
    namespace: Annotated[str, Meta(max_length=512)] = ""
    source: Name | None = None


class Held(_Message, frozen=True, tag="h"):
    """For a peer that the sender has just met: a replica without KV events has computed this prompt lately."""

    replica: Name
    head: Head
    tail: bytes
    namespace: Annotated[str, Meta(max_length=512)] = ""


class RequestReport(_Message, frozen=True, tag="r"):
    """What has happened to a request that the sender has placed."""

    number: Number
    fact: Transferred | TransferFailed | FirstToken | Ended


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

    `keys`: names of keys, their requests and tokens. `tenants`: seconds of GPU time. What is given back is kept until
    more is used: nothing here is negative.
    """

    keys: tuple[tuple[Name, Number, Number], ...] = ()
    tenants: tuple[tuple[Name, Annotated[float, Meta(ge=0, le=1e6)]], ...] = ()


class Left(_Message, frozen=True, tag="l"):
    """The sender stops, and has nothing in flight any more."""


Message = Tokens | PlacedRequest | Held | RequestReport | Beat | Again | Unknown | Ejected | Used | Left


class Packet(msgspec.Struct, frozen=True, array_like=True):
    """What one gateway publishes at once. `sender`: see `preble.core.types.PeerId`; new at each start of a gateway.

    `number`: above those of all packets that it has sent.
    """

    sender: Name
    number: Number
    messages: tuple[Message, ...]


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    """A packet on the bus. `macs`: see `preble.peers.seal`."""

    version: int
    macs: Annotated[tuple[Mac, ...], Meta(max_length=MOST_MACS)]
    body: bytes


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The part that every version has."""

    version: int


class Why(StrEnum):
    """Why a packet was not taken."""

    MALFORMED = "malformed"
    UNSIGNED = "unsigned"
    REPLAYED = "replayed"


class BadPacket(ValueError):
    """What arrived is no packet that this gateway takes."""

    def __init__(self, text: str, why: Why = Why.MALFORMED) -> None:
        super().__init__(text)
        self.why = why


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Packet)
_sealed = msgspec.msgpack.Decoder(_Sealed)
_envelopes = msgspec.msgpack.Decoder(_Envelope)


def encode(sender: PeerId, number: int, messages: tuple[Message, ...]) -> bytes:
    """Return a packet's body, for `decode`."""
    return _encoder.encode(Packet(sender, number, messages))


def join(macs: tuple[bytes, ...], body: bytes) -> bytes:
    """Return a packet as it travels, for `split`."""
    return _encoder.encode(_Sealed(VERSION, macs, body))


def split(data: bytes) -> tuple[tuple[bytes, ...], bytes]:
    """Return a packet's MACs and its body. Raises: BadPacket."""
    if len(data) > MAX_PACKET_BYTES:
        raise BadPacket(f"it has {len(data)} bytes; at most {MAX_PACKET_BYTES} are accepted")
    try:
        version = _envelopes.decode(data).version
        if version != VERSION:
            raise BadPacket(f"it is of version {version}; this gateway speaks version {VERSION}")
        sealed = _sealed.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadPacket(str(error)) from error
    return sealed.macs, sealed.body


def decode(body: bytes) -> Packet:
    """Return the packet. Raises: BadPacket.

    >>> decode(encode(PeerId("east"), 1, (RequestReport(7, FirstToken()),))).messages
    (RequestReport(number=7, fact=FirstToken()),)
    """
    try:
        packet = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadPacket(str(error)) from error
    for message in packet.messages:
        if isinstance(message, PlacedRequest | Held | Tokens) and len(message.tail) % TOKEN_BYTES:
            raise BadPacket(f"a prompt's tokens are no multiple of {TOKEN_BYTES} bytes")
    return packet
