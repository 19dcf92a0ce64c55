"""Three gateways of a group under load: one is killed, NATS is lost for a while, all are restarted in turn.

    python benchmarks/repro/gateway_group.py                 # all three, about ten minutes; writes the result, draws
    python benchmarks/repro/gateway_group.py killed --rate 10 --seconds 30
    python benchmarks/repro/gateway_group.py --draw

Real processes: `preble serve --peers`, a NATS server (`python3 dev/setup.py nats`), and four emulated replicas whose
caches hold about half of the documents that are asked about. The client does what a load balancer does: it asks
/ready four times a second, takes a ready gateway at random, and another one where a connection is refused. A request
is in the hands of a gateway once that has accepted its connection. Hit rates are those of the answers' usage; each
phase asks about the same documents in the same order.
Result: benchmarks/results/gateway_group.json. Drawn into docs/howto/several-gateways.md.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import msgspec
from page import filled, markdown

from preble.engines.starting.commands import LaunchOptions
from preble.engines.starting.launch import Fleet
from preble.engines.starting.ports import free_ports
from preble.lab.report import Table
from preble.logs import configure_logging

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "gateway_group.json"
PAGE = ROOT / "docs" / "howto" / "several-gateways.md"
NATS = ROOT / ".servers" / "nats" / "bin" / "nats-server"
GATEWAYS, REPLICAS = ("a", "b", "c"), 4
DOCUMENTS, DOCUMENT_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 48, 1536, 48, 12
KV_TOKENS = DOCUMENTS * DOCUMENT_TOKENS // 2 // REPLICAS
PROFILE = "a6000-mistral-7b"
LOOK_S = 0.25
STARTS_WITHIN_S = 120.0


class Phase(msgspec.Struct, frozen=True):
    """What was answered between two moments. `hit_rate`: of the prompt tokens."""

    name: str
    requests: int
    hit_rate: float


class Trial(msgspec.Struct, frozen=True):
    """One thing that happens, under load. `in_hands`: requests that a gateway had accepted when it was killed.

    `lost`: all others that failed. `left_in_flight`, `left_assumed`: what all gateways still count when all has ended.
    """

    what: str
    rate: float
    requests: int
    in_hands: int
    lost: int
    left_in_flight: int
    left_assumed: int
    phases: tuple[Phase, ...]


class Answer(msgspec.Struct, frozen=True):
    ended_at: float
    gateway: str
    ok: bool
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Gateway:
    """One process of `preble serve`."""

    def __init__(self, name: str, config: Path, port: int) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.is_ready = False
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "preble", "serve", "--config", str(self._config), "--log-level", "warning"]
        with self._config.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    async def stop(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            await asyncio.to_thread(process.wait)
            self.is_ready = False

    async def number(self, http: aiohttp.ClientSession, metric: str) -> float:
        """The sum of a metric over its labels."""
        async with http.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        return sum(float(value) for value in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, flags=re.MULTILINE))


class Nats:
    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.url = f"nats://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [str(NATS), "-a", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Scene:
    """The processes, and a client before them. `answers`: in the order of their ends."""

    def __init__(self, gateways: list[Gateway], nats: Nats, http: aiohttp.ClientSession, rate: float) -> None:
        self.gateways = gateways
        self.nats = nats
        self.http = http
        self.rate = rate
        self.answers: list[Answer] = []
        self.marks: list[tuple[float, str]] = []
        self._rng = random.Random(1)
        self._running: set[asyncio.Task[None]] = set()

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def mark(self, name: str) -> None:
        """What follows is called that."""
        self.marks.append((self.now, name))

    async def look(self) -> None:
        """Ask every gateway, all the time, whether it is ready."""
        while True:
            for gateway in self.gateways:
                gateway.is_ready = await self._says_ready(gateway)
            await asyncio.sleep(LOOK_S)

    async def _says_ready(self, gateway: Gateway) -> bool:
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self.http.get(f"{gateway.url}/ready", timeout=aiohttp.ClientTimeout(2.0)) as answer:
                return answer.status == 200
        return False

    async def load(self, seconds: float) -> None:
        """Send requests for so long; return when the last one is sent."""
        until, asked = self.now + seconds, random.Random(2)
        weights = [1.0 / (i + 1) ** 0.8 for i in range(DOCUMENTS)]
        while self.now < until:
            await asyncio.sleep(asked.expovariate(self.rate))
            (document,) = asked.choices(range(DOCUMENTS), weights)
            prompt = list(range(10_000 * document, 10_000 * document + DOCUMENT_TOKENS))
            prompt += [self._rng.randrange(1 << 30) for _ in range(OWN_TOKENS)]
            task = asyncio.create_task(self._ask(prompt))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def drained(self) -> None:
        """Wait for every answer."""
        while self._running:
            await asyncio.wait(set(self._running))

    async def _ask(self, prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS}
        ready = [gateway for gateway in self.gateways if gateway.is_ready]
        for gateway in self._rng.sample(ready, len(ready)):
            try:
                async with self.http.post(f"{gateway.url}/v1/completions", json=body) as answer:
                    usage = (await answer.json())["usage"] if answer.status == 200 else {}
            except aiohttp.ClientConnectorError:
                continue  # it has not accepted the connection
            except (aiohttp.ClientError, TimeoutError):
                self.answers.append(Answer(self.now, gateway.name, ok=False))
                return
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self.answers.append(Answer(self.now, gateway.name, bool(usage), usage.get("prompt_tokens", 0), cached))
            return
        self.answers.append(Answer(self.now, "none", ok=False))

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        deadline = self.now + STARTS_WITHIN_S
        while not await condition():
            if self.now > deadline:
                raise TimeoutError("the gateways did not come to agree")
            await asyncio.sleep(0.1)

    async def all_ready(self) -> bool:
        return all([await self._says_ready(gateway) for gateway in self.gateways])

    async def hear_each_other(self) -> bool:
        return all([await gateway.number(self.http, "preble_peers") == len(GATEWAYS) - 1 for gateway in self.gateways])

    def phases(self) -> tuple[Phase, ...]:
        """What was answered after each mark."""
        ends = [*(at for at, _ in self.marks[1:]), float("inf")]
        made = []
        for (begin, name), end in zip(self.marks, ends, strict=True):
            within = [answer for answer in self.answers if answer.ok and begin <= answer.ended_at < end]
            tokens = sum(answer.prompt_tokens for answer in within)
            cached = sum(answer.cached_tokens for answer in within)
            made.append(Phase(name, len(within), round(cached / tokens, 4) if tokens else 0.0))
        return tuple(made)


@asynccontextmanager
async def scene(rate: float, folder: Path) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        options = LaunchOptions(
            engine="emulator", replicas=REPLICAS, log_dir=folder, profile=PROFILE, kv_tokens=KV_TOKENS
        )
        fleet = await stack.enter_async_context(Fleet(options))
        nats = Nats()
        nats.start()
        stack.callback(nats.stop)
        gateways = []
        for name, port in zip(GATEWAYS, free_ports(len(GATEWAYS)), strict=True):
            config = folder / f"{name}.toml"
            config.write_text(
                f"replicas = {fleet.urls}\nport = {port}\nprofile = '{PROFILE}'\n[peers]\nname = '{name}'\n"
                f"servers = ['{nats.url}']\n[parity]\nenabled = false\n[timeouts]\ndrain_s = {4 * LOOK_S}\n"
            )
            gateway = Gateway(name, config, port)
            gateway.start()
            stack.push_async_callback(gateway.stop, signal.SIGKILL)
            gateways.append(gateway)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        )
        made = Scene(gateways, nats, http, rate)
        await made.until(made.all_ready)
        await made.until(made.hear_each_other)
        looking = asyncio.create_task(made.look())
        stack.callback(looking.cancel)
        await asyncio.sleep(2 * LOOK_S)
        yield made


async def killed(one: Scene, seconds: float) -> str | None:
    """Kill one gateway with requests in its hands. Returns its name."""
    one.mark("three gateways")
    await one.load(seconds)
    one.mark("one killed")
    loading = asyncio.create_task(one.load(seconds))
    await asyncio.sleep(seconds / 10)
    victim = one.gateways.pop(0)
    await victim.stop(signal.SIGKILL)
    await loading
    return victim.name


async def partitioned(one: Scene, seconds: float) -> str | None:
    """Lose the NATS server, and get it back."""
    one.mark("together")
    await one.load(seconds)
    one.nats.stop()
    one.mark("without NATS")
    await one.load(seconds)
    one.nats.start()
    await one.until(one.hear_each_other)
    one.mark("together again")
    await one.load(seconds)
    return None


async def restarted(one: Scene, seconds: float) -> str | None:
    """Restart every gateway in turn, as a rolling update does."""
    one.mark("before")
    await one.load(seconds)
    one.mark("restarts")
    loading = asyncio.create_task(one.load(1e9))
    for gateway in one.gateways:
        await gateway.stop(signal.SIGTERM)
        gateway.start()

        async def is_ready(gateway: Gateway = gateway) -> bool:
            return gateway.is_ready

        await one.until(is_ready)
    loading.cancel()
    one.mark("afterwards")
    await one.load(seconds)
    return None


TRIALS = {"killed": killed, "partitioned": partitioned, "restarted": restarted}


async def trial(name: str, rate: float, seconds: float, warm_s: float) -> Trial:
    with tempfile.TemporaryDirectory() as folder:
        async with scene(rate, Path(folder)) as one:
            await one.load(warm_s)
            dead = await TRIALS[name](one, seconds)
            await one.drained()
            failed = [answer for answer in one.answers if not answer.ok]
            in_hands = sum(answer.gateway == dead for answer in failed)

            async def left(metric: str) -> float:
                return sum([await gateway.number(one.http, metric) for gateway in one.gateways])

            async def nothing_left() -> bool:
                return not await left("preble_in_flight") and not await left("preble_assumed_in_flight")

            with suppress(TimeoutError):
                await one.until(nothing_left)
            return Trial(
                what=name,
                rate=rate,
                requests=len(one.answers),
                in_hands=in_hands,
                lost=len(failed) - in_hands,
                left_in_flight=round(await left("preble_in_flight")),
                left_assumed=round(await left("preble_assumed_in_flight")),
                phases=one.phases(),
            )


def drawn(trials: list[Trial]) -> dict[str, str]:
    """What stands between the markers of the page."""
    rows = []
    for one in trials:
        phases = "; ".join(f"{phase.name} {phase.hit_rate:.1%} ({phase.requests:,})" for phase in one.phases)
        left = f"{one.left_in_flight} + {one.left_assumed}"
        rows.append([one.what, f"{one.requests:,}", str(one.in_hands), str(one.lost), left, phases])
    columns = ["what happens", "requests", "failed in its hands", "other failures", "left in flight", "hit rates"]
    caption = (
        f"Three gateways, {REPLICAS} emulated replicas (A6000, Mistral-7B) whose caches hold half of "
        f"{DOCUMENTS} documents of {DOCUMENT_TOKENS:,} tokens, {trials[0].rate:g} requests a second. Left in flight: "
        "own and other gateways' requests that the gateways still count when all has ended. In brackets: requests."
    )
    return {"gateway_group": markdown(Table(columns, rows, caption))}


def read() -> list[Trial]:
    return msgspec.json.decode(RESULT.read_bytes(), type=list[Trial])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", nargs="*", choices=[*TRIALS, []], metavar="TRIAL", help=f"{', '.join(TRIALS)}")
    parser.add_argument("--rate", type=float, default=16.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=45.0, help="of each phase")
    parser.add_argument("--draw", action="store_true", help="draw from the result that is there")
    args = parser.parse_args()
    configure_logging("error", "console")
    if not args.draw:
        trials = []
        for name in args.trials or TRIALS:
            trials.append(asyncio.run(trial(name, args.rate, args.seconds, args.seconds / 2)))
            sys.stdout.write(msgspec.json.encode(trials[-1]).decode() + "\n")
        if args.trials:
            return 0
        RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(trials), indent=1) + b"\n")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), drawn(read())), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
