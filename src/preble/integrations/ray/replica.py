"""A replica of a Ray deployment as the serving room sees it: Ray says whether it runs, its routing stats the rest."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from preble.config import ReplicaConfig
from preble.core.types import ReplicaSpec
from preble.discovery import Member
from preble.engines import EngineInfo, ModelNames
from preble.engines.reporting import ReportingEngine
from preble.errors import EngineRefused

ADAPTER = "preble.integrations.ray.replica:RayReplica"
STATS_KEY = "kv_event_metadata"
"""In what a replica's `record_routing_stats` returns; the engines of Ray Serve LLM have it too."""


class Advert(msgspec.Struct, frozen=True):
    """What a replica says of its KV cache in its routing stats, under `STATS_KEY`. They come a while after the replica.

    `endpoint`, `replay_endpoint`: ZMQ addresses of its KV events that every node reaches, None for none. `kv_tokens`:
    the size of the cache, None where unknown.
    """

    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    block_size: int = 16
    kv_tokens: int | None = None


def advert_of(stats: Mapping[str, Any]) -> Advert:
    """Return what a replica's routing stats say; nothing for malformed ones."""
    try:
        return msgspec.convert(stats.get(STATS_KEY, {}), Advert)
    except msgspec.ValidationError:
        return Advert()


def url_of(replica: str) -> str:
    """Return the name that the serving room has for a replica of Ray. Nothing is ever sent there."""
    return f"http://{replica}"


def member_of(url: str, advert: Advert) -> Member:
    """Return the member that a replica is. It joins anew when its routing stats come, or say something else."""
    replica = ReplicaConfig(url, ADAPTER, advert.endpoint, advert.replay_endpoint, advert.topic)
    return Member(replica, incarnation=f"{advert.block_size}/{advert.kv_tokens}")


@cache
def running() -> dict[str, Advert]:
    """Return the replicas that Ray says are running, of all deployments to which this process has routers."""
    return {}


class RayReplica(ReportingEngine):
    """One replica, by what Ray and its routing stats say. It speaks no HTTP: Ray carries its requests."""

    async def probe(self) -> EngineInfo:
        await self.check_ready()
        advert = running()[self.url]
        return EngineInfo(
            engine="ray",
            models=(),
            spec=ReplicaSpec(
                self.replica_id,
                kv_capacity_tokens=advert.kv_tokens,
                block_size=self._block_size or advert.block_size,
                reports_events=bool(self._endpoints),
            ),
            kv_events=self._endpoints,
        )

    async def check_ready(self) -> None:
        if self.url not in running():
            raise self.http.error(EngineRefused, "does not run any more, says Ray")

    async def models(self) -> ModelNames:
        return ModelNames((), ())  # a deployment serves one, whatever clients call it

    async def tokenize(self, body: bytes) -> list[int]:
        raise self.http.error(EngineRefused, "has no /tokenize; give PrebleRouter a `tokenizer`")
