"""What restarts of the gateway cost its clients: each new one takes the listening socket over, the old one drains.

    python benchmarks/repro/restarts.py                     # 70 s; not on Windows
    python benchmarks/repro/restarts.py --json result.json

60 s at 50 requests a second, every second one streamed for about a second, while every 10 s a new gateway process is
started on the socket (as systemd passes it) and the old one gets SIGTERM. Clients keep connections. A request is lost
if it gets anything but its whole answer; nobody tries again. Status 1 if one is.
Result: benchmarks/results/restarts.json.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from preble.web.server.listening import listen

RESULT = Path(__file__).parents[1] / "results" / "restarts.json"
SECONDS, PER_SECOND, RESTART_EVERY_S = 60.0, 50.0, 10.0
PIECES, PIECE_S = 10, 0.1
TAKE_OVER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""systemd names the process that is to have the socket; only that process knows its number."""


class Result(msgspec.Struct, frozen=True):
    """`statuses`: of the gateways that were stopped. `lost`: what its client got of each request that was."""

    requests: int
    streams: int
    restarts: int
    statuses: list[int]
    lost: list[str]
    p99_s: float
    slowest_s: float


async def _answer(request: web.Request) -> web.StreamResponse:
    """A replica's answer, whole or in pieces, about a second later."""
    if not (await request.json()).get("stream"):
        await asyncio.sleep(PIECES * PIECE_S)
        return web.json_response({"choices": [{"index": 0, "text": "answer"}]})
    stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await stream.prepare(request)
    for _ in range(PIECES):
        await stream.write(b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n')
        await asyncio.sleep(PIECE_S)
    await stream.write(b"data: [DONE]\n\n")
    return stream


async def _replica(stack: AsyncExitStack) -> str:
    """Start a replica; return its URL."""

    async def models(request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": "tiny", "max_model_len": 8192}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", _answer)
    runner = web.AppRunner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def _start(listener: socket.socket, replica: str) -> asyncio.subprocess.Process:
    """Start a gateway on the socket; return once it takes requests."""
    number = listener.fileno()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TAKE_OVER, str(number)),
        *("-m", "preble", "serve", "--replica", replica, "--engine", "openai", "--log-level", "error"),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PREBLE_PARITY__ENABLED": "false"},
        pass_fds=(number,),
    )
    assert process.stdout is not None
    if b"listening" not in await process.stdout.readline():
        raise RuntimeError("the gateway did not start")
    return process


async def _ask(http: aiohttp.ClientSession, number: int) -> tuple[str | None, float]:
    """Return what went wrong, None for nothing, and how long it took."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    body = {"model": "tiny", "prompt": f"question {number}", "stream": number % 2 == 0}
    wrong = None
    try:
        async with http.post("/v1/completions", json=body) as answer:
            text = await answer.text()
            if answer.status != 200 or ("[DONE]" if body["stream"] else "choices") not in text:
                wrong = f"{answer.status} {text[-200:]}"
    except (aiohttp.ClientError, TimeoutError) as error:
        wrong = repr(error)
    return wrong, loop.time() - started


async def run() -> Result:
    """Send the load, and restart the gateway meanwhile."""
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1", 0))
        listener.set_inheritable(True)
        replica = await _replica(stack)
        current = await _start(listener, replica)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        http = await stack.enter_async_context(aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)))
        loop = asyncio.get_running_loop()
        begins, asked, stopped = loop.time(), [], []
        restart_at = begins + RESTART_EVERY_S
        following: asyncio.Task[asyncio.subprocess.Process] | None = None
        for number in range(int(SECONDS * PER_SECOND)):
            await asyncio.sleep(max(0.0, begins + number / PER_SECOND - loop.time()))
            asked.append(asyncio.create_task(_ask(http, number)))
            if loop.time() >= restart_at and following is None:
                restart_at += RESTART_EVERY_S
                following = asyncio.create_task(_start(listener, replica))
            if following is not None and following.done():
                current.send_signal(signal.SIGTERM)
                stopped.append(current)
                current, following = following.result(), None
        answers, num_restarts = await asyncio.gather(*asked), len(stopped)
        if following is not None:  # a machine so busy that a gateway takes long to start
            stopped.append(await following)
            stopped[-1].send_signal(signal.SIGINT)
        current.send_signal(signal.SIGINT)
        statuses = [await process.wait() for process in (*stopped, current)]
    times = sorted(took_s for _, took_s in answers)
    lost = [wrong for wrong, _ in answers if wrong is not None]
    p99_s, slowest_s = round(times[int(len(times) * 0.99)], 2), round(times[-1], 2)
    return Result(len(answers), (len(answers) + 1) // 2, num_restarts, statuses, lost, p99_s, slowest_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help=f"where to write the result, such as {RESULT.name}")
    arguments = parser.parse_args()
    result = asyncio.run(run())
    formatted = msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"
    sys.stdout.buffer.write(formatted)
    if arguments.json is not None:
        arguments.json.write_bytes(formatted)
    return int(bool(result.lost))


if __name__ == "__main__":
    sys.exit(main())
