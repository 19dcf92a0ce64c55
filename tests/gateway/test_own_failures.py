"""Failures of the gateway itself, and of adapters that are the user's own: logged, answered, and nothing is left over.

`serve` checks at the end of each test that nothing is in flight.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.conftest import Serve
from gateway.fakes import gated, replicas
from preble.engines import Engine
from preble.gateway.http.access import KeyRing
from preble.gateway.http.bodies import LimitedBody
from preble.gateway.requests.attempt import Attempt
from preble.web.client.pool import Exchange
from support.waiting import eventually

pytestmark = pytest.mark.plain


def fail(*args: Any) -> None:
    raise ZeroDivisionError("secret detail")


@pytest.mark.parametrize("failing", ["place", "begin", "_ended"])
async def test_a_failure_of_the_gateway_itself_is_a_500_without_a_traceback(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Before the request goes out, as it goes out (an adapter may be the user's own), and after its answer."""
    async with replicas(1) as [one], serve([one]) as gateway:
        with monkeypatch.context() as patch, capture_logs() as log:
            of = {"place": gateway.scheduler, "begin": Engine, "_ended": gateway.gateway.serving.telemetry}
            patch.setattr(of[failing], failing, fail)
            status, body, headers = await gateway.complete()
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert "secret" not in str(body)
        [logged] = [line for line in log if line["event"] == "request_failed"]
        assert logged["request_id"] == headers["x-request-id"]
        assert (await gateway.complete())[0] == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
@pytest.mark.parametrize(("broken", "method"), [(KeyRing, "caller"), (LimitedBody, "add"), (LimitedBody, "whole")])
async def test_a_failure_while_a_request_is_taken_is_a_500_in_the_form_of_its_endpoint(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, broken: type, method: str
) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        with monkeypatch.context() as patch, capture_logs() as log:
            patch.setattr(broken, method, fail)
            async with gateway.http.post(path, json={"prompt": "hello"}) as answer:
                error = (await answer.json())["error"]
        kind = {"/v1/completions": "internal_error", "/v1/messages": "api_error"}[path]
        assert (answer.status, error["type"]) == (500, kind)
        assert error["message"] == "the gateway failed; its log has the details"
        assert [type(line["exc_info"]) for line in log if line["event"] == "request_failed"] == [ZeroDivisionError]
        assert gateway.gateway.bodies.held == 0
        assert (await gateway.complete())[0] == 200


async def test_a_failure_after_an_answer_is_logged_and_frees_the_body(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        with monkeypatch.context() as patch, capture_logs() as log:
            patch.setattr(gateway.gateway.serving.ids, "release", fail)
            assert (await gateway.complete(prompt=None))[0] == 400
        assert [type(line["exc_info"]) for line in log if line["event"] == "request_failed"] == [ZeroDivisionError]
        assert gateway.gateway.bodies.held == 0


async def test_a_failure_between_a_placement_and_its_sending_ends_the_placement(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        with monkeypatch.context() as patch:
            patch.setattr(Attempt, "__init__", fail)
            assert (await gateway.complete())[0] == 500


async def test_a_request_that_cannot_be_aborted_ends_when_its_client_leaves(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(1) as [one], serve([one]) as gateway:
        one.script.append(gated)
        asked = asyncio.create_task(gateway.complete())
        await eventually(lambda: one.running == 1)
        with monkeypatch.context() as patch:
            patch.setattr(Exchange, "abort", fail)
            asked.cancel()
            await gateway.idle()
        assert gateway.gateway.bodies.held == 0
