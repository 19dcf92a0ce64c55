"""Replicas' answers, read for what the scheduler learns from them: tokens generated and prompt tokens cached."""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from preble.errors import EngineProtocolError

_MOST_TOKENS = 2**26
"""The most tokens believed of one answer: tens of times the longest context."""


class PromptTokensDetails(Struct):
    cached_tokens: int | None = None


class Usage(Struct, omit_defaults=True):
    """The tokens of an answer, as engines report them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def output_tokens(self) -> int | None:
        """Tokens generated; None if the engine reports none or an impossible number."""
        return _possible(self.completion_tokens)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were cached; None if the engine reports none or an impossible number."""
        return _possible(self.prompt_tokens_details.cached_tokens) if self.prompt_tokens_details else None


def _possible(count: int | None) -> int | None:
    """Return a reported count of tokens, or None if it cannot be one: some engines report -1 for "unknown".

    >>> _possible(0), _possible(-1), _possible(10**30)
    (0, None, None)
    """
    return count if count is not None and 0 <= count <= _MOST_TOKENS else None


class Answer(Struct):
    """The fields read of a whole answer."""

    choices: Raw
    usage: Usage | None = None


class _Piece(Struct):
    usage: Usage | None = None


_ANSWER = msgspec.json.Decoder(Answer)
_PIECE = msgspec.json.Decoder(_Piece)


def decode_answer(body: bytes) -> Answer:
    """Raises: EngineProtocolError: the replica's answer is not a completion."""
    try:
        return _ANSWER.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise EngineProtocolError(f"the replica's answer is not a completion: {error}") from error


def has_error_event(events: bytes) -> bool:
    r"""Return whether these bytes of a stream have an error in place of a piece of the answer.

    In generated text a quote is escaped, so the key cannot be part of it.

    >>> has_error_event(b'data: {"error": {"message": "no"}}'), has_error_event(rb'data: {"text": "\"error\":"}')
    (True, False)
    """
    return b'"error":' in events and b'data: {"error":' in events.replace(b"data:{", b"data: {")


class StreamMeter:
    """Counts the events of a stream from its raw bytes. O(bytes), copies nothing.

    Engines send about one event for each token, so the number of events replaces the number of output tokens where the
    engine reports no usage. A blank line ends an event; comments count too, which is close enough for an estimate.
    """

    __slots__ = ("_in_line_end", "_last", "_last_but_one", "events")

    def __init__(self) -> None:
        self.events = 0
        self._in_line_end = False
        self._last = b""
        self._last_but_one = b""

    def feed(self, chunk: bytes) -> None:
        """Count the next bytes of the stream."""
        if not chunk:
            return
        self.events += chunk.count(b"\n\n") + chunk.count(b"\n\r\n") + (self._in_line_end and chunk.startswith(b"\n"))
        self._in_line_end = chunk.endswith(b"\n") and not chunk.endswith(b"\n\n")
        self._last_but_one, self._last = self._last, chunk

    def usage(self) -> Usage | None:
        """Return the usage at the end of the stream, None if it reported none.

        Only the last two chunks are searched: engines send the usage in an event of its own just before `[DONE]`.
        """
        tail = self._last_but_one + self._last
        if b'"usage"' not in tail:
            return None
        for line in reversed(tail.splitlines()):
            if line.startswith(b"data:") and b'"usage"' in line and (usage := _usage(line[5:])):
                return usage
        return None

    def flaw(self) -> EngineProtocolError | None:
        """Return what is wrong with a stream that has ended: an error event, or no `[DONE]`. None if it is good."""
        tail = self._last_but_one + self._last
        if has_error_event(tail):
            return EngineProtocolError("the replica's stream ended with an error")
        if b"data: [DONE]" not in tail and b"data:[DONE]" not in tail:
            return EngineProtocolError("the replica's stream ended without [DONE]")
        return None

    def tokens(self) -> tuple[int, int | None]:
        """Return the output tokens and, if reported, the cached prompt tokens of the stream so far.

        Without a reported number, each event before `[DONE]` counts as one output token.
        """
        usage = self.usage()
        cached_tokens = usage.cached_tokens if usage else None
        if usage is not None and usage.output_tokens is not None:
            return usage.output_tokens, cached_tokens
        return self.events - (b"data: [DONE]" in self._last_but_one[-32:] + self._last[-32:]), cached_tokens


def _usage(data: bytes) -> Usage | None:
    try:
        return _PIECE.decode(data).usage
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
