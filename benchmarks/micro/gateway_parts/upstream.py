"""The replicas of the benchmark of the gateway, and its seam: servers that compute nothing.

    python upstream.py NUM_REPLICAS [TOKENIZER_FOLDER]

Each answers a completion at once: whole, or as many events as tokens are asked for, the first at once and one more
every EVENT_INTERVAL_S, each written by itself. So only the server in front of them is measured. With a tokenizer they
keep count of a prefix cache and publish KV events of it, as vLLM does.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httptools
import msgspec
import uvloop

if TYPE_CHECKING:
    from gateway_parts.cache import Computing, PublishedCache

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
    prompt: str | list[int] | None = None
    text: str | None = None
    input_ids: list[int] | None = None

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
    """One connection, which asks one thing after the other. `cache`: None for a replica that publishes nothing."""

    def __init__(self, cache: PublishedCache | None = None) -> None:
        self._cache = cache
        self._request: Computing | None = None

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
            if self._cache is not None:
                self._request = self._cache.take(asked.prompt or asked.text or asked.input_ids, self._body)
            if asked.stream:
                self._transport.write(_STREAM_HEAD)
                self._stream(asked.num_events, asyncio.get_running_loop().time())
            else:
                self._reply(200, _WHOLE)
                self._end()
        elif self._path == b"/v1/models":
            self._reply(200, msgspec.json.encode(_MODELS))
        elif self._path == b"/metrics" and self._cache is not None:
            self._reply(200, self._cache.metrics().encode())
        elif self._path == b"/kv_event_sources" and self._cache is not None:
            self._reply(200, msgspec.json.encode(self._cache.sources()))
        else:
            self._reply(200 if self._path == b"/health" else 404, b"{}")

    def _reply(self, status: int, body: bytes) -> None:
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        self._transport.write(head + body)

    def _stream(self, left: int, due: float) -> None:
        if self._transport.is_closing():
            self._end()
            return
        self._transport.write(_EVENT_CHUNK if left > 1 else _LAST_CHUNKS)
        if self._cache is not None and self._request is not None:
            self._cache.add_token(self._request)
        if left == 1:
            self._end()
        else:
            due += EVENT_INTERVAL_S
            asyncio.get_running_loop().call_at(due, self._stream, left - 1, due)

    def _end(self) -> None:
        if self._cache is not None and self._request is not None:
            self._cache.end(self._request)
            self._request = None


async def _serve(num_replicas: int, tokenizer: Path | None) -> None:
    loop, addresses = asyncio.get_running_loop(), []
    async with asyncio.TaskGroup() as tasks:
        for cache in [None] * num_replicas if tokenizer is None else _caches(num_replicas, tokenizer):
            if cache is not None:
                tasks.create_task(cache.publish())
            server = await loop.create_server(partial(Connection, cache), "127.0.0.1", 0)
            addresses.append("http://{}:{}".format(*server.sockets[0].getsockname()))
            tasks.create_task(server.serve_forever())
        sys.stderr.write("".join(f"{Path(__file__).name}: listening on {address}\n" for address in addresses))
        sys.stderr.flush()


def _caches(count: int, tokenizer: Path) -> list[PublishedCache]:
    sys.path.append(str(Path(__file__).parents[1]))
    from gateway_parts.cache import PromptTokenizer, PublishedCache  # the others start without the package

    shared = PromptTokenizer(tokenizer)
    return [PublishedCache(shared) for _ in range(count)]


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
