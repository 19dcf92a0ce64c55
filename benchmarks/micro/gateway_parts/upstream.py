"""The replica of the benchmark of the gateway, and its seam: a server that computes nothing.

It answers a completion at once: whole, or as many events as tokens are asked for, the first at once and one more every
EVENT_INTERVAL_S, each written by itself. So only the server in front of it is measured.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import httptools
import msgspec
import uvloop

EVENT_INTERVAL_S = 0.005
"""Long enough for two events of one answer not to arrive together."""
MODEL = "nothing"
_MODELS = {
    "object": "list",
    "data": [{"id": MODEL, "object": "model", "owned_by": "benchmark", "max_model_len": 2**20}],
}
_CHOICE = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None}
_COMPLETION = {"id": "cmpl-0123456789", "object": "text_completion", "created": 1, "model": MODEL, "choices": [_CHOICE]}
_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


class Sampling(msgspec.Struct):
    max_new_tokens: int = 1


class Asked(msgspec.Struct):
    """What is read of a request: in OpenAI's form, or in SGLang's own (`/generate`)."""

    stream: bool = False
    max_tokens: int | None = None
    sampling_params: Sampling | None = None

    @property
    def num_events(self) -> int:
        return self.max_tokens or (self.sampling_params or Sampling()).max_new_tokens


_ASKED = msgspec.json.Decoder(Asked)
_EVENT = b"data: " + msgspec.json.encode(_COMPLETION) + b"\n\n"
_WHOLE = msgspec.json.encode(_COMPLETION | {"usage": _USAGE})
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_EVENT_CHUNK, _LAST_CHUNKS = _chunk(_EVENT), _chunk(_EVENT) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection, which asks one thing after the other."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._path, self._body = b"", b""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._path in (b"/v1/completions", b"/v1/chat/completions", b"/generate"):
            asked = _ASKED.decode(self._body)
            if asked.stream:
                self._transport.write(_STREAM_HEAD)
                self._stream(asked.num_events, asyncio.get_running_loop().time())
            else:
                self._reply(200, _WHOLE)
        elif self._path == b"/v1/models":
            self._reply(200, msgspec.json.encode(_MODELS))
        else:
            self._reply(200 if self._path == b"/health" else 404, b"{}")

    def _reply(self, status: int, body: bytes) -> None:
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        self._transport.write(head + body)

    def _stream(self, left: int, due: float) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(_EVENT_CHUNK if left > 1 else _LAST_CHUNKS)
        if left > 1:
            due += EVENT_INTERVAL_S
            asyncio.get_running_loop().call_at(due, self._stream, left - 1, due)


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    sys.stderr.write(f"{Path(__file__).name}: listening on http://127.0.0.1:{port}\n")
    sys.stderr.flush()
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve())
