"""The client of a replica that says what it caches: where its KV events are, and the streams that follow them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from ipaddress import ip_address

import structlog

from preble.core.types import ReplicaId
from preble.engines.adapter import Engine, EngineInfo, EngineLoad, ModelNames
from preble.engines.http import HttpClient
from preble.engines.kv_events.sockets import KvEventEndpoints
from preble.engines.kv_events.stream import KvEventStream, Take
from preble.engines.openai import OpenAIEngine
from preble.errors import ConfigError, EngineProtocolError
from preble.web.client.pool import Ongoing, Receiver

RANK_HEADER = "x-data-parallel-rank"
"""Of a request, for vLLM and SGLang."""


class EventStreams:
    """The streams of KV events that follow one replica."""

    def __init__(self, replica_id: ReplicaId, reset_keeps_host: bool) -> None:
        self._replica_id = replica_id
        self._reset_keeps_host = reset_keeps_host
        self._streams: list[KvEventStream] = []

    async def follow(self, endpoints: KvEventEndpoints | None, take: Take) -> None:
        """Do as `KvEventStream.follow`; end at once without endpoints."""
        if endpoints is not None:
            stream = KvEventStream(self._replica_id, endpoints, reset_keeps_host=self._reset_keeps_host)
            self._streams = [*(other for other in self._streams if not other.closed), stream]
            await stream.follow(take)

    @property
    def have_caught_up(self) -> bool:
        return all(stream.has_caught_up for stream in self._streams)

    def resync(self) -> None:
        for stream in self._streams:
            stream.resync()

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams.clear()


class ReportingEngine(OpenAIEngine):
    """What vLLM and SGLang have in common. A probe sets `_endpoints`, those given or else those that it reports: one
    for each data-parallel rank, or none."""

    takes_cache_salt = True
    takes_ids = True
    reset_keeps_host = True
    """Whether a reset of its cache leaves what is in the host's memory."""

    def __init__(self, http: HttpClient, kv_events: KvEventEndpoints | None = None) -> None:
        super().__init__(http, kv_events)
        self._endpoints: tuple[KvEventEndpoints, ...] = () if kv_events is None else (kv_events,)
        self._streams = EventStreams(self.replica_id, self.reset_keeps_host)
        self._ranks: tuple[RankEngine, ...] = ()
        self._block_size: int | None = None
        """Of its KV events, where that is not what it says of itself."""
        self._log = structlog.get_logger(type(self).__module__).bind(replica=self.replica_id)

    @property
    def kv_event_endpoints(self) -> KvEventEndpoints | None:
        """Where its KV events are, of its first rank, as given or as the last probe found out; None for none."""
        return self._endpoints[0] if self._endpoints else None

    def ranks(self) -> tuple[Engine, ...]:
        return self._ranks or (self,)

    async def follow_kv_events(self, take: Take) -> None:
        await self._streams.follow(self.kv_event_endpoints, take)

    @property
    def has_caught_up(self) -> bool:
        return self._streams.have_caught_up

    def loads(self) -> AsyncIterator[EngineLoad | None] | None:
        return self.loads_of(0)

    def of_rank(self, rank: int) -> Engine:
        """Return the client of one rank, where another process has found out that there are several."""
        return RankEngine(self, rank)

    def paired(self, prefill: Engine) -> Engine | None:
        return self.paired_as(self, prefill)

    def paired_as(self, decode: Engine, prefill: Engine) -> Engine | None:
        """Do as `paired`, where `decode` is this server or a rank of it."""
        return None

    def loads_of(self, rank: int) -> AsyncIterator[EngineLoad | None] | None:
        """Return the load that a rank reports, as `loads`."""
        return None

    def resync_kv_events(self) -> None:
        self._streams.resync()

    def learn_block_size(self, block_size: int) -> bool:
        """Take the first size only: an engine with several reports its main cache first, or nonsense."""
        is_new = self._block_size is None
        self._block_size = self._block_size or block_size
        return is_new

    async def close(self) -> None:
        for streams in (self._streams, *(rank.streams for rank in self._ranks)):
            streams.close()
        await super().close()

    def _set_ranks(self, count: int, endpoints: tuple[KvEventEndpoints, ...]) -> None:
        """A probe has found that many data-parallel ranks, and where each publishes its events."""
        if len(endpoints) not in (0, count):
            self._log.warning("no_kv_events", reason=f"{len(endpoints)} of {count} ranks publish any")
            endpoints = ()
        self._endpoints = endpoints
        self.num_ranks = count
        if count == 1:
            self._ranks = ()
        elif len(self._ranks) != count:
            self._ranks = tuple(RankEngine(self, rank) for rank in range(count))
        for one in self._ranks:
            one.kv_peer = self.kv_peer

    def endpoints_of(self, rank: int) -> KvEventEndpoints | None:
        """Return where the events of a rank are, None where it publishes none."""
        return self._endpoints[rank] if self._endpoints else None

    def _endpoints_at(self, endpoint: str, replay: str | None, topic: str) -> KvEventEndpoints:
        """Return where to connect for the addresses that the replica reports. Raises: EngineProtocolError: bad ones."""
        host = self.http.host
        try:
            return KvEventEndpoints(reachable(endpoint, host), replay and reachable(replay, host), topic)
        except ConfigError as error:
            raise self.http.error(EngineProtocolError, f"reports a bad address: {error}") from error

    def _of_ranks(self, first: KvEventEndpoints | None, count: int) -> tuple[KvEventEndpoints, ...]:
        """Return those of every rank, given the first one's. Raises: EngineProtocolError: there are too many ranks."""
        try:
            return tuple(map(first.of_rank, range(count))) if first is not None else ()
        except ConfigError as error:
            text = f"has {count} ranks, and each takes the next port for its events: {error}"
            raise self.http.error(EngineProtocolError, text) from error

    def _say_no_events(self) -> None:
        self._log.warning("no_kv_events", reason="they are off", consequence="what it caches is estimated")


class RankEngine(Engine):
    """One data-parallel rank of a server. It shares the server's connections and has a cache and events of its own."""

    takes_cache_salt = True

    def __init__(self, server: ReportingEngine, rank: int) -> None:
        super().__init__(server.http)
        self._server = server
        self.rank = rank
        self.num_ranks = server.num_ranks
        self.kv_peer = server.kv_peer
        self.model_path = server.model_path
        self.takes_ids = server.takes_ids
        self.streams = EventStreams(self.replica_id, server.reset_keeps_host)

    @property
    def replica_id(self) -> ReplicaId:
        return ReplicaId(f"{self.http.replica_id}#{self.rank}")

    @property
    def adapter(self) -> str:
        return self._server.adapter

    @property
    def adapters(self) -> tuple[str, ...]:
        return self._server.adapters

    @adapters.setter
    def adapters(self, names: tuple[str, ...]) -> None:
        self._server.adapters = names

    async def probe(self) -> EngineInfo:
        return await self._server.probe()

    async def check_ready(self) -> None:
        await self._server.check_ready()

    async def models(self) -> ModelNames:
        return await self._server.models()

    async def tokenize(self, body: bytes) -> list[int]:
        return await self._server.tokenize(body)

    def paired(self, prefill: Engine) -> Engine | None:
        return self._server.paired_as(self, prefill)

    def answers_in_pairs(self, path: str, body: bytes) -> bool:
        return self._server.answers_in_pairs(path, body)

    def begin(self, path: str, body: bytes, headers: Mapping[str, str], receiver: Receiver) -> Ongoing:
        """Ask as any engine does, but this rank, unless the client has chosen one itself."""
        return self._server.begin(path, body, {RANK_HEADER: str(self.rank), **headers}, receiver)

    async def follow_kv_events(self, take: Take) -> None:
        await self.streams.follow(self._server.endpoints_of(self.rank or 0), take)

    @property
    def has_caught_up(self) -> bool:
        return self.streams.have_caught_up

    def loads(self) -> AsyncIterator[EngineLoad | None] | None:
        return self._server.loads_of(self.rank or 0)

    def resync_kv_events(self) -> None:
        self.streams.resync()

    def learn_block_size(self, block_size: int) -> bool:
        return self._server.learn_block_size(block_size)

    async def close(self) -> None:
        """Close nothing: the connections are the server's."""
        self.streams.close()


def reachable(endpoint: str, host: str) -> str:
    """Return the address to connect to for an endpoint that a replica on `host` binds.

    >>> reachable("tcp://*:5557", "10.0.0.5"), reachable("tcp://0.0.0.0:5557", "::1")
    ('tcp://10.0.0.5:5557', 'tcp://[::1]:5557')
    >>> reachable("tcp://10.0.0.9:5557", "10.0.0.5"), reachable("ipc:///run/events", "10.0.0.5")
    ('tcp://10.0.0.9:5557', 'ipc:///run/events')
    """
    if not endpoint.startswith("tcp://"):
        return endpoint
    bound, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if bound not in ("*", "0.0.0.0", "[::]", "::"):
        return endpoint
    return f"tcp://{bracketed(host)}:{port}"


def bracketed(host: str) -> str:
    try:
        return f"[{host}]" if ip_address(host).version == 6 else host
    except ValueError:
        return host
