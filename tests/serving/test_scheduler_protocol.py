"""The scheduler's socket spoken by hand, as the page describes it: bytes that no code of Preble has made."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import socket
import stat
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import structlog.testing

from gateway.fakes import FakeReplica, replicas
from preble.config import GatewayConfig, LimitsConfig, ParityConfig, ReplicaConfig
from preble.core.types.life import Lost
from preble.errors import ConfigError
from preble.rules.callers import Caller
from preble.serving import Serving
from preble.serving.link import frames, host, protocol
from preble.serving.placed import LocalPlaced
from preble.serving.terms import Terms
from support.waiting import PATIENCE_S, eventually

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "scheduler-protocol.md"
HELLO = b"\x93\x00" + bytes([protocol.VERSION]) + b"\xa7by-hand"  # [0, VERSION, "by-hand"]
ADMIT = b"\x93\x01\x01\x91\xa5req-1"  # [1, 1, ["req-1"]]
PLACE = b"\x95\x03\x02\x01\xa5req-1\xc4\x08\x05\x00\x00\x00\x07\x00\x00\x00"  # [3, 2, 1, "req-1", ids 5 and 7]
FIRST_TOKEN = b"\x93\x06\x02\x81\xa4fact\xabfirst_token"  # [6, 2, {"fact": "first_token"}]
ENDED = b"\x93\x06\x02\x83\xa4fact\xa5ended\xadoutput_tokens\x39\xadcached_tokens\x04"  # ..., 57, 4
LEAVE = b"\x92\x02\x01"  # [2, 1]
ASK = b"\x9a" + PLACE[1:] + b"\xc0\xa0\x90\xc3\x91\xa5req-1"  # [3, 2, 1, "req-1", ids, nil, "", [], true, ["req-1"]]
ENDED_AND_LEFT = b"\x94" + ENDED[1:] + b"\x01"  # [6, 2, {...}, 1]


class ByHand:
    """A carrier without a line of the project."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    def send(self, *messages: bytes) -> None:
        self.writer.write(b"".join(struct.pack("<I", len(message)) + message for message in messages))

    async def next(self) -> list[Any]:
        """The next message, but for the lists of replicas."""
        while True:
            [size] = struct.unpack("<I", await self._reader.readexactly(4))
            message: list[Any] = msgspec.msgpack.decode(await self._reader.readexactly(size))
            if message[0] != 1:
                return message

    async def is_closed(self) -> bool:
        return await self._reader.read() == b""

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


@asynccontextmanager
async def scheduler(folder: Path, **changes: Any) -> AsyncIterator[tuple[Serving, FakeReplica, Path]]:
    async with replicas(1) as [fake]:
        config = GatewayConfig(
            replicas=(ReplicaConfig(fake.url),), engine="openai", parity=ParityConfig(enabled=False), **changes
        )
        serving = await Serving.start(config)
        try:
            await serving.listen(folder / "socket")
            await eventually(lambda: len(serving.replicas) == 1)
            yield serving, fake, folder / "socket"
        finally:
            await serving.close()


@asynccontextmanager
async def connected(path: Path, first: bytes = HELLO) -> AsyncIterator[ByHand]:
    carrier = ByHand(*await asyncio.open_unix_connection(str(path)))
    try:
        if first:
            carrier.send(first)
            assert (await carrier.next())[:2] == [0, protocol.VERSION]
        yield carrier
    finally:
        await carrier.close()


async def test_a_request_by_hand_is_placed_and_reported(tmp_path: Path) -> None:
    async with scheduler(tmp_path) as (serving, fake, path), connected(path) as carrier:
        carrier.send(ADMIT, PLACE)
        assert await carrier.next() == [2, 1, "req-1"]
        placed_on = await carrier.next()
        assert placed_on[:4] == [3, 2, "req-1", fake.url] and placed_on[5:7] == [0, 2]
        assert (serving.num_in_flight, serving.num_admitted) == (1, 1)
        carrier.send(FIRST_TOKEN, ENDED, LEAVE)
        await eventually(lambda: (serving.num_in_flight, serving.num_admitted) == (0, 0))
        [decision] = serving.recent.of_request("req-1")
        assert (decision.outcome, decision.output_tokens, decision.cached_tokens) == ("ok", 57, 4)
        assert decision.first_token_s is not None


async def test_a_request_of_two_messages_is_admitted_placed_and_over(tmp_path: Path) -> None:
    async with scheduler(tmp_path) as (serving, fake, path), connected(path) as carrier:
        carrier.send(ASK)
        assert (await carrier.next())[:4] == [3, 2, "req-1", fake.url]
        assert (serving.num_in_flight, serving.num_admitted) == (1, 1)
        carrier.send(ENDED_AND_LEFT)
        await eventually(lambda: (serving.num_in_flight, serving.num_admitted) == (0, 0))
        [decision] = serving.recent.of_request("req-1")
        assert (decision.outcome, decision.output_tokens, decision.cached_tokens) == ("ok", 57, 4)
        carrier.send(ENDED_AND_LEFT, LEAVE, ADMIT)
        assert await carrier.next() == [2, 1, "req-1"], "the number and the id are free again"


async def test_a_place_that_asks_for_admission_is_refused_by_its_own_number(tmp_path: Path) -> None:
    limits = LimitsConfig(max_in_flight=1)
    async with (
        scheduler(tmp_path, limits=limits) as (serving, _, path),
        connected(path) as first,
        connected(path) as second,
    ):
        first.send(ASK)
        assert (await first.next())[0] == 3
        second.send(ASK)
        assert (await second.next())[:3] == [4, 2, "Overloaded"]
        second.send(LEAVE)
        first.send(ENDED_AND_LEFT)
        await eventually(lambda: (serving.num_in_flight, serving.num_admitted) == (0, 0))


async def test_the_end_of_a_connection_ends_what_was_placed_on_it(tmp_path: Path) -> None:
    async with scheduler(tmp_path) as (serving, _, path):
        async with connected(path) as carrier:
            carrier.send(ADMIT, PLACE)
            await eventually(lambda: serving.num_in_flight == 1)
            carrier.writer.transport.abort()
        await eventually(lambda: (serving.num_in_flight, serving.num_admitted) == (0, 0))
        assert [decision.outcome for decision in serving.recent.of_request("req-1")] == ["aborted"]
        async with connected(path) as other:
            other.send(ADMIT)
            assert await other.next() == [2, 1, "req-1"], "the id is free again"


async def test_the_end_of_a_connection_lets_go_of_what_it_was_admitted_whatever_fails_at_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*heard: object) -> None:
        raise ZeroDivisionError

    async with scheduler(tmp_path) as (serving, _, path):
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        async with connected(path) as carrier:
            carrier.send(ADMIT, PLACE)
            await carrier.next()
            await carrier.next()
            monkeypatch.setattr(serving.recent, "on", fails)
        await eventually(lambda: (serving.num_in_flight, serving.num_admitted) == (0, 0))


async def test_what_cannot_be_is_refused_by_its_number(tmp_path: Path) -> None:
    async with scheduler(tmp_path, limits=LimitsConfig(max_in_flight=1)) as (_, _, path), connected(path) as carrier:
        carrier.send(ADMIT, b"\x93\x01\x05\x91\xa5req-2", PLACE.replace(b"\x02\x01\xa5", b"\x06\x05\xa5"))
        assert await carrier.next() == [2, 1, "req-1"]
        assert (await carrier.next())[:3] == [4, 5, "Overloaded"]
        assert (await carrier.next())[:3] == [4, 6, "UnknownRequest"]


async def test_the_loss_of_a_replica_is_the_schedulers_to_report(tmp_path: Path) -> None:
    async with scheduler(tmp_path) as (serving, fake, path), connected(path) as carrier:
        carrier.send(ADMIT, PLACE, msgspec.msgpack.encode([6, 2, {"fact": "lost"}]))
        assert [(await carrier.next())[0] for _ in range(2)] == [2, 3]
        assert serving.num_in_flight == 1 and not serving.recent.of_request("req-1")[0].replica_lost
        await fake.stop()
        message = await carrier.next()
        assert message[:2] == [6, 2] and message[2]["fact"] == "lost" and message[2]["reason"]
        carrier.send(ENDED, LEAVE)
        await eventually(lambda: (serving.num_in_flight, serving.num_admitted) == (0, 0))


async def test_two_carriers_that_use_one_id_get_two(tmp_path: Path) -> None:
    async with scheduler(tmp_path) as (_, _, path), connected(path) as first, connected(path) as second:
        first.send(ADMIT)
        assert await first.next() == [2, 1, "req-1"]
        second.send(ADMIT)
        _, number, request_id = await second.next()
        assert number == 1 and request_id.startswith("req-1-")


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 3) + ADMIT[:3], struct.pack("<I", len(ADMIT)) + ADMIT, b"\xff" * 64],
    ids=["another protocol", "half a message", "no Hello", "a huge length"],
)
async def test_rubbish_ends_the_connection_and_nothing_else(tmp_path: Path, sent: bytes) -> None:
    async with scheduler(tmp_path) as (serving, _, path), connected(path) as good, connected(path, b"") as bad:
        bad.writer.write(sent)
        assert await bad.is_closed()
        good.send(ADMIT, PLACE)
        assert (await good.next())[0] == 2 and (await good.next())[0] == 3
        good.send(ENDED, LEAVE)
        await eventually(lambda: serving.num_in_flight == 0)


async def test_messages_about_placements_that_are_not_there_change_nothing(tmp_path: Path) -> None:
    async with scheduler(tmp_path) as (serving, _, path), connected(path) as carrier:
        moved = msgspec.msgpack.encode([6, 2, {"fact": "moved", "replica_id": "x"}])
        withdraw = b"\x92\x05\x02"
        carrier.send(FIRST_TOKEN, ENDED, LEAVE, moved, withdraw)
        carrier.send(ADMIT, PLACE)
        assert (await carrier.next())[0] == 2 and (await carrier.next())[0] == 3
        carrier.send(ENDED, ENDED, FIRST_TOKEN, LEAVE, LEAVE)
        await eventually(lambda: (serving.num_in_flight, serving.num_admitted) == (0, 0))


@pytest.mark.parametrize("again", [ADMIT, PLACE], ids=["Admit", "Place"])
async def test_a_number_that_is_used_twice_ends_the_connection_and_leaks_nothing(tmp_path: Path, again: bytes) -> None:
    async with scheduler(tmp_path) as (serving, _, path), connected(path) as carrier:
        carrier.send(ADMIT, PLACE)
        assert [(await carrier.next())[0] for _ in range(2)] == [2, 3]
        carrier.send(again.replace(b"req-1", b"req-2"))
        async with asyncio.timeout(PATIENCE_S):
            assert await carrier.is_closed()
        await eventually(lambda: (serving.num_in_flight, serving.num_admitted) == (0, 0))


async def test_a_request_of_less_than_one_prompt_is_no_message(tmp_path: Path) -> None:
    async with scheduler(tmp_path) as (serving, _, path), connected(path) as carrier:
        carrier.send(b"\x93\x01\x01\x92\xa5req-1\xfb")  # [1, 1, ["req-1", -5]]
        async with asyncio.timeout(PATIENCE_S):
            while not await carrier.is_closed():
                pass  # the list of replicas, perhaps in two pieces
        assert serving.num_admitted == 0


@pytest.mark.parametrize(
    "terms",
    [
        {"caller": {"weight": 0.0}},
        {"caller": {"weight": math.nan}},
        {"caller": {"weight": math.inf}},
        {"arrived_at": math.nan},
        {"arrived_at": -1.0},
    ],
    ids=str,
)
async def test_terms_that_cannot_be_end_the_connection_by_the_carriers_fault(
    tmp_path: Path, terms: dict[str, Any]
) -> None:
    row = ["req-1", 1, None, True, terms.get("caller", {}), None, None, None, terms.get("arrived_at")]
    await is_cut_off(tmp_path, msgspec.msgpack.encode([1, 1, row]))


@pytest.mark.parametrize(
    "message",
    [
        [8, {2: math.nan}],
        [8, {2: -1.0}],
        [6, 2, {"fact": "ended", "retry_after_s": math.inf}],
        [6, 2, {"fact": "ended", "output_tokens": -1}],
        [6, 2, {"fact": "ended", "output_tokens": 2**60}],
        [6, 2, {"fact": "ended", "output_tokens": 1, "cached_tokens": -1}],
        [6, 2, {"fact": "ended", "outcome": "nice"}],
        [6, 2, {"fact": "started_anew"}],
    ],
    ids=str,
)
async def test_numbers_that_cannot_be_end_the_connection_by_the_carriers_fault(
    tmp_path: Path, message: list[Any]
) -> None:
    await is_cut_off(tmp_path, ADMIT, PLACE, msgspec.msgpack.encode(message))


async def test_a_second_hello_ends_the_connection_by_the_carriers_fault(tmp_path: Path) -> None:
    await is_cut_off(tmp_path, ADMIT, PLACE, HELLO)


async def test_text_that_is_no_utf_8_ends_the_connection_by_the_carriers_fault(tmp_path: Path) -> None:
    await is_cut_off(tmp_path, ADMIT.replace(b"req-1", b"\xff\xfeq-1"))


@pytest.mark.parametrize(
    "message",
    [b"\x93\x02\x01" + b"\x91" * 100_000 + b"\xc0", b"\x93\x02\x01" + b"\x81\xa1a" * 100_000 + b"\xc0"],
    ids=["arrays", "maps"],
)
async def test_what_is_nested_too_deeply_ends_the_connection_by_the_carriers_fault(
    tmp_path: Path, message: bytes
) -> None:
    await is_cut_off(tmp_path, message)


@pytest.mark.parametrize(
    "reading",
    [
        ["preble_sold_total", [], [1.0]],
        ["preble_retries_denied_total", ["/v1/completions"], [1.0]],
        ["preble_retries_denied_total", [], []],
    ],
    ids=str,
)
async def test_numbers_of_no_metric_end_the_connection_by_the_carriers_fault(
    tmp_path: Path, reading: list[Any]
) -> None:
    await is_cut_off(tmp_path, ADMIT, PLACE, msgspec.msgpack.encode([10, 0, [reading]]))


async def is_cut_off(folder: Path, *sent: bytes) -> None:
    """For these bytes, which the log names as the carrier's fault, without a traceback; nothing of it stays."""
    with structlog.testing.capture_logs() as logged:
        async with scheduler(folder) as (serving, _, path), connected(path) as carrier:
            carrier.send(*sent)
            async with asyncio.timeout(PATIENCE_S):
                while not await carrier.is_closed():
                    pass  # the list of replicas, perhaps in two pieces
            await eventually(lambda: (serving.num_in_flight, serving.num_admitted) == (0, 0))
    assert [line["exc_info"] for line in logged if line["event"] == "link_broken"] == [None]


async def test_a_carrier_that_reads_nothing_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MOST_BYTES", 100_000)  # ships 256 MiB
    async with scheduler(tmp_path) as (serving, _, path), connected(path) as carrier:
        carrier.send(ADMIT, PLACE)
        await eventually(lambda: serving.num_in_flight == 1)
        heard = b"\x92\x08\x80"  # [8, {}]

        async def floods() -> None:
            while True:
                carrier.send(*[heard] * 1000)
                await carrier.writer.drain()

        with pytest.raises(OSError, match=r"onnection|pipe"):
            async with asyncio.timeout(PATIENCE_S):
                await floods()
        await eventually(lambda: (serving.num_in_flight, serving.num_admitted) == (0, 0))


async def test_a_carrier_that_falls_silent_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_SILENT_S", 0.2)  # ships 15 s
    async with scheduler(tmp_path) as (serving, _, path), connected(path) as carrier, connected(path, b"") as mute:
        carrier.send(ADMIT, PLACE)
        assert [(await carrier.next())[0] for _ in range(2)] == [2, 3]
        async with asyncio.timeout(PATIENCE_S):
            assert await carrier.is_closed() and await mute.is_closed()
        await eventually(lambda: (serving.num_in_flight, serving.num_admitted) == (0, 0))


async def test_a_scheduler_that_was_itself_held_up_cuts_nobody_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_SILENT_S", 0.05)  # ships 15 s
    monkeypatch.setattr(host, "_LATE_S", -1.0)  # ships 1 s: here each check comes too late
    async with scheduler(tmp_path), connected(tmp_path / "socket") as carrier:
        checks: list[bool] = []
        check = host._CarrierConnection._check_silence
        monkeypatch.setattr(
            host._CarrierConnection, "_check_silence", lambda one: (checks.append(one._is_silent), check(one))
        )
        await eventually(lambda: checks.count(True) >= 3)
        carrier.send(ADMIT, PLACE)
        assert [(await carrier.next())[0] for _ in range(2)] == [2, 3]


async def test_a_placement_is_withdrawn_in_the_moment_in_which_its_turn_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = host._CarrierConnection._keep

    def withdrawn_at_once(peer: Any, number: int, *args: Any) -> None:
        keep(peer, number, *args)
        peer.received(protocol.Withdraw(number))

    monkeypatch.setattr(host._CarrierConnection, "_keep", withdrawn_at_once)
    terms = Terms("req-1", caller=Caller("a", tenant="a", is_admin=False, shares_cache=False))
    async with scheduler(tmp_path) as (serving, _, path), connected(path) as carrier:
        carrier.send(msgspec.msgpack.encode(protocol.Admit(1, terms)), PLACE)
        assert [(await carrier.next())[0] for _ in range(2)] == [2, 3]
        await eventually(lambda: serving.num_in_flight == 0)


async def test_a_replica_that_leaves_in_the_moment_of_a_turn_is_reported_after_the_placement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = host._CarrierConnection._keep

    def lost_before(peer: Any, number: int, admitted: int, placed: LocalPlaced) -> None:
        placed.lose(Lost("it has left", 1.0))
        keep(peer, number, admitted, placed)

    monkeypatch.setattr(host._CarrierConnection, "_keep", lost_before)
    terms = Terms("req-1", caller=Caller("a", tenant="a", is_admin=False, shares_cache=False))
    async with scheduler(tmp_path) as (serving, _, path), connected(path) as carrier:
        carrier.send(msgspec.msgpack.encode(protocol.Admit(1, terms)), PLACE)
        assert [(await carrier.next())[0] for _ in range(3)] == [2, 3, 6]
        carrier.send(ENDED_AND_LEFT)
        await eventually(lambda: serving.num_in_flight == 0)


async def test_only_the_user_may_connect_and_one_process_listens(tmp_path: Path) -> None:
    async with scheduler(tmp_path) as (serving, _, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(ConfigError, match="in use"):
            await serving.listen(path)
    async with scheduler(tmp_path) as (_, _, path), connected(path):
        pass  # what an ended process has left is no obstacle


async def test_only_a_socket_that_nobody_serves_is_replaced(tmp_path: Path) -> None:
    path, serving = tmp_path / "socket", await Serving.start(GatewayConfig())
    try:
        path.write_text("precious", encoding="utf-8")
        with pytest.raises(ConfigError, match="something else lies there, and stays; set scheduler_socket"):
            await serving.listen(path)
        assert path.read_text(encoding="utf-8") == "precious"
        path.unlink()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        await serving.listen(path)
        async with connected(path):
            pass
    finally:
        await serving.close()


def test_the_page_names_every_message_with_its_number() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    there = {
        (str(kind.__struct_config__.tag), kind.__name__)
        for kind in vars(protocol).values()
        if isinstance(kind, type) and issubclass(kind, protocol.Message) and kind is not protocol.Message
    }
    assert set(rows) == there and f"version: {protocol.VERSION};" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("Place", protocol.Place),
        ("Terms", Terms),
        ("Replicas", protocol.LinkedReplica),
        ("PlacedOn", protocol.PlacedOn),
    ],
)
def test_the_page_has_a_row_for_each_field_of_a_long_message(heading: str, kind: type[msgspec.Struct]) -> None:
    _, _, below = PAGE.read_text(encoding="utf-8").partition(f"\n### {heading}\n")
    table = re.search(r"^\|.*\n\| --- \| --- \|\n((?:\|.*\n)+)", below, re.MULTILINE)
    assert table is not None and len(table[1].splitlines()) == len(kind.__struct_fields__)
