"""The client of one SGLang replica: configures itself by asking, follows its KV events, and aborts by request id.

SGLang notices that a client is gone after up to four seconds where the answer is not streamed. So each request that may
carry one gets an id of ours, by which it is aborted at once when we leave before its end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated
from uuid import uuid4

import msgspec

from preble.core.types import ReplicaSpec, Role
from preble.engines.adapter import Engine, EngineInfo, EngineLoad, PriorityOrder
from preble.engines.http import HttpClient
from preble.engines.json_fields import add_fields_before
from preble.engines.kv_events.sockets import KvEventEndpoints
from preble.engines.openai import adapters_among, roots_of, served_models
from preble.engines.reporting import ReportingEngine, bracketed
from preble.engines.sglang.bodies import GENERATING_PATHS, num_answers, with_adapter, with_request_id
from preble.engines.sglang.load_stream import LoadStream
from preble.engines.sglang.pairs import SglangPair
from preble.errors import EngineError
from preble.web.client.pool import Ongoing, Receiver

OWNER = "sglang"
"""What its `/v1/models` says to be owned by."""

ABORT_TIMEOUT_S = 2.0
_ROLES = MappingProxyType({"prefill": Role.PREFILL, "decode": Role.DECODE})
"""By what SGLang says of its `--disaggregation-mode`; without one it does both."""
_BOOTSTRAP_PORT = 8998
_PAIRED = b'{"bootstrap_host":'
"""How the body begins that both of a pair get."""
_NO_TRANSFER: Mapping[str, str | int] = MappingProxyType(
    {"bootstrap_host": "2.2.2.2", "bootstrap_port": _BOOTSTRAP_PORT, "bootstrap_room": 0}
)
"""With these SGLang answers a request of its own in a fixed role and moves no KV, as its own health checks do."""
_Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class SglangEventSource(msgspec.Struct):
    """Where KV events and load are published: data-parallel rank r uses the ports `..._base` + r."""

    publisher: str | None = None
    endpoint_host: str | None = None
    endpoint_port_base: _Port | None = None
    replay_endpoint_port_base: _Port | None = None
    load_endpoint_port_base: _Port | None = None
    topic: str = ""
    load_topic: str = "load"
    dp_size: int = 1


class ServerInfo(msgspec.Struct):
    """What we use of `/server_info`."""

    page_size: int | None = None
    max_total_num_tokens: int | None = None
    enable_cache_report: bool | None = None
    kv_events: SglangEventSource | None = None
    enable_priority_scheduling: bool | None = None
    schedule_low_priority_values_first: bool | None = None
    disaggregation_mode: str | None = None
    disaggregation_bootstrap_port: _Port | None = None
    disaggregation_decode_enable_radix_cache: bool | None = None
    disaggregation_transfer_backend: str | None = None
    kv_cache_dtype: str | None = None

    @property
    def transport(self) -> str:
        """What two servers must share to send KV. SGLang refuses another data type, but only when a request comes."""
        return " ".join(filter(None, (self.disaggregation_transfer_backend, self.kv_cache_dtype)))

    @property
    def priority(self) -> PriorityOrder | None:
        """Without its flag, SGLang ignores a `priority` or, as it is started, refuses it."""
        if not self.enable_priority_scheduling:
            return None
        return PriorityOrder(1 if self.schedule_low_priority_values_first else -1, is_required=True)


class LoadsAnswer(msgspec.Struct):
    version: str | None = None


class SglangEngine(ReportingEngine):
    """The client of one SGLang replica."""

    reset_keeps_host = False

    def __init__(self, http: HttpClient, kv_events: KvEventEndpoints | None = None) -> None:
        super().__init__(http, kv_events)
        self._load_endpoints: tuple[KvEventEndpoints, ...] = ()
        """By rank; empty where it reports no load."""
        self._load_streams: list[LoadStream] = []
        self._aborting: set[asyncio.Task[None]] = set()
        self.role = Role.MIXED
        """With which it was started, where a probe has found out."""

    @classmethod
    async def recognizes(cls, http: HttpClient) -> bool:
        return (await served_models(http))[0].owned_by == OWNER

    async def probe(self) -> EngineInfo:
        """Ask what it serves, how large its cache is and where it publishes. Raises: EngineError."""
        models = await served_models(self.http)
        info: ServerInfo = (await self.http.ask("/server_info")).decode(ServerInfo)
        self.role = _ROLES.get(info.disaggregation_mode or "", Role.MIXED)
        self.transport = "" if self.role is Role.MIXED else info.transport
        self.kv_peer = None
        if self.role is Role.PREFILL:
            port = info.disaggregation_bootstrap_port or _BOOTSTRAP_PORT
            self.kv_peer = self.given_kv_peer or f"{bracketed(self.http.host)}:{port}"
        loads = await self.http.ask("/v1/loads")
        num_ranks = max(info.kv_events.dp_size, 1) if info.kv_events is not None else 1
        first = self.given_kv_events or self._endpoints_of(info.kv_events)
        self._set_ranks(num_ranks, self._of_ranks(first, num_ranks))
        self._load_endpoints = self._of_ranks(self._load_endpoints_of(info.kv_events), num_ranks)
        if not info.enable_cache_report:
            self._log.warning("no_cache_report", hint="start SGLang with --enable-cache-report")
        return EngineInfo(
            engine="sglang",
            models=tuple(model.id for model in models),
            spec=ReplicaSpec(
                self.replica_id,
                kv_capacity_tokens=info.max_total_num_tokens,
                max_prompt_tokens=models[0].max_model_len,
                block_size=self._block_size or info.page_size or 1,
                reports_events=bool(self._endpoints) and self._caches(info),
                role=self.role,
                answers_alone=self.role is not Role.DECODE,
            ),
            max_model_len=models[0].max_model_len,
            adapters=adapters_among(models),
            roots=roots_of(models),
            kv_events=self._endpoints,
            version=loads.decode(LoadsAnswer).version if loads.status == 200 else None,
            priority=info.priority,
        )

    def _caches(self, info: ServerInfo) -> bool:
        """Return whether it keeps prefixes: mostly one that decodes does not, and its events say nothing."""
        return self.role is not Role.DECODE or bool(info.disaggregation_decode_enable_radix_cache)

    async def check_ready(self) -> None:
        """Return if the engine answers. Not by `/health`, which computes a token each time. Raises: EngineError."""
        (await self.http.ask("/v1/loads")).require_ok()

    def _endpoints_of(self, source: SglangEventSource | None) -> KvEventEndpoints | None:
        """Return where the events of the first rank are. Raises: EngineProtocolError."""
        if source is None or source.publisher != "zmq" or source.endpoint_port_base is None:
            self._say_no_events()
            return None
        return self._at(source.endpoint_host, source.endpoint_port_base, source.replay_endpoint_port_base, source.topic)

    def _load_endpoints_of(self, source: SglangEventSource | None) -> KvEventEndpoints | None:
        """Return where its first rank's load is, framed as KV events are, with no past. Raises: EngineProtocolError."""
        if source is None or source.load_endpoint_port_base is None:
            return None
        return self._at(source.endpoint_host, source.load_endpoint_port_base, None, source.load_topic)

    def _at(self, host: str | None, port: int, replay_port: int | None, topic: str) -> KvEventEndpoints:
        """Raises: EngineProtocolError: addresses that are none."""

        def at(number: int) -> str:
            return f"tcp://{host or '*'}:{number}"

        return self._endpoints_at(at(port), None if replay_port is None else at(replay_port), topic)

    def begin(self, path: str, body: bytes, headers: Mapping[str, str], receiver: Receiver) -> Ongoing:
        """Send what generates under an id of our own, by which the engine aborts it if we leave before its end.

        SGLang ignores a body's model: it answers with the base model, even where it lists an adapter of that name.
        So the adapter is named apart.
        """
        request_id = f"preble-{uuid4().hex}"
        if self.role is not Role.MIXED and path in GENERATING_PATHS and not body.startswith(_PAIRED):
            body = add_fields_before(body, _NO_TRANSFER)  # a question of our own
        changed = with_adapter(body, self.adapters)
        named = with_request_id(changed, request_id) if path in GENERATING_PATHS else None
        if named is None:
            return self.http.begin(path, changed, headers, receiver)
        return self.http.begin(path, named, headers, receiver, partial(self._abort_soon, request_id))

    def paired_as(self, decode: Engine, prefill: Engine) -> Engine | None:
        return SglangPair(decode, prefill)

    def answers_in_pairs(self, path: str, body: bytes) -> bool:
        return num_answers(body) == 1

    def _abort_soon(self, request_id: str) -> None:
        aborting = asyncio.get_running_loop().create_task(self._abort(request_id))
        self._aborting.add(aborting)
        aborting.add_done_callback(self._aborting.discard)

    async def _abort(self, request_id: str) -> None:
        """Ask the engine to abort, for a limited time. If it does not answer, it notices by itself or is gone."""
        body = msgspec.json.encode({"rid": request_id})
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self.http.ask("/abort_request", body)

    def loads_of(self, rank: int) -> AsyncIterator[EngineLoad | None] | None:
        if not self._load_endpoints:
            return None
        stream = LoadStream(self.replica_id, self._load_endpoints[rank])
        self._load_streams = [*(other for other in self._load_streams if not other.closed), stream]
        return stream.loads()

    async def close(self) -> None:
        for stream in self._load_streams:
            stream.close()
        self._load_streams.clear()
        await super().close()
