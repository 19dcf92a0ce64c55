"""Pairs of files: in NAME.requests.jsonl.gz the segments of each prompt, in NAME.segments.jsonl.gz what they are.

A segment has a text, or only a number of tokens. By default each has made-up tokens, so that lengths are exactly
those of the tokenizer that counted them; `LoadOptions.text` gives the texts instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from preble.core.types import PackedTokens
from preble.errors import TraceFormatError
from preble.lab.workloads.lines import bad_line, decoded_lines
from preble.lab.workloads.loaders.assemble import assembled, workload_name
from preble.lab.workloads.loaders.options import LoadOptions
from preble.lab.workloads.model import Segment, Workload, WorkloadRequest
from preble.lab.workloads.trace import AnswerTokens, NumTokens, made_up_tokens

EXAMPLE = '{"id": "q7", "segs": ["system", "tool"], "tail": "Why?", "n_in": 1201, "n_out": 40}'
SEGMENT_EXAMPLE = '{"id": "tool", "n_tok": 900, "text": "..."}'

Id = Annotated[str, Meta(min_length=1)]


class _SegmentLine(msgspec.Struct, frozen=True):
    """`n_tok`: tokens. `text`: None where the content is not known."""

    id: Id
    n_tok: NumTokens
    text: str | None = None


class _RequestLine(msgspec.Struct, frozen=True):
    """The prompt is its segments, then `tail`: `n_in` tokens in all. `parent`: has to be answered before."""

    id: Id
    segs: list[Id]
    n_in: NumTokens
    n_out: AnswerTokens
    tail: str = ""
    session: Id | None = None
    parent: Id | None = None


def read_segments(path: Path, options: LoadOptions) -> Workload:
    """`path`: the requests file; the segments file is found beside it.

    A request with a parent must begin with its parent's whole prompt; the answer follows, in its next segment.

    Raises: TraceFormatError.
    """
    prompts = (_TextPrompts if options.text else _TokenPrompts)(path)
    for number, line in decoded_lines(path, _RequestLine, EXAMPLE):
        prompts.take(number, line)
    note = "texts" if options.text else "made-up tokens, as many as the file counts"
    return assembled(path, prompts.requests(), note)


class _Prompts(ABC):
    """Takes the lines of one pair of files and makes requests of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = workload_name(path)
        self._segment_lines = _segment_lines(path)
        self._lines: dict[str, _RequestLine] = {}

    def take(self, number: int, line: _RequestLine) -> None:
        """Raises: TraceFormatError: the line does not fit the segments or the lines before it."""
        try:
            self._check(line)
        except ValueError as error:
            raise bad_line(self._path, number, f"request {line.id!r}: {error}") from error
        self._lines[line.id] = line

    def requests(self) -> Iterator[WorkloadRequest]:
        """Yield the requests of all that was taken, in order; segments are made once and shared."""
        segments = {segment_id: self._segment(line) for segment_id, line in self._segment_lines.items()}
        for line in self._lines.values():
            prompt = [segments[segment_id] for segment_id in line.segs]
            tail = self._tail(line)
            yield WorkloadRequest(
                line.id,
                tuple(prompt if tail is None else [*prompt, tail]),
                max(1, line.n_out),
                session=line.session,
                parent=line.parent,
                group=self._key_segment(line),
            )

    @abstractmethod
    def _segment(self, line: _SegmentLine) -> Segment: ...

    @abstractmethod
    def _tail(self, line: _RequestLine) -> Segment | None: ...

    def _tail_tokens(self, line: _RequestLine) -> int:
        return line.n_in - sum(self._segment_lines[segment_id].n_tok for segment_id in line.segs)

    def _segment_id(self, segment_id: str) -> str:
        """Return the id with the file's name before it, so that segments of several files differ."""
        return f"{self._name}:{segment_id}"

    def _key_segment(self, line: _RequestLine) -> str | None:
        if not line.segs:
            return None
        return self._segment_id(max(line.segs, key=lambda segment_id: self._segment_lines[segment_id].n_tok))

    def _check(self, line: _RequestLine) -> None:
        """Raises: ValueError."""
        if line.id in self._lines:
            raise ValueError("it is there twice; give each its own id")
        if unknown := [segment_id for segment_id in line.segs if segment_id not in self._segment_lines]:
            raise ValueError(f"segment {unknown[0]!r} is not in the segments file")
        if (tail_tokens := self._tail_tokens(line)) < 0:
            raise ValueError(f"its segments have {line.n_in - tail_tokens} tokens, more than the n_in of {line.n_in}")
        if line.parent is not None:
            self._check_parent(line, line.parent)

    def _check_parent(self, line: _RequestLine, parent_id: str) -> None:
        parent = self._lines.get(parent_id)
        if parent is None:
            raise ValueError(f"parent {parent_id!r} is not a request above; parents come before their children")
        if line.session is None or line.session != parent.session:
            raise ValueError(f"parent {parent_id!r} is of session {parent.session!r}, not {line.session!r}")
        rest = line.segs[len(parent.segs) :]
        following = (self._segment_lines[rest[0]].text or "") if rest else line.tail
        if line.segs[: len(parent.segs)] != parent.segs or not following.startswith(parent.tail):
            raise ValueError(f"its prompt does not begin with that of its parent {parent_id!r}")


class _TextPrompts(_Prompts):
    def _check(self, line: _RequestLine) -> None:
        super()._check(line)
        if missing := [segment_id for segment_id in line.segs if not self._segment_lines[segment_id].text]:
            raise ValueError(f"segment {missing[0]!r} has no text; load this file as made-up tokens, the default")
        if not (line.segs or line.tail):
            raise ValueError("its prompt has no text; load this file as made-up tokens, the default")

    def _segment(self, line: _SegmentLine) -> Segment:
        return Segment(self._segment_id(line.id), text=line.text or "")

    def _tail(self, line: _RequestLine) -> Segment | None:
        return Segment(text=line.tail) if line.tail else None


class _TokenPrompts(_Prompts):
    """Contents with an id of their own are tokens of their own, with one exception.

    Where a parent's tail is the beginning of the answer in its child ("assistant:"), both have the same tokens, so that
    the child begins with its parent's prompt in tokens as it does in text.
    """

    @cached_property
    def _openings(self) -> dict[str, int]:
        """Tails of parents, the longest first, and how many tokens each is; asked for when every line is taken."""
        parents = {line.parent for line in self._lines.values()}
        tokens: dict[str, int] = {}
        for line in self._lines.values():
            if line.id in parents and line.tail:
                tokens[line.tail] = max(tokens.get(line.tail, 0), self._tail_tokens(line))
        return {tail: tokens[tail] for tail in sorted(tokens, key=len, reverse=True)}

    def _segment(self, line: _SegmentLine) -> Segment:
        segment_id = self._segment_id(line.id)
        return Segment(segment_id, tokens=self._tokens(segment_id, line.text or "", line.n_tok))

    def _tail(self, line: _RequestLine) -> Segment | None:
        num_tokens = self._tail_tokens(line)
        if not num_tokens:
            return None
        return Segment(tokens=self._tokens(f"own:{line.id}", line.tail, num_tokens))

    def _tokens(self, content_id: str, text: str, num_tokens: int) -> PackedTokens:
        opening = next((opening for opening in self._openings if text.startswith(opening)), "")
        num_shared = min(num_tokens, self._openings.get(opening, 0))
        shared = made_up_tokens(f"{self._name}:opening:{opening}", num_shared)
        return PackedTokens(shared + made_up_tokens(content_id, num_tokens - num_shared))


def _segment_lines(path: Path) -> dict[str, _SegmentLine]:
    """Return the lines of the segments file beside a requests file, by id. Raises: TraceFormatError."""
    beside = _segments_file(path)
    lines: dict[str, _SegmentLine] = {}
    for number, line in decoded_lines(beside, _SegmentLine, SEGMENT_EXAMPLE):
        if line.id in lines:
            raise bad_line(beside, number, f"segment {line.id!r} is there twice; give each its own id")
        lines[line.id] = line
    return lines


def _segments_file(path: Path) -> Path:
    plain = path.name.replace(".requests.", ".segments.").removesuffix(".gz")
    if plain == path.name.removesuffix(".gz"):
        raise TraceFormatError(
            f"{path}: give a file of requests called NAME.requests.jsonl[.gz], with NAME.segments.jsonl[.gz] beside it"
        )
    for candidate in (path.with_name(f"{plain}.gz"), path.with_name(plain)):
        if candidate.is_file():
            return candidate
    raise TraceFormatError(f"{path}: its segments are missing; put {plain} or {plain}.gz beside it")
