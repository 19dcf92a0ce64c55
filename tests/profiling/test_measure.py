"""Measuring over real sockets: an emulated replica, and servers that are not what they should be.

How fast anything is decides nothing here; that the fit is right is tested on made-up times (test_fit.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner

from preble.cli import cli
from preble.core.types import ReplicaId
from preble.emulator import EmulatorConfig, EmulatorServer
from preble.engines import EngineServer, connect
from preble.engines.http import HttpClient
from preble.engines.vllm.client import VllmEngine
from preble.errors import ConfigError, EngineProtocolError, EngineRefused, PrebleError
from preble.lab.profiling import Measurements, fit_profile
from preble.lab.profiling.measure import Measuring
from preble.profiles import load_profile, profile_json
from preble.web.client.pool import Ongoing
from support.web_app import listening


async def measure(url: str, **options: Any) -> tuple[Measurements, int, int]:
    """The measurements, the steps that were announced and those that were taken."""
    engine = connect(url)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1

    try:
        measuring = Measuring(engine, machine="a test", seed=7, quick=True, **options)
        plan = await measuring.prepare()
        return await measuring.run(step), plan.num_steps, steps
    finally:
        await engine.close()


def told_of(measurements: Measurements) -> list[str]:
    """The notes but one: whether bursts end before the batch beside them does depends on the machine."""
    return [note for note in measurements.notes if "beside a decoding batch" not in note]


async def test_an_emulated_replica_gives_a_valid_profile(tmp_path: Path) -> None:
    config = EmulatorConfig(profile="tiny-cpu", speed=2.0, kv_tokens=4096, max_model_len=1500)
    async with EmulatorServer(config) as server:
        measurements, announced, taken = await measure(server.url)
    assert announced == taken
    assert measurements.kv_capacity_tokens == 4096
    assert told_of(measurements) == []
    assert max(times.new_tokens for times in measurements.prefill) == 1499
    assert all(len(times.seconds) >= 3 for times in measurements.prefill)
    fit = fit_profile(measurements, name="mine", source="a test")
    path = tmp_path / "mine.json"
    path.write_text(profile_json(fit.profile))
    assert load_profile(str(path)) == fit.profile  # what is not monotone or negative cannot be loaded


async def test_what_was_cached_is_what_the_replica_says() -> None:
    config = EmulatorConfig(profile="tiny-cpu", speed=2.0, kv_tokens=4096, max_model_len=1500)
    async with EmulatorServer(config) as server:
        measurements, _, _ = await measure(server.url)
    behind = [times for times in measurements.prefill if times.cached_tokens]
    assert {times.cached_tokens for times in behind} == {749 // 16 * 16}
    assert {times.new_tokens for times in behind} == {128 + 749 % 16, 512 + 749 % 16}


async def test_batches_that_the_replica_does_not_run_are_left_out_and_told_of() -> None:
    config = EmulatorConfig(profile="tiny-cpu", speed=2.0, kv_tokens=8192, max_model_len=1500, max_running=4)
    async with EmulatorServer(config) as server:
        measurements, _, _ = await measure(server.url)
    assert {times.num_sequences for times in measurements.decode} == {1, 4}
    assert told_of(measurements) == ["the replica does not decode 16 sequences at once; measured up to fewer"]


async def test_the_context_of_a_decode_counts_all_its_sequences() -> None:
    config = EmulatorConfig(profile="tiny-cpu", speed=2.0, kv_tokens=16_384, max_model_len=1500)
    async with EmulatorServer(config) as server:
        measurements, _, _ = await measure(server.url)
    for times in measurements.decode:
        each = times.context_tokens / times.num_sequences
        assert 16 < each < 16 + 60 or 512 < each < 512 + 100


# --- servers that are not what they should be ---

Answer = Callable[[dict[str, Any]], tuple[int, str]]


def events(*texts: str, completion_tokens: int | None = None, **usage: Any) -> str:
    lines = [{"choices": [{"text": text}]} for text in texts]
    if completion_tokens is not None:
        lines.append({"choices": [], "usage": {"completion_tokens": completion_tokens, **usage}})
    return "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n"


@asynccontextmanager
async def server(answer: Answer, max_model_len: int | None = 512) -> AsyncIterator[str]:
    """The least of an OpenAI server; `answer` makes (status, body) from a completion's body."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": max_model_len}]})

    async def complete(request: web.Request) -> web.Response:
        status, body = answer(await request.json())
        return web.Response(status=status, text=body)

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
    async with listening(app) as url:
        yield url


def exactly(body: dict[str, Any]) -> tuple[int, str]:
    return 200, events(*"x" * body["max_tokens"], completion_tokens=body["max_tokens"])


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda body: (200, events("x", completion_tokens=body["max_tokens"] + 5)), "it ignores max_tokens"),
        (lambda body: (200, events("x", completion_tokens=1)), "obeys ignore_eos"),
        (lambda body: (200, events()), "without a token"),
        (exactly, "a proxy on the way"),
        (lambda body: (200, "data: {nope\n\n"), "is no completion"),
        (
            lambda body: (200, 'data: {"error": {"message": "out of memory"}}\n\n'),
            "broke off its answer: out of memory",
        ),
        (lambda body: (400, '{"error": {"message": "no ids here"}}'), "status 400: no ids here"),
        (lambda body: (500, "<html>"), "status 500"),
    ],
)
async def test_an_answer_that_cannot_be_timed_is_reported(answer: Answer, says: str) -> None:
    async with server(answer) as url:
        with pytest.raises(EngineProtocolError, match=says):
            await measure(url, kv_tokens=4096)


async def test_random_prompts_that_are_cached_are_refused() -> None:
    def cached(body: dict[str, Any]) -> tuple[int, str]:
        n = body["max_tokens"]
        return 200, events(*"x" * n, completion_tokens=n, prompt_tokens_details={"cached_tokens": 32})

    async with server(cached) as url:
        with pytest.raises(EngineProtocolError, match="Give another --seed"):
            await measure(url, kv_tokens=4096)


class Silent(HttpClient):
    """Reads nothing of what a replica says of cached tokens."""

    def begin(self, path: str, body: bytes, *rest: Any) -> Ongoing:
        return super().begin(path, body.replace(b'"include_usage":true', b'"include_usage":false'), *rest)


async def test_without_reported_cached_tokens_attention_is_left_out_and_told_of() -> None:
    config = EmulatorConfig(profile="tiny-cpu", speed=2.0, kv_tokens=4096, max_model_len=500)
    async with EmulatorServer(config) as emulated:
        engine = EngineServer(lambda: Silent(emulated.url, ReplicaId("silent")), VllmEngine, None)
        measuring = Measuring(engine, machine="a test", seed=7, quick=True)
        await measuring.prepare()
        measurements = await measuring.run()
        await engine.close()
    assert all(not times.cached_tokens for times in measurements.prefill)
    assert "--enable-prompt-tokens-details" in measurements.notes[0]


@pytest.mark.parametrize(
    ("options", "max_model_len", "error", "says"),
    [
        ({"kv_tokens": 4096}, None, ConfigError, "give --max-tokens"),
        ({}, 512, ConfigError, "give --kv-tokens"),
        ({"kv_tokens": 4096, "model": "other"}, 512, ConfigError, "does not serve 'other'; it serves m"),
        ({"kv_tokens": 4096}, 100, ConfigError, "longer context"),
    ],
)
async def test_what_must_be_known_is_asked_for(
    options: dict[str, Any], max_model_len: int | None, error: type[PrebleError], says: str
) -> None:
    async with server(exactly, max_model_len) as url:
        with pytest.raises(error, match=says):
            await measure(url, **options)


async def test_a_replica_that_is_not_there_is_refused() -> None:
    with pytest.raises(EngineRefused, match="cannot be reached"):
        await measure("http://127.0.0.1:1")


# --- the command ---


def test_the_command_writes_profile_measurements_and_figure(tmp_path: Path, emulated: str) -> None:
    profile, raw, figure = tmp_path / "tiny.json", tmp_path / "raw.json", tmp_path / "fit.png"
    arguments = ["profile", "--url", emulated, "-o", str(profile), "--raw", str(raw), "--plot", str(figure), "--quick"]
    result = CliRunner().invoke(cli, [*arguments, "--machine", "a bench", "--json", "-"])
    assert result.exit_code == 0, result.output
    written = load_profile(str(profile))
    assert written.name == "tiny"
    assert "a bench" in written.source
    assert "emulator" in written.source
    assert json.loads(result.stdout)["profile"]["decode_base_s"] == written.decode_base_s
    assert json.loads(raw.read_text())["machine"] == "a bench"
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_command_shows_every_measurement_with_its_error(tmp_path: Path, emulated: str) -> None:
    result = CliRunner().invoke(cli, ["profile", "--url", emulated, "-o", str(tmp_path / "p.json"), "--quick"])
    assert result.exit_code == 0, result.output
    assert "prefill 1 tokens" in result.stdout
    assert re.search(r"measuring http://\S+: \d+/\d+ steps\n", result.stderr), "how far it is"
    assert "decode 4 x " in result.stdout


def test_the_command_wants_to_know_where_the_profile_goes() -> None:
    result = CliRunner().invoke(cli, ["profile", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 2
    assert "Missing option '-o' / '--output'" in result.stderr
