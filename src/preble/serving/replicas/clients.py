"""The clients of replicas, as the configuration says."""

from __future__ import annotations

from preble.config import GatewayConfig, ReplicaConfig
from preble.core.types import ReplicaId
from preble.engines import Engine, EngineServer, HttpClient, HttpTimeouts, KvEventEndpoints, connect
from preble.engines.registry import engine_class


def server_of(config: GatewayConfig, replica: ReplicaConfig) -> EngineServer:
    """Return the server of a replica, which may be down. Raises: ConfigError: the replica is unusable."""
    endpoints = None
    if replica.kv_events is not None:
        endpoints = KvEventEndpoints(replica.kv_events, replica.kv_events_replay, replica.kv_events_topic)
    return connect(
        replica.url,
        replica.engine or config.engine,
        replica_id=ReplicaId(replica.url),
        api_key=config.auth.engine_api_key,
        timeouts=_timeouts(config),
        kv_events=endpoints,
        kv_store=replica.kv_store,
        kv_peer=replica.kv_peer,
        role=replica.role,
        transfer_group=replica.transfer_group,
    )


def client_of(config: GatewayConfig, replica_id: ReplicaId, url: str, adapter: str, rank: int | None) -> Engine:
    """Return the client of a replica that another process has probed. Raises: ConfigError: the adapter is unusable."""
    server_id = ReplicaId(replica_id.partition("#")[0])
    http = HttpClient(url, server_id, api_key=config.auth.engine_api_key, timeouts=_timeouts(config))
    engine = engine_class(adapter)(http)
    return engine if rank is None else engine.of_rank(rank)


def _timeouts(config: GatewayConfig) -> HttpTimeouts:
    return HttpTimeouts(
        connect_s=config.timeouts.connect_s,
        first_byte_s=config.timeouts.first_byte_s,
        idle_s=config.timeouts.idle_s,
        control_s=config.health.check_timeout_s,
    )
