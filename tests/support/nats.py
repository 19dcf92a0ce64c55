"""A real NATS server for tests, which can be stopped and started again at the same address."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from preble.engines.starting.ports import free_ports
from support.servers import require_server
from support.waiting import PATIENCE_S


class NatsServer:
    """`url`: where it listens, or will again after `start`."""

    def __init__(self, program: Path, *options: str) -> None:
        [self.port] = free_ports(1)  # one that no client gets while the server is down
        self.url = f"nats://127.0.0.1:{self.port}"
        self._command = [str(program), "-a", "127.0.0.1", "-p", str(self.port), *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it accepts connections."""
        process = self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
                return
            except OSError:
                assert process.poll() is None, "nats-server has ended"
                assert time.monotonic() < deadline, "nats-server does not start"
                time.sleep(0.02)

    def stop(self) -> None:
        """Kill it. Its clients lose their connections."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def nats_server(*options: str) -> Iterator[NatsServer]:
    """Run one on 127.0.0.1. Skips the test where the server is not set up."""
    server = NatsServer(require_server("nats", "nats-server"), *options)
    server.start()
    try:
        yield server
    finally:
        server.stop()
