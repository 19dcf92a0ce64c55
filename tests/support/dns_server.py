"""A DNS server on this machine, over UDP, whose records a test changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset


class DnsServer(asyncio.DatagramProtocol):
    """`records`: by name and type, such as ("vllm.test.", "A"), the TTL and the texts. `num_asked`: how often asked."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], tuple[int, list[str]]] = {}
        self.fails = False
        self.num_asked = 0
        self.address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.num_asked += 1
        question = dns.message.from_wire(data)
        answer = dns.message.make_response(question)
        answer.flags |= dns.flags.RA
        [asked] = question.question
        name = asked.name.to_text()
        ttl, texts = self.records.get((name, dns.rdatatype.to_text(asked.rdtype)), (0, []))
        if self.fails:
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif texts:
            answer.answer.append(dns.rrset.from_text_list(asked.name, ttl, "IN", asked.rdtype, texts))
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        self._transport.sendto(answer.to_wire(), addr)


@asynccontextmanager
async def dns_server() -> AsyncIterator[DnsServer]:
    """A running server, at `address`."""
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        DnsServer, local_addr=("127.0.0.1", 0)
    )
    host, port = transport.get_extra_info("sockname")
    server.address = f"{host}:{port}"
    try:
        yield server
    finally:
        transport.close()
