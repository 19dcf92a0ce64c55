"""Logging fails nobody: where stderr takes no line, the caller goes on and the line is counted."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
import structlog

from preble.logs import LogLosses, LossyStream, configure_logging


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, before = root.handlers[:], root.level, structlog.get_config()
    yield
    root.handlers[:], root.level = handlers, level
    structlog.configure(**before)


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """A pipe: the file descriptor that is read, and the stream that is written."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        yield reader, stream


def test_asyncio_says_nothing_of_its_start() -> None:
    configure_logging("info", "json")
    assert not logging.getLogger("asyncio").isEnabledFor(logging.INFO)
    assert logging.getLogger("asyncio").isEnabledFor(logging.WARNING)


def log_one_line_each_way() -> None:
    structlog.get_logger().warning("from_structlog", value=1)
    logging.getLogger("library").warning("from a library")


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_reader_that_is_gone_costs_lines_only(
    pipe: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch, log_format: str
) -> None:
    reader, stream = pipe
    os.close(reader)
    monkeypatch.setattr(sys, "stderr", stream)
    losses = configure_logging("info", log_format)
    log_one_line_each_way()
    assert losses.num_lines == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_lines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stderr", full)
        losses = configure_logging("info", "json")
        log_one_line_each_way()
        assert losses.num_lines == 2


def test_a_reader_that_does_not_read_holds_up_nobody(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    losses = LogLosses()
    lossy = LossyStream(stream, losses)
    line = "x" * 9_999 + "\n"
    for _ in range(100):  # a megabyte: more than a pipe holds
        lossy.write(line)
    assert 0 < losses.num_lines < 100
    taken = os.read(reader, 1 << 20)
    lossy.write("the next line\n")
    os.close(reader)
    assert taken.startswith(line.encode())


def test_a_line_that_was_cut_off_is_ended_before_the_next(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    lossy = LossyStream(stream, LogLosses())
    for _ in range(100):
        lossy.write("x" * 9_999 + "\n")
    os.read(reader, 1 << 20)
    lossy.write("the next line\n")
    text = os.read(reader, 1 << 20)
    os.close(reader)
    assert text == b"\nthe next line\n"


def test_lines_of_several_threads_do_not_mix(pipe: tuple[int, TextIO]) -> None:
    """A long line goes into a pipe in several pieces."""
    reader, stream = pipe
    lossy = LossyStream(stream, LogLosses())
    found: list[bytes] = []

    def read() -> None:
        while data := os.read(reader, 1 << 16):
            found.append(data)

    reading = threading.Thread(target=read)
    reading.start()
    writers = [threading.Thread(target=lossy.write, args=(letter * 100_000 + "\n",)) for letter in "abc" * 5]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    stream.close()
    reading.join()
    os.close(reader)
    assert all(len(set(line)) <= 1 for line in b"".join(found).splitlines())


def test_a_value_that_cannot_be_shown_costs_its_line_only(
    pipe: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError("no words")

    reader, stream = pipe
    monkeypatch.setattr(sys, "stderr", stream)
    losses = configure_logging("info", "json")
    structlog.get_logger().warning("hostile", value=Hostile())
    assert losses.num_lines == 1
    structlog.get_logger().warning("fine", half="\udc80")
    text = os.read(reader, 1 << 16)
    os.close(reader)
    assert text.count(b"\n") == 1
    assert b'"event": "fine"' in text


def test_a_stream_without_a_descriptor_is_written_to() -> None:
    buffer = io.StringIO()
    LossyStream(buffer, LogLosses()).write("line\n")
    assert buffer.getvalue() == "line\n"


@pytest.mark.parametrize(("is_terminal", "first"), [(True, "20"), (False, "{")])
def test_people_get_text_on_a_terminal_and_programs_get_json(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, first: str
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging("info", "auto")
    structlog.get_logger().info("listening", path=Path("a"), half="\ud800")
    written = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert written.startswith(first) and "listening" in written
    if not is_terminal:
        line = json.loads(written)
        assert (line["event"], line["level"], line["half"]) == ("listening", "info", "\ud800")
