from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from typing import cast

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from preble.web.client.failures import why_unreachable

KEY = cast(ConnectionKey, None)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (aiohttp.ClientConnectorDNSError(KEY, socket.gaierror(-2, "Name or service not known")), "Name or service not"),
        (aiohttp.ClientConnectorError(KEY, OSError(113, "Connect call failed ('10.0.0.1', 1)")), "No route to host"),
        (aiohttp.ConnectionTimeoutError("Connection timeout to host http://10.0.0.1:1"), "no answer in time"),
        (
            aiohttp.ClientConnectorCertificateError(KEY, ssl.SSLCertVerificationError(1, "self-signed certificate")),
            "SSL_CERT_FILE=ca.pem names other authorities",
        ),
        (aiohttp.ServerDisconnectedError(), "Server disconnected"),
    ],
)
def test_what_kept_a_connection_from_being_made_is_said_plainly(error: Exception, said: str) -> None:
    assert said in why_unreachable(error)


async def test_https_where_http_is_spoken_is_said() -> None:
    closed = asyncio.Event()

    async def answer_plainly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        closed.set()

    server = await asyncio.start_server(answer_plainly, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError) as caught:
            await session.get(f"https://127.0.0.1:{port}/")
        await closed.wait()
    assert why_unreachable(caught.value) == "TLS: wrong version number; does it speak plain http://?"


async def test_a_refused_connection_is_said_without_the_address() -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectorError) as caught:
                await session.get(f"http://127.0.0.1:{taken.getsockname()[1]}/")
    assert why_unreachable(caught.value) == "Connection refused"
