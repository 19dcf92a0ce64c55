"""A client that plays the gateway: it speaks external processing to a picker as Envoy does.

The conformance tests of the Gateway API Inference Extension need a cluster and a gateway. What they ask of an endpoint
picker is asked here, over the same gRPC.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import msgspec
from google.protobuf.struct_pb2 import Struct

from preble.picker import envoy
from preble.picker.envoy import pb

DESTINATION = "x-gateway-destination-endpoint"
BODY = b'{"model": "tiny", "prompt": "hello", "stream": true}'
MOST_PIECE_BYTES = 64 * 1024
FULL_DUPLEX = pb.ProtocolConfiguration(request_body_mode=envoy.FULL_DUPLEX, response_body_mode=envoy.FULL_DUPLEX)


@dataclass
class Sent:
    """What the picker says of a request. `destinations`: its endpoints, best first. `body`: for the replica."""

    destinations: list[str]
    headers: dict[str, str]
    removed: list[str]
    body: bytes


@dataclass
class Refused:
    """What the gateway is to answer by itself."""

    status: int
    headers: dict[str, str]
    error: dict[str, Any]


@dataclass
class Exchange:
    """One request that the gateway passes through the picker. Leave it with `close`, or `abort`."""

    call: Any
    seen: list[Any] = field(default_factory=list)

    async def send(self, **fields: Any) -> None:
        await self.call.write(pb.ProcessingRequest(**fields))

    async def read(self) -> Any:
        reply = await self.call.read()
        assert reply is not grpc.aio.EOF, "the picker has ended the stream"
        self.seen.append(reply)
        return reply

    async def head(
        self,
        path: str = "/v1/completions",
        headers: Mapping[str, str] | None = None,
        *,
        method: str = "POST",
        subset: str | list[str] | None = None,
        ends: bool = False,
        config: Any = FULL_DUPLEX,
    ) -> None:
        given = {":method": method, ":path": path, ":authority": "models", **(headers or {})}
        await self.send(
            request_headers=pb.HttpHeaders(headers=header_map(given), end_of_stream=ends),
            protocol_config=config,
            metadata_context=metadata("envoy.lb.subset_hint", f"{DESTINATION}-subset", subset),
        )

    async def body(self, body: bytes = BODY, pieces: int = 1) -> None:
        size = -(-len(body) // pieces) or 1
        for start in range(0, len(body) or 1, size):
            ends = start + size >= len(body)
            await self.send(request_body=pb.HttpBody(body=body[start : start + size], end_of_stream=ends))

    async def ask(self, body: bytes = BODY, **head: Any) -> Sent | Refused:
        """Pass a whole request through."""
        await self.head(**head)
        await self.body(body)
        return await self.decision()

    async def decision(self) -> Sent | Refused:
        first = await self.read()
        if first.WhichOneof("response") == "immediate_response":
            refusal = first.immediate_response
            return Refused(refusal.status.code, changed(refusal.headers), msgspec.json.decode(refusal.body)["error"])
        common = first.request_headers.response
        headers = changed(common.header_mutation)
        assert all(o.append_action == envoy.OVERWRITE for o in set_headers(common))
        assert common.clear_route_cache
        assert first.dynamic_metadata["envoy.lb"][DESTINATION] == headers[DESTINATION], "both say the same"
        return Sent(headers[DESTINATION].split(","), headers, [*common.header_mutation.remove_headers], b"")

    async def placed(self, body: bytes = BODY, **head: Any) -> Sent:
        """Pass a request through that is placed, and take its body back."""
        sent = await self.ask(body, **head)
        assert isinstance(sent, Sent), sent
        sent.body = await self.body_back()
        return sent

    async def body_back(self) -> bytes:
        body = b""
        while True:
            piece = (await self.read()).request_body.response.body_mutation.streamed_response
            assert len(piece.body) <= MOST_PIECE_BYTES
            body += piece.body
            if piece.end_of_stream:
                return body

    async def answer_head(
        self,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        *,
        served: str | None = None,
        ends: bool = False,
    ) -> dict[str, str]:
        given = {":status": str(status), "content-type": "text/event-stream", **(headers or {})}
        await self.send(
            response_headers=pb.HttpHeaders(headers=header_map(given), end_of_stream=ends),
            metadata_context=metadata("envoy.lb", f"{DESTINATION}-served", served),
        )
        return changed((await self.read()).response_headers.response.header_mutation)

    async def answer_piece(self, piece: bytes, *, ends: bool = False) -> None:
        """The picker has to give it back as it is."""
        await self.send(response_body=pb.HttpBody(body=piece, end_of_stream=ends))
        back = (await self.read()).response_body.response.body_mutation.streamed_response
        assert (back.body, back.end_of_stream) == (piece, ends)

    async def answer(self, pieces: Sequence[bytes], **head: Any) -> dict[str, str]:
        headers = await self.answer_head(**head)
        for number, piece in enumerate(pieces):
            await self.answer_piece(piece, ends=number + 1 == len(pieces))
        return headers

    async def close(self) -> None:
        """End the stream as Envoy does when it needs nothing more."""
        await self.call.done_writing()
        await self.call.read()

    def abort(self) -> None:
        """End the stream as Envoy does when the client has gone."""
        self.call.cancel()


EVENTS = (b'data: {"choices": [{"text": "a"}]}\n\n', b'data: {"choices": [{"text": "b"}]}\n\n')
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, '
USAGE += b'"prompt_tokens_details": {"cached_tokens": 4}}}\n\ndata: [DONE]\n\n'


def header_map(headers: Mapping[str, str]) -> Any:
    return pb.HeaderMap(headers=[pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()])


def metadata(namespace: str, key: str, value: str | list[str] | None) -> Any:
    if value is None:
        return None
    found = Struct()
    found.update({key: value})
    return pb.Metadata(filter_metadata=[pb.FilterMetadataEntry(key=namespace, value=found)])


def set_headers(common: Any) -> Sequence[Any]:
    found: Sequence[Any] = common.header_mutation.set_headers
    return found


def changed(mutation: Any) -> dict[str, str]:
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


class GatewayByHand:
    """A connection to a picker. `exchange`: passes one request through."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._process = channel.stream_stream(
            f"/{envoy.SERVICE}/Process", pb.ProcessingRequest.SerializeToString, pb.ProcessingResponse.FromString
        )

    def exchange(self) -> Exchange:
        return Exchange(self._process())


@asynccontextmanager
async def gateway_to(port: int) -> AsyncIterator[GatewayByHand]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield GatewayByHand(channel)
