"""What becomes of the scheduler process's memory over a million requests with new prompts.

    nice python benchmarks/repro/soak.py                          # half an hour of one core
    python benchmarks/repro/soak.py --requests 50000 --json -     # a short look
    python benchmarks/repro/soak.py --fill                        # only fill the page in from the kept result

`preble serve` with one front end runs as users start it. This script places requests through the scheduler's socket, as
fast as it can: so the scheduler process does for each of them what it does for a client's, but for the page's numbers.
Each prompt begins with one of a few shared prefixes and goes on with tokens that nobody has sent. The replicas report
neither KV events nor a capacity, so the index keeps all prompts until its memory budget is full.

Result: benchmarks/results/soak.json, and the table in docs/howto/sizing.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import numpy as np
from page import filled, markdown

from preble.core.placing import scheduler as global_scheduler
from preble.core.types.life import FIRST_TOKEN, Ended
from preble.lab.report import Table
from preble.serving.link import protocol as m
from preble.serving.link.frames import LENGTH
from preble.serving.terms import Terms

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "soak.json"
PAGE = ROOT / "docs" / "howto" / "sizing.md"
REPLICAS, REQUESTS, SAMPLES = 4, 1_000_000, 20
AT_ONCE = 64
"""Requests in flight."""
PREFIXES, PREFIX_TOKENS, NEW_TOKENS, VOCABULARY = 16, 256, 200, 32_000
SEED = 0
_NUMBER = re.compile(r"^(preble_\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


class Sample(msgspec.Struct, frozen=True):
    """`resident_mb`: of the scheduler process. `index_mb`: as the index counts itself. `unindexed`: prompts so far that
    found no room in the index."""

    requests: int
    resident_mb: float
    index_mb: float
    index_tokens: int
    unindexed: int


class Result(msgspec.Struct, frozen=True):
    """`core`: compiled or plain. `cpu_s`: of the scheduler process."""

    core: str
    seed: int
    budget_mib: int
    cpu_s: float
    in_flight_afterwards: int
    samples: list[Sample]


class _Replica(BaseHTTPRequestHandler):
    """Says that it serves a model; nobody sends it a request."""

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": "tiny", "max_model_len": 8192}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _replica() -> str:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Replica)
    Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


class Carrier:
    """Places requests over the scheduler's socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._arrived = bytearray()
        self._decode = msgspec.msgpack.Decoder(m.FromScheduler).decode
        self._send([m.Hello(m.VERSION, "soak")])
        self._random = np.random.default_rng(SEED)
        self._prefixes = [self._tokens(PREFIX_TOKENS) for _ in range(PREFIXES)]
        self._heard_at = 0.0

    def _tokens(self, count: int) -> bytes:
        return self._random.integers(0, VOCABULARY, count, dtype="<u4").tobytes()

    def _send(self, messages: list[m.Message]) -> None:
        frames = map(msgspec.msgpack.encode, messages)
        self._socket.sendall(b"".join(LENGTH.pack(len(frame)) + frame for frame in frames))

    def _next(self) -> m.FromScheduler:
        while True:
            if len(self._arrived) >= LENGTH.size:
                [size] = LENGTH.unpack_from(self._arrived)
                end = LENGTH.size + size
                if len(self._arrived) >= end:
                    frame = bytes(self._arrived[LENGTH.size : end])
                    del self._arrived[:end]
                    return self._decode(frame)
            if not (data := self._socket.recv(1 << 20)):
                raise RuntimeError("the scheduler process has closed the connection")
            self._arrived += data

    def serve(self, first: int, count: int) -> None:
        """Have `count` requests placed at once, and end them."""
        names = range(first, first + count)
        prompts = [self._prefixes[number % PREFIXES] + self._tokens(NEW_TOKENS) for number in names]
        self._send(
            [
                m.Place(number, number, f"soak-{number}", prompt, 16, terms=Terms(f"soak-{number}", streams=True))
                for number, prompt in zip(names, prompts, strict=True)
            ]
        )
        placed = 0
        while placed < count:
            message = self._next()
            if isinstance(message, m.Refused):
                raise RuntimeError(message.text)
            placed += isinstance(message, m.PlacedOn)
            if isinstance(message, m.Count):
                self._send([m.MetricsReport(message.number, [])])
        ends = [m.PlacementReport(number, Ended(output_tokens=16), leaves=number) for number in names]
        self._send([*(m.PlacementReport(number, FIRST_TOKEN) for number in names), *ends])
        self.live()

    def live(self) -> None:
        """Send the sign of life, and answer what the scheduler process asks."""
        if time.monotonic() - self._heard_at > 1.0:
            self._heard_at = time.monotonic()
            self._send([m.Heard({})])
        while select.select([self._socket], [], [], 0)[0]:
            if isinstance(message := self._next(), m.Count):
                self._send([m.MetricsReport(message.number, [])])


def _numbers(url: str) -> dict[str, float]:
    """The gateway's metrics: those of the scheduler process alone where each process has its own; else their sum."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    numbers: dict[str, float] = {}
    for name, labels, value in _NUMBER.findall(text):
        if "process=" not in labels or 'process="scheduler"' in labels:
            numbers[name] = numbers.get(name, 0.0) + float(value)
    return numbers


def run(num_requests: int, budget_mib: int) -> Result:
    """Send the requests, and look at the memory now and then."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "socket"
        replicas = [option for _ in range(REPLICAS) for option in ("--replica", _replica())]
        command = [sys.executable, "-m", "preble", "serve", *replicas, "--engine", "openai", "--port", "0"]
        settings = {"PREBLE_SCHEDULER_SOCKET": str(path), "PREBLE_WORKERS": "1"}
        settings["PREBLE_SCHEDULER__INDEX_BUDGET_MIB"] = str(budget_mib)
        gateway = subprocess.Popen(
            [*command, "--log-level", "error"], stdout=subprocess.PIPE, text=True, env=os.environ | settings
        )
        try:
            assert gateway.stdout is not None
            url = gateway.stdout.readline().split()[-1]
            while _numbers(url)["preble_replica_up"] < REPLICAS:
                time.sleep(0.1)
            return _soaked(url, Carrier(path), num_requests, budget_mib)
        finally:
            gateway.terminate()
            gateway.wait()


def _soaked(url: str, carrier: Carrier, num_requests: int, budget_mib: int) -> Result:
    samples: list[Sample] = []
    sample_each = max(AT_ONCE, num_requests // SAMPLES // AT_ONCE * AT_ONCE)
    for first in range(1, num_requests + AT_ONCE + 1, AT_ONCE):
        if (first - 1) % sample_each == 0:
            numbers = _numbers_while_alive(url, carrier)
            samples.append(
                Sample(
                    first - 1,
                    round(numbers["preble_process_resident_bytes"] / 1e6, 1),
                    round(numbers["preble_index_bytes"] / 1e6, 1),
                    int(numbers["preble_index_tokens"]),
                    int(numbers.get("preble_unindexed_total", 0)),
                )
            )
            sys.stderr.write(f"{samples[-1]}\n")
        if first <= num_requests:
            carrier.serve(first, min(AT_ONCE, num_requests + 1 - first))
    numbers = _numbers_while_alive(url, carrier)
    core = "compiled" if global_scheduler.__file__.endswith(".so") else "plain"
    cpu_s = round(numbers["preble_process_cpu_seconds_total"], 1)
    return Result(core, SEED, budget_mib, cpu_s, int(numbers.get("preble_in_flight", 0)), samples)


def _numbers_while_alive(url: str, carrier: Carrier) -> dict[str, float]:
    """The scheduler process asks its carriers before it shows metrics: answer it meanwhile."""
    found: list[dict[str, float]] = []
    asking = Thread(target=lambda: found.append(_numbers(url)))
    asking.start()
    while asking.is_alive():
        carrier.live()
        asking.join(0.05)
    return found[0]


def table(result: Result) -> str:
    """The table of the page."""
    rows = [
        (
            f"{sample.requests:,}",
            f"{sample.resident_mb:.0f} MB",
            f"{sample.index_mb:.0f} MB",
            f"{sample.resident_mb - sample.index_mb:.0f} MB",
            f"{sample.index_tokens / 1e6:.1f} million",
        )
        for sample in result.samples
    ]
    columns = ("requests", "scheduler process", "of it the index", "the rest", "tokens in the index")
    budget = f"an index budget of {result.budget_mib} MiB ({result.budget_mib * 2**20 / 1e6:.0f} MB)"
    caption = f"{result.core.capitalize()} core, {budget}, {result.cpu_s:.0f} s of CPU time, seed {result.seed}."
    return markdown(Table(columns, rows, caption=caption))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="how many [default: %(default)s]")
    parser.add_argument("--budget-mib", type=int, default=256, help="of the index [default: %(default)s]")
    parser.add_argument("--json", type=Path, help="where to write the result; the page stays as it is")
    parser.add_argument("--fill", action="store_true", help="only fill the page in")
    arguments = parser.parse_args()
    if not arguments.fill:
        result = run(arguments.requests, arguments.budget_mib)
        formatted = msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"
        if arguments.json is not None:
            Path("/dev/stdout" if str(arguments.json) == "-" else arguments.json).write_bytes(formatted)
            return 0
        RESULT.write_bytes(formatted)
    kept = msgspec.json.decode(RESULT.read_bytes(), type=Result)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), {"soak": table(kept)}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
