"""What the gateway shows of its decisions, over real sockets: pages, metrics, the log, the commands that use them."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner, Result

from gateway.conftest import Serve, Served
from gateway.fakes import FakeReplica, gated_stream, replicas, status
from preble.cli import cli
from preble.config import (
    AuthConfig,
    DecisionsConfig,
    GatewayConfig,
    HealthConfig,
    ParityConfig,
    ReplicaConfig,
)
from preble.decisions.lines import VERSION, AddReplicaLine, PlaceLine, RemoveReplicaLine, ReportLine
from preble.decisions.names import unpack_text
from preble.decisions.reader import LogReader
from preble.gateway.server import serving
from preble.lab.replay.replay import Replay
from support.waiting import eventually

LONG = "the same beginning of every prompt " * 8


async def got(gateway: Served, path: str, code: int = 200) -> Any:
    async with gateway.http.get(path) as answer:
        assert answer.status == code, await answer.text()
        return await answer.json()


async def preble(*arguments: str) -> Result:
    """The command, in a thread, so that the gateway in this one can answer it."""
    return await asyncio.to_thread(CliRunner().invoke, cli, arguments)


async def test_a_decision_is_explained_with_its_candidates_and_what_came_of_it(serve: Serve) -> None:
    async with replicas(2) as fakes, serve(fakes, policy="e2") as gateway:
        for fake in fakes:
            fake.cached_tokens = 64
        await gateway.complete(prompt=LONG)
        _, _, headers = await gateway.complete(prompt=LONG + "end")
        [decision] = (await got(gateway, f"/debug/decisions/{headers['x-request-id']}"))["decisions"]
        assert (decision["reason"], decision["policy"]) == ("exploit", "e2")
        assert decision["replica"] == headers["x-preble-replica"]
        assert decision["matched_tokens"] == int(headers["x-preble-matched-tokens"]) > 0
        assert decision["num_prompt_tokens"] == len(LONG) + 3
        assert [candidate["replica"] for candidate in decision["candidates"]] == [decision["replica"]]
        assert decision["candidates"][0]["prefill_s"] > 0
        assert (decision["outcome"], decision["output_tokens"], decision["cached_tokens"]) == ("ok", 3, 64)
        assert decision["end_s"] >= 0


@pytest.mark.parametrize(
    ("headers", "fields", "asked"),
    [
        ({}, {}, None),
        ({"x-preble-priority": "batch"}, {"service_tier": "auto"}, "class 'batch', service tier 'auto'"),
        ({}, {"nvext": {"agent_hints": {"priority": -5}}}, "service tier 'flex'"),
        ({}, {"nvext": {"agent_hints": {"priority": 5}}}, None),
        (
            {"x-preble-ttft-ms": "9500", "x-sgl-tps-slo": "2"},
            {},
            "the first token in 9.5 s, 0.5 s a token",
        ),
        ({}, {"service_tier": "\x1b[2J" + "x" * 10_000}, "service tier '\\x1b[2J" + "x" * 36 + "'"),
    ],
    ids=["nothing", "class", "hint", "hint without effect", "target", "escapes"],
)
async def test_a_decision_says_what_its_client_asked_for(
    serve: Serve, headers: dict[str, str], fields: dict[str, Any], asked: str | None
) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        body = {"model": "tiny", "prompt": "hello", **fields}
        async with gateway.http.post("/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
        request_id = answer.headers["x-request-id"]
        [decision] = (await got(gateway, f"/debug/decisions/{request_id}"))["decisions"]
        assert decision["asked"] == asked
        shown = (await preble("explain", request_id, "--url", gateway.gateway.url)).stdout
        assert (f"Its client asked for {asked}." in shown) if asked else "asked for" not in shown


async def test_a_request_that_moved_has_a_decision_for_each_placement(serve: Serve) -> None:
    async with replicas(2) as fakes, serve(fakes) as gateway:
        fakes[0].script.append(status(503))
        fakes[1].script.append(status(503))
        _, _, headers = await gateway.complete()
        decisions = (await got(gateway, f"/debug/decisions/{headers['x-request-id']}"))["decisions"]
        assert [decision["outcome"] for decision in decisions] == ["refused", "refused"]
        assert {decision["replica"] for decision in decisions} == {fake.url for fake in fakes}


async def test_a_request_with_several_prompts_has_a_decision_for_each(serve: Serve) -> None:
    async with replicas(2) as fakes, serve(fakes) as gateway:
        async with gateway.http.post("/v1/completions", json={"prompt": ["a", "b"]}, headers={"X-Request-Id": "x"}):
            pass
        found = (await got(gateway, "/debug/decisions/x"))["decisions"]
        assert sorted(decision["request_id"] for decision in found) == ["x#0", "x#1"]
        assert len((await got(gateway, "/debug/decisions/x%231"))["decisions"]) == 1


async def test_a_running_request_is_reported_as_running(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.script.append(gated_stream)
        headers = {"X-Request-Id": "running"}
        async with gateway.http.post(
            "/v1/completions", json={"prompt": "a", "stream": True}, headers=headers
        ) as answer:
            await answer.content.readany()
            [decision] = (await got(gateway, "/debug/decisions/running"))["decisions"]
            assert decision["outcome"] is None and decision["end_s"] is None
            assert decision["first_token_s"] is not None
            one.gate.set()


async def test_the_last_decisions_come_newest_first_and_as_many_as_asked_for(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one], decisions=DecisionsConfig(remembered=3)) as gateway:
        for _ in range(5):
            await gateway.complete()
        everything = [d["request_id"] for d in (await got(gateway, "/debug/decisions"))["decisions"]]
        assert len(everything) == 3
        assert [d["request_id"] for d in (await got(gateway, "/debug/decisions?limit=2"))["decisions"]] == everything[
            :2
        ]
        assert (await got(gateway, f"/debug/decisions/{everything[0]}"))["decisions"]
        for wrong in ("0", "4", "x", "-1", ""):
            body = await got(gateway, f"/debug/decisions?limit={wrong}", 400 if wrong else 200)
            assert not wrong or body["error"]["param"] == "limit"


@pytest.mark.parametrize("path", ["/debug/decisions/unheard-of", "/debug/nothing", "/debug/replicas/one"])
async def test_what_is_not_there_is_a_404_in_openais_form(serve: Serve, path: str) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        assert (await got(gateway, path, 404))["error"]["code"] == "not_found"


async def test_explain_needs_an_admin_key(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one], auth=AuthConfig(api_keys=("c",), admin_keys=("k",))) as gateway:
        result = await preble("explain", "x", "--url", gateway.gateway.url)
        assert (result.exit_code, "give --api-key" in result.stderr) == (2, True)
        result = await preble("explain", "x", "--url", gateway.gateway.url, "--api-key", "k")
        assert (result.exit_code, "no decision about request 'x'" in result.stderr) == (1, True)


async def test_replicas_are_shown_with_what_is_believed_of_them(serve: Serve) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.cached_tokens = 16
        await gateway.complete(prompt=LONG)
        await gateway.complete(prompt=LONG)
        page = await got(gateway, "/debug/replicas")
        assert (page["policy"], page["in_flight"]) == ("round_robin", 0)
        [replica] = page["replicas"]
        assert (replica["replica"], replica["engine"], replica["in_flight"]) == (one.url, "openai", 0)
        assert (replica["drift_requests"], replica["drift_reported_tokens"]) == (2, 32)
        assert replica["load_s"] > 0
        assert page["index_bytes"] > 0
        metrics = await gateway.metrics()
        assert f'preble_drift_reported_tokens_total{{replica="{one.url}"}} 32.0' in metrics
        assert "preble_index_bytes " in metrics and "preble_unindexed_total 0.0" in metrics


async def test_explain_explains_a_decision_in_words(serve: Serve) -> None:
    async with replicas(2) as fakes, serve(fakes, policy="e2") as gateway:
        _, _, headers = await gateway.complete(prompt=LONG)
        request_id = headers["x-request-id"]
        result = await preble("explain", request_id, "--url", gateway.gateway.url)
        assert result.exit_code == 0, result.stderr
        assert f"request {request_id}, placed" in result.stdout
        assert f"* {headers['x-preble-replica']}" in result.stdout
        assert "lowest L + M + P" in result.stdout
        result = await preble("explain", request_id, "--url", gateway.gateway.url, "--json", "-")
        assert json.loads(result.stdout)["decisions"][0]["reason"] == "explore"


async def test_explain_says_when_something_else_answers(serve: Serve) -> None:
    async with replicas(1) as [one]:
        result = await preble("explain", "x", "--url", one.url)
        assert (result.exit_code, "is that a Preble gateway?" in result.stderr) == (1, True)


# the log


def logging_to(path: Path, fakes: list[FakeReplica], **decisions: Any) -> GatewayConfig:
    return GatewayConfig(
        replicas=tuple(ReplicaConfig(fake.url) for fake in fakes),
        engine="openai",
        port=0,
        health=HealthConfig(check_interval_s=0.05, retry_min_s=0.02, retry_max_s=0.05),
        decisions=DecisionsConfig(log=str(path), **decisions),
        parity=ParityConfig(enabled=False),
    )


async def logged_run(path: Path, **decisions: Any) -> None:
    """A gateway before three replicas, one of which goes: requests that share prefixes, some that fail or move."""
    async with (
        replicas(3) as fakes,
        serving(logging_to(path, fakes, **decisions)) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        await eventually(lambda: len(gateway.serving.replicas) == 3)
        fakes[1].script.append(status(503))
        for i in range(12):
            if i == 8:
                await fakes[2].stop()
            body = {"model": "tiny", "prompt": LONG[: 40 * (i % 5)] + str(i)}
            async with http.post("/v1/completions", json=body) as answer:
                assert answer.status == 200
        await eventually(lambda: len(gateway.serving.replicas) == 2)


@pytest.mark.parametrize("tokens", ["renamed", "plain"])
async def test_the_gateways_log_replays_to_the_same_placements(tmp_path: Path, tokens: str) -> None:
    path = tmp_path / "decisions.jsonl"
    await logged_run(path, log_tokens=tokens)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    log = LogReader(path)
    events = [numbered.event for numbered in log]
    assert (log.header.tokens, log.ended_at) == (tokens, None)
    assert {AddReplicaLine, PlaceLine, ReportLine, RemoveReplicaLine} <= set(map(type, events))
    result = Replay(LogReader(path)).run()
    assert (result.difference, result.ended_at) == (None, None)
    assert result.compared == sum(isinstance(event, PlaceLine) for event in events) >= 12


async def test_the_command_replays_a_log_and_puts_it_to_other_policies(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    await logged_run(path)
    result = await preble("replay", str(path), "--json", "-")
    assert (result.exit_code, json.loads(result.stdout)["difference"]) == (0, None)
    assert "are made again" in (await preble("replay", str(path))).stdout
    result = await preble("replay", str(path), "--policy", "round_robin", "--json", "-")
    outcomes = json.loads(result.stdout)["outcomes"]
    arms = [(o["policy"], o["as_logged"]) for o in outcomes]
    assert arms == [("preble", True), ("preble", False), ("round_robin", False)]
    assert len({o["placements"] for o in outcomes}) == 1
    assert "round_robin" in (await preble("replay", str(path), "--policy", "round_robin")).stdout


async def test_a_log_has_of_a_request_what_the_gateway_remembered(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    async with (
        replicas(2) as fakes,
        serving(logging_to(path, fakes)) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        await eventually(lambda: len(gateway.serving.replicas) == 2)
        body = {"model": "tiny", "prompt": [LONG, LONG + "end", "other"]}
        for _ in range(2):
            async with http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as answer:
                assert answer.status == 200
        async with http.get("/debug/decisions/mine") as answer:
            remembered = (await answer.json())["decisions"]
    result = await preble("explain", "mine", "--log", str(path), "--json", "-")
    logged = json.loads(result.stdout)["decisions"]
    assert len(logged) == 6
    times = ("placed_at", "first_token_s", "end_s")
    for ours, theirs in zip(logged, remembered, strict=True):
        assert {**ours, **dict.fromkeys(times)} == {**theirs, **dict.fromkeys(times)}
        assert ours["placed_at"] == pytest.approx(theirs["placed_at"], abs=1.0)
    text = (await preble("explain", "mine#2", "--log", str(path))).stdout
    assert text.startswith("request mine#2, placed 2") and text.count("Finished after") == 2
    missing = await preble("explain", "yours", "--log", str(path))
    assert (missing.exit_code, f"no decision about request 'yours' in {path}" in missing.stderr) == (1, True)


async def test_a_log_that_does_not_replay_explains_nothing(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    await logged_run(path)
    path.write_text(path.read_text().replace('"matched_tokens":0', '"matched_tokens":16', 1))
    result = await preble("explain", "any", "--log", str(path))
    assert (result.exit_code, f"run `preble replay {path}`" in result.stderr) == (2, True)


async def test_a_changed_log_is_found_out_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    await logged_run(path)
    lines = path.read_text().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if '"kind":"place"' in line)
    changed = json.loads(lines[number])
    changed["placement"]["matched_tokens"] += 16
    lines[number] = json.dumps(changed) + "\n"
    path.write_text("".join(lines))
    result = await preble("replay", str(path))
    assert result.exit_code == 1
    assert f"line {number + 1} differs, request {changed['id']}" in result.stdout


async def test_no_prompt_can_be_read_from_a_log_with_renamed_tokens(tmp_path: Path) -> None:
    await logged_run(tmp_path / "plain.jsonl", log_tokens="plain")
    await logged_run(tmp_path / "renamed.jsonl")
    tokens = {}
    for name in ("plain", "renamed"):
        events = [numbered.event for numbered in LogReader(tmp_path / f"{name}.jsonl")]
        prompts = [unpack_text(event.prompt) for event in events if isinstance(event, PlaceLine)]
        tokens[name] = {prompt[i : i + 4] for prompt in prompts for i in range(0, len(prompt), 4)}
    assert len(tokens["plain"]) == len(tokens["renamed"])
    assert not tokens["plain"] & tokens["renamed"]


async def test_a_log_that_is_there_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text("old")
    await logged_run(path)
    assert (tmp_path / "decisions.jsonl.1").read_text() == "old"
    assert LogReader(path).header.version == VERSION
