"""Requests that are served by callbacks: a connection without sockets, and the same requests as strict parsers read."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any, cast

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from preble.web.messages import CONTINUE
from preble.web.server.answering import Answering, RequestHead
from preble.web.server.connection import MAX_HEAD_BYTES, ClientConnection, Shared
from web.test_connection import FakeLoop

pytestmark = pytest.mark.plain

KEPT = b"HTTP/1.1 200 OK\r\n"
BUG = RuntimeError("a bug")


class Loop(FakeLoop):
    """Calls later what is to be called soon, when the test says so."""

    def __init__(self) -> None:
        self._soon: list[Callable[[], object]] = []

    def call_soon(self, call: Callable[..., object], *args: object) -> None:
        self._soon.append(lambda: call(*args))

    def turn(self) -> None:
        while self._soon:
            self._soon.pop(0)()


class Transport(asyncio.Transport):
    """Takes everything, or nothing more while the client does not read."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.written = b""
        self.closed = False
        self.reading = True
        self.full_bytes = 0

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return self.full_bytes


class Served(Answering):
    """Answers with the number of bytes of the body: at once, as always at `/at-once`, or when the test says so."""

    def __init__(self, client: Client, connection: ClientConnection, head: RequestHead) -> None:
        super().__init__(connection, head)
        self._client = client
        self.body = b""
        self.num_pieces = 0
        self.gone = 0
        self.paused_times = 0
        self.failures: list[Exception] = []
        client.served.append(self)

    def on_start(self) -> None:
        self._work("start")
        if self._client.refuses:
            self.reply(401, [], b"")

    def on_body(self, data: bytes) -> None:
        self._work("body")
        self.body += data
        self.num_pieces += 1

    def on_body_end(self) -> None:
        self._work("body end")
        self._client.complete.append((self.head.path, self.body))
        if self._client.at_once or self.head.path == "/at-once":
            self.answer()

    def answer(self) -> None:
        self.reply(200, [], b"%d" % len(self.body))

    def _work(self, step: str) -> None:
        if step == self._client.bug and self.head.path == "/bug":
            raise BUG

    def on_failed(self, error: Exception) -> None:
        self.failures.append(error)
        self.reply(500, [], b"sorry")

    def on_gone(self) -> None:
        self.gone += 1

    def on_paused(self) -> None:
        self.paused_times += 1


class Client:
    """A client's connection without a socket."""

    def __init__(self, *, at_once: bool = True, refuses: bool = False, bug: str = "") -> None:
        """`bug`: the step at which what serves `/bug` fails; "accept" before it is served."""
        self.at_once, self.refuses, self.bug = at_once, refuses, bug
        self.served: list[Served] = []
        self.complete: list[tuple[str, bytes]] = []
        self.loop, self.transport = Loop(), Transport()
        self.connection = ClientConnection(Shared(self._accept), cast(Any, self.loop))
        self.connection.connection_made(self.transport)

    def _accept(self, connection: ClientConnection, head: RequestHead) -> Served:
        if self.bug == "accept":
            raise BUG
        return Served(self, connection, head)

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            if not self.transport.closed:
                self.connection.data_received(piece)
                self.loop.turn()


def post(path: bytes, body: bytes, framing: str = "length", more: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nhost: x\r\n%b" % (path, more)
    if framing == "length":
        return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(body[i : i + 7]), body[i : i + 7]) for i in range(0, len(body), 7))
    return b"%btransfer-encoding: chunked\r\n\r\n%b0\r\n\r\n" % (head, chunks)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def strictly(data: bytes) -> list[tuple[str, bytes]]:
    """The complete requests that h11 reads, until it refuses one."""
    connection, found = h11.Connection(h11.SERVER), []
    path, body = "", b""
    connection.receive_data(data)
    try:
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Request):
                path, body = event.target.decode(), b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                found.append((path, body))
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE:
                    break
                connection.start_next_cycle()
            elif isinstance(event, h11.ConnectionClosed):
                break
    except h11.ProtocolError:
        pass
    return found


REQUESTS = st.lists(
    st.tuples(st.sampled_from([b"/a", b"/b/c", b"/d"]), st.binary(max_size=40), st.sampled_from(["length", "chunks"])),
    min_size=1,
    max_size=4,
)
PLACES = st.lists(st.integers(0, 10_000), max_size=8)


@given(REQUESTS, PLACES, st.booleans())
def test_requests_are_the_same_in_whatever_pieces_they_come(
    requests: list[tuple[bytes, bytes, str]], places: list[int], at_once: bool
) -> None:
    client = Client(at_once=at_once)
    client.send(*cut(b"".join(post(*request) for request in requests), places))
    for number in range(len(requests) if not at_once else 0):
        client.served[number].answer()
        client.loop.turn()
    assert client.complete == [(path.decode(), body) for path, body, _ in requests]
    assert client.transport.written.count(KEPT) == len(requests)
    assert not client.transport.closed and client.transport.reading


JUNK = st.binary(min_size=1, max_size=3) | st.sampled_from(
    [b"\r\n", b"\n", b" ", b"\0", b"content-length: 3\r\n", b"-"]
)


@given(REQUESTS, st.integers(0, 1000), st.integers(0, 3), JUNK, PLACES)
def test_no_request_is_read_that_a_strict_parser_reads_otherwise(
    requests: list[tuple[bytes, bytes, str]], place: int, removed: int, junk: bytes, places: list[int]
) -> None:
    """Bytes of requests replaced by others: what both take for whole requests is the same, in the same order."""
    sent = b"".join(post(*request) for request in requests)
    place %= len(sent)
    sent = sent[:place] + junk + sent[place + removed :]
    client = Client()
    client.send(*cut(sent, places))
    ours, theirs = client.complete, strictly(sent)
    assert [body for _, body in ours][: len(theirs)] == [body for _, body in theirs][: len(ours)]


@given(st.lists(st.binary(max_size=30), max_size=6))
def test_garbage_is_refused_or_waited_for(pieces: list[bytes]) -> None:
    client = Client()
    client.send(*pieces)
    assert client.complete == [] or b"POST" in b"".join(pieces)


def test_a_path_is_found_however_it_is_written() -> None:
    client = Client()
    for path in (b"/v1/completions", b"/v1/%63ompletions?a=b", b"http://x/v1/completions"):
        client.send(post(path, b""))
    assert client.complete == [("/v1/completions", b"")] * 3


def test_whoever_asks_whether_to_go_on_is_answered_first() -> None:
    client = Client()
    head, _, body = post(b"/", b"hello", more=b"expect: 100-continue\r\n").partition(b"hello")
    client.send(head)
    assert client.transport.written == CONTINUE
    client.send(b"hello", body)
    assert client.complete == [("/", b"hello")]


def test_a_body_in_tiny_chunks_takes_the_memory_of_its_bytes() -> None:
    """An object for each chunk would take twenty times as much, which no limit counts."""
    client = Client()
    client.send(post(b"/", b"tiny" * 1000, "chunks") + post(b"/", b"next" * 1000, "chunks"))
    assert client.complete == [("/", b"tiny" * 1000), ("/", b"next" * 1000)]
    assert [served.num_pieces for served in client.served] == [1, 1]


@pytest.mark.parametrize("refuses", [False, True], ids=["before the answer", "after a refusal"])
@pytest.mark.parametrize(
    "begun", [b"2\r\nhi\r\n0\r\n", b"2\r\nhi\r\n0\r\nx: ", b"2;"], ids=["trailers", "one trailer", "extension"]
)
def test_what_is_neither_head_nor_body_has_an_end(begun: bytes, *, refuses: bool) -> None:
    client = Client(refuses=refuses)
    client.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + begun)
    piece = b"x: " + b"v" * 1000 + b"\r\n" if begun.endswith(b"0\r\n") else b"v" * 1000
    client.send(*[piece] * (MAX_HEAD_BYTES // len(piece) + 2))
    assert client.transport.closed and client.complete == []
    statuses = [int(part[:3]) for part in client.transport.written.split(b"HTTP/1.1 ")[1:]]
    assert statuses == ([401] if refuses else [431])


def test_a_body_may_come_in_any_number_of_chunks_and_end_with_trailers() -> None:
    client = Client()
    client.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(MAX_HEAD_BYTES // 10):
        client.send(b"1;sixteen=letters\r\n", b"a\r\n")
    client.send(b"0\r\nhost: y\r\n", b"x-sum: 1\r\n\r\n")
    assert [len(body) for _, body in client.complete] == [MAX_HEAD_BYTES // 10]


def test_who_is_refused_is_not_asked_to_go_on_and_his_body_is_nobodys_request() -> None:
    client = Client(refuses=True)
    client.send(post(b"/", post(b"/smuggled", b""), more=b"expect: 100-continue\r\n"), post(b"/next", b""))
    assert client.transport.written.count(b"HTTP/1.1 401 ") == len(client.served) == 2
    assert CONTINUE not in client.transport.written
    assert client.complete == []


def test_no_body_is_asked_for_that_came_before_its_turn() -> None:
    client = Client(at_once=False)
    client.send(post(b"/first", b"") + post(b"/second", b"hello", more=b"expect: 100-continue\r\n"))
    client.served[0].answer()
    client.loop.turn()
    assert client.complete[1] == ("/second", b"hello")
    assert CONTINUE not in client.transport.written


def test_ten_thousand_refused_requests_behind_a_slow_one_are_answered_one_after_the_other() -> None:
    client = Client(at_once=False)
    client.send(post(b"/", b"slow"))
    client.refuses = True
    client.connection.data_received(post(b"/", b"") * 10_000)
    assert not client.transport.reading
    client.served[0].answer()
    client.loop.turn()
    assert client.transport.written.count(b"HTTP/1.1 401 ") == 10_000


def test_http_1_0_ends_with_its_connection_and_has_no_chunks() -> None:
    client = Client(at_once=False)
    client.send(b"POST / HTTP/1.0\r\ncontent-length: 2\r\n\r\nhi")
    [served] = client.served
    served.begin(200, [])
    served.write(b"one")
    served.write(b"two")
    served.end()
    head, _, body = client.transport.written.partition(b"\r\n\r\n")
    assert body == b"onetwo" and b"chunked" not in head and b"connection: close" in head
    assert client.transport.closed


def test_a_stream_is_written_in_chunks() -> None:
    client = Client(at_once=False)
    client.send(post(b"/", b""))
    [served] = client.served
    served.begin(200, [(b"a", b"b")])
    served.write(b"one")
    served.end()
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(client.transport.written)
    kinds = [type(connection.next_event()) for _ in range(3)]
    assert kinds == [h11.Response, h11.Data, h11.EndOfMessage]
    assert not client.transport.closed


@pytest.mark.parametrize("is_begun", [False, True])
def test_who_leaves_before_his_answer_is_heard_of_once(is_begun: bool) -> None:
    client = Client(at_once=False)
    client.send(post(b"/", b""), post(b"/later", b""))
    one, later = client.served
    if is_begun:
        one.begin(200, [])
    client.connection.connection_lost(None)
    client.loop.turn()
    assert (one.gone, later.gone) == (1, 0)
    assert client.complete == [("/", b"")]


def test_a_whole_answer_counts_as_complete_once_it_has_been_read() -> None:
    client = Client(at_once=False)
    client.send(post(b"/", b"a"), post(b"/later", b""))
    one, _ = client.served
    client.connection.pause_writing()
    one.answer()
    client.loop.turn()
    assert (one.response_complete, one.paused_times, len(client.complete)) == (False, 1, 1)
    client.connection.resume_writing()
    client.loop.turn()
    assert one.response_complete and len(client.complete) == 2


def test_an_answer_that_is_written_at_once_leaves_the_connection_idle_for_as_long_as_any() -> None:
    client = Client()
    client.send(post(b"/", b""))
    client.connection.on_time(client.connection.keep_alive_s - 1)
    assert not client.transport.closed
    client.connection.on_time(client.connection.keep_alive_s)
    assert client.transport.closed


def test_of_requests_that_come_together_one_is_served_in_a_turn_of_the_event_loop() -> None:
    client = Client()
    client.connection.data_received(b"".join(post(b"/%d" % number, b"a") for number in range(3)))
    assert [path for path, _ in client.complete] == ["/0"]
    assert not client.transport.reading
    client.loop.turn()
    assert [path for path, _ in client.complete] == ["/0", "/1", "/2"]
    assert client.transport.reading


def test_the_rest_of_a_body_is_read_that_came_with_an_answered_request() -> None:
    client = Client()
    start, end = cut(post(b"/answered", b"") + post(b"/later", b"hello"), [-3])
    client.send(start)
    assert client.transport.reading
    client.send(end)
    assert client.complete == [("/answered", b""), ("/later", b"hello")]


def test_a_connection_is_not_idle_while_a_request_is_served_that_came_with_an_answered_one() -> None:
    client = Client(at_once=False)
    client.send(post(b"/at-once", b"") + post(b"/long", b""))
    client.connection.on_time(client.connection.keep_alive_s)
    assert client.complete == [("/at-once", b""), ("/long", b"")]
    assert client.transport.written.count(KEPT) == 1 and not client.transport.closed
    client.served[1].answer()
    client.connection.on_time(client.connection.keep_alive_s)
    assert client.transport.closed


def test_nothing_is_served_after_the_last_answer_of_a_connection() -> None:
    client = Client()
    client.send(post(b"/last", b"a", more=b"connection: close\r\n") + post(b"/more", b"b"))
    assert client.complete == [("/last", b"a")]
    assert client.transport.closed and client.transport.written.count(KEPT) == 1


@pytest.mark.parametrize("bug", ["start", "body", "body end"])
@pytest.mark.parametrize("before", [b"", post(b"/", b"")], ids=["first", "with another"])
def test_what_serves_a_request_hears_of_its_own_bug_and_the_connection_ends_with_its_answer(
    bug: str, before: bytes
) -> None:
    client = Client(bug=bug)
    client.send(before + post(b"/bug", b"hello") + post(b"/later", b""))
    assert [served.failures for served in client.served if served.head.path == "/bug"] == [[BUG]]
    assert client.transport.written.count(KEPT) == bool(before)
    assert client.transport.written.endswith(b"connection: close\r\n\r\nsorry") and client.transport.closed


def test_a_bug_before_a_request_is_served_is_logged_and_answered() -> None:
    client = Client(bug="accept")
    with capture_logs() as logs:
        client.send(post(b"/", b"hello"))
    head, _, body = client.transport.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ") and json.loads(body)["error"]["code"] == "internal_error"
    assert [(line["event"], line["exc_info"]) for line in logs] == [("request_failed", BUG)]
    assert client.transport.closed


@pytest.mark.parametrize("target", [b"http://x", b"http://x?a=b", b"http://x:99999/a"])
def test_an_address_without_a_path_is_the_clients_mistake(target: bytes) -> None:
    client = Client()
    with capture_logs() as logs:
        client.send(post(target, b""))
    assert client.transport.written.startswith(b"HTTP/1.1 400 ") and client.transport.closed
    assert logs == []


def test_an_idle_connection_is_closed_in_time_and_one_that_is_served_is_not() -> None:
    client = Client(at_once=False)
    client.send(post(b"/", b""))
    client.connection.on_time(1e6)
    assert not client.transport.closed
    client.served[0].answer()
    client.connection.on_time(client.connection.keep_alive_s - 1)
    assert not client.transport.closed
    client.connection.on_time(client.connection.keep_alive_s)
    assert client.transport.closed


def test_no_request_begins_once_the_server_has_stopped() -> None:
    client = Client(at_once=False)
    client.send(post(b"/", b""), post(b"/later", b""))
    assert client.connection.stop()
    client.served[0].answer()
    client.loop.turn()
    assert client.complete == [("/", b"")]
    assert client.transport.closed
