"""Real Envoy, with the configuration of the Helm chart, from an environment of its own (`.servers/envoy`)."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from preble.engines.starting.commands import Command
from preble.engines.starting.launch import ReplicaProcess
from preble.engines.starting.ports import free_ports
from support.servers import ROOT, require_server

CONFIG = ROOT / "deploy" / "helm" / "preble" / "files" / "envoy.yaml"
READY_S = 120.0


def envoy_config(port: int, admin_port: int, picker_port: int, endpoints: Sequence[str]) -> str:
    """The chart's configuration with everything on this machine."""

    def hosts() -> str:
        pairs = (endpoint.rsplit(":", 1) for endpoint in endpoints)
        address = "{ endpoint: { address: { socket_address: { address: %s, port_value: %s } } } }"
        return ", ".join(address % (host, port) for host, port in pairs)

    values = {"ADMIN_PORT": admin_port, "ADDRESS": "127.0.0.1", "PORT": port}
    values |= {"PICKER": "127.0.0.1", "PICKER_PORT": picker_port, "REPLICAS": hosts()}
    text = CONFIG.read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    return text


@asynccontextmanager
async def running_envoy(picker_port: int, endpoints: Sequence[str], folder: Path) -> AsyncIterator[str]:
    """Run Envoy before replicas. Yields its URL once it listens."""
    port, admin_port = free_ports(2)
    config = folder / "envoy.yaml"
    config.write_text(envoy_config(port, admin_port, picker_port, endpoints))
    argv = (
        str(require_server("envoy", "envoy")),
        "-c",
        str(config),
        "--concurrency",
        "1",
        "--log-level",
        "warn",
        "--disable-hot-restart",  # it leaves shared memory behind
    )
    process = ReplicaProcess("envoy", Command(argv, dict(os.environ), admin_port, "/ready"), folder / "envoy.log")
    try:
        await process.start()
        await process.wait_ready(READY_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        await process.stop()
