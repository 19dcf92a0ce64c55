"""The addresses of a DNS name, looked up again when its records expire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from math import inf
from typing import NamedTuple

import dns.asyncresolver
from dns.exception import DNSException
from dns.nameserver import Do53Nameserver
from dns.resolver import NoAnswer

from preble import background
from preble.config import DiscoveryConfig, GroupConfig
from preble.discovery.member import Member, member_at
from preble.discovery.source import Source
from preble.errors import ConfigError

LEAST_PAUSE_S = 1.0
_DNS_PORT = 53


class _Found(NamedTuple):
    members: tuple[Member, ...]
    ttl_s: float


class DnsSource(Source):
    """Each address of a name, or of each target of its SRV records, is a member.

    Of a name with A records the AAAA records are not looked up: they mostly are other addresses of the same replicas.
    A name without records counts as a failed lookup.
    """

    def __init__(self, name: str, group: GroupConfig, settings: DiscoveryConfig) -> None:
        """Raises: ConfigError: the group or the server is incomplete."""
        super().__init__(name)
        if group.dns and not isinstance(group.port, int):
            raise ConfigError(f"group {name!r} needs a `port`, a number: a DNS name has none")
        if group.scheme == "https":
            raise ConfigError(f"group {name!r}: certificates name hosts, not addresses; give `replicas` by their names")
        self._group = group
        self._longest_s = settings.dns_interval_s
        self._resolver = _resolver(settings.dns_server)

    async def members(self) -> AsyncIterator[tuple[Member, ...]]:
        last: tuple[Member, ...] | None = None
        while True:
            try:
                found = await (self._by_srv(self._group.srv) if self._group.srv else self._by_name())
            except (DNSException, OSError, ConfigError) as error:
                pause_s = self.failed(error)
            else:
                self.worked()
                pause_s = min(max(found.ttl_s, LEAST_PAUSE_S), self._longest_s)
                if found.members != last:
                    last = found.members
                    yield last
            background.check_cancelled()
            await asyncio.sleep(pause_s)

    async def _by_name(self) -> _Found:
        assert self._group.dns is not None and isinstance(self._group.port, int)
        return await self._at(self._group.dns, self._group.port)

    async def _by_srv(self, name: str) -> _Found:
        answer = await self._resolver.resolve(name, "SRV")
        targets = sorted((str(record.target), record.port) for record in answer)
        found = await asyncio.gather(*(self._at(target, port) for target, port in targets))
        members = {member.url: member for one in found for member in one.members}
        return _Found(tuple(members.values()), min([_ttl_s(answer), *(one.ttl_s for one in found)]))

    async def _at(self, name: str, port: int) -> _Found:
        try:
            answer = await self._resolver.resolve(name, "A")
        except NoAnswer:
            answer = await self._resolver.resolve(name, "AAAA")
        addresses = sorted(str(record.address) for record in answer)
        return _Found(tuple(member_at(self._group, address, port) for address in addresses), _ttl_s(answer))


def _ttl_s(answer: dns.resolver.Answer) -> float:
    return float(answer.rrset.ttl) if answer.rrset is not None else inf


def _resolver(server: str | None) -> dns.asyncresolver.Resolver:
    """Raises: ConfigError: the server is no address."""
    if server is None:
        return dns.asyncresolver.Resolver()
    resolver = dns.asyncresolver.Resolver(configure=False)
    address, _, port = server.rpartition(":") if server.count(":") == 1 or "]" in server else (server, "", "")
    try:
        resolver.nameservers = [Do53Nameserver(address.strip("[]"), int(port or _DNS_PORT))]
    except ValueError as error:
        raise ConfigError(f"discovery.dns_server = {server!r} is neither ADDRESS nor ADDRESS:PORT") from error
    return resolver
