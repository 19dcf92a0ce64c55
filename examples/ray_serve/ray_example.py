"""One command that shows what the router is worth: `python examples/ray_serve/ray_example.py`.

It starts Ray on this machine, an application of four emulated replicas behind three ingress replicas, and sends the
same workload under Ray's power of two choices and under Preble. Needs no GPU.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import msgspec
import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray_emulated import application
from rich.console import Console
from rich.table import Table

from preble.integrations.ray.placing import PlacerState

APP = "preble-example"
READY_S = 60.0
_PREFIXES, _ZIPF = 60, 1.1
_PREFIX_TOKENS, _OWN_TOKENS, _OUTPUT_TOKENS = (1000, 3000), 50, (8, 48)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `hits`: the share of prompt tokens that replicas found cached, by their own count. `ttft_*`: seconds of
    the emulated engines. `in_flight`: requests that routers believe to run after the last answer. `unplaced`: requests
    that Preble left to Ray.
    """

    router: str
    ingresses: int
    requests: int
    failed: int
    hits: float
    ttft_mean_s: float
    ttft_p99_s: float
    busiest: float
    in_flight: int
    unplaced: int


def workload(count: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Yield requests that share prefixes: a few prefixes are popular, most are rare."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(32000) for _ in range(rng.randrange(*_PREFIX_TOKENS))] for _ in range(_PREFIXES)]
    weights = [1 / (rank + 1) ** _ZIPF for rank in range(_PREFIXES)]
    for _ in range(count):
        own = [rng.randrange(32000) for _ in range(_OWN_TOKENS)]
        prompt = rng.choices(prefixes, weights)[0] + own
        yield {"prompt": prompt, "max_tokens": rng.randrange(*_OUTPUT_TOKENS)}


@contextmanager
def local_ray(**http: Any) -> Iterator[None]:
    """Ray and Serve: the cluster of `RAY_ADDRESS`, else a small one of its own. `http`: options of Serve's proxy, which
    is not started without any."""
    here = {
        "num_cpus": 4,
        "object_store_memory": 200 * 2**20,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }
    ray.init(log_to_driver=False, **({} if "RAY_ADDRESS" in os.environ else here))
    try:
        serve.start(http_options=http or {"location": "NoServer"})
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


async def run(preble: bool, *, requests: int, rate: float, ingresses: int, replicas: int, **engine: Any) -> Outcome:
    """Deploy the application, send the workload at `rate` a second, and delete the application."""
    app = application(preble=preble, replicas=replicas, ingresses=ingresses, **engine)
    handle = await asyncio.to_thread(serve.run, app, name=APP, route_prefix=None)
    try:
        if preble:
            await ready(ingresses, replicas)
        ttfts = await send(handle, requests, rate)
        counts = await at_replicas("EmulatedReplica", "counts")
        states = await settled() if preble else []
    finally:
        await asyncio.to_thread(serve.delete, APP)
    prompts, hits = (sum(count[i] for count in counts) for i in (0, 1))
    return Outcome(
        router="Preble" if preble else "Ray's power of two choices",
        ingresses=ingresses,
        requests=requests,
        failed=requests - len(ttfts),
        hits=hits / prompts,
        ttft_mean_s=sum(ttfts) / len(ttfts),
        ttft_p99_s=sorted(ttfts)[int(0.99 * len(ttfts))],
        busiest=max(count[0] for count in counts) * len(counts) / prompts,
        in_flight=sum(state.in_flight + state.assumed for state in states),
        unplaced=sum(state.unplaced for state in states),
    )


async def send(handle: Any, requests: int, rate: float) -> list[float]:
    """Return the times to first token of the requests that succeeded."""
    rng, tasks = random.Random(7), []
    loop = asyncio.get_running_loop()
    at = loop.time()
    for body in workload(requests):
        at += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, at - loop.time()))
        tasks.append(asyncio.create_task(_ask(handle, body)))
    return [ttft for ttft in await asyncio.gather(*tasks) if ttft is not None]


async def _ask(handle: Any, body: dict[str, Any]) -> float | None:
    try:
        ttft: float = await handle.ask.remote(body)
    except Exception as error:  # noqa: BLE001 (whatever Ray raises: the request is lost, and counted)
        click.echo(f"a request failed: {error}", err=True)
        return None
    return ttft


async def at_replicas(deployment: str, method: str) -> list[Any]:
    """What a method returns at each replica of a deployment that lives: Ray may list one that has just died."""
    handle = serve.get_deployment_handle(deployment, APP)
    try:
        found = await handle.broadcast(method).results_async(timeout_s=30, return_exceptions=True)
    except DeploymentUnavailableError:
        return []
    return [one for one in found if not isinstance(one, BaseException)]


async def states() -> list[PlacerState]:
    """What the routers of the ingress replicas know."""
    return await at_replicas("Ingress", "router_state")


async def ready(ingresses: int, replicas: int) -> None:
    """Wait until every router knows its peers and follows every replica's KV events. Raises: TimeoutError."""
    async with asyncio.timeout(READY_S):
        while True:
            now = await states()
            if len(now) == ingresses and all(
                one.is_connected and one.peers >= ingresses - 1 and [*one.replicas.values()] == [True] * replicas
                for one in now
            ):
                return
            await asyncio.sleep(0.25)


async def settled() -> list[PlacerState]:
    """Wait until no router believes that a request is in flight, or for a while; return their states."""
    loop = asyncio.get_running_loop()
    until = loop.time() + READY_S
    while True:
        now = await states()
        if not any(one.in_flight + one.assumed for one in now) or loop.time() >= until:
            return now
        await asyncio.sleep(0.25)


@click.command()
@click.option("--requests", default=400, show_default=True)
@click.option("--rate", default=20.0, show_default=True, help="Requests a second.")
@click.option("--ingresses", default="3", show_default=True, help="Ingress replicas; several numbers: a run for each.")
@click.option("--replicas", default=4, show_default=True, help="Emulated replicas.")
@click.option("--kv-tokens", default=40_000, show_default=True, help="KV cache of each replica.")
@click.option("--speed", default=4.0, show_default=True, help="How many times faster than an A100 with Mistral 7B.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def main(as_json: bool, ingresses: str, **settings: Any) -> None:
    """Compare Ray's power of two choices with Preble on emulated replicas."""
    counts = [int(count) for count in ingresses.split(",")]
    with local_ray():
        outcomes = [
            asyncio.run(run(preble, ingresses=count, **settings)) for count in counts for preble in (False, True)
        ]
    if as_json:
        sys.stdout.writelines(f"{msgspec.json.encode(outcome).decode()}\n" for outcome in outcomes)
    else:
        Console().print(_table(outcomes))


def _table(outcomes: list[Outcome]) -> Table:
    table = Table("router", "ingress replicas", "hits", "mean TTFT", "p99 TTFT", "failed", "in flight after")
    for one in outcomes:
        times = [f"{1000 * seconds:.0f} ms" for seconds in (one.ttft_mean_s, one.ttft_p99_s)]
        table.add_row(one.router, str(one.ingresses), f"{one.hits:.3f}", *times, str(one.failed), str(one.in_flight))
    return table


if __name__ == "__main__":
    main()
