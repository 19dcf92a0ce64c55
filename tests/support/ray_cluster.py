"""A small Ray on this machine for tests, and Ray's Python, in which alone the integration can be imported."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from preble.engines.starting.ports import free_ports
from support.servers import ROOT, require_server

STARTS_WITHIN_S = 180.0
ENDS_WITHIN_S = 30.0
RUNS_FOR_S = 800.0


class RayCluster:
    """One node. `folder`: where it keeps its logs and sockets; a short path, since sockets' names are limited."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self._python = require_server("ray", "python")
        self._ports = free_ports(5)
        self._folder = folder
        self.environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "examples" / "ray_serve")]
            ),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",  # Ray listens on every interface
            "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else it writes one into the home directory
            "RAY_worker_niceness": "0",  # 15 starves workers on a busy machine
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
            **environ,
        }

    def start(self) -> None:
        """Start it, and wait until it accepts drivers.

        With fixed ports, Ray does not wait for its agents to say theirs, for which it gives them only 15 s.
        """
        port, metrics, grpc, listen, runtime_env = self._ports
        options = {
            "node-ip-address": "127.0.0.1",
            "port": port,
            "metrics-export-port": metrics,
            "dashboard-agent-grpc-port": grpc,
            "dashboard-agent-listen-port": listen,
            "runtime-env-agent-port": runtime_env,
            "min-worker-port": 0,  # any free ones, not a range that includes those above
            "max-worker-port": 0,
            "num-cpus": 8,
            "object-store-memory": 200_000_000,
            "include-dashboard": "false",
            "temp-dir": self._folder,
        }
        command = [str(self._python.with_name("ray")), "start", "--head", "--block"]
        command += [f"--{name}={value}" for name, value in options.items()]
        self._log = (self._folder / "start.log").open("wb")
        self._process = subprocess.Popen(
            command, env=self.environ, stdout=self._log, stderr=self._log, start_new_session=True
        )
        self.environ["RAY_ADDRESS"] = f"127.0.0.1:{port}"
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not _is_open(port):
            assert self._process.poll() is None, (self._folder / "start.log").read_text(errors="replace")
            assert time.monotonic() < deadline, "Ray does not start"
            time.sleep(0.1)

    def stop(self) -> None:
        """End it with everything that it has started."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def run(self, *arguments: str, **environ: str) -> list[Any]:
        """Run Ray's Python on the cluster, and return what it prints: each line is JSON."""
        command = [str(self._python), *arguments]
        done = subprocess.run(
            command, env=self.environ | environ, capture_output=True, text=True, timeout=RUNS_FOR_S, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


def _is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


@contextmanager
def ray_cluster(**environ: str) -> Iterator[RayCluster]:
    """Run one. Skips the test where Ray is not set up."""
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        cluster = RayCluster(Path(folder), **environ)
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop()
