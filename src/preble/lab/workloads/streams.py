"""Streams of requests by numbers: populations of prefixes that stay, renew themselves or change their popularity.

A scenario is several streams at once, each with its share of the rate and its own time: everyday traffic, a tenant's
flood, one new document that many ask about. Nothing depends on how long a run is: a longer one begins as a shorter one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from pathlib import Path

import msgspec

from preble.errors import ConfigError, TraceFormatError
from preble.lab.workloads.generators.pieces import made_up_segment
from preble.lab.workloads.model import Segment, Workload, WorkloadRequest
from preble.lab.workloads.popularity import Zipf
from preble.lab.workloads.trace import own_tokens


class Stream(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Requests that each begin with one of `prefixes` prefixes of `prefix_tokens` tokens and end with a question.

    `share`: of the rate, in proportion to the other streams'; it comes on top of them outside of their times. `from_s`,
    `until_s`: when it asks, in seconds after the warm-up; None for to the end. `output_tokens`: of an answer;
    `long_every`: each n-th prefix gets `long_output_tokens` instead, 0 for none. `zipf`: exponent of the
    popularity, 0 for uniform. `flip_s`: seconds after which other prefixes are the popular ones. `renew_s`: seconds
    after which a prefix is replaced by one that nobody asked before, each at a time of its own. `turns`: requests from
    a session's root to its leaves, each of which adds its question to what was said before; `branches`: how many go on
    from each answer, so that a session is a tree. `pause_s`: from an answer to what follows it. `tenant`: who asks.
    """

    name: str = "stream"
    share: float = 1.0
    from_s: float = 0.0
    until_s: float | None = None
    prefixes: int = 100
    prefix_tokens: int = 2000
    question_tokens: int = 100
    output_tokens: int = 40
    long_every: int = 0
    long_output_tokens: int = 0
    zipf: float = 0.0
    flip_s: float | None = None
    renew_s: float | None = None
    turns: int = 1
    branches: int = 1
    pause_s: float = 0.0
    tenant: str = "all"

    def __post_init__(self) -> None:
        for name in ("prefixes", "question_tokens", "output_tokens", "turns", "branches", "share", "flip_s", "renew_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ConfigError(f"stream {self.name!r}: {name} must be positive, got {value}")
        for name in ("prefix_tokens", "long_every", "long_output_tokens", "zipf", "from_s", "pause_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ConfigError(f"stream {self.name!r}: {name} must not be negative, got {getattr(self, name)}")
        if self.until_s is not None and self.until_s <= self.from_s:
            raise ConfigError(f"stream {self.name!r}: until_s must be after from_s, got {self.until_s}")
        if bool(self.long_every) != bool(self.long_output_tokens):
            raise ConfigError(f"stream {self.name!r}: long_every and long_output_tokens go together")

    @property
    def requests_per_session(self) -> int:
        return sum(self.branches**turn for turn in range(self.turns))


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Streams that run at once, after a warm-up of `warm_s` in which every prefix is asked for once."""

    stream: tuple[Stream, ...]
    warm_s: float = 0.0


def is_scenario(source: str) -> bool:
    """Return whether a workload's source is a scenario file."""
    return source.endswith(".toml")


@lru_cache(maxsize=32)
def _read(path: str, mtime_ns: int) -> Scenario:
    """`mtime_ns`: so that a file which changes is read again."""
    try:
        return msgspec.toml.decode(Path(path).read_bytes(), type=Scenario)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceFormatError(f"{path}: {error}; scenarios are described in docs/reference/workloads.md") from error


def read_scenario(path: Path) -> Scenario:
    """Return the scenario in a TOML file. Raises: TraceFormatError, ConfigError: it cannot be read, or says what cannot
    be.
    """
    try:
        return _read(str(path), path.stat().st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"cannot read scenario {path}: {error.strerror}") from error


def stream_workload(streams: Sequence[Stream], rps: float, lasting_s: float, warm_s: float, seed: int) -> Workload:
    """Return the requests of all streams with their times: `rps` a second in all, for `lasting_s` after the warm-up.

    `warm_s`: before that, every prefix is asked for once, at equal gaps, the most popular last; 0 for a cold start.

    Raises: ConfigError: no stream, or two of one name.
    """
    if not streams or len({stream.name for stream in streams}) < len(streams):
        raise ConfigError("a scenario needs at least one stream, each with a name of its own")
    whole = sum(stream.share for stream in streams)
    sessions = [
        session
        for stream in streams
        for session in _Maker(stream, seed).sessions(rps * stream.share / whole, lasting_s, warm_s)
    ]
    sessions.sort(key=lambda session: session[0].arrival_s or 0.0)
    if not sessions:
        raise ConfigError(f"no request comes within {lasting_s:g} s; give a higher rate or more requests")
    requests = tuple(request for session in sessions for request in session)
    note = f"{', '.join(stream.name for stream in streams)}: {rps:g}/s for {lasting_s:g} s, seed {seed}"
    return Workload("streams", requests, f"{note}; made-up tokens")


class _Maker:
    """Makes the sessions of one stream. Arrivals, picks and lengths each have chance of their own."""

    def __init__(self, stream: Stream, seed: int) -> None:
        self._stream = stream
        self._content = f"{stream.name}/{seed}"
        self._arrivals = random.Random(f"streams/{self._content}/arrivals")
        self._picks = random.Random(f"streams/{self._content}/picks")
        self._zipf = Zipf(stream.prefixes, stream.zipf)
        births = random.Random(f"streams/{self._content}/births")
        self._births = [births.random() for _ in range(stream.prefixes)]
        self._order: tuple[int, list[int]] = (-1, [])
        self._count = 0

    def sessions(self, rps: float, lasting_s: float, warm_s: float) -> Iterator[list[WorkloadRequest]]:
        stream = self._stream
        if warm_s and not stream.from_s:
            for place in range(stream.prefixes):
                rank = stream.prefixes - 1 - place
                yield self._session(self._piece(rank, 0.0), 0.0, warm_s * place / stream.prefixes, turns=1)
        until_s = min(lasting_s, inf if stream.until_s is None else stream.until_s)
        now = stream.from_s + self._gap_s(rps)
        while now < until_s:
            yield self._session(self._piece(self._zipf.pick(self._picks), now), now, warm_s + now, turns=stream.turns)
            now += self._gap_s(rps)

    def _gap_s(self, rps: float) -> float:
        return self._arrivals.expovariate(rps / self._stream.requests_per_session)

    def _piece(self, rank: int, now: float) -> int:
        """Return which of the prefixes has this rank now."""
        if self._stream.flip_s is None:
            return rank
        epoch = int(now / self._stream.flip_s)
        if self._order[0] != epoch:
            order = list(range(self._stream.prefixes))
            random.Random(f"streams/{self._content}/order/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][rank]

    def _session(self, piece: int, now: float, arrival_s: float, *, turns: int) -> list[WorkloadRequest]:
        stream = self._stream
        age = 0 if stream.renew_s is None else int(now / stream.renew_s + self._births[piece])
        is_long = bool(stream.long_every) and piece % stream.long_every == 0
        opening: tuple[Segment, ...] = ()
        if stream.prefix_tokens:
            opening = (made_up_segment(f"{self._content}:prefix:{piece}.{age}", stream.prefix_tokens),)
        root = self._request(None, opening, stream.long_output_tokens if is_long else stream.output_tokens)
        return [replace(root, arrival_s=arrival_s), *self._followers(root, turns - 1)]

    def _followers(self, parent: WorkloadRequest, turns: int) -> Iterator[WorkloadRequest]:
        """Yield all that goes on from an answer, parents first."""
        if not turns:
            return
        answer = made_up_segment(f"{self._content}:answer:{parent.request_id}", parent.output_tokens)
        said = (*parent.segments, answer)
        for _ in range(self._stream.branches):
            child = self._request(parent, said, parent.output_tokens)
            yield child
            yield from self._followers(child, turns - 1)

    def _request(self, parent: WorkloadRequest | None, said: tuple[Segment, ...], output: int) -> WorkloadRequest:
        request_id = f"{self._content}-{self._count}"
        self._count += 1
        # A segment with an id can be quoted by those who go on from here.
        name = f"{self._content}:question:{request_id}" if self._stream.turns > 1 else None
        tokens = own_tokens(request_id, self._stream.question_tokens)
        return WorkloadRequest(
            request_id,
            (*said, Segment(name, tokens=tokens)),
            output,
            session=parent.session if parent else (request_id if self._stream.turns > 1 else None),
            parent=parent.request_id if parent else None,
            delay_s=self._stream.pause_s if parent else 0.0,
            group=self._stream.name,
        )
