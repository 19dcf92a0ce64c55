"""One request to an OpenAI-compatible endpoint, timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from preble.errors import ConfigError
from preble.lab.bench.completion_stream import CompletionEvent, StreamUsage, completion_body, server_sent_data
from preble.lab.metrics import RequestRecord
from preble.lab.metrics.itl import GapCounts, gap_key
from preble.lab.workloads import WorkloadRequest
from preble.web.client.failures import why_unreachable

Clock = Callable[[], float]
"""Seconds since the start of the run."""

LOOK_TIMEOUT_S = 30.0
"""Time limit of the question which models the endpoint serves."""

KEEP_ALIVE_S = 2.0
"""How long an idle connection is kept: engines close theirs after 5 s, and a request sent just then is lost."""

REPLICA_HEADER = "x-preble-replica"
REASON_HEADER = "x-preble-reason"


class _ListedModel(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_ListedModel]


class _RequestFailed(Exception):
    """A request that failed; `kind` is the short text by which failures are counted."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(slots=True)
class _Attempt:
    """What is known so far about one request in flight."""

    status: int | None = None
    replica: str | None = None
    reason: str | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    events: int = 0
    gaps: GapCounts = field(default_factory=dict)
    usage: StreamUsage | None = None


@dataclass(eq=False, repr=False)
class BenchClient:
    """Sends completions to one endpoint. An async context manager: leaving it closes its connections.

    `model`: None takes the first that the endpoint serves. `ignore_eos`: ask for exactly the number of tokens (an
    extension of vLLM, SGLang and the emulator). `timeout_s`: for one request, from sending to its last byte.
    """

    url: str
    _: KW_ONLY
    model: str | None = None
    api_key: str | None = None
    ignore_eos: bool = True
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        self._encode = msgspec.json.Encoder().encode
        self._decoder = msgspec.json.Decoder(CompletionEvent)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            timeout=aiohttp.ClientTimeout(total=self.timeout_s, connect=min(30.0, self.timeout_s)),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def find_model(self) -> str:
        """Return the model that requests will name, after the endpoint has answered.

        Raises: ConfigError: no answer, no OpenAI-compatible endpoint, or no such model.
        """
        names = await self._served_models()
        if self.model is None:
            self.model = names[0]
        elif self.model not in names:
            raise ConfigError(f"{self.url} does not serve {self.model!r}; it serves {', '.join(names)}")
        return self.model

    async def _served_models(self) -> list[str]:
        try:
            timeout = aiohttp.ClientTimeout(total=LOOK_TIMEOUT_S)
            async with self._session.get(f"{self.url}/v1/models", timeout=timeout) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ConfigError(f"nothing answers at {self.url}: {why_unreachable(error)}; is it running?") from error
        if response.status in (401, 403):
            raise ConfigError(f"{self.url} requires a valid API key; give --api-key")
        if response.status != 200:
            raise ConfigError(f"{self.url}/v1/models answers with status {response.status}; is it an OpenAI endpoint?")
        try:
            names = [model.id for model in msgspec.json.decode(body, type=_Models).data]
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self.url}/v1/models does not answer as an OpenAI endpoint: {error}") from error
        if not names:
            raise ConfigError(f"{self.url} serves no model now; start its replicas")
        return names

    async def send(self, request: WorkloadRequest, scheduled_s: float, clock: Clock) -> RequestRecord:
        """Send one request, receive its whole answer, and return its record, which also has failures.

        Call `find_model` first.
        """
        attempt, error = _Attempt(), None
        asked = completion_body(self.model, request.prompt(), request.output_tokens)
        body = self._encode(asked | {"ignore_eos": True} if self.ignore_eos else asked)
        sent_s = clock()
        try:
            await self._receive(body, attempt, clock)
        except _RequestFailed as failure:
            error = failure.kind
        except TimeoutError:
            error = "timeout"
        except (aiohttp.ClientError, OSError) as failure:
            error = f"connection: {type(failure).__name__}"
        usage = attempt.usage or StreamUsage(completion_tokens=attempt.events)
        return RequestRecord(
            request_id=request.request_id,
            scheduled_s=scheduled_s,
            sent_s=sent_s,
            first_token_s=attempt.first_token_s,
            end_s=clock(),
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            replica=attempt.replica,
            reason=attempt.reason,
            status=attempt.status,
            error=error,
            gaps=attempt.gaps,
        )

    async def _receive(self, body: bytes, attempt: _Attempt, clock: Clock) -> None:
        """POST, read to the end, and fill in `attempt`.

        Raises: _RequestFailed, aiohttp.ClientError, OSError, TimeoutError.
        """
        headers = {"Content-Type": "application/json"}
        async with self._session.post(f"{self.url}/v1/completions", data=body, headers=headers) as response:
            attempt.status = response.status
            attempt.replica = response.headers.get(REPLICA_HEADER)
            attempt.reason = response.headers.get(REASON_HEADER)
            if response.status != 200:
                raise _RequestFailed(f"status {response.status}")
            is_done = False
            async for data in server_sent_data(response.content.iter_any()):
                if data == b"[DONE]":
                    is_done = True
                else:
                    self._take(data, attempt, clock)
            if not is_done:
                raise _RequestFailed("answer cut off")

    def _take(self, data: bytes, attempt: _Attempt, clock: Clock) -> None:
        try:
            event = self._decoder.decode(data)
        except msgspec.DecodeError:
            raise _RequestFailed("answer not understood") from None
        if event.error is not None:
            raise _RequestFailed(f"error {event.error.code or event.error.message[:60]}")
        if event.choices:
            now_s = clock()
            if attempt.first_token_s is None:
                attempt.first_token_s = now_s
            else:
                key = gap_key(now_s - attempt.last_token_s)
                attempt.gaps[key] = attempt.gaps.get(key, 0) + 1
            attempt.last_token_s = now_s
            attempt.events += 1
        if event.usage is not None:
            attempt.usage = event.usage
