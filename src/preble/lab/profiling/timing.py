"""One request to a replica, with the arrival times of its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec

from preble.engines import AwaitedAnswer, Engine
from preble.engines.vllm.client import copy_source
from preble.errors import EngineError, EngineProtocolError
from preble.lab.bench.completion_stream import CompletionEvent, StreamUsage, completion_body, server_sent_data

PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """`sent_s`, `arrivals_s`: on the event loop's clock, an arrival per event. `cached_tokens`: None if unreported."""

    sent_s: float
    arrivals_s: tuple[float, ...]
    output_tokens: int
    cached_tokens: int | None

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s


class Timer:
    """Sends prompts of token ids to one replica and times the answers."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model
        self._decoder = msgspec.json.Decoder(CompletionEvent)

    async def ask(self, prompt: Sequence[int], output_tokens: int, peer: str | None = None) -> TimedAnswer:
        """Generate exactly `output_tokens` tokens after `prompt`. `peer`: from where its KV is to be copied.

        Raises: EngineError: the replica fails, refuses the request, or generates another number of tokens.
        """
        body = completion_body(self._model, prompt, output_tokens) | {"ignore_eos": True}
        if peer is not None:
            body["kv_transfer_params"] = copy_source(peer)
        encoded = msgspec.json.encode(body)
        sent_s = asyncio.get_running_loop().time()
        async with self._engine.send(PATH, encoded, {}) as response:
            if response.status != 200:
                raise await self._refusal(response)
            arrivals, usage = await self._receive(response)
        generated = len(arrivals) if usage is None else usage.completion_tokens
        self._check_length(len(arrivals), generated, output_tokens)
        return TimedAnswer(sent_s, tuple(arrivals), generated, usage.cached_tokens if usage is not None else None)

    async def _receive(self, response: AwaitedAnswer) -> tuple[list[float], StreamUsage | None]:
        arrivals: list[float] = []
        arrived_s, usage = 0.0, None

        async def chunks() -> AsyncIterator[bytes]:
            nonlocal arrived_s
            async for chunk in response.chunks():
                arrived_s = asyncio.get_running_loop().time()
                yield chunk

        async for data in server_sent_data(chunks()):
            if data == b"[DONE]":
                continue
            event = self._decode(data)
            if event.error is not None:
                raise self._error(f"broke off its answer: {event.error.message}")
            if event.choices:
                arrivals.append(arrived_s)
            usage = event.usage or usage
        return arrivals, usage

    async def _refusal(self, response: AwaitedAnswer) -> EngineError:
        content = b"".join([chunk async for chunk in response.chunks()])
        try:
            answer = self._decoder.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError):
            answer = CompletionEvent()
        said = answer.error.message if answer.error is not None else answer.message
        return self._error(f"answers {PATH} with status {response.status}: {said or repr(content[:200])}")

    def _decode(self, data: bytes) -> CompletionEvent:
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._error(f"streams an event that is no completion ({error})") from error

    def _check_length(self, num_events: int, generated: int, wanted: int) -> None:
        if not num_events:
            raise self._error("ended an answer without a token")
        if generated > wanted:
            raise self._error(f"generated {generated} tokens where max_tokens was {wanted}: it ignores max_tokens")
        if generated < wanted:
            raise self._error(
                f"stopped after {generated} of {wanted} tokens: timing needs an engine that obeys "
                "ignore_eos, as vLLM and SGLang do"
            )

    def _error(self, what: str) -> EngineProtocolError:
        return EngineProtocolError(f"replica {self._engine.url} {what}", replica_id=self._engine.replica_id)
