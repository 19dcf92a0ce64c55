"""A front end's own trouble: the scheduler process goes away, comes back, or is there late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gateway.fakes import FakeReplica, replicas, status
from preble.config import GatewayConfig, LimitsConfig, ParityConfig, ReplicaConfig, TracingConfig
from preble.config.keys import KeyConfig
from preble.core.types import Reason
from preble.core.types.life import FirstToken, Progress
from preble.errors import EngineProtocolError, EngineRefused, NoReplicaError, Overloaded
from preble.gateway.http.access import KeyRing
from preble.gateway.server import accepting
from preble.gateway.workers.front_app import FrontApp
from preble.prompts.endpoints import COMPLETIONS, ENDPOINTS
from preble.prompts.tokens import pool
from preble.rules.callers import ANYBODY, Caller
from preble.serving import (
    FrontEnd,
    Intake,
    Placed,
    SchedulerAway,
    Serving,
)
from preble.serving.link import link, protocol
from preble.serving.telemetry.numbers import Reading
from preble.serving.telemetry.tracing import Tracing
from preble.serving.terms import Terms
from preble.web.server.listening import listen
from support.waiting import PATIENCE_S, eventually

BODY = b'{"prompt": "hello", "stream": true}'


class Host:
    """A scheduler that can be ended and started again at one path, and a front end that stays."""

    def __init__(self, config: GatewayConfig, path: Path) -> None:
        self.config, self.path = config, path
        self.serving: Serving
        self.front_end: FrontEnd

    async def start(self) -> None:
        self.serving = await Serving.start(self.config)
        await self.serving.listen(self.path)

    async def kill(self) -> None:
        """End as a killed process does: without a word."""
        self.path.unlink()
        await self.serving.close()
        await eventually(lambda: not self.front_end.is_led)

    @asynccontextmanager
    async def placed(
        self, name: str = "r", headers: dict[bytes, bytes] | None = None, caller: Caller = ANYBODY
    ) -> AsyncIterator[Placed]:
        front_end = self.front_end
        parsed = await front_end.parse(COMPLETIONS, headers or {}, BODY, name, caller)
        async with front_end.admitted(parsed) as parsed:
            placed = await front_end.place(await front_end.tokenize(parsed), parsed.terms)
            try:
                yield placed
            finally:
                placed.end()


@asynccontextmanager
async def host(
    folder: Path, count: int = 2, share: int = 1, **changes: Any
) -> AsyncIterator[tuple[Host, list[FakeReplica]]]:
    async with replicas(count) as fakes:
        config = GatewayConfig(
            replicas=tuple(ReplicaConfig(fake.url) for fake in fakes),
            engine="openai",
            parity=ParityConfig(enabled=False),
            **changes,
        )
        one = Host(config, folder / "socket")
        await one.start()
        one.front_end = await FrontEnd.connect(config, one.path, name="front-end-1", share=share)
        try:
            await eventually(lambda: len(one.front_end.replicas) == count)
            yield one, fakes
        finally:
            await one.front_end.close()
            await one.serving.close()


async def test_without_the_scheduler_process_requests_are_placed_by_load_and_say_so(tmp_path: Path) -> None:
    async with host(tmp_path) as (one, fakes):
        async with one.placed() as placed:
            assert placed.placement.reason is not Reason.SCHEDULER_AWAY
            await one.kill()
            async with one.placed("b") as second, one.placed("c") as third:
                assert {second.engine.url, third.engine.url} == {fake.url for fake in fakes}, "by load"
                assert {second.placement.reason, third.placement.reason} == {Reason.SCHEDULER_AWAY}
            placed.report(FirstToken())  # what was placed before goes on
        assert one.front_end.telemetry.exposition().decode().count('reason="scheduler_away"') == 2, "one a replica"


async def test_the_scheduler_process_that_is_back_decides_again_and_counts_what_goes_on(tmp_path: Path) -> None:
    async with host(tmp_path) as (one, _), one.placed("old"):
        await one.kill()
        async with one.placed("while it was away"):
            await one.start()
            await eventually(lambda: one.front_end.is_led and one.serving.num_admitted == 2)
            await eventually(lambda: len(one.front_end.replicas) == 2)
            async with one.placed("new") as placed:
                assert placed.placement.reason is not Reason.SCHEDULER_AWAY
                assert one.serving.num_in_flight == 1
        await eventually(lambda: (one.serving.num_in_flight, one.serving.num_admitted) == (0, 1))


async def test_a_request_that_the_old_process_placed_can_be_placed_again(tmp_path: Path) -> None:
    async with host(tmp_path) as (one, _), one.placed() as placed:
        await one.kill()
        placed.end(EngineRefused("no"))
        async with asyncio.timeout(PATIENCE_S):
            again = await placed.place_again()
        assert again.engine.url != placed.engine.url and again.placement.reason is Reason.SCHEDULER_AWAY
        again.end()


async def test_a_request_that_waits_for_its_place_is_placed_here_when_the_process_dies(tmp_path: Path) -> None:
    async with host(tmp_path) as (one, _):
        own = one.serving._socket
        assert own is not None
        for peer in own.carriers:
            peer.received = lambda message: None  # type: ignore[method-assign]  # it has stopped to answer
        waiting = asyncio.create_task(one.placed().__aenter__())
        await asyncio.sleep(0)
        await one.kill()
        placed = await waiting
        assert placed.placement.reason is Reason.SCHEDULER_AWAY
        placed.end()


@pytest.mark.plain
async def test_a_client_that_leaves_as_its_placement_arrives_leaves_nothing_behind(tmp_path: Path) -> None:
    async with host(tmp_path) as (one, _):
        hears = one.front_end._link.received

        def received(message: protocol.FromScheduler) -> None:
            if isinstance(message, protocol.PlacedOn):
                request.cancel()
            hears(message)

        one.front_end._link.received = received  # type: ignore[method-assign]
        request = asyncio.ensure_future(one.placed().__aenter__())
        with pytest.raises(asyncio.CancelledError):
            await request
        await eventually(lambda: (one.serving.num_in_flight, one.serving.num_admitted) == (0, 0))
        [decision] = one.serving.recent.of_request("r")
        assert decision.outcome == "aborted"


async def test_a_number_that_no_message_can_have_is_placed_all_the_same(tmp_path: Path) -> None:
    async with host(tmp_path) as (one, _):
        front_end = one.front_end
        parsed = await front_end.parse(COMPLETIONS, {}, b'{"prompt": "hello", "max_tokens": %d}' % 2**70, "r")
        async with front_end.admitted(parsed) as parsed:
            (await front_end.place(await front_end.tokenize(parsed), parsed.terms)).end()
        await eventually(lambda: one.serving.num_admitted == 0)
        assert not front_end._link._asked and not front_end._link._tickets


async def test_a_message_that_cannot_be_written_leaves_no_request_behind(tmp_path: Path) -> None:
    async with host(tmp_path) as (one, _):
        unwritable = Terms("r", model="\ud800")
        with pytest.raises(UnicodeEncodeError):
            one.front_end._link.admit(unwritable, at_once=True)
        with pytest.raises(UnicodeEncodeError):
            await one.front_end.page("GET", "/\ud800", b"", [], b"")
        assert not one.front_end._link._asked and not one.front_end._link._tickets


async def test_a_front_end_connects_again_whatever_has_gone_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_PULSE_S", 0.01)  # ships 1 s
    async with host(tmp_path) as (one, _):
        readings = one.front_end._link._readings

        def fails() -> list[Reading]:
            one.front_end._link._readings = readings
            raise ValueError

        one.front_end._link._readings = fails
        await eventually(lambda: not one.front_end.is_led)
        await eventually(lambda: one.front_end.is_led)
        async with one.placed() as placed:
            assert placed.placement.reason is not Reason.SCHEDULER_AWAY


async def test_the_limit_is_shared_out_while_nobody_counts_for_all(tmp_path: Path) -> None:
    async with host(tmp_path, share=2, limits=LimitsConfig(max_in_flight=2)) as (one, _):
        async with one.placed("a"), one.placed("b"):
            pass
        await one.kill()
        async with one.placed("a"):
            with pytest.raises(Overloaded):
                await one.placed("b").__aenter__()


@pytest.mark.parametrize(("limit", "of_two"), [("requests_per_minute", 4), ("tokens_per_minute", 20)])
async def test_what_a_key_has_used_counts_while_the_scheduler_process_is_away(
    tmp_path: Path, limit: str, of_two: int
) -> None:
    key: Any = {limit: of_two}
    caller = Caller("key", "tenant", limits=KeyConfig("0" * 64, **key))
    async with host(tmp_path, share=2) as (one, _):
        async with one.placed("a", caller=caller) as placed:
            placed.report(Progress(3))
        await one.kill()
        async with one.placed("b", caller=caller) as placed:
            placed.report(Progress(3))
        with pytest.raises(Overloaded, match=f"its {of_two // 2} {limit.split('_')[0]} a minute"):
            await one.placed("c", caller=caller).__aenter__()


async def test_a_request_that_is_answered_unplaced_waits_for_its_admission(tmp_path: Path) -> None:
    async with host(tmp_path, limits=LimitsConfig(max_in_flight=1)) as (one, _), one.placed():
        parsed = await one.front_end.parse(ENDPOINTS["/tokenize"], {}, b"{}", "b")
        with pytest.raises(Overloaded):
            await one.front_end.admitted(parsed).__aenter__()


async def test_a_front_end_before_its_scheduler_process_says_what_is_wrong(tmp_path: Path) -> None:
    front_end = await FrontEnd.connect(GatewayConfig(), tmp_path / "nothing", name="front-end-1")
    try:
        parsed = await front_end.parse(COMPLETIONS, {}, BODY, "r")
        with pytest.raises(NoReplicaError):
            await front_end.tokenize(parsed)
        with pytest.raises(SchedulerAway):
            await front_end.page("GET", "/metrics", b"", [], b"")
    finally:
        await front_end.close()


async def test_ids_that_clients_choose_are_used_once_over_all_front_ends(tmp_path: Path) -> None:
    async with host(tmp_path) as (one, _):
        other = await FrontEnd.connect(one.config, one.path, name="front-end-2")
        try:
            await eventually(lambda: other.is_led)
            own = {b"x-request-id": b"mine"}
            async with one.placed("mine", own) as first:
                parsed = await other.parse(COMPLETIONS, own, BODY, "mine")
                async with other.admitted(parsed) as parsed:
                    assert parsed.request_id != "mine" == first.placement.request_id
        finally:
            await other.close()


async def test_metrics_are_sums_and_outlive_a_front_end(tmp_path: Path) -> None:
    async with host(tmp_path) as (one, _):
        one.front_end.telemetry.numbers.add("preble_responses_total", "/v1/completions", "200", "")
        one.serving.telemetry.numbers.add("preble_responses_total", "/v1/completions", "200", "")
        one.front_end.telemetry.gaps("tiny")(0.5)
        line = 'preble_responses_total{model="",path="/v1/completions",status="200"} 2.0'
        assert line in (await one.serving.exposition()).decode()
        assert (await one.serving.picture()).counts.itl[-1] == 0.5
        await one.front_end.close()
        await eventually(lambda: not one.serving._socket.carriers)  # type: ignore[union-attr]
        assert line in (await one.serving.exposition()).decode()
        assert (await one.serving.picture()).counts.itl[-1] == 0.5


async def test_replicas_that_leave_and_are_held_back_are_so_in_the_front_end(tmp_path: Path) -> None:
    async with host(tmp_path, 2) as (one, fakes):
        members = one.serving.members
        members.wanted.drain(fakes[0].url)
        members.reconcile()
        await eventually(lambda: one.front_end.replicas.held_back == {fakes[0].url})
        await one.kill()
        async with one.placed("a") as a, one.placed("b") as b:
            assert {a.engine.url, b.engine.url} == {fakes[1].url}, "nobody undrains while it is away"
        await fakes[0].stop()
        await one.start()
        await eventually(lambda: one.front_end.is_led and list(one.front_end.replicas) == [fakes[1].url])


async def test_a_front_end_without_requests_is_heard_less_often(tmp_path: Path) -> None:
    async with host(tmp_path) as (one, _):
        sent: list[type] = []
        one.front_end._link._send = lambda message: sent.append(type(message))  # type: ignore[method-assign]

        def pulses() -> list[type]:
            sent.clear()
            for number in range(1, 6):
                one.front_end._link.pulse(number)
            return sent

        assert pulses() == [protocol.Heard, protocol.MetricsReport]
        async with one.placed("a"):
            assert pulses() == [*[protocol.Heard] * 5, protocol.MetricsReport]


@pytest.mark.plain
async def test_a_request_takes_two_messages_to_the_scheduler_process(tmp_path: Path) -> None:
    async with host(tmp_path) as (one, _):
        [peer] = one.serving._socket.carriers  # type: ignore[union-attr]
        received, hears = [], peer.received

        def hear(message: protocol.ToScheduler) -> None:
            received.append(type(message))
            hears(message)

        peer.received = hear  # type: ignore[method-assign]
        async with one.placed("a"):
            pass
        async with one.placed("b") as b, one.placed("c") as c:
            b.end(EngineProtocolError("nonsense"))
            c.end()
            (await b.place_again()).end()
        await eventually(lambda: one.serving.num_admitted == 0)
        of_requests = [kind for kind in received if kind not in (protocol.Heard, protocol.MetricsReport)]
        place, report = protocol.Place, protocol.PlacementReport
        expected = [place, report, place, place, report, report, protocol.PlaceAgain]
        assert of_requests[: len(expected)] == expected, "an end waits for nothing but its own request's leave"


async def test_the_candidates_of_a_placement_come_where_the_request_is_traced(tmp_path: Path) -> None:
    async with host(tmp_path, policy="preble") as (one, fakes):
        async with one.placed("plain") as placed:
            assert not placed.placement.candidates
        one.front_end.tracing = Tracing(TracingConfig(endpoint="http://127.0.0.1:9/v1/traces"))
        async with one.placed("traced") as placed:
            assert {candidate.replica_id for candidate in placed.placement.candidates} == {fake.url for fake in fakes}


class Clock:
    """The event loop's time, which passes only when the test says so: what replicas seem to take, and rates, change
    decisions."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._now = loop.time()
        patch.setattr(loop, "time", lambda: self._now)

    async def advance(self, seconds: float) -> None:
        """Let time pass, and timers run that are due."""
        self._now += seconds
        for _ in range(5):
            await asyncio.sleep(0)

    async def stop_until(self, condition: Callable[[], bool]) -> None:
        """Wait for what takes no time: `eventually` would wait for ever."""
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_placements_and_their_explanations_are_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same requests at the same times, to a scheduler of this process and through the socket."""
    rng = Random(7)
    heads = ["".join(rng.choices("abcdefgh ", k=rng.randrange(40, 400))) for _ in range(6)]
    prompts = [rng.choice(heads) + "".join(rng.choices("abcdefgh ", k=60)) for _ in range(120)]
    async with host(tmp_path, 1, policy="preble") as (one, _), replicas(2) as others:
        alone = await Serving.start(one.config)
        try:
            await eventually(lambda: len(alone.replicas) == 1)
            for count, fake in enumerate(others, start=2):  # one by one: they join both in the same order
                for intake in (alone, one.serving):
                    intake.add_replica(ReplicaConfig(fake.url))
                    await eventually(lambda: len(intake.replicas) == count)  # noqa: B023 (called at once)
            await eventually(lambda: len(one.front_end.replicas) == 3)
            with monkeypatch.context() as patch:
                clock = Clock(patch)
                for number, prompt in enumerate(prompts):
                    await ask((alone, one.front_end), prompt, number, clock)
                    await clock.stop_until(lambda: one.serving.num_admitted == 0)
                    await clock.advance(0.03)
            assert decisions(one.serving) == decisions(alone)
        finally:
            await alone.close()


async def ask(intakes: Sequence[Intake], prompt: str, number: int, clock: Clock) -> None:
    """Have one request served by each. Every fifth fails at its first replica."""
    body = msgspec.json.encode({"prompt": prompt, "stream": True, "max_tokens": 8})
    async with AsyncExitStack() as admissions:
        asked = []
        for intake in intakes:
            parsed = await intake.parse(COMPLETIONS, {}, body, f"r{number}")
            parsed = await admissions.enter_async_context(intake.admitted(parsed))
            placed = await intake.place(await intake.tokenize(parsed), parsed.terms)
            if number % 5 == 0:
                placed.end(EngineProtocolError("nonsense"))
                placed = await placed.place_again()
            asked.append(placed)
        here, there = (one.placement for one in asked)
        assert (here.predicted_ttft_s, here.predicted_ttft_p98_s) == (
            there.predicted_ttft_s,
            there.predicted_ttft_p98_s,
        )
        assert (here.predicted_tpot_s, here.predicted_tpot_p98_s) == (
            there.predicted_tpot_s,
            there.predicted_tpot_p98_s,
        )
        assert here.predicted_tpot_s is not None
        await clock.advance(0.02)
        for placed in asked:
            placed.report(FirstToken())
            placed.report(Progress(number % 7, len(prompt) // 8))
            placed.end()


def decisions(serving: Serving) -> list[Any]:
    """All of them, but for times."""
    return [
        (
            *(decision.request_id, decision.replica, decision.reason, decision.matched_tokens),
            *(decision.outcome, decision.output_tokens, decision.cached_tokens),
            [(candidate.replica, candidate.matched_tokens) for candidate in decision.candidates],
        )
        for decision in serving.recent.latest(1000)
    ]


async def test_a_front_end_sends_no_ids_if_the_scheduler_process_has_another_tokenizer(tmp_path: Path) -> None:
    def make_tokenizer(word: str) -> None:
        Tokenizer(WordLevel({word: 0}, unk_token=word)).save(str(tmp_path / "tokenizer.json"))
        pool._loaded.cache_clear()  # each process loads it once

    make_tokenizer("one")
    async with host(tmp_path, tokenizer=str(tmp_path)) as (one, _):
        for has_changed in (False, True):
            if has_changed:
                await one.kill()
                make_tokenizer("other")
                await one.start()
            await eventually(lambda: len(one.serving.replicas) == 2 and one.front_end.is_led)
            for replica in one.serving.replicas.values():
                one.serving.replicas.set_takes_ids(replica, True)
            one.serving.replicas.hold_back(frozenset(one.serving.replicas))
            await eventually(lambda: len(one.front_end.replicas.held_back) == 2, "it has heard of all changes")
            assert one.front_end.replicas.of_model("tiny").takes_ids is not has_changed


async def test_a_front_end_knows_which_replicas_take_token_ids(tmp_path: Path) -> None:
    async with host(tmp_path) as (one, [fake, _]):
        replica = next(live for live in one.serving.replicas.values() if live.engine.url == fake.url)
        one.serving.replicas.set_takes_ids(replica, True)
        await eventually(lambda: one.front_end.replicas[replica.engine.replica_id].takes_ids)
        assert not one.front_end.replicas.of_model("tiny").takes_ids, "the other one does not"
        for other in one.serving.replicas.values():
            one.serving.replicas.set_takes_ids(other, True)
        await eventually(lambda: one.front_end.replicas.of_model("tiny").takes_ids)


@pytest.mark.plain
async def test_a_client_that_leaves_while_its_request_moves_has_the_move_withdrawn_before_the_request_leaves(
    tmp_path: Path,
) -> None:
    async with host(tmp_path, policy="round_robin") as (one, fakes):
        [peer] = one.serving._socket.carriers  # type: ignore[union-attr]
        received, hears = [], peer.received

        def hear(message: protocol.ToScheduler) -> None:
            received.append(type(message))
            if not isinstance(message, protocol.PlaceAgain):  # which waits for its answer
                hears(message)

        peer.received = hear  # type: ignore[method-assign]
        for fake in fakes:
            fake.script.append(status(500))
        app = FrontApp(one.config, one.front_end, KeyRing(one.config.auth, one.config.queue.classes), 1)
        with listen("127.0.0.1", 0) as sock:
            async with (
                accepting(app, [sock], one.config),
                aiohttp.ClientSession(f"http://127.0.0.1:{sock.getsockname()[1]}") as http,
            ):
                asked = asyncio.create_task(http.post("/v1/completions", data=BODY).__aenter__())
                await eventually(lambda: protocol.PlaceAgain in received)
                asked.cancel()
                await eventually(lambda: one.serving.num_admitted == 0)
        of_requests = [kind for kind in received if kind not in (protocol.Heard, protocol.MetricsReport)]
        expected = [protocol.Place, protocol.PlacementReport, protocol.PlaceAgain, protocol.Withdraw, protocol.Leave]
        assert of_requests == expected
