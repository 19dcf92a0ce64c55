"""The server of calls alone, against peers that take what lies outside of any call."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from socket import socket

import grpc
from hyperframe.frame import SettingsFrame, WindowUpdateFrame

from picker.hostile_peer import PREFACE, data, message, opened
from preble.picker.calls import MOST_HELD_BYTES, CallServer, PickerCall, Refusal
from preble.picker.handshakes import MOST_HANDSHAKES
from preble.web.server.listening import listen
from support.waiting import eventually

ECHO, TALK = "/test/Echo", "/test/Talk"
LONG = bytes(200_000)
WIDE_OPEN = (
    PREFACE
    + SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: 2**31 - 1}).serialize()
    + SettingsFrame(0, flags=["ACK"]).serialize()
    + WindowUpdateFrame(0, window_increment=2**31 - 2**16).serialize()
)


async def echo(call: PickerCall) -> None:
    while (said := await call.read()) is not None:
        await call.write(said)


async def talk(call: PickerCall) -> None:
    while True:
        await call.write(LONG)


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, list[Refusal]]]:
    """Yields the port, and what was refused."""
    refused: list[Refusal] = []
    server = CallServer({ECHO: echo, TALK: talk}, refused.append)
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    await server.start(listener, tls)
    try:
        yield port, refused
    finally:
        await server.stop(0.0)


async def connected(port: int, stack: AsyncExitStack) -> socket:
    """Return a connection that reads nothing."""
    found = stack.enter_context(socket())
    found.setblocking(False)
    await asyncio.get_running_loop().sock_connect(found, ("127.0.0.1", port))
    return found


async def certified(folder: Path) -> tuple[ssl.SSLContext, bytes]:
    """Return how a server secures its connections, and the certificate that its clients believe."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    argv += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    await asyncio.to_thread(subprocess.run, argv, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    context.set_alpn_protocols(["h2"])
    return context, cert.read_bytes()


async def test_peers_that_read_nothing_of_what_they_ask_for_stay_within_the_budget() -> None:
    calls = b"".join(opened(number, TALK) + data(number, message(b"go")) for number in range(1, 400, 2))
    enough = MOST_HELD_BYTES // (200 * len(LONG)) + 2
    async with serving() as (port, refused), AsyncExitStack() as stack:
        for _ in range(enough):
            await asyncio.get_running_loop().sock_sendall(await connected(port, stack), WIDE_OPEN + calls)
        await eventually(lambda: Refusal.MEMORY in refused, "the heaviest is left")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert await channel.unary_unary(ECHO)(b"hello") == b"hello"


async def test_handshakes_that_do_not_go_on_make_room_for_others(tmp_path: Path) -> None:
    tls, certificate = await certified(tmp_path)
    async with serving(tls) as (port, refused), AsyncExitStack() as stack:
        for _ in range(MOST_HANDSHAKES + 20):
            await connected(port, stack)
        await eventually(lambda: refused == [Refusal.CONNECTIONS] * 20, "those beyond the limit are left")
        credentials = grpc.ssl_channel_credentials(certificate)
        async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
            assert await channel.unary_unary(ECHO)(b"hello") == b"hello"
        assert refused == [Refusal.CONNECTIONS] * 21
