"""Two replicas that answer one request: what each gets, whose answer counts, and how the pair ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf

import pytest

from engines.test_http import ANSWER, BEGUN, FOREVER, HEAD, Peer, Script, Server, serving
from preble.core.types import ReplicaId
from preble.core.types.life import TRANSFERRED
from preble.engines import pairs
from preble.engines.adapter import Engine
from preble.engines.http import HttpClient
from preble.engines.pairs import PairedEngine
from preble.engines.sglang import pairs as sglang_pairs
from preble.engines.sglang.client import SglangEngine
from preble.engines.sglang.pairs import PairedLegs
from preble.engines.vllm.client import VllmEngine
from preble.engines.vllm.pairs import VllmPair, body_of_source
from preble.errors import EngineError, EngineFailed, EngineGone, EngineRefused
from preble.web.client.pool import Ongoing
from preble.web.messages import HeaderList
from support.waiting import eventually

BODY = b'{"prompt": "a"}'
REFUSAL = b"HTTP/1.1 503 Busy\r\nRetry-After: 2\r\nContent-Length: 4\r\n\r\nbusy"
ERROR = HEAD.replace(b"200 OK", b"500 Oh") + b"Content-Length: 2\r\n\r\nno"
STREAM_HEAD = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def answering(content: bytes) -> Script:
    """Answers each request with this, and an abort with nothing."""

    async def script(peer: Peer, _: int) -> None:
        while True:
            asked = await peer.request()
            await peer.answer(ANSWER if b"/abort_request" in asked[:40] else content)

    return script


def silent(sent: bytes = b"") -> Script:
    """Answers a generating request with this and no more."""

    async def script(peer: Peer, _: int) -> None:
        if b"/abort_request" in (await peer.request())[:40]:
            await peer.answer(ANSWER)
        else:
            await peer.answer(sent)
            await peer.request()

    return script


async def breaks(peer: Peer, _: int) -> None:
    await peer.request()


@dataclass
class Heard:
    """What becomes of a request, as its carrier hears it."""

    status: int = 0
    body: bytes = b""
    error: EngineError | None = None
    is_over: bool = False
    said: list[str] = field(default_factory=list)

    def answered(self, status: int, headers: HeaderList) -> None:
        self.said.append("head")
        self.status = status

    def received(self, data: bytes) -> None:
        self.said.append("body")
        self.body += data

    def ended(self) -> None:
        self.is_over = True

    def failed(self, error: EngineError) -> None:
        self.error, self.is_over = error, True


@dataclass
class Both:
    prefill: Server
    decode: Server
    pair: Engine
    heard: Heard
    ongoing: Ongoing | None = None

    async def over(self) -> Heard:
        await eventually(lambda: self.heard.is_over)
        return self.heard

    def asked(self, server: Server) -> list[dict[str, object]]:
        return [json.loads(body) for head, body in requests(server) if b"/abort_request" not in head]

    def aborted(self, server: Server) -> list[object]:
        return [json.loads(body)["rid"] for head, body in requests(server) if b"/abort_request" in head]

    async def is_left(self, server: Server) -> None:
        """The request on this server has been aborted."""
        await eventually(lambda: self.aborted(server) == [self.asked(server)[0]["rid"]])


def requests(server: Server) -> list[tuple[bytes, bytes]]:
    split = (request.partition(b"\r\n\r\n") for peer in server.peers for request in peer.requests)
    return [(head, body) for head, _, body in split]


@asynccontextmanager
async def both(prefill: Script, decode: Script, *, begin: bool = True) -> AsyncIterator[Both]:
    async with serving(prefill) as p, serving(decode) as d:
        source = SglangEngine(HttpClient(p.url, ReplicaId("p")))
        target = SglangEngine(HttpClient(d.url, ReplicaId("d")))
        source.kv_peer = "10.0.0.9:8998"
        pair = target.paired(source)
        assert pair is not None
        made = Both(p, d, pair, Heard())
        try:
            if begin:
                made.ongoing = pair.begin("/v1/completions", BODY, {}, made.heard)
            yield made
        finally:
            await source.close()
            await target.close()


async def test_both_get_the_request_at_once_with_the_source_and_one_room() -> None:
    async with both(silent(), silent()) as it:
        await eventually(lambda: bool(it.asked(it.prefill) and it.asked(it.decode)))
        [first], [second] = it.asked(it.prefill), it.asked(it.decode)
        where = [(body["bootstrap_host"], body["bootstrap_port"], body["prompt"]) for body in (first, second)]
        assert where == [("10.0.0.9", 8998, "a")] * 2
        assert first["bootstrap_room"] == second["bootstrap_room"] != 0


async def test_the_answer_is_that_of_the_one_that_decodes_and_the_other_one_is_dropped() -> None:
    async with both(answering(HEAD + b"Content-Length: 3\r\n\r\nyes"), answering(ANSWER)) as it:
        heard = await it.over()
        assert (heard.status, heard.body, heard.error) == (200, b"ok", None)
        assert it.pair.failed_leg is None


async def test_the_end_of_the_sources_leg_is_reported_before_the_other_one_says_anything() -> None:
    async with both(answering(ANSWER), silent(), begin=False) as it:
        facts: list[object] = []
        assert isinstance(it.pair, PairedEngine)
        it.pair.report = facts.append
        it.pair.begin("/v1/completions", BODY, {}, it.heard)
        await eventually(lambda: facts == [TRANSFERRED])
        assert it.heard.said == []


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_source_that_has_left_the_rotation_has_failed_at_once(has_begun: bool) -> None:
    async with both(silent(), silent(), begin=False) as it:
        assert isinstance(it.pair, PairedEngine)
        if has_begun:
            it.pair.begin("/v1/completions", BODY, {}, it.heard)
        it.pair.lose_source("it is silent")
        if not has_begun:
            it.pair.begin("/v1/completions", BODY, {}, it.heard)
        heard = await it.over()
        assert isinstance(heard.error, EngineGone) and heard.error.replica_id == "p" == it.pair.failed_leg


@pytest.mark.parametrize(
    ("computes", "takes", "decodes", "blamed"),
    [
        (False, False, False, "p"),
        (False, True, True, "p"),
        (False, False, True, None),
        (True, True, True, None),
        (True, False, False, "d"),
    ],
)
async def test_who_is_late_is_the_one_that_does_nothing_for_others_either(
    computes: bool, takes: bool, decodes: bool, blamed: str | None
) -> None:
    async with both(silent(), silent()) as it:
        assert isinstance(it.pair, PairedEngine) and isinstance(it.ongoing, PairedLegs)
        source, target, now = it.pair.prefill, it.pair.decode, asyncio.get_running_loop().time()
        source.last_leg_at = now if computes else -inf
        target.last_leg_at, target.last_output_at = now if takes else -inf, now if decodes else -inf
        it.ongoing._on_late()
        assert (it.heard.error and it.heard.error.replica_id) == blamed
        assert (it.pair.failed_leg == "p") == (blamed == "p")
        it.ongoing.abort()


@pytest.mark.parametrize("computes", [False, True])
async def test_a_pair_whose_target_stays_full_is_given_up_at_last(computes: bool) -> None:
    async with both(silent(), silent()) as it:
        assert isinstance(it.pair, PairedEngine) and isinstance(it.ongoing, PairedLegs)
        for _ in range(sglang_pairs.MOST_PROLONGED):
            now = asyncio.get_running_loop().time()
            it.pair.prefill.last_leg_at, it.pair.decode.last_output_at = now if computes else -inf, now
            it.ongoing._on_late()
            assert it.heard.error is None
        it.ongoing._on_late()
        assert it.heard.error is not None and it.heard.error.replica_id == "d", "the one that has no room"
        assert it.pair.failed_leg is None and "within 600 s" in str(it.heard.error)


async def test_each_pair_has_a_room_of_its_own() -> None:
    async with both(answering(ANSWER), answering(ANSWER)) as it:
        await it.over()
        again = Heard()
        it.pair.begin("/v1/completions", BODY, {}, again)
        await eventually(lambda: again.is_over)
        assert len({body["bootstrap_room"] for body in it.asked(it.decode)}) == 2


async def test_a_source_that_breaks_off_ends_the_pair_at_once_and_is_to_blame() -> None:
    async with both(breaks, silent()) as it:
        heard = await it.over()
        assert isinstance(heard.error, EngineGone) and heard.error.replica_id == "p"
        assert it.pair.failed_leg == "p" and heard.status == 0
        await it.is_left(it.decode)


async def test_a_source_that_is_not_there_ends_the_pair_at_once() -> None:
    async with both(silent(), silent(), begin=False) as it, serving(silent()) as gone:
        source = SglangEngine(HttpClient(gone.url, ReplicaId("gone")))
        source.kv_peer = "x:1"
        it.pair = pairs_with(it, source)
        await source.close()
        with pytest.raises(EngineRefused):
            it.pair.begin("/v1/completions", BODY, {}, it.heard)
        assert it.pair.failed_leg == "gone"
        assert it.asked(it.decode) == []


def pairs_with(it: Both, source: Engine) -> Engine:
    assert isinstance(it.pair, pairs.PairedEngine)
    pair = it.pair.decode.paired(source)
    assert pair is not None
    return pair


@pytest.mark.parametrize("head", [b"", STREAM_HEAD], ids=["before its head", "after its head"])
async def test_a_source_that_refuses_gives_its_own_answer_while_the_other_one_has_sent_nothing(head: bytes) -> None:
    async with both(answering(REFUSAL), silent(head)) as it:
        heard = await it.over()
        assert (heard.status, heard.body, it.pair.failed_leg) == (503, b"busy", "p")
        await it.is_left(it.decode)


async def test_one_that_decodes_and_fails_ends_the_pair_and_the_source_is_left() -> None:
    async with both(silent(), answering(ERROR)) as it:
        heard = await it.over()
        assert (heard.status, heard.body, it.pair.failed_leg) == (500, b"no", None)
        await it.is_left(it.prefill)


@pytest.mark.parametrize("words", [b"Lost connection with prefill instance", b"Decode handshake failed for request"])
async def test_one_that_decodes_may_hear_first_that_the_source_is_gone(words: bytes) -> None:
    head = HEAD.replace(b"200 OK", b"500 Oh") + b"Content-Length: %d\r\n\r\n" % len(words)
    async with both(silent(), answering(head + words)) as it:
        heard = await it.over()
        assert (heard.status, it.pair.failed_leg) == (500, "p")
        await it.is_left(it.prefill)


async def test_once_the_answer_has_begun_a_source_that_fails_changes_nothing() -> None:
    begun = asyncio.Event()

    async def fails_late(peer: Peer, _: int) -> None:
        await peer.request()
        await begun.wait()

    async with both(fails_late, silent(BEGUN)) as it:
        await eventually(lambda: it.heard.body == b"hi")
        begun.set()
        await eventually(it.prefill.peers[0].writer.is_closing)
        assert not it.heard.is_over and it.pair.failed_leg is None


async def test_a_client_that_leaves_ends_both() -> None:
    async with both(silent(), silent(BEGUN)) as it:
        await eventually(lambda: it.heard.body == b"hi" and bool(it.asked(it.prefill)))
        assert it.ongoing is not None
        it.ongoing.abort()
        await it.is_left(it.prefill)
        await it.is_left(it.decode)
        assert not it.heard.is_over


async def test_a_source_that_hangs_is_given_up_long_before_sglang_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sglang_pairs.PREFILL_S < 300
    monkeypatch.setattr(sglang_pairs, "PREFILL_S", 1.0)  # ships 120 s
    async with both(silent(), silent()) as it:
        heard = await it.over()
        assert isinstance(heard.error, EngineFailed) and it.pair.failed_leg == "p"
        await it.is_left(it.prefill)
        await it.is_left(it.decode)


async def test_an_answer_that_has_begun_outlives_a_source_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_pairs, "PREFILL_S", 0.3)  # ships 120 s
    async with both(silent(), silent(BEGUN)) as it:
        await eventually(lambda: it.heard.body == b"hi")
        await it.is_left(it.prefill)
        assert not it.heard.is_over and it.pair.failed_leg is None


async def test_a_source_that_has_done_its_part_is_not_late_however_long_the_answer_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang_pairs, "PREFILL_S", 0.2)  # ships 120 s
    release = asyncio.Event()

    async def slow(peer: Peer, _: int) -> None:
        await peer.request()
        await release.wait()
        await peer.answer(ANSWER)
        await asyncio.sleep(FOREVER)

    async with both(answering(ANSWER), slow) as it:
        asyncio.get_running_loop().call_later(0.4, release.set)
        assert (await it.over()).body == b"ok"


async def test_a_question_of_our_own_to_one_with_a_role_moves_nothing() -> None:
    async with both(answering(ANSWER), answering(ANSWER), begin=False) as it:
        assert isinstance(it.pair, pairs.PairedEngine)
        source = it.pair.prefill
        assert isinstance(source, SglangEngine)
        source.role = source.role.PREFILL
        async with source.send("/v1/completions", BODY, {}) as answer:
            assert b"".join([piece async for piece in answer.chunks()]) == b"ok"
        [asked] = it.asked(it.prefill)
        assert (asked["bootstrap_host"], asked["bootstrap_room"]) == ("2.2.2.2", 0)


DEEP = b'{"prompt": "a", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def of_status(status: bytes, body: bytes = b"no") -> bytes:
    return HEAD.replace(b"200 OK", status) + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def test_a_body_that_is_too_deep_is_not_split() -> None:
    assert body_of_source("/v1/completions", DEEP) is None


@pytest.mark.parametrize(
    ("refusal", "rests"),
    [
        pytest.param(of_status(b"400 Bad"), False, id="400"),
        pytest.param(of_status(b"429 Later"), True, id="429"),
        pytest.param(of_status(b"500 Oh"), True, id="500"),
        pytest.param(of_status(b"200 OK", DEEP), True, id="too deep"),
        pytest.param(of_status(b"200 OK", b'{"kv_transfer_params": {"a": "\xff"}}'), True, id="no UTF-8"),
    ],
)
async def test_a_vllm_source_rests_after_a_fault_of_its_own_and_not_of_the_request(refusal: bytes, rests: bool) -> None:
    async with serving(answering(refusal)) as p, serving(answering(ANSWER)) as d:
        source, target = (
            VllmEngine(HttpClient(server.url, ReplicaId(name)), None) for server, name in ((p, "p"), (d, "d"))
        )
        heard = Heard()
        source.kv_peer = "nixl:600"  # half of which is longer than the test waits
        VllmPair(target, source).begin("/v1/completions", BODY, {}, heard)
        await eventually(lambda: heard.is_over)
        assert heard.status == 200, "the target has computed"
        assert (source.rests_until > 0.0) == rests
        await source.close()
        await target.close()
