"""What one bad replica of four costs: it says that it is well, and fails every request in one of five ways.

    python benchmarks/repro/bad_replica.py                       # all ways; four minutes
    python benchmarks/repro/bad_replica.py hang --json result.json

200 requests at 12 a second through the gateway, answers of 3 s, 12 prefixes that are shared, the policy `preble`. Each
way with ejection and retries as they are by default, and without both. The answers of `hang` are streamed: of one that
comes whole, nobody can tell from outside that it never will. Status 1 if by default more than 2 % fail.
Result: benchmarks/results/bad_replica.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from preble.config import EjectionConfig, GatewayConfig, ParityConfig, ReplicaConfig, RetryConfig
from preble.core.types import ReplicaId
from preble.gateway.server import serving
from preble.logs import configure_logging

RESULT = Path(__file__).parents[1] / "results" / "bad_replica.json"
REQUESTS, PER_SECOND, ANSWER_S, PREFIXES, REPLICAS = 200, 12.0, 3.0, 12, 4
LARGEST_SHARE = 0.02
MODEL = "tiny"

Handler = Callable[[], Awaitable[web.StreamResponse]]


async def _good() -> web.StreamResponse:
    await asyncio.sleep(ANSWER_S)
    usage = {"prompt_tokens": 100, "completion_tokens": 3, "total_tokens": 103}
    return web.json_response({"choices": [{"index": 0, "text": "answer"}], "usage": usage})


async def _good_stream() -> web.Response:
    await asyncio.sleep(ANSWER_S)
    event = json.dumps({"choices": [{"index": 0, "text": "answer", "finish_reason": "stop"}]})
    return web.Response(text=f"data: {event}\n\ndata: [DONE]\n\n", content_type="text/event-stream")


async def _fails_at_once() -> web.StreamResponse:
    return web.json_response({"error": {"message": "CUDA error"}}, status=500)


async def _error_as_answer() -> web.StreamResponse:
    return web.json_response({"error": {"message": "CUDA error"}})


async def _garbage() -> web.StreamResponse:
    return web.Response(text="<html>busy</html>", content_type="text/html")


async def _hang() -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def _not_now() -> web.StreamResponse:
    return web.json_response({"error": {"message": "busy"}}, status=429, headers={"Retry-After": "30"})


WAYS: tuple[tuple[str, Handler], ...] = (
    ("500", _fails_at_once),
    ("error-as-answer", _error_as_answer),
    ("garbage", _garbage),
    ("hang", _hang),
    ("429", _not_now),
)
STREAMED = frozenset({"hang"})


class Run(msgspec.Struct, frozen=True):
    """One run. `tried`: requests that the bad replica got. `slowest_s`: of those that were answered."""

    way: str
    guarded: bool
    requests: int
    failed: int
    tried: int
    mean_s: float
    slowest_s: float


@asynccontextmanager
async def replica(handler: Handler) -> AsyncIterator[tuple[str, list[int]]]:
    """Yield the URL of a replica, and a list with one entry for each request that it gets."""
    got: list[int] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        await request.read()
        got.append(1)
        return await handler()

    async def models(request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "max_model_len": 8192}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", got
    finally:
        await runner.cleanup()


def gateway_config(urls: list[str], *, guarded: bool) -> GatewayConfig:
    config = GatewayConfig(
        replicas=tuple(ReplicaConfig(url) for url in urls),
        engine="openai",
        port=0,
        parity=ParityConfig(enabled=False),
    )
    if guarded:
        return config
    ejection, retries = EjectionConfig(enabled=False, longest_hold_s=0.0), RetryConfig(share=0.0, least=0)
    return msgspec.structs.replace(config, ejection=ejection, retries=retries)


async def run(way: str, handler: Handler, *, guarded: bool) -> Run:
    """Send the load to a gateway with one bad replica and three good ones."""
    async with AsyncExitStack() as stack:
        handlers = [handler, *[_good_stream if way in STREAMED else _good] * (REPLICAS - 1)]
        fleet = [await stack.enter_async_context(replica(each)) for each in handlers]
        urls = [url for url, _ in fleet]
        gateway = await stack.enter_async_context(serving(gateway_config(urls, guarded=guarded)))
        while any(ReplicaId(url) not in gateway.serving.replicas for url in urls):  # noqa: ASYNC110 (a test of its own)
            await asyncio.sleep(0.05)
        # Clients give up after a while, so that a hang counts as a failure.
        timeout = aiohttp.ClientTimeout(total=60.0)
        http = await stack.enter_async_context(aiohttp.ClientSession(gateway.url, timeout=timeout))
        times = await _load(http, stream=way in STREAMED)
        answered = [time for time in times if time is not None]
        return Run(
            way,
            guarded,
            len(times),
            len(times) - len(answered),
            len(fleet[0][1]),
            round(sum(answered) / max(len(answered), 1), 2),
            round(max(answered, default=0.0), 2),
        )


async def _load(http: aiohttp.ClientSession, *, stream: bool) -> list[float | None]:
    """Return the seconds that each answer took, None for a failure."""
    tasks = []
    for number in range(REQUESTS):
        tasks.append(asyncio.create_task(_ask(http, number, stream=stream)))
        await asyncio.sleep(1 / PER_SECOND)
    return list(await asyncio.gather(*tasks))


async def _ask(http: aiohttp.ClientSession, number: int, *, stream: bool) -> float | None:
    prompt = f"tool {number % PREFIXES}: " + "how to use it, at length. " * 40 + f"Question {number}"
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        asked = {"model": MODEL, "prompt": prompt, "stream": stream}
        async with http.post("/v1/completions", json=asked) as answer:
            raw = await answer.read()
            is_good = b"[DONE]" in raw if stream else "choices" in json.loads(raw)
            return loop.time() - started if answer.status == 200 and is_good else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=", ".join(name for name, _ in WAYS))
    parser.add_argument("--json", type=Path, help=f"where to write the result, such as {RESULT.name}")
    arguments = parser.parse_args()
    configure_logging("error", "console")
    runs = []
    for way, handler in WAYS:
        if arguments.ways and way not in arguments.ways:
            continue
        for guarded in (False, True):
            runs.append(asyncio.run(run(way, handler, guarded=guarded)))
            sys.stdout.write(f"{msgspec.json.encode(runs[-1]).decode()}\n")
            sys.stdout.flush()
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=1) + b"\n")
    return int(any(each.guarded and each.failed > LARGEST_SHARE * each.requests for each in runs))


if __name__ == "__main__":
    sys.exit(main())
