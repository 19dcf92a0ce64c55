"""A real Prometheus scrapes the gateway, takes the alert rules, and answers every query of the dashboard."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import yaml

from gateway.conftest import Serve, Served
from gateway.fakes import replicas, status
from gateway.test_tenants import table
from preble.config import AuthConfig
from preble.engines.starting.launch import Fleet, LaunchOptions
from preble.engines.starting.ports import free_ports
from support.monitoring import ROOT, generator
from support.servers import require_server
from support.waiting import eventually

KEY, USER = "of-an-admin", "of-a-user"
MAY_BE_EMPTY = re.compile(r"prefix_replications|preble_(copies|copied_tokens|splits|split_tokens)_total")
"""No prefix gets so many requests here that it is replicated, and no replica sends another one KV."""


@asynccontextmanager
async def prometheus(gateway: Served, folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A Prometheus that scrapes the gateway, with the rules, and a client of it."""
    program = require_server("prometheus", "prometheus")
    target = gateway.gateway.url.removeprefix("http://")
    scrape = {
        "job_name": "preble",
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "authorization": {"credentials": KEY},
        "static_configs": [{"targets": [target]}],
    }
    rules = str(ROOT / "deploy" / "prometheus" / "alerts.yml")
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump({"scrape_configs": [scrape], "rule_files": [rules]}))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    running = await asyncio.create_subprocess_exec(
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession(f"http://{address}") as http:
            yield http
    finally:
        running.terminate()
        await running.wait()


async def ask(http: aiohttp.ClientSession, path: str, **params: str) -> Any:
    """What it answers as `data`; None while it starts."""
    try:
        async with http.get(path, params=params) as answer:
            if answer.status == 503:
                return None
            page = await answer.json()
    except aiohttp.ClientConnectionError:
        return None
    assert answer.status == 200, page
    return page["data"]


async def test_a_real_prometheus_scrapes_the_gateway_and_answers_the_dashboard(serve: Serve, tmp_path: Path) -> None:
    """One replica is emulated, with KV events and a cache of known size; the other one fails a request."""
    keys = tmp_path / "keys.toml"
    keys.write_text(table("user", USER) + table("root", KEY, admin=True))
    launch = LaunchOptions(engine="emulator", replicas=1, log_dir=tmp_path)
    async with (
        Fleet(launch) as fleet,
        replicas(1, models=[{"id": "tiny-cpu", "max_model_len": 8192}]) as [fake],
        serve(
            [SimpleNamespace(url=fleet.urls[0]), fake], engine="auto", auth=AuthConfig(keys_file=str(keys))
        ) as gateway,
        prometheus(gateway, tmp_path) as http,
    ):
        fake.script.append(status(500))

        async def value(query: str) -> list[float]:
            data = await ask(http, "/api/v1/query", query=query)
            return [float(series["value"][1]) for series in data["result"]] if data else []

        async def is_scraped() -> bool:
            return await value("sum(preble_replica_up)") == [2.0]

        await eventually(is_scraped, "Prometheus has seen both replicas")

        async def rates_are_there() -> bool:
            """A series that begins with its last value has no rate, so ask until it has grown."""
            for stream in (True, False):
                body = {"prompt": "some words " * 40, "max_tokens": 4, "stream": stream}
                async with gateway.http.post("/v1/completions", json=body, headers={"x-api-key": USER}) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
            return (await value("sum(rate(preble_ttft_seconds_count[1m]))") or [0.0])[0] > 0

        await eventually(rates_are_there, "Prometheus has seen the requests")
        for query in generator("dashboard").queries():
            asked = query.replace("$__rate_interval", "1m").replace("$job", ".*").replace("$model", ".*")
            found = await value(asked)
            assert found or MAY_BE_EMPTY.search(query), query
        [group] = (await ask(http, "/api/v1/rules"))["groups"]
        assert len(group["rules"]) == len(generator("alerts").ALERTS)
        assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}

        async def is_up() -> bool:
            [target] = (await ask(http, "/api/v1/targets"))["activeTargets"]
            return bool(target["health"] == "up")

        await eventually(is_up, "a scrape has ended in time")
