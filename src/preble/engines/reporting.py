"""The client of a replica that says what it caches: where its KV events are, and the streams that follow them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from ipaddress import ip_address

import structlog

from preble.core.types import KvEvent
from preble.engines.http import HttpClient
from preble.engines.kv_events import KvEventEndpoints, KvEventStream
from preble.engines.openai import OpenAIEngine
from preble.errors import ConfigError, EngineProtocolError


class ReportingEngine(OpenAIEngine):
    """What vLLM and SGLang have in common. A probe sets `_endpoints`: those given, or else those that it reports."""

    takes_cache_salt = True

    def __init__(self, http: HttpClient, kv_events: KvEventEndpoints | None = None) -> None:
        super().__init__(http, kv_events)
        self._endpoints: KvEventEndpoints | None = kv_events
        self._streams: list[KvEventStream] = []
        self._log = structlog.get_logger(type(self).__module__).bind(replica=self.replica_id)

    @property
    def kv_event_endpoints(self) -> KvEventEndpoints | None:
        """Where its KV events are, as given or as the last probe found out; None where it has none."""
        return self._endpoints

    def kv_events(self) -> AsyncIterator[KvEvent] | None:
        if self._endpoints is None:
            return None
        stream = KvEventStream(self.replica_id, self._endpoints)
        self._streams = [*(other for other in self._streams if not other.closed), stream]
        return stream.events()

    def resync_kv_events(self) -> None:
        for stream in self._streams:
            stream.resync()

    async def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        await super().close()

    def _endpoints_at(self, endpoint: str, replay: str | None, topic: str) -> KvEventEndpoints:
        """Where to connect to for addresses that the replica tells. Raises: EngineProtocolError: they are none."""
        host = self.http.host
        try:
            return KvEventEndpoints(reachable(endpoint, host), replay and reachable(replay, host), topic)
        except ConfigError as error:
            raise self.http.error(EngineProtocolError, f"tells a wrong address: {error}") from error

    def _say_no_events(self, *, several_caches: bool) -> None:
        """`several_caches`: it has data-parallel ranks; else its events are off."""
        reason = "it has data-parallel ranks, each with a cache of its own" if several_caches else "they are off"
        self._log.warning("no_kv_events", reason=reason, consequence="what it caches is a belief")


def reachable(endpoint: str, host: str) -> str:
    """The address to connect to for an endpoint that a replica on `host` binds.

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
