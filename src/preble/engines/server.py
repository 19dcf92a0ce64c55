"""From a URL to the replicas behind it, through the adapter of the program that runs there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from preble.core.types import ReplicaId, ReplicaSpec, Role
from preble.engines.adapter import Engine, EngineInfo
from preble.engines.http import HttpClient, HttpTimeouts
from preble.engines.kv_events.sockets import KvEventEndpoints
from preble.engines.openai import OpenAIEngine, is_gateway
from preble.engines.registry import AUTO, engine_class, engine_classes
from preble.errors import EngineRefused


@dataclass(frozen=True, slots=True)
class Found:
    """One replica that a probe has found: its client, and what it says of itself."""

    engine: Engine
    info: EngineInfo

    @property
    def ranks(self) -> tuple[Found, ...]:
        """The same, each data-parallel rank for itself."""
        return tuple(Found(rank, _info_of(self.info, rank)) for rank in self.engine.ranks())


def _info_of(info: EngineInfo, rank: Engine) -> EngineInfo:
    return replace(info, spec=replace(info.spec, replica_id=rank.replica_id))


def connect(
    url: str,
    engine: str = AUTO,
    *,
    replica_id: ReplicaId | None = None,
    api_key: str | None = None,
    timeouts: HttpTimeouts | None = None,
    kv_events: KvEventEndpoints | None = None,
    kv_store: str = "",
    kv_peer: str | None = None,
    role: Role | None = None,
    transfer_group: str = "",
) -> EngineServer:
    """Return the server at `url`. Opens no connection: it may be down.

    `engine`: an adapter's name (`preble.engines.registry`); "auto" asks the server at each probe. `replica_id`: the URL
    where not given. `kv_events`: where its KV events are, for a program that cannot say so itself. `kv_store`: name of
    the store of KV blocks that it shares with others. `kv_peer`: see `Engine.given_kv_peer`.
    `role`: fixed by the operator, for a program that can be either. `transfer_group`: a name of those among which KV
    may be sent.

    Raises: ConfigError: the URL or the adapter is unusable.
    """

    def http() -> HttpClient:
        return HttpClient(url, replica_id or ReplicaId(url), api_key=api_key, timeouts=timeouts)

    adapter = None if engine == AUTO else engine_class(engine)
    return EngineServer(http, adapter, kv_events, kv_store, kv_peer, role, transfer_group)


def _transfer_group(engine: Engine, info: EngineInfo, given: str) -> str:
    """Return a name that replicas share if all they say of their KV is equal. The engine compares the rest.

    `given`: by the operator; those with another one have another name.
    """
    model = info.roots[:1] or info.models[:1]
    common = (info.engine, info.version or "", *model, str(info.spec.block_size))
    return " ".join(filter(None, (engine.transport, *common, given)))


class EngineServer:
    """One server, up or down. Its program may be another one after a restart, unless the adapter is given."""

    def __init__(
        self,
        new_http: Callable[[], HttpClient],
        adapter: type[Engine] | None,
        kv_events: KvEventEndpoints | None,
        kv_store: str = "",
        kv_peer: str | None = None,
        role: Role | None = None,
        transfer_group: str = "",
    ) -> None:
        """`adapter`: None finds it out at each probe."""
        self._new_http = new_http
        self._adapter = adapter
        self._kv_events = kv_events
        self._kv_store = kv_store
        self._kv_peer = kv_peer
        self._role = role
        self._transfer_group = transfer_group
        self._http = new_http()
        self._engine: Engine | None = None

    @property
    def replica_id(self) -> ReplicaId:
        return self._http.replica_id

    @property
    def http(self) -> HttpClient:
        """Its client now: another one after its program has changed."""
        return self._http

    @property
    def url(self) -> str:
        return self._http.url

    async def probe(self) -> Found:
        """Ask what runs there. While that is the same program, the client is the same object. Raises: EngineError."""
        engine = await self._current()
        engine.given_kv_peer = self._kv_peer
        info = await engine.probe()
        takes_part = engine.kv_peer or info.spec.role is not Role.MIXED
        group = _transfer_group(engine, info, self._transfer_group) if takes_part else ""
        spec = replace(self._with_role(info.spec), store=self._kv_store, transfer_group=group)
        return Found(engine, replace(info, spec=spec))

    def _with_role(self, spec: ReplicaSpec) -> ReplicaSpec:
        """Return what it says of itself, with the role that the operator gives it: of one that can be either."""
        given = self._role
        if given in (None, spec.role):
            return spec
        if spec.splits and given is not None:
            return replace(spec, role=given, splits=False)
        log = structlog.get_logger().bind(replica=self.replica_id)
        log.warning("role_differs", given=given, role=spec.role, consequence="what the engine says counts")
        return spec

    async def _current(self) -> Engine:
        adapter = self._adapter or await self._find_out()
        if type(self._engine) is not adapter:
            if self._engine is not None:
                await self.close()
                self._http = self._new_http()
            self._engine = adapter(self._http, self._kv_events)
        return self._engine

    async def _find_out(self) -> type[Engine]:
        for adapter in engine_classes():
            if await adapter.recognizes(self._http):
                return adapter
        if await is_gateway(self._http):
            raise EngineRefused(
                f"{self.url} is a Preble gateway, not a replica: name the replicas behind it, or choose the engine "
                "`openai` if one gateway shall stand behind another",
                replica_id=self.replica_id,
            )
        return OpenAIEngine

    async def close(self) -> None:
        """Close every connection and stream. May be called twice."""
        if self._engine is not None:
            await self._engine.close()
        await self._http.close()
