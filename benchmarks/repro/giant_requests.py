"""What one client's giant requests cost the others: how long the gateway is silent, and what memory it keeps.

    python benchmarks/repro/giant_requests.py                     # two minutes; Linux
    python benchmarks/repro/giant_requests.py --json result.json

A gateway with a tokenizer before one emulated replica, each in a process of its own. While a giant request comes,
another client asks for `/health` every 20 ms. Then bursts of bodies of 4 MB, 16 at once: the gateway's resident memory
before, at most meanwhile, and a second after each burst. The limits that would refuse the giants at once are raised, so
that they do their worst. Result: benchmarks/results/giant_requests.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

RESULT = Path(__file__).parents[1] / "results" / "giant_requests.json"
HEADERS = {"content-type": "application/json"}
EVERY_S = 0.02
MB = 1_000_000
BODY_BYTES, BODIES, AT_ONCE = 4 * MB, 100, 16

RAISED = {"PREBLE_LIMITS__MAX_PROMPTS": "4096", "PREBLE_LIMITS__MAX_BODY_BYTES": str(32 * MB)}
GIANTS: dict[str, Callable[[], object]] = {
    "nothing": lambda: "hello",
    "4,096 prompts": lambda: ["a short prompt"] * 4096,
    "4,096 prompts, of 1 KB": lambda: ["word " * 200] * 4096,
    "a text of 20 MB": lambda: "word " * (4 * MB),
    "20 MB of spaces": lambda: " " * (20 * MB),
    "20 MB of token ids": lambda: [12345] * (3 * MB),
}
BURSTS: dict[str, dict[str, object]] = {
    "answered": {"prompt": "hello", "max_tokens": 1},
    "refused": {"prompt": 5},
}


class Lag(msgspec.Struct, frozen=True):
    """One giant. `longest_s`, `p99_s`: until `/health` answered, meanwhile. `took_s`: the giant's own answer."""

    giant: str
    status: int
    took_s: float
    longest_s: float
    p99_s: float


class Burst(msgspec.Struct, frozen=True):
    """One burst. Resident memory in MB."""

    kind: str
    before_mb: int
    most_mb: int
    after_mb: int


class Process:
    """A command that prints the URL at which it listens."""

    def __init__(self, command: list[str], environ: dict[str, str], log: Path) -> None:
        argv = [sys.executable, "-m", "preble", *command]
        with log.open("wb") as errors:
            self.process = subprocess.Popen(argv, env=os.environ | environ, stdout=subprocess.PIPE, stderr=errors)
        assert self.process.stdout is not None
        found = re.search(rb"http://\S+", self.process.stdout.readline())
        if found is None:
            raise RuntimeError(log.read_text())
        self.url = found[0].decode()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=300)

    @property
    def resident_mb(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // MB

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


@contextmanager
def gateway(folder: Path) -> Iterator[Process]:
    """A gateway whose replica is up."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    names = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    tokenizer = Tokenizer(BPE(names, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    replica = Process(["emulate", "--profile", "tiny-cpu", "--port", "0"], {}, folder / "replica.log")
    command = ["serve", "--replica", replica.url, "--engine", "openai", "--tokenizer", str(folder), "--port", "0"]
    serving = Process(command, RAISED | {"PREBLE_PARITY__ENABLED": "false"}, folder / "gateway.log")
    try:
        while ask(serving, "GET", "/ready") != 200:
            time.sleep(0.05)
        yield serving
    finally:
        serving.stop()
        replica.stop()


def ask(serving: Process, method: str, path: str, body: bytes | None = None) -> int:
    connection = serving.connect()
    try:
        connection.request(method, path, body, HEADERS)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (ConnectionError, http.client.HTTPException):  # refused before the whole body was sent
        return 0
    finally:
        connection.close()


class Beside:
    """Does something again and again in a thread, within the context. `seen`: what it returned."""

    def __init__(self, look: Callable[[], float], every_s: float) -> None:
        self.seen: list[float] = []
        self._look = look
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.seen.append(self._look())
            time.sleep(self._every_s)

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def lag(serving: Process, giant: str) -> Lag:
    """Send one giant while another client asks whether the gateway is well."""
    body = json.dumps({"prompt": GIANTS[giant](), "max_tokens": 1}).encode()

    def health() -> float:
        started = time.perf_counter()
        assert ask(serving, "GET", "/health") == 200
        return time.perf_counter() - started

    with Beside(health, EVERY_S) as beside:
        time.sleep(0.2)
        started = time.perf_counter()
        status = ask(serving, "POST", "/v1/completions", body)
        took_s = time.perf_counter() - started
        time.sleep(1.0)
    seen = sorted(beside.seen)
    return Lag(giant, status, round(took_s, 2), round(seen[-1], 3), round(seen[int(len(seen) * 0.99)], 3))


def burst(serving: Process, kind: str) -> Burst:
    """Send many large bodies."""
    body = json.dumps(BURSTS[kind] | {"user": "u" * BODY_BYTES}).encode()
    before = serving.resident_mb
    with Beside(lambda: serving.resident_mb, 0.01) as beside, ThreadPoolExecutor(AT_ONCE) as clients:
        list(clients.map(lambda _: ask(serving, "POST", "/v1/completions", body), range(BODIES)))
    time.sleep(1.0)
    return Burst(kind, before, int(max(beside.seen)), serving.resident_mb)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help=f"where to write the result, such as {RESULT.name}")
    arguments = parser.parse_args()
    results: list[Lag | Burst] = []
    with tempfile.TemporaryDirectory() as folder:
        with gateway(Path(folder)) as serving:
            bursts = [burst(serving, kind) for kind in (*BURSTS, *BURSTS)]
        with gateway(Path(folder)) as serving:
            lags = [lag(serving, giant) for giant in GIANTS]
    for result in (*bursts, *lags):
        results.append(result)
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
