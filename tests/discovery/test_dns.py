"""The addresses of a DNS name as members, asked of a real DNS server on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from unittest import mock

import pytest
from dns.resolver import NoAnswer

from preble.config import DiscoveryConfig, GroupConfig
from preble.discovery import Source, make_source
from preble.errors import ConfigError
from support.dns_server import DnsServer, dns_server
from support.members import Followed, followed
from support.waiting import PATIENCE_S, eventually

NAME = GroupConfig(dns="vllm.test", port=8000)
SRV = GroupConfig(srv="_http._tcp.vllm.test")


def source(server: DnsServer, group: GroupConfig = NAME) -> Source:
    return make_source(group, DiscoveryConfig(dns_server=server.address))


async def test_each_address_of_a_name_is_a_member_and_changes_are_followed_when_the_record_expires() -> None:
    async with dns_server() as server:
        server.records["vllm.test.", "A"] = (1, ["10.0.0.2", "10.0.0.1"])
        async with followed(source(server)) as found:
            await eventually(lambda: found.urls == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"])
            server.records["vllm.test.", "A"] = (1, ["10.0.0.2", "10.0.0.3"])
            await eventually(lambda: found.urls == ["http://10.0.0.2:8000", "http://10.0.0.3:8000"])
            assert len(found.sets) == 2, "the same addresses are named once"


async def test_a_record_that_lives_long_is_not_asked_for_again() -> None:
    async with dns_server() as server, dns_server() as other:
        server.records["vllm.test.", "A"] = (3600, ["10.0.0.1"])
        other.records["vllm.test.", "A"] = (1, ["10.0.0.1"])
        async with followed(source(server)) as found, followed(source(other)) as often:
            await eventually(lambda: other.num_asked >= 3)
            assert found.urls == often.urls == ["http://10.0.0.1:8000"]
            assert server.num_asked == 1


async def test_a_source_that_is_no_longer_followed_ends_though_the_lookup_loses_the_cancellation() -> None:
    """`asyncio.wait_for` of Python 3.11, with which the library waits, loses it if the answer comes at that moment."""
    async with dns_server() as server:
        server.records["vllm.test.", "A"] = (1, ["10.0.0.1"])
        followed_source = source(server)
        task = asyncio.create_task(Followed(followed_source).run())

        async def answers(*_: object) -> object:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            raise NoAnswer

        with mock.patch.object(followed_source._resolver, "resolve", answers):
            await asyncio.wait({task}, timeout=PATIENCE_S)
            assert task.cancelled()


async def test_a_name_with_ipv6_addresses_only_is_followed_too() -> None:
    async with dns_server() as server:
        server.records["vllm.test.", "AAAA"] = (60, ["fd00::1"])
        async with followed(source(server)) as found:
            await eventually(lambda: found.urls == ["http://[fd00::1]:8000"])


async def test_a_host_of_both_families_is_one_member() -> None:
    async with dns_server() as server:
        server.records |= {("vllm.test.", "A"): (60, ["10.0.0.1"]), ("vllm.test.", "AAAA"): (60, ["fd00::1"])}
        async with followed(source(server)) as found:
            await eventually(lambda: found.urls == ["http://10.0.0.1:8000"])


async def test_srv_records_give_the_ports() -> None:
    async with dns_server() as server:
        server.records["_http._tcp.vllm.test.", "SRV"] = (1, ["0 1 8001 a.test.", "0 1 8002 b.test."])
        server.records |= {("a.test.", "A"): (60, ["10.0.0.1"]), ("b.test.", "A"): (60, ["10.0.0.2", "10.0.0.3"])}
        async with followed(source(server, SRV)) as found:
            wanted = ["http://10.0.0.1:8001", "http://10.0.0.2:8002", "http://10.0.0.3:8002"]
            await eventually(lambda: found.urls == wanted)
            server.records["_http._tcp.vllm.test.", "SRV"] = (1, ["0 1 8001 a.test."])
            await eventually(lambda: found.urls == wanted[:1])


@pytest.mark.parametrize("how", ["server failure", "no such name", "no address"])
async def test_a_failed_lookup_keeps_what_was_known(how: str) -> None:
    async with dns_server() as server:
        server.records["vllm.test.", "A"] = (1, ["10.0.0.1"])
        async with followed(source(server)) as found:
            await eventually(lambda: found.urls is not None)
            if how == "server failure":
                server.fails = True
            else:
                server.records = {} if how == "no such name" else {("vllm.test.", "TXT"): (1, ["x"])}
            await eventually(lambda: found.source.error is not None)
            assert len(found.sets) == 1
            server.fails, server.records["vllm.test.", "A"] = False, (1, ["10.0.0.9"])
            await eventually(lambda: found.urls == ["http://10.0.0.9:8000"])
            assert found.source.error is None


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (GroupConfig(dns="vllm.test"), "needs a `port`"),
        (GroupConfig(dns="vllm.test", port=443, scheme="https"), "certificates name hosts"),
        (GroupConfig(), "exactly one of `dns`, `srv`, `service`, `pods` and `pool`"),
        (GroupConfig(dns="a", srv="b"), "exactly one of `dns`, `srv`, `service`, `pods` and `pool`"),
    ],
)
def test_an_incomplete_group_is_refused(group: GroupConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_source(group, DiscoveryConfig())


def test_a_wrong_dns_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither ADDRESS nor ADDRESS:PORT"):
        make_source(NAME, DiscoveryConfig(dns_server="nonsense:x"))


@pytest.mark.parametrize(
    ("module", "group", "extra"), [("dns", NAME, "dns"), ("kubernetes", GroupConfig(service="vllm"), "k8s")]
)
def test_where_the_library_is_missing_the_error_says_what_to_install(
    module: str, group: GroupConfig, extra: str
) -> None:
    missing = {f"preble.discovery.{module}": None}
    with mock.patch.dict(sys.modules, missing), pytest.raises(ConfigError, match=rf"pip install 'preble\[{extra}\]'"):
        make_source(group, DiscoveryConfig())
