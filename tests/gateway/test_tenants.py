"""Keys and tenants: who is let in, what he may see, and what he learns of others."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.conftest import Serve, Served
from gateway.fakes import gated, replicas, rubbish, status
from preble.config import AuthConfig, LimitsConfig
from preble.config.keys import KeyConfig, load_keys
from preble.engines.json_fields import add_fields_after
from preble.errors import ConfigError, Overloaded, RequestError
from preble.gateway.http.access import KeyRing
from preble.prompts.endpoints.bodies import PromptLimits, read_chat
from preble.rules import key_limits
from preble.rules.callers import Caller
from preble.rules.key_limits import KeyLimits
from support.waiting import eventually

PROMPT = "a secret that alice and nobody else has sent so far; long enough for several blocks of tokens. " * 4


def table(name: str, key: str, **fields: Any) -> str:
    lines = [f"[{name}]", f'sha256 = "{sha256(key.encode()).hexdigest()}"']
    return "\n".join([*lines, *(f"{field} = {json.dumps(value)}" for field, value in fields.items()), ""])


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(
        table("alice", "key-a")
        + table("bob", "key-b")
        + table("ann", "key-n", share_cache=True)
        + table("ben", "key-m", share_cache=True)
        + table("root", "key-r", admin=True, share_cache=True)
    )
    return path


def write(path: Path, text: str) -> None:
    path.write_text(text)


async def ask(gateway: Served, key: str | None, header: str = "Authorization", **fields: Any) -> aiohttp.ClientResponse:
    prefix = "Bearer " if header == "Authorization" else ""
    headers = {} if key is None else {header: prefix + key}
    body = {"model": "tiny", "prompt": PROMPT, **fields}
    async with gateway.http.post("/v1/completions", json=body, headers=headers) as answer:
        await answer.read()
        return answer


@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
async def test_a_named_key_is_let_in_by_either_header(serve: Serve, keys_file: Path, header: str) -> None:
    async with replicas(1) as [one], serve([one], auth=AuthConfig(keys_file=str(keys_file))) as gateway:
        assert (await ask(gateway, "key-a", header)).status == 200
        assert (await ask(gateway, "key-z", header)).status == 401
        assert (await ask(gateway, None)).status == 401


async def test_a_key_in_the_configuration_can_have_a_name_and_be_a_hash(serve: Serve) -> None:
    ann, ron = (f"{name}=sha256:{sha256(key).hexdigest()}" for name, key in (("ann", b"key-a"), ("ron", b"key-r")))
    auth = AuthConfig(api_keys=(ann,), admin_keys=(ron,))
    async with replicas(1) as [one], serve([one], auth=auth) as gateway:
        assert (await ask(gateway, "key-a")).status == 200
        assert (await ask(gateway, ann)).status == 401, "a hash is no key"
        headers = {"Authorization": "Bearer key-r"}
        async with gateway.http.get("/metrics", headers=headers) as page:
            assert 'key="ann"' in await page.text()


async def test_only_an_admin_sees_where_a_request_went(serve: Serve, keys_file: Path) -> None:
    async with replicas(1) as [one], serve([one], auth=AuthConfig(keys_file=str(keys_file))) as gateway:
        told = {
            key: {h.lower(): v for h, v in (await ask(gateway, key)).headers.items() if "preble" in h.lower()}
            for key in ("key-a", "key-r")
        }
        assert told["key-a"] == {}
        assert len(told["key-r"]) == 5
        assert all(float(told["key-r"][f"x-preble-predicted-{what}-ms"]) > 0 for what in ("ttft", "tpot"))


@pytest.mark.parametrize(("key", "answer"), [(None, 401), ("key-a", 403), ("key-r", 200)])
async def test_debug_pages_are_for_admins(serve: Serve, keys_file: Path, key: str | None, answer: int) -> None:
    auth = AuthConfig(keys_file=str(keys_file))
    async with replicas(1) as [one], serve([one], auth=auth) as gateway:
        for path in ("/debug/replicas", "/debug/decisions", "/metrics"):
            async with gateway.http.get(path, headers={} if key is None else {"x-api-key": key}) as page:
                assert page.status == answer
        async with gateway.http.post("/debug/parity", headers={} if key is None else {"x-api-key": key}) as page:
            assert page.status == answer


async def matched(gateway: Served, key: str) -> int:
    """Leading tokens of the prompt that count as cached for a key, as its decision says."""
    request_id = (await ask(gateway, key)).headers["x-request-id"]
    async with gateway.http.get(f"/debug/decisions/{request_id}", headers={"x-api-key": "key-r"}) as page:
        return int((await page.json())["decisions"][0]["matched_tokens"])


async def test_a_tenant_cannot_find_out_what_another_has_sent(serve: Serve, keys_file: Path) -> None:
    async with replicas(1) as [one], serve([one], auth=AuthConfig(keys_file=str(keys_file))) as gateway:
        assert await matched(gateway, "key-a") == 0
        assert await matched(gateway, "key-b") == 0
        assert await matched(gateway, "key-a") > 0


async def test_tenants_that_opt_in_share_what_is_cached(serve: Serve, keys_file: Path) -> None:
    async with replicas(1) as [one], serve([one], auth=AuthConfig(keys_file=str(keys_file))) as gateway:
        assert await matched(gateway, "key-n") == 0
        assert await matched(gateway, "key-m") > 0


async def test_a_client_cannot_choose_the_salt_of_another_tenant(
    serve: Serve, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preble.engines.openai.OpenAIEngine.takes_cache_salt", True)
    async with replicas(1) as [one], serve([one], auth=AuthConfig(keys_file=str(keys_file))) as gateway:
        await ask(gateway, "key-a")
        salt = one.requests[-1]["cache_salt"]
        await ask(gateway, "key-b", cache_salt=salt)
        assert one.requests[-1]["cache_salt"] not in (salt, "")
        await ask(gateway, "key-r", cache_salt="mine")
        mine = one.requests[-1]["cache_salt"]
        for forged in (salt, sha256(b"tenant\0alice\0").hexdigest()[:32], sha256(b"alice\0").hexdigest()[:32]):
            await ask(gateway, "key-r", cache_salt=forged)
            assert one.requests[-1]["cache_salt"] not in (forged, salt, mine)


def test_a_salt_takes_the_tenants_key_to_compute_and_is_the_same_wherever_that_is_accepted(tmp_path: Path) -> None:
    def salt(*keys: str) -> str | None:
        digests = [sha256(key.encode()).hexdigest() for key in keys]
        tables = (f'[k{number}]\nsha256 = "{digest}"\ntenant = "t"\n' for number, digest in enumerate(digests))
        file.write_text("".join(tables), encoding="utf-8")
        caller = KeyRing(AuthConfig(keys_file=str(file))).caller({b"x-api-key": keys[-1].encode()})
        assert caller is not None and caller.tenant == "t"
        return caller.cache_salt(None)

    file = tmp_path / "keys.toml"
    assert salt("one") == salt("one") != salt("another")
    assert salt("one", "two") == salt("two", "one"), "all keys of a tenant share its caches"


@pytest.mark.parametrize("path", ["/v1/responses/.x", "/v1/responses/:x/cancel", "/v1/models/@x", "/v1/responses/"])
async def test_odd_names_need_a_key_too(serve: Serve, path: str) -> None:
    async with replicas(1) as fakes, serve(fakes, auth=AuthConfig(api_keys=("k",))) as gateway:
        async with gateway.http.get(path) as answer:
            assert answer.status == 401
        async with gateway.http.get(path, headers={"x-api-key": "k"}) as answer:
            assert answer.status == 404


async def test_a_replica_that_knows_no_salts_is_sent_none(serve: Serve, keys_file: Path) -> None:
    async with replicas(1) as [one], serve([one], auth=AuthConfig(keys_file=str(keys_file))) as gateway:
        await ask(gateway, "key-a")
        assert "cache_salt" not in one.requests[-1]


@pytest.mark.parametrize("behaviour", [rubbish(b"not json", "text/plain"), status(500)])
async def test_errors_name_no_address_to_clients(serve: Serve, keys_file: Path, behaviour: Any) -> None:
    async with replicas(1) as [one], serve([one], auth=AuthConfig(keys_file=str(keys_file))) as gateway:
        one.script.append(behaviour)
        answer = await ask(gateway, "key-a")
        assert answer.status >= 500
        assert str(one.port) not in (await answer.text())
        await one.stop()
        answer = await ask(gateway, "key-a")
        assert answer.status >= 500
        assert str(one.port) not in (await answer.text())


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"bootstrap_room": 7},
        {"data_parallel_rank": 1},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
        {"vllm_xargs": {"kv_cache_report_mode": "full"}},
        {"priority": -5},
        {"priority": 0},
        {"kv_hints": {"protocol_version": "1", "message_id": "m", "actions": []}},
        {"routing_key": "k"},
        {"session_params": {"id": "s"}},
    ],
)
async def test_fields_of_routers_never_come_from_clients(serve: Serve, fields: dict[str, Any]) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        code, body, _ = await gateway.complete(**fields)
        assert (code, body["error"]["param"].split(".")[-1]) == (400, next(iter(fields.get("vllm_xargs", fields))))
        assert one.requests == []
        assert (await gateway.complete(kv_transfer_params=None, vllm_xargs={"mine": 1}))[0] == 200


async def test_what_the_gateway_does_not_act_on_is_passed_on(serve: Serve) -> None:
    sessions = ("x-claude-code-session-id", "x-session-affinity", "session-id")
    targets = ("x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-sgl-ttft-slo-ms", "x-sgl-tps-slo")
    headers = dict.fromkeys((*sessions, *targets, "baggage", "traceparent"), "7")
    fields = {"session_id": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h", "nvext": {"agent_hints": {}}}
    fields["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    async with replicas(1) as [one], serve([one]) as gateway:
        body = {"model": "tiny", "prompt": "hello", **fields}
        async with gateway.http.post("/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
        assert one.requests == [body]
        sent = {name.lower(): value for name, value in one.headers[0].items()}
        assert headers.items() <= sent.items()


@pytest.mark.parametrize(
    ("headers", "fields", "session"),
    [
        ({"x-session-id": "own", "session-id": "other"}, {"session_id": "body"}, "own"),
        ({"x-claude-code-session-id": "c"}, {"prompt_cache_key": "k"}, "c"),
        ({"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a7"}, {}, "c/a7"),
        ({"x-session-affinity": "sticky", "session-id": "x"}, {}, "sticky"),
        ({"session-id": "x"}, {}, "x"),
        ({}, {"session_id": "s", "conversation": "c", "prompt_cache_key": "k"}, "s"),
        ({}, {"session_id": None, "conversation": {"id": "conv_1", "more": 1}, "prompt_cache_key": "k"}, "conv_1"),
        ({}, {"prompt_cache_key": "k"}, "k"),
        ({}, {"prompt_cache_key": "two\r\nx-evil: lines"}, None),
        ({}, {"session_id": "s" * 257}, None),
        ({}, {"session_id": 5, "conversation": ["c"]}, None),
        ({"session-id": "with space"}, {}, None),
        ({}, {}, None),
    ],
)
async def test_the_first_that_names_a_session_names_it_to_the_replica(
    serve: Serve, headers: dict[str, str], fields: dict[str, Any], session: str | None
) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    async with replicas(1) as [one], serve([one]) as gateway:
        for path, body in (
            ("/v1/completions", {"model": "tiny", "prompt": "hello"}),
            ("/v1/chat/completions", chat),
        ):
            async with gateway.http.post(path, json=body | fields, headers=headers) as answer:
                await answer.read()
            sent = {name.lower(): value for name, value in one.headers[-1].items()}
            assert sent.get("x-session-id") == session, path
            assert "x-evil" not in sent
        assert len(one.headers) == 2


async def test_an_escaped_name_hides_no_field() -> None:
    with pytest.raises(RequestError, match="kv_transfer_params"):
        read_chat(b'{"messages": [], "kv\\u005ftransfer_params": {}}', PromptLimits(1, 100))


async def test_keys_are_read_again(serve: Serve, keys_file: Path) -> None:
    async with replicas(1) as [one], serve([one], auth=AuthConfig(keys_file=str(keys_file))) as gateway:
        write(keys_file, table("carol", "key-c"))
        gateway.gateway.reload()
        assert (await ask(gateway, "key-a")).status == 401
        assert (await ask(gateway, "key-c")).status == 200
        write(keys_file, "[carol")
        gateway.gateway.reload()
        assert (await ask(gateway, "key-c")).status == 200, "a bad file changes nothing"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a", "is not TOML"),
        ("a = " + 5000 * "[", "is not TOML: it is nested too deep"),
        ('[a]\nsha256 = "abc"', "sha256sum"),
        (table("a", "k", admn=True), "admn"),
        (table("a", "k") + table("b", "k"), "same key"),
        (table("a", "k", weight=0), "weight"),
        (table("a", "k", priority="urgent"), "none of interactive, batch"),
    ],
)
def test_a_bad_file_of_keys_is_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_keys(path, ("interactive", "batch"))


def test_a_salt_goes_before_what_the_client_wrote() -> None:
    assert json.loads(add_fields_after(b' {"cache_salt": "theirs"} \n', {"cache_salt": "ours"})) == {
        "cache_salt": "ours"
    }


async def test_a_key_has_its_limits(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    write(
        path,
        table("few", "key-f", requests_per_minute=2)
        + table("short", "key-s", tokens_per_minute=100)
        + table("root", "key-r", admin=True),
    )
    async with replicas(1) as [one], serve([one], auth=AuthConfig(keys_file=str(path))) as gateway:
        answers = [await ask(gateway, "key-f") for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 429]
        assert 1 <= int(answers[2].headers["Retry-After"]) <= 30
        assert [(await ask(gateway, "key-s")).status for _ in range(2)] == [200, 429]
        metrics = await gateway.metrics("key-r")
        assert 'preble_key_requests_total{key="few"} 2.0' in metrics
        assert f'preble_key_tokens_total{{key="short",kind="prompt"}} {float(len(PROMPT))}' in metrics
        assert 'preble_key_tokens_total{key="short",kind="output"} 3.0' in metrics


async def test_a_key_has_a_number_of_prompts_at_once(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    write(path, table("few", "key-f", prompts_at_once=2))
    async with replicas(1) as [one], serve([one], auth=AuthConfig(keys_file=str(path))) as gateway:
        assert (await ask(gateway, "key-f", prompt=["a", "b", "c"])).status == 400
        one.script.extend([gated, gated])
        waiting = [asyncio.create_task(ask(gateway, "key-f", prompt=f"p{number}")) for number in range(2)]
        await eventually(lambda: one.running == 2)
        assert (await ask(gateway, "key-f")).status == 429
        one.gate.set()
        assert [(await task).status for task in waiting] == [200, 200]
        assert (await ask(gateway, "key-f")).status == 200


async def test_no_tenant_can_take_all_the_room(serve: Serve, keys_file: Path) -> None:
    auth, limits = AuthConfig(keys_file=str(keys_file)), LimitsConfig(max_in_flight=10)
    async with replicas(1) as [one], serve([one], auth=auth, limits=limits) as gateway:
        one.script.extend([gated] * 20)
        waiting = [asyncio.create_task(ask(gateway, "key-a", prompt=f"p{number}")) for number in range(20)]
        await eventually(lambda: sum(task.done() for task in waiting) == 12)
        other = asyncio.create_task(ask(gateway, "key-b"))
        await eventually(lambda: gateway.gateway.serving.num_admitted == 9)
        one.gate.set()
        assert (await other).status == 200
        assert sorted([(await task).status for task in waiting]) == [200] * 8 + [429] * 12


def test_allowances_come_back_with_time() -> None:
    limits = KeyLimits()
    caller = Caller("k", "t", limits=KeyConfig("0" * 64, tokens_per_minute=60))
    limits.admit(caller, 1, 0.0)
    limits.charge(caller, 90, 0.0)
    with pytest.raises(Overloaded) as refused:
        limits.admit(caller, 1, 10.0)
    assert refused.value.retry_after_s == pytest.approx(21.0)
    limits.admit(caller, 1, 31.0)


def test_what_a_key_uses_at_another_gateway_counts_here_whenever_it_first_comes() -> None:
    caller = Caller("k", "t", limits=KeyConfig("0" * 64, tokens_per_minute=60, requests_per_minute=100))
    before, after = KeyLimits(), KeyLimits()
    before.admit(caller, 1, 0.0)
    for limits in (before, after):  # one has seen the key, the other has not
        limits.used_elsewhere("k", 1, 90, 0.0)
        with pytest.raises(Overloaded) as refused:
            limits.admit(caller, 1, 10.0)
        assert refused.value.retry_after_s == pytest.approx(21.0)
        limits.admit(caller, 1, 31.0)


def test_a_key_tells_other_gateways_only_what_was_used_here_and_once() -> None:
    limits = KeyLimits()
    caller = Caller("k", "t", limits=KeyConfig("0" * 64, tokens_per_minute=60))
    limits.admit(caller, 1, 0.0)
    limits.charge(caller, 30, 0.0)
    limits.charge(caller, -10, 0.0)
    limits.used_elsewhere("k", 5, 500, 0.0)
    assert limits.take_untold() == [("k", 1, 20)]
    assert limits.take_untold() == []


def test_what_is_given_back_is_taken_from_what_the_key_uses_next() -> None:
    limits = KeyLimits()
    caller = Caller("k", "t", limits=KeyConfig("0" * 64, tokens_per_minute=60))
    limits.charge(caller, -30, 0.0)
    assert limits.take_untold() == []
    limits.charge(caller, 50, 0.0)
    assert limits.take_untold() == [("k", 0, 20)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_no_word_of_a_peer_takes_more_from_a_key_than_a_minute_gives_back(when: str) -> None:
    limits = KeyLimits()
    caller = Caller("k", "t", limits=KeyConfig("0" * 64, tokens_per_minute=60, requests_per_minute=600))
    if when == "after":
        limits.admit(caller, 1, 0.0)
    for _ in range(3):
        limits.used_elsewhere("k", 10**9, 10**9, 1.0)
    with pytest.raises(Overloaded) as refused:
        limits.admit(caller, 1, 1.0)
    assert refused.value.retry_after_s <= 61.0
    limits.admit(caller, 1, 63.0)


def test_a_deficit_of_its_own_is_not_forgiven_by_the_word_of_a_peer() -> None:
    limits = KeyLimits()
    caller = Caller("k", "t", limits=KeyConfig("0" * 64, tokens_per_minute=60))
    limits.charge(caller, 600, 0.0)
    limits.used_elsewhere("k", 0, 1, 0.0)
    with pytest.raises(Overloaded) as refused:
        limits.admit(caller, 1, 0.0)
    assert refused.value.retry_after_s == pytest.approx(541.0)


def test_what_peers_say_of_keys_takes_bounded_memory() -> None:
    limits = KeyLimits()
    for number in range(key_limits.MOST_KEYS + 5):
        limits.used_elsewhere(f"key-{number}", 1, 1, 0.0)
    assert len(limits._elsewhere) == key_limits.MOST_KEYS
    limits.used_elsewhere("late", 1, 1, 61.0)
    assert list(limits._elsewhere) == ["late"], "the others have used nothing for a minute"
    for number in range(10_000):
        limits.used_elsewhere("late", 1, 1, 61.0 + number / 100)
    assert len(limits._elsewhere["late"]) <= 61
