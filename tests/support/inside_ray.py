"""What Preble's router does in Ray Serve when processes die, and behind HAProxy. Runs in Ray's Python; prints JSON.

    .servers/ray/bin/python tests/support/inside_ray.py kills

Each function is one scenario and returns what was seen; tests/ray_serve/test_ray_serve.py judges it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import aiohttp
import ray
import ray_example as example
from ray import serve
from ray.serve._private.common import DeploymentID
from ray_emulated import PROFILE, EmulatedServer, application

from preble.core.types.life import Ended
from preble.errors import ConfigError
from preble.integrations.ray.direct import Message, direct_application, reported
from preble.integrations.ray.hub import REPORT, HubBus, find_hub
from preble.integrations.ray.placing import RESERVATION, Placer, PlacerState
from preble.integrations.ray.settings import config_of, request_router_config
from preble.reservations import Reservations
from preble.serving import Serving
from support.waiting import eventually

INGRESSES, REPLICAS = 3, 4
ENGINE = {"kv_tokens": 40_000, "speed": 4.0}
Record = dict[str, Any]


async def kills() -> Record:
    """A replica, then an ingress replica with its router, die under load, and then the hub. Clients ask again."""
    app = application(preble=True, replicas=REPLICAS, ingresses=INGRESSES, **ENGINE)
    handle = await asyncio.to_thread(serve.run, app, name=example.APP, route_prefix=None)
    await example.ready(INGRESSES, REPLICAS)
    killed = []

    async def ask(body: Record) -> None:
        while True:
            try:
                await handle.ask.remote(body)
            except Exception:  # noqa: BLE001 (whatever Ray raises for a process that died)
                await asyncio.sleep(0.2)
            else:
                return

    tasks = []
    for number, body in enumerate(example.workload(90)):
        tasks.append(asyncio.create_task(ask(body)))
        if number == 30:
            killed.append(await kill("EmulatedReplica"))
        if number == 60:
            killed.append(await kill("Ingress"))
        await asyncio.sleep(0.05)
    await asyncio.gather(*tasks)
    await example.ready(INGRESSES, REPLICAS)
    await kill_the_hub()
    await example.ready(INGRESSES, REPLICAS)
    await asyncio.gather(*[ask(body) for body in example.workload(6)])
    states = await example.settled()
    counts = await example.at_replicas("EmulatedReplica", "counts")
    return {
        "answered": len(tasks),
        "survived": [pid for name in ("EmulatedReplica", "Ingress") for pid in await pids(name) if pid in killed],
        "in_flight": [state.in_flight for state in states],
        "assumed": [state.assumed for state in states],
        "running": sum(count[2] for count in counts),
    }


async def kill_the_hub() -> None:
    """And wait until a router has made another one."""
    deployment = str(DeploymentID(name="EmulatedReplica", app_name=example.APP))
    old = await asyncio.to_thread(find_hub, deployment)
    ray.kill(old, no_restart=True)
    async with asyncio.timeout(example.READY_S):
        while True:
            with suppress(ValueError):
                if (await asyncio.to_thread(find_hub, deployment))._actor_id != old._actor_id:
                    return
            await asyncio.sleep(0.1)


async def pids(deployment: str) -> list[int]:
    return list(await example.at_replicas(deployment, "pid"))


async def kill(deployment: str) -> int:
    """And return the process id."""
    pid = (await pids(deployment))[0]
    os.kill(pid, signal.SIGKILL)
    return pid


async def direct() -> Record:
    """HAProxy asks the scheduler, and replicas stream to it; clients leave; a replica dies."""
    engines = serve.deployment(
        EmulatedServer,
        num_replicas=REPLICAS,
        max_ongoing_requests=200,
        ray_actor_options={"num_cpus": 0},
        request_router_config=request_router_config(profile=PROFILE),
        health_check_period_s=2,
    ).bind(*ENGINE.values())
    await asyncio.to_thread(serve.run, direct_application(engines), name=example.APP, route_prefix="/")
    await until(lambda state: state.is_connected and [*state.replicas.values()] == [True] * REPLICAS)
    statuses: Counter[str] = Counter()
    async with aiohttp.ClientSession() as session:

        async def ask(body: Record, *, leaves: bool = False) -> None:
            url = f"http://127.0.0.1:{os.environ['PREBLE_TEST_PORT']}/v1/completions"
            try:
                async with session.post(url, json={**body, "stream": True}) as answer:
                    if leaves:
                        answer.close()
                        return
                    text = await answer.text()
                    done = answer.status == 200 and text.rstrip().endswith("[DONE]")
                    statuses["answered" if done else f"{answer.status} {text[:100]}"] += 1
            except aiohttp.ClientError:
                statuses["failed"] += 1

        await asyncio.gather(*[ask(body) for body in example.workload(60)])
        counts = await example.at_replicas("EmulatedServer", "counts")
        first = dict(statuses)
        await asyncio.gather(*[ask(body, leaves=True) for body in example.workload(10)])
        await until(lambda state: not state.in_flight)
        killed = asyncio.Event()

        async def keep_asking(body: Record) -> None:
            """However slow the machine is, many are then in flight at once."""
            while not killed.is_set():
                await ask({**body, "max_tokens": 400})

        asking = [asyncio.create_task(keep_asking(body)) for body in example.workload(20)]
        await until(lambda state: state.in_flight >= len(asking) // 2)
        await kill("EmulatedServer")
        killed.set()
        before = statuses["answered"]
        await asyncio.gather(*asking)
    state = await until(lambda state: not state.in_flight)
    prompts, hits = (sum(count[i] for count in counts) for i in (0, 1))
    survived = statuses["answered"] - before
    return {"first": first, "survived": survived, "hits": hits / prompts, "in_flight": state.in_flight}


async def scheduler_state() -> PlacerState:
    handle = serve.get_deployment_handle("DirectScheduler", example.APP)
    state: PlacerState = await handle.router_state.remote()
    return state


async def until(condition: Callable[[PlacerState], bool]) -> PlacerState:
    async with asyncio.timeout(example.READY_S):
        while True:
            if condition(state := await scheduler_state()):
                return state
            await asyncio.sleep(0.1)


async def failures() -> Record:
    """A lease that ends before Ray says so, applications that fail, a packet that nobody reads. Needs no Ray."""
    placer = await placer_of("one")
    chosen = []
    for end in (placer.ended, placer.cancelled):
        attempt: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        metadata = SimpleNamespace(internal_request_id="late", multiplexed_model_id="")
        pending = SimpleNamespace(args=({"prompt": [1, 2, 3]},), kwargs={}, metadata=metadata, future=attempt)
        chosen.append(await placer.choose(pending))
        placer._reservations.cancel("late")  # as at the end of its lease
        end("late")
    await placer.close()
    reporter = Mock()
    for app in (_fails, _is_left, _refuses):
        with suppress(OSError):
            scope = {"path": "/v1/completions", "headers": [(b"x-request-id", b"mine")]}
            await reported(app, reporter)(scope, AsyncMock(), AsyncMock())
    answered = []
    for most in (1 << 20, 60):  # the second time it is larger than what is kept
        with patch("preble.integrations.ray.direct._MAX_WHOLE_BYTES", most):  # shipped: 64 MiB
            await reported(_answers, reporter)(scope, AsyncMock(), AsyncMock())
        answered.append(reporter.report.call_args.args[1].output_tokens)
    bus = HubBus("alone", Mock(side_effect=KeyError), "one", Mock(), Mock())
    bus._take(REPORT, b"of another version")
    await bus.close()
    again = Placer("again", config_of({}))
    with patch.object(Serving, "start", AsyncMock(side_effect=OSError)) as start:
        for _ in range(2):
            again.start()
            await asyncio.gather(again._starting, return_exceptions=True)
    facts = [call.args[1] for call in reporter.report.call_args_list]
    statuses = [fact.status for fact in facts if isinstance(fact, Ended)]
    return {"chosen": chosen, "starts": start.call_count, "statuses": statuses, "answered": answered}


async def placer_of(*replicas: str) -> Placer:
    """One that knows these replicas, and needs no Ray."""
    placer = Placer("alone", config_of({}))
    placer._serving = serving = await Serving.start(placer.config)
    placer._reservations = Reservations(serving)
    placer._starting = asyncio.create_task(asyncio.sleep(0))
    placer.update_replicas([(replica, {}) for replica in replicas])
    await eventually(lambda: len(serving.replicas) == len(replicas))
    return placer


async def shared_id() -> Record:
    """Two direct requests of one id, and those whose chosen replica is gone or dies. Needs no Ray."""
    placer = await placer_of("one", "two")
    assert placer._reservations is not None

    async def choose(request_id: str) -> str | None:
        metadata = SimpleNamespace(internal_request_id=request_id, multiplexed_model_id="")
        kwargs = {RESERVATION: request_id}
        return await placer.choose(SimpleNamespace(args=({"prompt": [1, 2]},), kwargs=kwargs, metadata=metadata))

    chosen = [await choose("same"), await choose("same")]
    held = []
    for _ in range(2):
        placer._take("same", Ended(), 0.0)
        held.append("same" in placer._reservations)
    first = await choose("goes")
    placer.sent_to("goes", "two" if first == "one" else "one")
    moved_to = placer._reservations["goes"].placement.replica_id
    moved = not moved_to.endswith(str(first))
    retried = []
    for is_noticed in (True, False):
        dies = await choose("again")
        if not is_noticed:
            retried.append(await choose("again") is not None)
        placer.update_replicas([({"one": "two", "two": "one"}[str(dies)], {})])
        await eventually(lambda: placer._reservations["again"].loss is not None)
        if is_noticed:
            retried.append(await choose("again") is not None)
        placer._take("again", Ended(), 0.0)
        retried.append("again" in placer._reservations)
        placer.update_replicas([("one", {}), ("two", {})])
        await eventually(lambda: len(placer._serving.replicas) == 2)
    await placer.close()
    return {"placed": [one is not None for one in chosen], "held": held, "moved": moved, "retried": retried}


async def _fails(scope: Message, receive: Any, send: Any) -> None:
    raise OSError


async def _is_left(scope: Message, receive: Any, send: Any) -> None:
    """Its client goes before the first token."""


async def _refuses(scope: Message, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 429, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def _answers(scope: Message, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (b'{"choices": [{"text": "yes"}], ', b'"usage": {"prompt_tokens": 3, "completion_tokens": 7}}'):
        await send({"type": "http.response.body", "body": part, "more_body": True})


async def refusals() -> Record:
    """What a wrong setting says."""
    said = []
    for settings in ({"polcy": "preble"}, {"limits": {"max_in_flight": "many"}}):
        try:
            request_router_config(**settings)
        except ConfigError as error:
            said.append(str(error))
    return {"said": said}


def main(scenario: str) -> None:
    alone = {"refusals": refusals, "failures": failures, "shared_id": shared_id}
    if scenario in alone:
        found = asyncio.run(alone[scenario]())
    elif scenario == "direct":
        with example.local_ray(host="127.0.0.1", port=int(os.environ["PREBLE_TEST_PORT"])):
            found = asyncio.run(direct())
    else:
        with example.local_ray():
            found = asyncio.run(kills())
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
