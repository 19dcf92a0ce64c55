"""Rotel, a collector for OpenTelemetry: it takes OTLP, checks and batches it, and sends it on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from preble.engines.starting.ports import free_ports
from support.servers import not_there, require_server
from support.waiting import eventually

CANNOT_BE_LOADED = 127
"""The dynamic loader's exit status where a shared library is missing."""


@asynccontextmanager
async def collector(to: str) -> AsyncIterator[str]:
    """Run one that sends spans to the URL `to`; the context is where it takes them. The end waits for what it has.

    Skips the test where it is not set up.
    """
    python = require_server("rotel", "python")
    [program] = (python.parents[1] / "lib").glob("python*/site-packages/rotel/rotel-agent")
    grpc, http = free_ports(2)
    running = await asyncio.create_subprocess_exec(
        program,
        "start",
        *("--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--otlp-http-endpoint", f"127.0.0.1:{http}"),
        *(
            "--exporter",
            "otlp",
            "--otlp-exporter-protocol",
            "http",
            "--otlp-exporter-endpoint",
            to.removesuffix("/v1/traces"),
        ),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )

    async def listens() -> bool:
        if running.returncode == CANNOT_BE_LOADED:
            not_there("rotel needs the shared library of the Python that installed it, and this one has none")
        assert running.returncode is None, "rotel has ended"
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", http)
        except OSError:
            return False
        writer.close()
        return True

    try:
        await eventually(listens, "rotel listens")
        yield f"http://127.0.0.1:{http}/v1/traces"
        running.terminate()  # it sends what it has first
        await running.wait()
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
