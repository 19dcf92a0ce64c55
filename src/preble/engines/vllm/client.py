"""The client of one vLLM replica: configures itself by asking, and knows what the replica caches from its KV events.

The emulator speaks the same dialect and says that it is one in a header.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import Any
from uuid import uuid4

from preble.core.types import ReplicaSpec
from preble.engines.adapter import Engine, EngineInfo, PriorityOrder
from preble.engines.http import HttpAnswer, HttpClient
from preble.engines.kv_events.sockets import KvEventEndpoints
from preble.engines.openai import adapters_among, roots_of, served_models
from preble.engines.reporting import ReportingEngine
from preble.engines.vllm.answers import (
    TransferConfig,
    VersionAnswer,
    VllmConfig,
    VllmEventSource,
    VllmServerInfo,
    read_cache_config,
)
from preble.engines.vllm.pairs import NIXL, VllmPair, lease_s, may_split
from preble.errors import EngineError, EngineProtocolError, EngineTimeout

EMULATED_HEADER = b"x-preble-emulated"
TIERS_METRIC = b"vllm:kv_offload_tiering"
"""Begins the names of the metrics of a vLLM with secondary tiers."""
NIXL_METRIC = b"vllm:nixl_"
"""Begins the names of the metrics of a vLLM with NIXL."""
_INFO_S = 5.0
"""For an answer that vLLM's first time takes seconds: it runs programs to look at its machine, and keeps the answer."""
_MOST_LATE = 6
"""A vLLM that has not answered in time this often joins without copies: only that answer would allow them."""
FIRST_TO_IGNORE_PRIORITY = (0, 32)
"""The first version that was tried; earlier ones may do so, too."""


def _is_emulated(answer: HttpAnswer) -> bool:
    return any(name == EMULATED_HEADER for name, _ in answer.headers)


class VllmEngine(ReportingEngine):
    """The client of one vLLM (or emulated) replica."""

    _late_answers = 0
    """Of /server_info, one after the other."""
    _model_data_type = ""
    """As /server_info has it; empty where nobody had to ask."""

    @classmethod
    async def recognizes(cls, http: HttpClient) -> bool:
        """Return whether it is vLLM or the emulator: only these have metrics of vLLM's names."""
        answer = await http.ask("/metrics")
        return answer.status == 200 and b"vllm:cache_config_info" in answer.content

    async def probe(self) -> EngineInfo:
        """Ask what it serves, how large its cache is and where its KV events are. Raises: EngineError."""
        models = await served_models(self.http)
        self.model_path = models[0].root
        version = await self.http.ask("/version")
        emulated = _is_emulated(version)
        number = version.decode(VersionAnswer).version if version.status == 200 else None
        self.takes_ids = not emulated  # to which a text costs nothing
        metrics = await self._metrics()
        try:
            cache = read_cache_config(metrics.decode(errors="replace"), has_null_block=not emulated)
        except ValueError as error:
            text = f"answers /metrics with a cache that cannot be read ({error})"
            raise self.http.error(EngineProtocolError, text) from error
        sends_kv = any(name in metrics for name in (TIERS_METRIC, NIXL_METRIC)) and cache.num_ranks == 1
        self.kv_peer = (self.given_kv_peer or await self._ask_kv_peer()) if sends_kv else None
        given = self.given_kv_events
        endpoints = self._of_ranks(given, cache.num_ranks) if given else await self._ask_endpoints()
        self._set_ranks(cache.num_ranks, endpoints)
        max_model_len, splits = models[0].max_model_len, lease_s(self) > 0.0 and bool(self._endpoints)
        self.transport = " ".join(filter(None, ("nixl" if splits else "", self._model_data_type, cache.data_type)))
        return EngineInfo(
            engine="emulator" if emulated else "vllm",
            models=tuple(model.id for model in models),
            spec=ReplicaSpec(
                self.replica_id,
                kv_capacity_tokens=cache.capacity_tokens,
                max_prompt_tokens=max_model_len,
                block_size=self._block_size or cache.block_size,
                reports_events=bool(self._endpoints),
                splits=splits,
            ),
            max_model_len=max_model_len,
            adapters=adapters_among(models),
            roots=roots_of(models),
            kv_events=self._endpoints,
            version=number,
            priority=PriorityOrder(1) if _ignores_priority(number) and not emulated else None,
        )

    def answers_in_pairs(self, path: str, body: bytes) -> bool:
        return may_split(path, body)

    def paired_as(self, decode: Engine, prefill: Engine) -> Engine | None:
        rests = asyncio.get_running_loop().time() < prefill.rests_until
        return None if rests or not lease_s(prefill) or not lease_s(decode) else VllmPair(decode, prefill)

    async def check_ready(self) -> None:
        """Return if the engine behind the HTTP server lives. Raises: EngineError."""
        (await self.http.ask("/health")).require_ok()

    async def _metrics(self) -> bytes:
        answer = await self.http.ask("/metrics")
        if answer.status == 200:
            return answer.content
        self._log.warning("no_metrics", status=answer.status, consequence="size of the KV cache is unknown")
        return b""

    async def _ask_kv_peer(self) -> str | None:
        """Return where its p2p tier listens, or that it has NIXL; None where it has neither, or does not say.

        Raises: EngineError: not yet, so a later probe may find it.
        """
        try:
            async with asyncio.timeout(_INFO_S):
                answer = await self.http.ask("/server_info?config_format=json")
        except (EngineError, TimeoutError) as error:
            self._late_answers += 1
            if self._late_answers < _MOST_LATE:
                late = f"{self.url} did not say within {_INFO_S:g} s how it is configured (/server_info)"
                raise EngineTimeout(late, replica_id=self.replica_id) from error
            config = None
        else:
            self._late_answers = 0
            self._model_data_type, config = _transfers_of(answer)
        if config is None:
            hint = "if it has a p2p tier, give kv_peer for this replica"
            self._log.warning("kv_tiers_unknown", consequence="it copies no KV from other replicas", hint=hint)
            return None
        if config.kv_connector == "NixlConnector":
            if (reason := config.against_splits()) is not None:
                self._log.warning("splits_refused", reason=reason, consequence="it splits no requests with others")
                return None
            return f"{NIXL}{config.kv_connector_extra_config.kv_lease_duration:g}"
        tiers = (tier for tier in config.kv_connector_extra_config.secondary_tiers if tier.type == "p2p")
        return next((f"{tier.host}:{tier.port}" for tier in tiers), None)

    async def _ask_endpoints(self) -> tuple[KvEventEndpoints, ...]:
        answer = await self.http.ask("/kv_event_sources")
        if answer.status in (404, 405):
            self._log.warning("kv_events_unknown", hint="this vLLM reports none; give kv_events for this replica")
            return ()
        return self._endpoints_from(answer)

    def _endpoints_from(self, answer: HttpAnswer) -> tuple[KvEventEndpoints, ...]:
        """Return the endpoints by rank. Raises: EngineError: the answer is not the documented one."""
        sources: dict[str, VllmEventSource] = answer.decode(dict[str, VllmEventSource])
        by_rank = [sources[rank] for rank in sorted(sources, key=lambda rank: (len(rank), rank))]
        live = [s for s in by_rank if s.enable_kv_cache_events and s.publisher == "zmq" and s.endpoint]
        if not live:
            self._say_no_events()
        return tuple(self._endpoints_at(s.endpoint or "", s.replay_endpoint, s.topic) for s in live)


def _transfers_of(answer: HttpAnswer) -> tuple[str, TransferConfig | None]:
    """Return its model's data type, and how it transfers KV, by its /server_info; None where it does not say."""
    if answer.status == 200:
        with suppress(EngineProtocolError):
            config: VllmConfig = answer.decode(VllmServerInfo).vllm_config
            return config.model_config.dtype, config.kv_transfer_config
    return "", None


def copy_source(peer: str) -> dict[str, Any]:
    """Return the `kv_transfer_params` with which one prompt's KV is copied from `peer`, another one's `kv_peer`.

    Each has an id of its own: two prompts under one end vLLM 0.32.
    """
    host, _, port = peer.rpartition(":")
    return {"remote_kv_source": {"kv_request_id": uuid4().hex, "remote_host": host, "remote_port": int(port)}}


def _ignores_priority(version: str | None) -> bool:
    """Return whether this vLLM takes a `priority` without `--scheduling-policy priority`, and ignores it.

    It does not say how it schedules. 0.32 takes one; its own documentation says that others refuse any but 0.
    """
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return found is not None and (int(found[1]), int(found[2])) >= FIRST_TO_IGNORE_PRIORITY
