"""`/replicas`: replicas are listed, added, drained and removed by operators, while the gateway serves."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

import msgspec

from preble.config import ReplicaConfig
from preble.config.load import replica_of
from preble.errors import ConfigError, RequestError
from preble.gateway.http.page_client import PageClient
from preble.gateway.http.refusals import NO_ADMINS
from preble.gateway.pages.front import Front
from preble.serving import (
    MemberRow,
    Serving,
    SourceRow,
    UnknownReplica,
)
from preble.web.urls import server_url

REPLICAS = "/replicas"
DRAIN, UNDRAIN = "/replicas/drain", "/replicas/undrain"
_LARGEST_BYTES = 64 * 1024


class ReplicasPage(msgspec.Struct, frozen=True):
    """`GET /replicas`: every replica that is watched, and the sources that name them."""

    replicas: list[MemberRow]
    sources: list[SourceRow]


class Removed(msgspec.Struct, frozen=True):
    """The answer when a replica has gone."""

    removed: str


class ReplicaPages:
    """Answers requests to `/replicas`, of admins.

    A gateway without keys refuses changes: any page in a browser on this machine could redirect prompts to itself.
    """

    def __init__(self, serving: Serving, front: Front) -> None:
        self._serving = serving
        self._front = front

    def page(self) -> ReplicasPage:
        """Return every replica that is watched, and the sources."""
        return ReplicasPage(list(self._serving.members), self._serving.members.sources())

    async def list(self, client: PageClient) -> None:
        """Answer GET."""
        await client.reply_json(200, self.page())

    async def add(self, client: PageClient) -> None:
        """Answer POST: 201 if the replica was not wanted before, else 200. Raises: RequestError."""
        if await self._is_refused(client):
            return
        replica = _replica(await self._front.read_body(client, _LARGEST_BYTES))
        try:
            is_new = self._serving.add_replica(replica)
        except ConfigError as error:
            raise RequestError(str(error)) from error
        await client.reply_json(201 if is_new else 200, self._serving.members.row(replica.url))

    async def drain(self, client: PageClient) -> None:
        """Answer POST to `DRAIN` and `UNDRAIN`. Raises: RequestError."""
        if await self._is_refused(client):
            return
        url, members = _url(client.head.query), self._serving.members
        (members.wanted.drain if client.path == DRAIN else members.wanted.undrain)(url)
        members.reconcile()
        await client.reply_json(200, members.row(url))

    async def remove(self, client: PageClient) -> None:
        """Answer DELETE: 202 if requests still run there, else 200. Raises: RequestError."""
        if await self._is_refused(client):
            return
        url, members = _url(client.head.query), self._serving.members
        members.remove(url, at_once=_is_set(client.head.query, "now"))
        try:
            await client.reply_json(202, members.row(url))
        except UnknownReplica:
            await client.reply_json(200, Removed(url))

    async def _is_refused(self, client: PageClient) -> bool:
        if not self._front.keys.has_keys:
            await client.fail(NO_ADMINS)
        return not self._front.keys.has_keys


def _replica(body: bytes) -> ReplicaConfig:
    """Raises: RequestError."""
    try:
        table: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(table, (dict, str)):
        raise RequestError('the body is neither a URL nor an object such as {"url": "http://10.0.0.5:8000"}')
    try:
        replica = replica_of("body", table)
    except ConfigError as error:
        raise RequestError(str(error)) from error
    if replica.engine is not None and ":" in replica.engine:
        raise RequestError("only the configuration may name an adapter as module:Class", param="engine")
    return replica


def _url(query: bytes) -> str:
    """Raises: RequestError: the query has no URL of a replica."""
    given = parse_qs(query.decode("latin-1")).get("url")
    if not given:
        raise RequestError("give the replica as ?url=http://HOST:PORT", param="url")
    try:
        return server_url(given[-1])
    except ConfigError as error:
        raise RequestError(str(error), param="url") from error


def _is_set(query: bytes, name: str) -> bool:
    """Raises: RequestError: it is neither true nor false.

    >>> _is_set(b"url=http://a&now=true", "now"), _is_set(b"", "now")
    (True, False)
    """
    value = parse_qs(query.decode("latin-1")).get(name, ["false"])[-1]
    if value not in ("true", "false"):
        raise RequestError(f"{name}={value[:50]} is neither true nor false", param=name)
    return value == "true"
