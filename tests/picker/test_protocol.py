"""The endpoint picker's protocol, asked by a client that plays the gateway.

With the cases that the conformance tests of the Gateway API Inference Extension have for endpoint pickers.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import grpc
import msgspec
import pytest

from gateway.fakes import FakeReplica, replicas
from picker.conftest import Pick, Picking
from picker.gateway_by_hand import BODY, DESTINATION, EVENTS, USAGE, Exchange, Refused, Sent, header_map
from preble.config import AuthConfig, LimitsConfig, TimeoutsConfig
from preble.picker.envoy import pb
from preble.picker.picked_request import PickedRequest
from support.waiting import eventually

KEY = "secret"
BUFFERED = 2
"""A `ProcessingMode.BodySendMode`."""


def endpoints(fakes: list[FakeReplica]) -> list[str]:
    return [fake.url.partition("//")[2] for fake in fakes]


def completion(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "tiny", "prompt": "hello", **fields})


async def refusal(exchange: Exchange, body: bytes = BODY, **head: Any) -> Refused:
    found = await exchange.ask(body, **head)
    assert isinstance(found, Refused), found
    return found


# where a request goes


async def test_the_destination_is_live_and_the_body_comes_back_unchanged(pick: Pick) -> None:
    async with replicas(3) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        sent = await exchange.placed()
        assert sent.destinations[0] in endpoints(fakes) and sent.body == BODY
        assert picking.in_flight()[sent.destinations[0]] == 1, "it counts as load from now on"
        await exchange.answer([*EVENTS, USAGE])


async def test_a_repeated_prompt_goes_where_it_is_cached(pick: Pick) -> None:
    long = completion(prompt="a" * 4000, stream=True)
    async with replicas(4) as fakes, pick(fakes) as picking:
        found = []
        for _ in range(6):
            exchange = picking.exchange()
            found.append((await exchange.placed(long)).destinations[0])
            headers = await exchange.answer([*EVENTS, USAGE])
        assert len(set(found)) == 1
        assert headers["x-preble-replica"] == f"http://{found[0]}" and int(headers["x-preble-matched-tokens"]) > 3000


async def test_further_destinations_are_other_endpoints_for_when_the_first_cannot_be_reached(pick: Pick) -> None:
    async with replicas(4) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        sent = await exchange.placed()
        assert len(sent.destinations) == len(set(sent.destinations)) == 3
        assert set(sent.destinations) <= set(endpoints(fakes))
        exchange.abort()


@pytest.mark.parametrize("form", ["list", "text", "address"])
async def test_a_subset_is_obeyed_however_it_is_given(pick: Pick, form: str) -> None:
    async with replicas(2) as first, replicas(1, address="127.0.0.2") as other, pick([*first, *other]) as picking:
        allowed = endpoints(first)[:1] if form != "address" else ["127.0.0.2"]
        for _ in range(4):
            exchange = picking.exchange()
            sent = await exchange.placed(subset=allowed if form == "list" else f"{allowed[0]}, 10.9.9.9:1")
            assert sent.destinations == (endpoints(other) if form == "address" else allowed)
            exchange.abort()


async def test_a_subset_without_a_live_replica_is_answered_503(pick: Pick) -> None:
    async with replicas(2) as fakes, pick(fakes) as picking:
        found = await refusal(picking.exchange(), subset=["10.9.9.9:8000"])
        assert (found.status, found.error["code"]) == (503, "no_replica") and "retry-after" in found.headers
        ends = picking.exchange()
        await ends.head("/v1/models", method="GET", ends=True, subset="10.9.9.9:8000")
        decision = await ends.decision()
        assert isinstance(decision, Refused) and decision.status == 503


async def test_without_a_replica_the_answer_is_503(pick: Pick) -> None:
    async with replicas(1) as fakes:
        await fakes[0].stop()
        async with pick(fakes, live=0) as picking:
            found = await refusal(picking.exchange())
            assert found.status == 503 and found.headers["content-type"] == "application/json"


async def test_requests_that_are_no_completions_take_turns_over_the_endpoints(pick: Pick) -> None:
    async with replicas(3) as fakes, pick(fakes) as picking:
        found = set()
        for _ in range(3):
            exchange = picking.exchange()
            await exchange.head("/v1/models", method="GET", ends=True)
            sent = await exchange.decision()
            assert isinstance(sent, Sent) and len(sent.destinations) == 3
            found.add(sent.destinations[0])
            await exchange.answer([b"{}"], headers={"content-type": "application/json"})
        assert found == set(endpoints(fakes)) and picking.serving.num_in_flight == 0
        assert not isinstance(await page(picking, "/v1/models/tiny"), Refused)


async def page(picking: Picking, path: str, headers: dict[str, str] | None = None) -> Sent | Refused:
    exchange = picking.exchange()
    await exchange.head(path, headers, method="GET", ends=True)
    found = await exchange.decision()
    exchange.abort()
    return found


UNKNOWN = ["/sleep", "/v1", "//v1/completions", "/v1/../sleep", "/v1/%2e%2e/sleep", "/v1/load_lora_adapter"]


@pytest.mark.parametrize("path", UNKNOWN)
async def test_a_path_that_the_gateway_refuses_is_refused_here_too(pick: Pick, path: str) -> None:
    async with replicas(1) as fakes, pick(fakes, auth=AuthConfig(engine_api_key="theirs")) as picking:
        for found in (await refusal(picking.exchange(), path=path), await page(picking, path)):
            assert isinstance(found, Refused) and (found.status, found.error["code"]) == (404, "not_found")


async def test_a_path_is_placed_as_the_engine_reads_it(pick: Pick) -> None:
    async with replicas(1) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        await exchange.placed(path="/v1/%63ompletions")
        assert picking.serving.num_in_flight == 1
        exchange.abort()


async def test_a_stored_response_is_nobodys_where_there_are_keys(pick: Pick) -> None:
    async with replicas(1) as fakes:
        async with pick(fakes) as picking:
            assert isinstance(await page(picking, "/v1/responses/resp_1"), Sent)
        async with pick(fakes, auth=AuthConfig(api_keys=(KEY,))) as picking:
            own = {"authorization": f"Bearer {KEY}"}
            assert isinstance(await page(picking, "/v1/responses/resp_1", own), Refused)
            assert (await refusal(picking.exchange(), path="/v1/responses/resp_1/cancel", headers=own)).status == 404


async def test_a_clients_own_destination_is_overwritten(pick: Pick) -> None:
    async with replicas(1) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        sent = await exchange.placed(headers={DESTINATION: "10.9.9.9:22"})
        assert sent.destinations == endpoints(fakes)
        exchange.abort()


async def test_a_list_of_prompts_goes_to_one_replica_as_several_placements(pick: Pick) -> None:
    async with replicas(3) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        sent = await exchange.placed(completion(prompt=["a", "bc", "def"]))
        assert picking.in_flight()[sent.destinations[0]] == 3 == picking.serving.num_in_flight
        whole = b'{"choices": [], "usage": {"completion_tokens": 30}}'
        await exchange.answer([whole], headers={"content-type": "application/json"})
        await picking.idle()
        assert (picking.decision().outcome, picking.decision().output_tokens) == ("ok", 10)


# bodies


async def test_nothing_is_said_before_the_body_is_complete_and_a_large_one_comes_back_in_pieces(pick: Pick) -> None:
    body = completion(prompt=[[7] * 6000], padding="x" * 1_000_000)
    async with replicas(1) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        await exchange.head()
        await exchange.body(body, pieces=20)
        assert isinstance(await exchange.decision(), Sent)
        assert await exchange.body_back() == body and len(exchange.seen) > 16
        exchange.abort()


async def test_trailers_end_a_body_too(pick: Pick) -> None:
    async with replicas(1) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        await exchange.head()
        await exchange.send(request_body=pb.HttpBody(body=BODY))
        await exchange.send(request_trailers=pb.HttpTrailers(trailers=header_map({"x-checksum": "1"})))
        assert isinstance(await exchange.decision(), Sent)
        piece = (await exchange.read()).request_body.response.body_mutation.streamed_response
        assert (piece.body, piece.end_of_stream) == (BODY, False)
        assert (await exchange.read()).WhichOneof("response") == "request_trailers"
        await exchange.answer_head()
        await exchange.answer_piece(EVENTS[0])
        await exchange.answer_piece(USAGE)
        await exchange.send(response_trailers=pb.HttpTrailers())
        assert (await exchange.read()).WhichOneof("response") == "response_trailers"
        await picking.idle()
        assert picking.decision().outcome == "ok"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"no JSON", 400, "invalid_request_error"),
        (completion(model="other"), 404, "model_not_found"),
        (completion(prompt=[1] * 9000), 400, "context_length_exceeded"),
        (completion(padding="x" * 20_000), 413, "request_too_large"),
    ],
)
async def test_what_the_client_must_change_is_answered_without_a_replica(
    pick: Pick, body: bytes, status: int, code: str
) -> None:
    async with replicas(1) as fakes, pick(fakes, limits=LimitsConfig(max_body_bytes=20_000)) as picking:
        found = await refusal(picking.exchange(), body)
        assert (found.status, found.error["code"]) == (status, code)
        counted = f'preble_responses_total{{model="",path="/v1/completions",status="{status}"}} 1.0'
        await eventually(lambda: counted in picking.serving.telemetry.exposition().decode())


async def test_a_body_that_does_not_come_is_answered_408(pick: Pick) -> None:
    async with replicas(1) as fakes, pick(fakes, timeouts=TimeoutsConfig(body_s=0.05)) as picking:
        exchange = picking.exchange()
        await exchange.head()
        found = await exchange.decision()
        assert isinstance(found, Refused) and found.status == 408


async def test_more_than_the_limit_is_answered_429(pick: Pick) -> None:
    async with replicas(1) as fakes, pick(fakes, limits=LimitsConfig(max_in_flight=1)) as picking:
        exchange = picking.exchange()
        await exchange.placed()
        found = await refusal(picking.exchange())
        assert found.status == 429 and "retry-after" in found.headers
        exchange.abort()


async def test_keys_are_asked_for_and_do_not_reach_the_replicas(pick: Pick) -> None:
    async with replicas(1) as fakes, pick(fakes, auth=AuthConfig(api_keys=(KEY,))) as picking:
        assert (await refusal(picking.exchange())).status == 401
        exchange = picking.exchange()
        sent = await exchange.placed(headers={"authorization": f"Bearer {KEY}"})
        assert sent.removed == ["authorization", "x-api-key"]
        headers = await exchange.answer([*EVENTS, USAGE])
        assert "x-preble-replica" not in headers, "where it went is for admins"


async def test_headers_by_which_a_client_would_speak_as_a_router_do_not_reach_the_replicas(pick: Pick) -> None:
    given = {"x-override-priority": "9", "x-preble-replica": "a", "x-request-id": "mine"}
    async with replicas(1) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        assert (await exchange.placed(headers=given)).removed == ["x-override-priority", "x-preble-replica"]
        exchange.abort()
        page = picking.exchange()
        await page.head("/v1/models", given, method="GET", ends=True)
        decision = await page.decision()
        assert isinstance(decision, Sent) and decision.removed == ["x-override-priority", "x-preble-replica"]
        page.abort()


async def test_the_engines_own_key_is_sent_to_them(pick: Pick) -> None:
    async with replicas(1) as fakes, pick(fakes, auth=AuthConfig(engine_api_key="theirs")) as picking:
        exchange = picking.exchange()
        assert (await exchange.placed()).headers["authorization"] == "Bearer theirs"
        exchange.abort()


async def test_a_gateway_that_does_not_stream_both_bodies_hears_what_to_set(pick: Pick) -> None:
    async with replicas(1) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        await exchange.head(config=pb.ProtocolConfiguration(request_body_mode=BUFFERED))
        with pytest.raises(grpc.aio.AioRpcError, match="FULL_DUPLEX_STREAMED"):
            await exchange.read()


async def test_a_gateway_that_does_not_say_how_it_streams_is_served(pick: Pick) -> None:
    async with replicas(1) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        assert (await exchange.placed(config=None)).body == BODY
        exchange.abort()


# a placement's life


async def test_first_token_usage_and_end_are_followed(pick: Pick) -> None:
    async with replicas(1) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        await exchange.placed()
        await exchange.answer_head()
        assert picking.decision().first_token_s is None
        await exchange.answer_piece(EVENTS[0])
        assert picking.decision().first_token_s is not None and picking.decision().outcome is None
        await exchange.answer_piece(USAGE, ends=True)
        decision = picking.decision()
        assert (decision.outcome, decision.output_tokens, decision.cached_tokens) == ("ok", 2, 4), "before our reply"
        await exchange.close()


async def test_a_whole_answer_reports_its_usage(pick: Pick) -> None:
    whole = b'{"choices": [], "usage": {"completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}}}'
    async with replicas(1) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        await exchange.placed(completion())
        await exchange.answer([whole[:20], whole[20:]], headers={"content-type": "application/json"})
        decision = picking.decision()
        assert (decision.outcome, decision.output_tokens, decision.cached_tokens) == ("ok", 9, 3)
        assert decision.first_token_s is None, "only known for streams"


@pytest.mark.parametrize("how", ["abort", "close"])
@pytest.mark.parametrize("when", ["placed", "answering"])
async def test_a_stream_that_ends_early_releases_what_it_took(pick: Pick, how: str, when: str) -> None:
    async with replicas(1) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        await exchange.placed()
        if when == "answering":
            await exchange.answer_head()
            await exchange.answer_piece(EVENTS[0])
        if how == "abort":
            exchange.abort()
        else:
            await exchange.close()
        await picking.idle()
        assert (picking.decision().outcome, picking.decision().output_tokens) == ("aborted", int(when == "answering"))


async def test_of_a_body_that_is_refused_nothing_is_kept_while_its_stream_stays_open(pick: Pick) -> None:
    piece = pb.ProcessingRequest(request_body=pb.HttpBody(body=bytes(1024 * 1024)))
    head = pb.HttpHeaders(headers=header_map({":method": "POST", ":path": "/v1/completions"}))
    limits = LimitsConfig(max_body_bytes=4 * 1024 * 1024)
    async with pick([], limits=limits) as picking, PickedRequest(picking.gateway, lambda: None) as request:
        await request.replies(pb.ProcessingRequest(request_headers=head))
        tracemalloc.start()
        try:
            while not request.has_ended:
                await request.replies(piece)
            kept, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most > 4 * 1024 * 1024 and kept < 1024 * 1024


async def test_of_an_answer_that_has_ended_nothing_is_kept_while_its_stream_stays_open(pick: Pick) -> None:
    whole = [b" " * 1024 * 1024] * 4 + [b'{"choices": [], "usage": {"completion_tokens": 1}}']
    head = header_map({":method": "POST", ":path": "/v1/completions"})
    answer = header_map({":status": "200", "content-type": "application/json"})
    async with replicas(1) as fakes, pick(fakes) as picking, PickedRequest(picking.gateway, lambda: None) as request:
        await request.replies(pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=head)))
        await request.replies(pb.ProcessingRequest(request_body=pb.HttpBody(body=BODY, end_of_stream=True)))
        await request.replies(pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=answer)))
        tracemalloc.start()
        try:
            for piece in whole:
                body = pb.HttpBody(body=piece, end_of_stream=piece is whole[-1])
                await request.replies(pb.ProcessingRequest(response_body=body))
            kept, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert request.has_ended and most > 4 * 1024 * 1024 and kept < 2 * 1024 * 1024


async def test_a_body_that_ends_twice_leaves_no_placement_behind(pick: Pick) -> None:
    async with replicas(1) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        await exchange.placed()
        await exchange.body()
        again = await exchange.decision()
        assert isinstance(again, Refused) and again.status == 400
        await picking.idle()


@pytest.mark.parametrize(
    ("status", "piece", "outcome"),
    [
        (503, b"upstream connect error", "refused"),
        (400, b"{}", "rejected"),
        (500, b"{}", "engine_failed"),
        (200, b'data: {"error": {"message": "broken"}}\n\n', "engine_protocol_error"),
    ],
)
async def test_answers_count_as_what_they_are(pick: Pick, status: int, piece: bytes, outcome: str) -> None:
    async with replicas(1) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        await exchange.placed()
        await exchange.answer([piece], status=status)
        assert picking.decision().outcome == outcome


@pytest.mark.parametrize("status", ["abc", "", "1e3", "-20", "9" * 5000, "\uff12\uff10\uff10"])
async def test_a_status_that_is_none_is_the_gateways_fault_and_leaves_nothing(pick: Pick, status: str) -> None:
    async with replicas(1) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        await exchange.placed()
        await exchange.send(response_headers=pb.HttpHeaders(headers=header_map({":status": status})))
        assert await exchange.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await picking.idle()


async def test_an_answer_without_a_body_ends_with_its_head(pick: Pick) -> None:
    async with replicas(1) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        await exchange.placed()
        await exchange.answer_head(429, {"retry-after": "7"}, ends=True)
        assert picking.decision().outcome == "refused"


async def test_the_placement_moves_to_the_endpoint_that_served(pick: Pick) -> None:
    async with replicas(3) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        first, second, _ = (await exchange.placed()).destinations
        headers = await exchange.answer_head(served=second)
        assert headers["x-preble-replica"] == f"http://{second}"
        assert (picking.in_flight()[first], picking.in_flight()[second]) == (0, 1)
        await exchange.answer_piece(USAGE, ends=True)


async def test_a_served_endpoint_that_nobody_knows_changes_nothing(pick: Pick) -> None:
    async with replicas(1) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        [only] = (await exchange.placed()).destinations
        await exchange.answer_head(served="10.9.9.9:1")
        assert picking.in_flight() == {only: 1}
        await exchange.answer_piece(USAGE, ends=True)


async def test_an_answer_of_the_gateways_own_before_the_body_is_complete_passes(pick: Pick) -> None:
    async with replicas(1) as fakes, pick(fakes) as picking:
        exchange = picking.exchange()
        await exchange.head()
        await exchange.answer([b"timeout"], status=408)
        await exchange.close()
        assert picking.serving.num_in_flight == 0


async def test_64_streams_at_once_are_each_placed_and_ended(pick: Pick) -> None:
    async with replicas(4) as fakes, pick(fakes) as picking:

        async def one(number: int) -> None:
            exchange = picking.exchange()
            body = completion(prompt=f"{number}" * 500, stream=True)
            assert (await exchange.placed(body)).body == body
            await exchange.answer([*EVENTS, USAGE])

        await asyncio.gather(*map(one, range(64)))
        assert [decision.outcome for decision in picking.serving.recent.latest(64)] == ["ok"] * 64


async def test_a_replica_that_leaves_is_chosen_no_more(pick: Pick) -> None:
    async with replicas(2) as fakes, pick(fakes) as picking:
        await fakes[0].stop()
        await eventually(lambda: len(picking.serving.replicas) == 1)
        exchange = picking.exchange()
        assert (await exchange.placed()).destinations == endpoints(fakes)[1:]
        exchange.abort()
