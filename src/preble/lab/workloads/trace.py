"""The trace format: JSON lines, one object per line, distinguished by `kind`; see docs/reference/trace-format.md.

The reader is strict: it refuses what the format does not define, with file, line and remedy, so that a typing error in
a trace does not silently change an experiment.
"""

from __future__ import annotations

import gzip
import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, ClassVar, cast

import msgspec
import numpy as np
from msgspec import Meta

from preble.core.types import TOKEN_BYTES, PackedTokens, pack_tokens, unpack_tokens
from preble.errors import TraceFormatError
from preble.lab.workloads.lines import bad_line, numbered_lines
from preble.lab.workloads.model import Segment, Workload, WorkloadRequest

VERSION = 1
REFERENCE = "the format is described in docs/reference/trace-format.md"
MAX_TOKENS = 10_000_000
"""The most tokens allowed for an answer, or for a piece of prompt given by its length alone. No model's context is
longer, and the limit keeps a typing error from filling the memory."""

Id = Annotated[str, Meta(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(min_length=1)]
Seconds = Annotated[float, Meta(ge=0)]
NumTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
AnswerTokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
"""Output tokens as recorded; an empty answer counts as one token."""


class _TaggedLine(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="kind", kw_only=True
):
    """What all lines have in common."""


class TraceLine(_TaggedLine, frozen=True, tag="trace"):
    """The first line: the version of the format and the trace's name."""

    version: int
    name: Id
    note: str = ""


class SegmentLine(_TaggedLine, frozen=True, tag="segment"):
    """A piece of prompt that requests name. `num_tokens`: the number of made-up tokens, unique to the segment."""

    id: Id
    text: Annotated[str, Meta(min_length=1)] | None = None
    token_ids: TokenIds | None = None
    num_tokens: NumTokens | None = None


class RequestLine(_TaggedLine, frozen=True, tag="request"):
    """One request: the segments it names, then its own text, token ids or `num_tokens` made-up tokens."""

    id: Id
    output_tokens: NumTokens
    segments: list[Id] = []
    text: Annotated[str, Meta(min_length=1)] | None = None
    token_ids: TokenIds | None = None
    num_tokens: NumTokens | None = None
    arrival_s: Seconds | None = None
    session: Id | None = None
    parent: Id | None = None
    delay_s: Seconds = 0.0
    group: str | None = None


def read_own(path: Path) -> Workload:
    """Return the workload in a file of this format, plain or compressed. O(file).

    Raises: TraceFormatError: the file cannot be read or a line breaks the format; names file and line.
    """
    reader = _TraceReader(path)
    for number, line in numbered_lines(path):
        reader.take(number, line)
    return reader.workload()


def write_trace(path: Path, workload: Workload) -> None:
    """Write a workload as a trace file, compressed if the name ends in `.gz`. Overwrites.

    Of made-up tokens only the number is written, so that a trace of lengths stays small.

    Raises: OSError. ValueError: two different segments have the same id. TypeError: swapped arguments.
    """
    if not isinstance(workload, Workload):
        given = f"{type(path).__name__}, {type(workload).__name__}"
        raise TypeError(f"write_trace takes a Path and a Workload, in this order; it got {given}")
    encode = msgspec.json.Encoder().encode
    with _open_to_write(path) as out:
        for line in _lines(workload):
            out.write(encode(line) + b"\n")


def made_up_tokens(segment_id: str, num_tokens: int) -> PackedTokens:
    """Return token ids that stand for a segment of unknown content; they depend only on its id and length.

    Ids are in 10 … 1009, which every model's vocabulary has. A longer run begins with the shorter run of the same id.
    O(num_tokens), about 10 ns each.

    >>> made_up_tokens("video:7", 3) == made_up_tokens("video:7", 5)[:12] != made_up_tokens("video:8", 3)
    True
    """
    noise = hashlib.shake_128(segment_id.encode("utf-8", "surrogatepass")).digest(2 * num_tokens)
    return PackedTokens((np.frombuffer(noise, "<u2") % 1000 + 10).astype(np.uint32).tobytes())


def own_tokens(request_id: str, num_tokens: int) -> PackedTokens:
    """Return made-up token ids that stand for a part of a prompt unique to this request."""
    return made_up_tokens(f"own:{request_id}", num_tokens)


def _open_to_write(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "wb")) if path.suffix == ".gz" else path.open("wb")


class _TraceReader:
    """Builds the workload from the lines of one file, in order."""

    _decoder: ClassVar = msgspec.json.Decoder(TraceLine | SegmentLine | RequestLine)

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header: TraceLine | None = None
        self._segments: dict[str, Segment] = {}
        self._requests: dict[str, WorkloadRequest] = {}

    def take(self, number: int, line: bytes) -> None:
        try:
            decoded = self._decoder.decode(line)
            self._add(decoded)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise bad_line(self._path, number, f"{error}; {REFERENCE}") from error

    def workload(self) -> Workload:
        """Return the workload. Raises: TraceFormatError: the lines do not form one."""
        if self._header is None:
            raise TraceFormatError(f"{self._path}: the file is empty; {REFERENCE}")
        workload = Workload(self._header.name, tuple(self._requests.values()), self._header.note)
        if not workload.requests:
            raise TraceFormatError(f"{self._path}: it has no request; add lines of kind 'request'")
        with_arrival = [r for r in workload.openers if r.arrival_s is not None]
        if with_arrival and not workload.has_arrivals:
            missing = next(r for r in workload.openers if r.arrival_s is None)
            raise TraceFormatError(
                f"{self._path}: request {missing.request_id!r} has no arrival_s although others have; "
                "give one to every request without a parent, or to none"
            )
        return workload

    def _add(self, line: TraceLine | SegmentLine | RequestLine) -> None:
        """Add one decoded line. Raises: ValueError: it contradicts earlier lines; says why."""
        if isinstance(line, TraceLine):
            self._begin(line)
        elif self._header is None:
            raise ValueError('the first line must be {"kind": "trace", "version": 1, "name": ...}')
        elif isinstance(line, SegmentLine):
            if line.id in self._segments:
                raise ValueError(f"segment {line.id!r} is defined twice; give each its own id")
            self._segments[line.id] = _segment(line)
        else:
            if line.id in self._requests:
                raise ValueError(f"request {line.id!r} occurs twice; give each its own id")
            self._requests[line.id] = self._request(line)

    def _begin(self, line: TraceLine) -> None:
        if self._header is not None:
            raise ValueError("a second line of kind 'trace'; keep one trace per file")
        if line.version != VERSION:
            raise ValueError(f"unknown version {line.version}; this Preble reads version {VERSION}")
        self._header = line

    def _request(self, line: RequestLine) -> WorkloadRequest:
        self._check_parent(line)
        return WorkloadRequest(
            request_id=line.id,
            segments=self._prompt(line),
            output_tokens=line.output_tokens,
            arrival_s=_finite(line.arrival_s),
            session=line.session,
            parent=line.parent,
            delay_s=line.delay_s,
            group=line.group,
        )

    def _check_parent(self, line: RequestLine) -> None:
        if line.parent is None:
            return
        parent = self._requests.get(line.parent)
        if parent is None:
            raise ValueError(f"parent {line.parent!r} is not a request above; parents come before their children")
        if line.session is None or line.session != parent.session:
            raise ValueError(f"parent {line.parent!r} is of session {parent.session!r}, not {line.session!r}")

    def _prompt(self, line: RequestLine) -> tuple[Segment, ...]:
        unknown = [name for name in line.segments if name not in self._segments]
        if unknown:
            raise ValueError(f"segment {unknown[0]!r} is not defined above; define a segment before it is used")
        if sum(content is not None for content in (line.text, line.token_ids, line.num_tokens)) > 1:
            raise ValueError("a request has more than one of text, token_ids and num_tokens; keep one")
        segments = [self._segments[name] for name in line.segments]
        if line.text is not None:
            segments.append(Segment(text=line.text))
        if line.token_ids is not None:
            segments.append(Segment(tokens=pack_tokens(line.token_ids)))
        if line.num_tokens is not None:
            segments.append(Segment(tokens=own_tokens(line.id, line.num_tokens)))
        if not segments:
            raise ValueError("the prompt is empty; give segments, text, token_ids or num_tokens")
        if len({segment.text is None for segment in segments}) > 1:
            raise ValueError("the prompt mixes text and token ids; make all of it text or all of it token ids")
        return tuple(segments)


def _finite(seconds: float | None) -> float | None:
    if seconds is not None and not math.isfinite(seconds):
        raise ValueError("arrival_s must be a finite number of seconds")
    return seconds


def _segment(line: SegmentLine) -> Segment:
    if sum(content is not None for content in (line.text, line.token_ids, line.num_tokens)) != 1:
        raise ValueError(f"segment {line.id!r} needs exactly one of text, token_ids and num_tokens")
    if line.text is not None:
        return Segment(line.id, text=line.text)
    if line.num_tokens is not None:
        return Segment(line.id, tokens=made_up_tokens(line.id, line.num_tokens))
    return Segment(line.id, tokens=pack_tokens(line.token_ids or ()))


def _lines(workload: Workload) -> Iterator[_TaggedLine]:
    yield TraceLine(version=VERSION, name=workload.name, note=workload.note)
    defined: dict[str, Segment] = {}
    for request in workload.requests:
        named, own = _named_and_own(request)
        for segment_id, segment in named:
            if segment_id not in defined:
                yield _segment_line(segment_id, segment)
            elif (defined[segment_id].text, defined[segment_id].tokens) != (segment.text, segment.tokens):
                raise ValueError(f"workload {workload.name!r}: two different segments have the id {segment_id!r}")
            defined[segment_id] = segment
        yield _request_line(request, [segment_id for segment_id, _ in named], own)


def _named_and_own(request: WorkloadRequest) -> tuple[list[tuple[str, Segment]], list[Segment]]:
    """Split the prompt after its last segment with an id; earlier segments without an id get one."""
    ids = [segment.segment_id for segment in request.segments]
    end = max((place for place, segment_id in enumerate(ids, start=1) if segment_id is not None), default=0)
    names = [f"{request.request_id}/{place}" if name is None else name for place, name in enumerate(ids[:end])]
    return list(zip(names, request.segments[:end], strict=True)), list(request.segments[end:])


def _segment_line(segment_id: str, segment: Segment) -> SegmentLine:
    if segment.tokens is not None and segment.tokens == made_up_tokens(segment_id, segment.num_tokens or 0):
        return SegmentLine(id=segment_id, num_tokens=segment.num_tokens)
    return SegmentLine(id=segment_id, text=segment.text, token_ids=_ids(segment.tokens or b""))


def _request_line(request: WorkloadRequest, segment_ids: list[str], own: list[Segment]) -> RequestLine:
    tokens = b"".join(segment.tokens or b"" for segment in own)
    num_tokens = len(tokens) // TOKEN_BYTES
    is_made_up = num_tokens > 0 and tokens == own_tokens(request.request_id, num_tokens)
    return RequestLine(
        id=request.request_id,
        output_tokens=request.output_tokens,
        segments=segment_ids,
        text="".join(segment.text or "" for segment in own) or None,
        token_ids=None if is_made_up else _ids(tokens),
        num_tokens=num_tokens if is_made_up else None,
        arrival_s=request.arrival_s,
        session=request.session,
        parent=request.parent,
        delay_s=request.delay_s,
        group=request.group,
    )


def _ids(tokens: bytes) -> list[int] | None:
    return list(unpack_tokens(tokens)) or None
