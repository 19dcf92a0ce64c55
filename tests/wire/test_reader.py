"""The reader of answers: the same answers whatever pieces they come in, and nothing that a strict parser refuses."""

from __future__ import annotations

import itertools

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preble.web.messages import MAX_HEAD_BYTES, AnswerReader, BadAnswer, answer_head, chunk

HEAD = b"HTTP/1.1 200 OK\r\n"
WHOLE = HEAD + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def read(*pieces: bytes, is_last: bool = False) -> tuple[AnswerReader, bytes]:
    reader = AnswerReader()
    body = b"".join(reader.feed(piece) for piece in pieces)
    if is_last:
        reader.eof()
    return reader, body


BODIES = st.lists(st.binary(min_size=1, max_size=40), max_size=5)
NAMES = st.from_regex(r"x-[a-z]{1,8}", fullmatch=True)
VALUES = st.from_regex(r"([!-~]([ -~]{0,10}[!-~])?)?", fullmatch=True)
HEADERS = st.lists(st.tuples(NAMES.map(str.encode), VALUES.map(str.encode)), max_size=4)
PLACES = st.lists(st.integers(0, 10_000), max_size=8)


@given(BODIES, HEADERS, st.sampled_from(["length", "chunks", "close"]), st.integers(0, 2), PLACES)
def test_an_answer_is_the_same_in_whatever_pieces_it_comes(
    body: list[bytes], headers: list[tuple[bytes, bytes]], framing: str, interims: int, places: list[int]
) -> None:
    whole = b"".join(body)
    extra = {
        "length": [(b"content-length", b"%d" % len(whole))],
        "chunks": [(b"transfer-encoding", b"chunked")],
        "close": [],
    }[framing]
    sent = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * interims + answer_head(200, [*headers, *extra])
    sent += b"".join(map(chunk, body)) + b"0\r\n\r\n" if framing == "chunks" else whole
    reader, found = read(*cut(sent, places), is_last=framing == "close")
    assert (reader.status, found, reader.is_complete) == (200, whole, True)
    assert reader.headers == [*headers, *extra]
    assert reader.can_go_on == (framing != "close")


ANSWERS = st.sampled_from(
    [
        WHOLE,
        CHUNKED + b"5\r\nhello\r\n0\r\n\r\n",
        CHUNKED + b"2;a=b\r\nhe\r\n3\r\nllo\r\n0\r\nx: y\r\n\r\n",
        HEAD + b"\r\nhello",
        HEAD + b"Content-Length: 5\r\nConnection: close\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\n\r\nhello",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE,
    ]
)
JUNK = st.binary(min_size=1, max_size=3) | st.sampled_from(
    [b"\r", b"\n", b"\r\n", b" ", b":", b"-1", b"\0", b"chunked"]
)


def strictly(data: bytes) -> tuple[int, bytes, bool] | None:
    """Status and body as h11 reads them until the end of the connection, and whether it is complete; None: refused."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    connection.send(h11.EndOfMessage())
    status, body = 0, b""
    try:
        for piece in (data, b""):
            connection.receive_data(piece)
            while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    return status, body, True
                elif isinstance(event, h11.ConnectionClosed):
                    return status, body, False
    except h11.RemoteProtocolError:
        return None
    return status, body, False


@given(ANSWERS, st.integers(0, 300), st.integers(0, 3), JUNK)
def test_what_both_a_strict_parser_and_this_one_take_for_complete_is_the_same(
    answer: bytes, place: int, removed: int, junk: bytes
) -> None:
    """Bytes of an answer replaced by others: nobody may read another status or body out of them."""
    place %= len(answer)
    sent = answer[:place] + junk + answer[place + removed :]
    strict = strictly(sent)
    try:
        reader, body = read(sent, is_last=True)
    except BadAnswer:
        return
    if reader.is_complete and strict is not None and strict[2]:
        assert (reader.status, body) == strict[:2]


@given(st.lists(st.binary(max_size=30), max_size=6))
def test_garbage_never_raises_anything_else(pieces: list[bytes]) -> None:
    reader = AnswerReader()
    try:
        for piece in pieces:
            reader.feed(piece)
    except BadAnswer as error:
        assert len(str(error)) < 1000
    reader.eof()


def test_one_connection_reads_one_answer_after_the_other() -> None:
    reader = AnswerReader()
    for sent in (WHOLE, CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", WHOLE):
        assert reader.feed(sent) == b"hello"
        assert reader.is_complete and reader.can_go_on


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\n", WHOLE, b"rubbish"])
def test_a_server_that_says_more_than_it_was_asked_is_not_asked_again(more: bytes) -> None:
    reader, body = read(WHOLE + more)
    assert (body, reader.is_complete, reader.can_go_on) == (b"hello", True, False)


@pytest.mark.parametrize("piece", [b"a: " + b"b" * 4000 + b"\r\n", b"c" * 4000])
def test_a_head_without_end_is_given_up(piece: bytes) -> None:
    reader = AnswerReader()
    reader.feed(HEAD + b"a: ")
    with pytest.raises(BadAnswer, match="65536"):
        for _ in range(MAX_HEAD_BYTES // len(piece) + 2):
            reader.feed(piece)


@pytest.mark.parametrize("begun", [b"0\r\n", b"0\r\na: ", b"2;"], ids=["trailers", "one trailer", "extension"])
def test_what_is_neither_head_nor_body_has_an_end(begun: bytes) -> None:
    reader = AnswerReader()
    assert reader.feed(CHUNKED + b"5\r\nhello\r\n" + begun) == b"hello"
    piece = b"a: " + b"b" * 4000 + b"\r\n" if begun == b"0\r\n" else b"b" * 4000
    with pytest.raises(BadAnswer, match="65536"):
        for _ in range(MAX_HEAD_BYTES // len(piece) + 2):
            reader.feed(piece)


def test_trailers_are_no_headers_and_a_body_may_have_any_number_of_chunks() -> None:
    reader = AnswerReader()
    body = reader.feed(CHUNKED)
    for _ in range(MAX_HEAD_BYTES // 10):
        body += reader.feed(b"1;sixteen=letters\r\n") + reader.feed(b"a\r\n")
    reader.feed(b"0\r\ncontent-type: x\r\n\r\n")
    assert (len(body), reader.is_complete) == (MAX_HEAD_BYTES // 10, True)
    assert b"content-type" not in dict(reader.headers)


def test_an_answer_that_switches_to_another_protocol_is_none() -> None:
    with pytest.raises(BadAnswer):
        read(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")


@pytest.mark.parametrize("sent", [b"", HEAD, WHOLE[:-1], CHUNKED + b"5\r\nhello\r\n"])
def test_an_answer_that_breaks_off_is_not_complete(sent: bytes) -> None:
    reader, _ = read(sent, is_last=True)
    assert not reader.is_complete
