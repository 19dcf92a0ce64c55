"""The selection service over HTTP: who is chosen, what is held, what bad input gets."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.fakes import replicas
from preble.config import AuthConfig, LimitsConfig, SelectionConfig
from selection.conftest import Select, Selecting
from support.waiting import eventually

IDS = list(range(100))
_OF_BODY = b'{"path": "/v1/completions", "body": "%s"}'
NESTED = b'{"path": "/v1/completions", "body": %s%s}' % (b"[" * 50_000, b"]" * 50_000)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


async def reserved(one: Selecting, selection_id: str, **fields: Any) -> dict[str, Any]:
    status, answer = await one.post("/select_and_reserve", selection_id=selection_id, token_ids=IDS, **fields)
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


async def test_a_request_is_reserved_followed_and_ended(select: Select) -> None:
    async with replicas(2) as fakes, select([fake.url for fake in fakes]) as one:
        answer = await reserved(one, "r", model_name="tiny", expected_output_tokens=9)
        assert answer["endpoint"] in {fake.url for fake in fakes}
        assert (answer["isl_tokens"], answer["effective_prefill_tokens"]) == (100, 100)
        assert answer["overlap"] == {"longest_matched": 0, "gpu": 0, "dp": {"0": 0}, "cpu": 0, "disk": 0}
        assert (answer["model_name"], answer["routing_group"], answer["lease_s"]) == ("tiny", "default", 300.0)
        assert one.serving.num_in_flight == 1
        _, row = await one.post("/reservations/r/prefill_complete")
        assert (row["status"], row["prefill_complete"], row["endpoint"]) == ("ok", True, answer["endpoint"])
        _, row = await one.post("/reservations/r/output_block")
        assert row["output_tokens"] == answer["block_size"]
        _, row = await one.post("/reservations/r/progress", output_tokens=20, cached_tokens=3)
        _, row = await one.ask("GET", "/reservations/r")
        assert row["output_tokens"] == 20 and "lost" not in row
        assert (await one.post("/reservations/r/end", output_tokens=25))[0] == 200
        [decision] = one.serving.recent.of_request(answer["request_id"])
        assert (decision.outcome, decision.output_tokens) == ("ok", 25)
        for path in ("end", "prefill_complete", "output_block", "renew"):
            status, error = await one.post(f"/reservations/r/{path}")
            assert (status, error["error"]["code"]) == (404, "reservation_not_found")
        again = await reserved(one, "r2", explain=True)
        assert again["endpoint"] == answer["endpoint"] and again["overlap"]["longest_matched"] > 0
        assert {row["replica_id"] for row in again["candidates"]} == {fake.url for fake in fakes}


async def test_a_freed_reservation_ended_well_if_its_prompt_was_computed(select: Select) -> None:
    async with replicas(1) as [fake], select([fake.url]) as one:
        for name, reports, outcome in (("a", ["prefill_complete"], "ok"), ("b", [], "aborted")):
            await reserved(one, name)
            for report in reports:
                await one.post(f"/reservations/{name}/{report}")
            assert (await one.ask("DELETE", f"/reservations/{name}"))[0] == 200
            assert one.outcomes(name) == [outcome]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        ("unreachable", "engine_refused"),
        ("broken", "engine_gone"),
        ("timeout", "engine_timeout"),
        ("cancelled", "aborted"),
    ],
)
async def test_an_end_says_what_went_wrong(select: Select, error: str, outcome: str) -> None:
    async with replicas(1) as [fake], select([fake.url]) as one:
        await reserved(one, "r")
        await one.post("/reservations/r/end", error=error, output_tokens=2)
        [decision] = one.serving.recent.of_request("r")
        assert (decision.outcome, decision.output_tokens) == (outcome, 2)


async def test_a_selection_without_an_id_holds_nothing(select: Select) -> None:
    async with replicas(1) as [fake], select([fake.url]) as one:
        status, answer = await one.post("/select", token_ids=IDS)
        assert status == 200 and "selection_id" not in answer and "lease_s" not in answer
        assert answer["endpoint"] == fake.url and one.serving.num_in_flight == 0


async def test_a_selection_is_held_until_it_is_reserved(select: Select) -> None:
    async with replicas(1) as [fake], select([fake.url]) as one:
        _, answer = await one.post("/select", selection_id="s", token_ids=IDS)
        assert (answer["lease_s"], one.serving.num_in_flight) == (10.0, 1)
        await one.post("/select", selection_id="s", token_ids=IDS)  # the later one counts
        status, row = await one.post("/reservations", selection_id="s")
        assert (status, row["lease_s"], one.serving.num_in_flight) == (201, 300.0, 1)
        assert (await one.post("/reservations", selection_id="s"))[0] == 404
        status, error = await one.post("/select", selection_id="s", token_ids=IDS)
        assert (status, error["error"]["code"]) == (409, "reservation_held")


async def test_a_selection_that_nobody_reserves_goes(select: Select) -> None:
    async with replicas(1) as [fake], select([fake.url], selection=SelectionConfig(hold_s=0.02)) as one:
        await one.post("/select", selection_id="s", token_ids=IDS)
        await eventually(lambda: one.serving.num_in_flight == 0)
        status, error = await one.post("/reservations", selection_id="s")
        assert status == 404 and "worker_id" in error["error"]["message"]


async def test_a_selection_gives_its_room_to_the_next_one_under_its_id(select: Select) -> None:
    async with replicas(1) as [fake], select([fake.url], limits=LimitsConfig(max_in_flight=1)) as one:
        for _ in range(2):
            status, answer = await one.post("/select", selection_id="s", token_ids=IDS)
            assert (status, answer.get("request_id")) == (200, "s"), answer
        status, error = await one.post("/select_and_reserve", token_ids=IDS)
        assert (status, error["error"]["code"]) == (429, "overloaded")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"token_ids": []}, 400),
        ({"token_ids": IDS, "allowed_worker_ids": [7]}, 404),
        ({"token_ids": IDS, "model_name": "unknown"}, 404),
        ({"path": "/v1/completions", "body": {"prompt": 7}}, 400),
    ],
)
async def test_a_bad_selection_leaves_the_one_that_is_pending_under_its_id(
    select: Select, fields: dict[str, Any], expected: int
) -> None:
    async with replicas(1) as [fake], select([fake.url]) as one:
        assert (await one.post("/select", selection_id="s", token_ids=IDS))[0] == 200
        assert (await one.post("/select", selection_id="s", **fields))[0] == expected
        assert (await one.post("/reservations", selection_id="s"))[0] == 201


async def test_a_selection_for_which_no_worker_is_left_leaves_the_one_that_is_pending_under_its_id(
    select: Select,
) -> None:
    async with replicas(1) as [fake], select([fake.url]) as one:
        assert (await one.post("/select", selection_id="s", token_ids=IDS))[0] == 200
        one.serving.replicas.hold_back(frozenset(one.serving.replicas))
        assert (await one.post("/select", selection_id="s", token_ids=IDS))[0] == 503
        assert (await one.post("/select", selection_id="s", token_ids=[1] * 9000))[0] == 400
        assert (await one.post("/reservations", selection_id="s"))[0] == 201


async def test_numbers_beyond_any_engines_are_refused_or_cut(select: Select) -> None:
    async with replicas(1) as [fake], select([fake.url]) as one:
        await reserved(one, "r", expected_output_tokens=2**62)
        assert [row["load_s"] < 1e7 for row in (await one.ask("GET", "/loads"))[1][0]["loads"]] == [True]
        for path in ("progress", "end"):
            for field in ("output_tokens", "cached_tokens"):
                status, error = await one.post(f"/reservations/r/{path}", **({"output_tokens": 1} | {field: 10**400}))
                assert status == 400 and field in error["error"]["message"]
        assert one.serving.num_in_flight == 1


async def test_the_memory_of_a_body_is_counted_until_its_answer_and_then_given_back(
    select: Select, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(1) as [fake], select([fake.url]) as one:
        held, take = [], one.service.select_and_reserve

        async def watched(*asked: Any) -> Any:
            held.append(one.gateway.bodies.held)
            return await take(*asked)

        monkeypatch.setattr(one.service, "select_and_reserve", watched)
        body = {"model": "tiny", "prompt": "hello" * 1000}
        await one.post("/select_and_reserve", selection_id="r", path="/v1/completions", body=body)
        request = one.service.reservations["r"].request
        assert (held[0] > 5000, one.gateway.bodies.held) == (True, 0)
        assert (request.body, request.fields.prompts, request.fields.model) == (b"", (), "tiny")


async def test_a_worker_of_the_callers_choice_can_be_reserved(select: Select) -> None:
    async with replicas(2) as fakes, select([fake.url for fake in fakes]) as one:
        numbers = {row["endpoint"]: row["worker_id"] for row in (await one.ask("GET", "/workers"))[1]}
        for fake in fakes:
            worker_id = numbers[fake.url]
            for path, rule in (
                ("/reservations", {"worker_id": worker_id}),
                ("/reservations", {"worker_id": worker_id, "dp_rank": 0}),
                ("/select_and_reserve", {"allowed_worker_ids": [worker_id]}),
                ("/select_and_reserve", {"pinned_worker": {"worker_id": worker_id, "dp_rank": 0}}),
            ):
                status, answer = await one.post(path, selection_id="w", token_ids=IDS, **rule)
                assert status in (200, 201) and answer["endpoint"] == fake.url
                await one.ask("DELETE", "/reservations/w")
        for rule in ({"worker_id": 5}, {"worker_id": numbers[fakes[0].url], "dp_rank": 7}):
            status, _ = await one.post("/reservations", selection_id="w", token_ids=IDS, **rule)
            assert status == (404 if rule["worker_id"] == 5 else 503)


async def test_text_and_chats_are_tokenized_as_the_gateway_does(select: Select, auth: AuthConfig) -> None:
    async with replicas(1) as [fake], select([fake.url], auth=auth) as one:
        given = {"path": "/v1/completions", "body": {"model": "tiny", "prompt": "hello"}}
        status, answer = await one.ask("POST", "/select", "key-r", **given)
        assert (status, answer["isl_tokens"]) == (200, 5) and "body" not in answer
        given["body"] = '{"model": "tiny", "prompt": "hello"}'
        assert (await one.ask("POST", "/select", "key-r", **given))[1]["isl_tokens"] == 5
        given |= {"path": "/v1/chat/completions", "body": CHAT, "headers": {"X-API-Key": "key-o"}}
        status, answer = await one.ask("POST", "/select", "key-r", **given)
        assert status == 200 and answer["isl_tokens"] == 5
        given["headers"] = {"authorization": "Bearer wrong"}
        status, error = await one.ask("POST", "/select", "key-r", **given)
        assert (status, error["error"]["code"]) == (401, "invalid_api_key")


async def test_only_admins_may_ask(select: Select, auth: AuthConfig) -> None:
    async with replicas(1) as [fake], select([fake.url], auth=auth) as one:
        for key, expected in (("", 401), ("wrong", 401), ("key-o", 403), ("key-r", 200)):
            for method, path in (("POST", "/select"), ("GET", "/loads"), ("GET", "/openapi.json")):
                fields = {"token_ids": IDS} if method == "POST" else {}
                assert (await one.ask(method, path, key, **fields))[0] == expected
        assert (await one.ask("GET", "/health"))[0] == 200


async def test_workers_come_and_go_over_http(select: Select, auth: AuthConfig) -> None:
    async with replicas(2) as [named, other], select([named.url], auth=auth) as one:

        async def asked(method: str, path: str, **fields: Any) -> tuple[int, Any]:
            return await one.ask(method, path, "key-r", **fields)

        given = {"worker_id": 7, "endpoint": f"{other.url}/v1", "model_name": "tiny", "block_size": 16}
        status, row = await asked("POST", "/workers", **given)
        assert (status, row["worker_id"], row["endpoint"], row["lifecycle"]) == (201, 7, other.url, "incomplete")
        await eventually(lambda: len(one.serving.replicas) == 2)
        _, rows = await asked("GET", "/workers")
        assert [row["lifecycle"] for row in rows] == ["schedulable"] * 2 and 7 in {row["worker_id"] for row in rows}
        _, answer = await asked("POST", "/select", token_ids=IDS, allowed_worker_ids=[7])
        assert (answer["worker_id"], answer["endpoint"]) == (7, other.url)
        assert (await asked("POST", "/workers", **given))[0] == 201
        assert (await asked("DELETE", "/workers/7"))[1]["endpoint"] == other.url
        await eventually(lambda: set(one.serving.replicas) == {named.url})
        for path, expected in (("/workers/7", 404), ("/workers/x", 400)):
            assert (await asked("DELETE", path))[0] == expected
        status, error = await asked("POST", "/workers", worker_id=8, endpoint="no address")
        assert (status, error["error"]["param"]) == (400, "endpoint")


async def test_a_number_given_to_another_worker_replaces_it(select: Select, auth: AuthConfig) -> None:
    async with replicas(2) as [first, second], select([], auth=auth) as one:
        for fake in (first, second):
            await one.ask("POST", "/workers", "key-r", worker_id=1, endpoint=fake.url)
            await eventually(lambda fake=fake: set(one.serving.replicas) == {fake.url})  # type: ignore[misc]


async def test_without_keys_nobody_changes_workers(select: Select) -> None:
    async with replicas(1) as [fake], select([fake.url]) as one:
        status, error = await one.post("/workers", worker_id=1, endpoint=fake.url)
        assert (status, error["error"]["code"]) == (403, "admin_key_needed")


async def test_loads_and_what_a_prompt_would_add(select: Select) -> None:
    async with replicas(2) as fakes, select([fake.url for fake in fakes]) as one:
        held = await reserved(one, "r")
        await one.post("/reservations/r/prefill_complete")
        await one.post("/reservations/r/end", output_tokens=3)
        await reserved(one, "second", allowed_worker_ids=[held["worker_id"]])
        [model] = (await one.ask("GET", "/loads?model_name=tiny"))[1]
        loads = {row["worker_id"]: row for row in model["loads"]}
        assert (model["model_name"], model["pending_count"]) == ("tiny", 0)
        assert sum(row["active_requests"] for row in loads.values()) == loads[held["worker_id"]]["active_requests"] == 1
        assert (await one.ask("GET", "/loads?model_name=unknown"))[1] == []
        assert (await one.ask("GET", "/loads?model_name=default"))[1] == [model]
        _, scores = await one.post("/overlap_scores", token_ids=IDS)
        blocks = {row["worker_id"]: row["device_blocks"] for row in scores["workers"]}
        assert scores["num_blocks"] == 100 // scores["block_size"]
        assert blocks[held["worker_id"]] == max(blocks.values()) > min(blocks.values()) == 0
        _, potential = await one.post("/potential_loads", token_ids=IDS)
        added = {row["worker_id"]: row["potential_prefill_tokens"] for row in potential}
        assert added[held["worker_id"]] - loads[held["worker_id"]]["potential_prefill_tokens"] < 100
        assert max(added.values()) == 100 and one.serving.num_in_flight == 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "empty"),
        ({"token_ids": [1], "path": "/v1/completions"}, "either"),
        ({"token_ids": [-1]}, ">= 0"),
        ({"token_ids": IDS, "allowed_workers": [1]}, "allowed_workers"),
        ({"token_ids": IDS, "routing_group": "mine"}, "routing_group"),
        ({"token_ids": IDS, "lease_s": 0}, "lease_s"),
        ({"token_ids": IDS, "selection_id": "a b"}, "1 to 128"),
        ({"token_ids": IDS, "allowed_worker_ids": [2**64]}, "allowed_worker_ids"),
        ({"token_ids": IDS, "allowed_worker_ids": []}, "allowed_worker_ids"),
        ({"block_hashes": [1], "sequence_hashes": [1], "isl_tokens": 16}, "token_ids"),
        ({"path": "/nowhere", "body": {}}, "/v1/completions"),
        ({"path": "/v1/completions"}, "body"),
        ({"path": "/v1/completions", "body": {"prompt": 7}}, "prompt"),
    ],
)
async def test_bad_input_gets_an_error_that_says_what_to_do(select: Select, fields: dict[str, Any], says: str) -> None:
    async with replicas(1) as [fake], select([fake.url]) as one:
        status, error = await one.post("/select_and_reserve", **fields)
        assert status == 400 and says in error["error"]["message"], error
        assert one.serving.num_in_flight == one.serving.num_admitted == 0


async def test_other_errors_have_their_status(select: Select) -> None:
    async with replicas(1) as [fake], select([fake.url]) as one:
        for wrong in (
            b"no JSON",
            b'{"model_name": "\xff"}',
            *(_OF_BODY % body for body in (rb"\ud800", b"\xff")),
            NESTED,
        ):
            async with one.http.post("/select", data=wrong) as answer:
                assert answer.status == 400 and "body is not JSON" in await answer.text()
        for method, path, expected in (
            ("GET", "/select", 405),
            ("DELETE", "/loads", 405),
            ("POST", "/reservations/a/b", 404),
        ):
            status, error = await one.ask(method, path)
            assert status == expected
            assert status == 405 or "/reservations/{selection_id}/end" in error["error"]["message"]
        assert (await one.post("/select", token_ids=IDS, model_name="unknown"))[0] == 404
        await fake.stop()
        await eventually(lambda: not one.serving.replicas)
        assert (await one.post("/select", token_ids=IDS))[0] == 503


async def test_metrics_count_reservations(select: Select) -> None:
    async with replicas(1) as [fake], select([fake.url]) as one:
        await reserved(one, "stays")
        await reserved(one, "goes", lease_s=0.02)
        await eventually(lambda: "goes" not in one.service.reservations)
        async with one.http.get("/metrics") as answer:
            text = await answer.text()
        assert "preble_reservations 1.0" in text and "preble_reservations_expired_total 1.0" in text
        assert 'path="/select_and_reserve"' in text
