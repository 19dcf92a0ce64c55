"""Streamed answers, metered as raw bytes: events are counted, and only the ends of a stream are read."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from preble.errors import EngineProtocolError
from preble.prompts.endpoints.answers import Usage, usage_of_event

_LAST = 4
"""A stream's last pieces, which are searched for its end and usage: an event may come in two of them."""

_LINE_FEED, _RETURN = ord("\n"), ord("\r")


@dataclass(frozen=True, slots=True)
class EventForm:
    """How an endpoint streams. Patterns never match in generated text, where quotes and line breaks are escaped.

    `error`: an event in place of a piece of the answer. `end`: the last event of a whole answer, named `end_name`.
    `begin`: the first event that comes only after the prefill, None if every event does. `usage`: reads it from the
    stream's last pieces. `ends_long`: the last event repeats the answer, so its name may be farther from the end.
    """

    error: re.Pattern[bytes]
    end: re.Pattern[bytes]
    end_name: str
    usage: Callable[[bytes], Usage | None]
    begin: re.Pattern[bytes] | None = None
    ends_long: bool = False

    def has_error(self, events: bytes) -> bool:
        """Return whether these bytes of a stream have an error in place of a piece of the answer."""
        return self.error.search(events) is not None


class StreamMeter:
    """Counts the events of a stream from its raw bytes. O(bytes), copies nothing.

    Engines send about one event for each token, so the number of events replaces the number of output tokens where the
    engine reports no usage. A blank line ends an event; comments count too, and a piece with both kinds of line ends
    counts those of one, which is close enough for an estimate.
    """

    __slots__ = ("_form", "_has_ended", "_last", "_looks", "_starts_with", "events", "has_begun")

    def __init__(self, form: EventForm) -> None:
        self.events = 0
        self.has_begun = form.begin is None
        """Whether the prefill is over. Until then a carrier may keep back what it has, and move the request."""
        self._form = form
        self._has_ended = False
        self._looks = form.begin is not None or form.ends_long
        """Whether the next bytes can show that the answer begins, or that it has ended."""
        self._last: deque[bytes] = deque(maxlen=_LAST)
        self._starts_with: Usage | None = None

    def feed(self, chunk: bytes) -> None:
        """Count the next bytes of the stream. Every token costs this, so it looks for what is usual first."""
        if not chunk:
            return
        self.events += chunk.count(b"\n\n") or chunk.count(b"\n\r\n")
        if chunk[0] == _LINE_FEED:  # a blank line may come in two pieces
            before = self._tail()
            self.events += before.endswith((b"\n", b"\n\r")) and not before.endswith(b"\n\n")
        elif chunk[0] == _RETURN:
            self.events += chunk.startswith(b"\r\n") and self._tail().endswith(b"\n")
        self._last.append(chunk)
        if self._looks:
            self._look(self._tail())

    def _look(self, tail: bytes) -> None:
        if not self.has_begun and (begin := self._form.begin) is not None:
            self._starts_with = self._form.usage(tail) or self._starts_with
            self.has_begun = begin.search(tail) is not None
        if self._form.ends_long and not self._has_ended:
            self._has_ended = self._form.end.search(tail) is not None
        self._looks = not self.has_begun or (self._form.ends_long and not self._has_ended)

    def _tail(self) -> bytes:
        return b"".join(self._last)

    def usage(self) -> Usage | None:
        """Return the usage at the end of the stream, None if it reported none.

        Only the last pieces are searched: engines send the usage just before the end.
        """
        return self._form.usage(self._tail())

    def error(self) -> EngineProtocolError | None:
        """Return the error event among the last pieces, None if there is none."""
        tail = self._tail()
        if (found := self._form.error.search(tail)) is None:
            return None
        return EngineProtocolError(f"the replica's stream has an error: {_excerpt(tail[found.start() :])}")

    def flaw(self) -> EngineProtocolError | None:
        """Return what is wrong with a stream that has ended: an error event, or no end. None if it is good."""
        tail = self._tail()
        if self._form.has_error(tail):
            return EngineProtocolError("the replica's stream ended with an error")
        if not self._has_ended and self._form.end.search(tail) is None:
            return EngineProtocolError(f"the replica's stream ended without {self._form.end_name}")
        return None

    def tokens(self) -> tuple[int, int | None]:
        """Return the output tokens and, if reported, the cached prompt tokens of the stream so far.

        Without a reported number, each event before the end counts as one output token.
        """
        usage = self.usage()
        cached_tokens = usage.cached_tokens if usage else None
        if cached_tokens is None and self._starts_with is not None:  # SGLang reports it there alone, to `/v1/messages`
            cached_tokens = self._starts_with.cached_tokens
        if usage is not None and usage.output_tokens is not None:
            return usage.output_tokens, cached_tokens
        return self.events - (self._form.end.search(self._tail()[-64:]) is not None), cached_tokens


_EXCERPT_BYTES = 200


def _excerpt(raw: bytes) -> str:
    return raw[:_EXCERPT_BYTES].decode("utf-8", "replace")


def usage_in_events(tail: bytes) -> Usage | None:
    """Return the last usage among whole events of OpenAI's form."""
    if b'"usage"' not in tail:
        return None
    for line in reversed(tail.splitlines()):
        if line.startswith(b"data:") and b'"usage"' in line and (usage := usage_of_event(line[5:])):
            return usage
    return None


_USAGE_OBJECT = re.compile(rb'"usage": ?(\{(?:[^{}]|\{[^{}]*\})*\})')
T = TypeVar("T")


def usage_objects(tail: bytes, kind: type[T]) -> list[T]:
    """Return the objects named `usage`, of whatever event, even if the first event's beginning is not in `tail`."""
    objects = []
    for found in _USAGE_OBJECT.findall(tail):
        with suppress(msgspec.DecodeError, UnicodeError):
            objects.append(msgspec.json.decode(found, type=kind))
    return objects


OPENAI_EVENTS = EventForm(
    error=re.compile(rb'data: ?\{"error":'),
    end=re.compile(rb"data: ?\[DONE\]"),
    end_name="[DONE]",
    usage=usage_in_events,
)
"""Of `/v1/completions` and `/v1/chat/completions`."""
