"""Cases that a policy may lose: a wide family to draw from, and those with names; see `hard_cases.py`."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, log
from random import Random
from types import MappingProxyType

import msgspec

from preble.core.costs.model import CostModel
from preble.lab.sim import Failure, FailureKind, SimConfig
from preble.lab.workloads import Stream, Workload, WorkloadPlan
from preble.lab.workloads.streams import stream_workload
from preble.profiles import load_profile

PROFILE = load_profile("a6000-mistral-7b")
COSTS = CostModel(PROFILE)
BLOCK_TOKENS = 64
REQUESTS = (250, 600)
"""Of a drawn case, about."""
LOOPS = 0.12
"""Part of the drawn cases in which the first stream is clients that each ask, wait for the answer and ask on."""
ROUNDS = 15


class Case(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Streams on a cluster. A stream's `share` is its requests a second. `warm_s`: see `stream_workload`.

    Requests come for `lasting_s` after that, and count then. `kv_tokens`: of a replica, None for the profile's.
    `plan`: a workload in place of streams.
    """

    streams: tuple[Stream, ...] = ()
    lasting_s: float
    plan: WorkloadPlan | None = None
    warm_s: float = 0.0
    replicas: int = 4
    kv_tokens: int | None = None
    speeds: dict[str, float] = {}
    failures: tuple[Failure, ...] = ()

    def workload(self, seed: int) -> Workload:
        if self.plan is not None:
            return msgspec.structs.replace(self.plan, seed=seed).make()
        rps = sum(stream.share for stream in self.streams)
        return stream_workload(self.streams, rps, self.lasting_s, self.warm_s, seed)

    def config(self, seed: int) -> SimConfig:
        return SimConfig(
            profile=PROFILE,
            replicas=self.replicas,
            kv_tokens=self.kv_tokens,
            block_size=BLOCK_TOKENS,
            seed=seed,
            speeds=self.speeds,
            failures=tuple(msgspec.structs.replace(one, time_s=one.time_s + self.warm_s) for one in self.failures),
        )


# -- cases at random --------------------------------------------------------------------------------------------------


def _between(rng: Random, low: float, high: float) -> float:
    """Draw a number whose logarithm is uniform."""
    return exp(rng.uniform(log(low), log(high)))


def _stream(rng: Random, name: str) -> Stream:
    """A population of prefixes at one request a second."""
    prefix = int(_between(rng, 50, 200_000))
    turns = rng.choice((1, 1, 1, 2, 6, 20))
    return Stream(
        name=name,
        prefixes=max(1, int(_between(rng, 1, min(2000, 4_000_000 / prefix)))),
        prefix_tokens=prefix,
        question_tokens=int(_between(rng, 20, 2000)) if rng.random() < 0.9 else int(_between(rng, 2000, 50_000)),
        output_tokens=int(_between(rng, 5, 800)),
        long_every=(long := rng.choice((0, 0, 0, 5, 20))),
        long_output_tokens=int(_between(rng, 500, 2000)) if long else 0,
        zipf=rng.choice((0.0, 0.0, 0.8, 1.1, 1.5)),
        flip_s=rng.choice((None, None, None, 10.0, 30.0)),
        renew_s=rng.choice((None, None, None, 60.0)),
        turns=turns,
        branches=rng.choice((2, 5, 24)) if turns == 2 else 1,
        pause_s=rng.choice((0.0, 0.5, 3.0)),
    )


def drawn(number: int) -> Case:
    """The case of this number."""
    rng = Random(f"hard case/{number}")
    replicas = rng.choice((2, 3, 4, 4, 4, 8))
    names = [f"r{i}" for i in range(replicas)]
    speeds = {names[0]: _between(rng, 0.25, 0.8)} if rng.random() < 0.15 else {}
    streams = [_stream(rng, f"s{i}") for i in range(rng.choice((1, 1, 2, 2, 3)))]
    loops = Random(f"hard case/{number}/loops")
    if loops.random() < LOOPS:
        streams[0] = _clients(loops, streams[0])
    population = sum(stream.prefixes * stream.prefix_tokens for stream in streams)
    longest = max(_longest(stream) for stream in streams)
    held = rng.choice((0.1, 0.3, 0.6, 1.0, 1.0, 4.0))
    kv_tokens = int(min(max(held * population / replicas + 20_000, 1.3 * longest), max(800_000, 1.3 * longest)))
    share = min(1.0, kv_tokens * replicas / (population + 1))
    rest, load = rng.choice(("even", "random")), rng.uniform(0.3, 0.95)
    weights = [1.0 if rest == "even" else rng.random() + 0.05 for _ in streams]
    power = replicas - len(speeds) + sum(speeds.values())
    each = load * power / sum(weights)
    timed = [
        stream
        if stream.until_s
        else msgspec.structs.replace(stream, share=each * weight / _work_s(stream, 1 - 0.8 * share))
        for stream, weight in zip(streams, weights, strict=True)
    ]
    rate = sum(stream.share for stream in timed if not stream.until_s)
    lasting_s = min(max(rng.uniform(*REQUESTS) / rate, 20.0), 600.0) if rate else 60.0
    if rng.random() < 0.4:
        timed.append(_burst(rng, lasting_s, load, kv_tokens))
    failures: tuple[Failure, ...] = ()
    if (chance := rng.random()) < 0.15:
        kind = FailureKind.LOST if chance < 0.05 else FailureKind.ADDED
        who = names[-1] if kind is FailureKind.LOST else "new"
        failures = (Failure(round(lasting_s / 3, 1), kind, who),)
        if kind is FailureKind.ADDED and rng.random() < 0.5:
            speeds["new"] = _between(rng, 0.25, 1.0)
    warm_s = rng.choice((0.0, 1.0)) * sum(s.prefixes * COSTS.prefill_s(s.prefix_tokens) for s in streams) / power / 0.6
    return Case(
        streams=tuple(timed),
        lasting_s=round(lasting_s, 1),
        warm_s=round(min(warm_s, 300.0), 1),
        replicas=replicas,
        kv_tokens=kv_tokens,
        speeds=speeds,
        failures=failures,
    )


def _clients(rng: Random, stream: Stream) -> Stream:
    """All of them come within the first second."""
    return msgspec.structs.replace(
        stream,
        share=float(rng.randint(4, 32) * ROUNDS),
        until_s=1.0,
        question_tokens=min(stream.question_tokens, 500),
        turns=ROUNDS,
        branches=1,
        flip_s=None,
        renew_s=None,
    )


def _burst(rng: Random, lasting_s: float, load: float, kv_tokens: int) -> Stream:
    """Many questions about something new within a few seconds."""
    during_s, at_s = _between(rng, 0.5, 10.0), rng.uniform(0.2, 0.6) * lasting_s
    prefix = int(min(_between(rng, 500, 100_000), kv_tokens / 2))
    questions = _between(rng, 10, 200 * load)
    return Stream(
        name="burst",
        share=questions / during_s,
        from_s=at_s,
        until_s=at_s + during_s,
        prefixes=1,
        prefix_tokens=prefix,
        question_tokens=60,
        output_tokens=int(_between(rng, 10, 200)),
    )


def _longest(stream: Stream) -> int:
    """Tokens of its longest request."""
    answer = max(stream.output_tokens, stream.long_output_tokens)
    return stream.prefix_tokens + stream.turns * (stream.question_tokens + answer)


def _work_s(stream: Stream, missed: float) -> float:
    """Seconds of a replica that one of its requests takes, where this share of prefixes is computed; roughly."""
    said = stream.prefix_tokens + (stream.turns - 1) / 2 * (stream.question_tokens + stream.output_tokens)
    answer = stream.output_tokens
    if stream.long_every:
        answer += (stream.long_output_tokens - answer) // stream.long_every
    prefill_s = COSTS.prefill_s(stream.question_tokens, int(said)) + missed * COSTS.prefill_s(stream.prefix_tokens)
    return prefill_s + COSTS.decode_s(answer, said)


# -- cases with names -------------------------------------------------------------------------------------------------

TOOLS = Stream(
    name="tools", share=12.0, prefixes=300, prefix_tokens=1800, question_tokens=80, output_tokens=40, zipf=1.1
)


def _questions(count: int, tokens: int, *times_s: float) -> Iterator[Stream]:
    for at_s in times_s:
        yield Stream(
            name=f"document at {at_s:g} s",
            share=float(count),
            from_s=at_s,
            until_s=at_s + 1.0,
            prefixes=1,
            prefix_tokens=tokens,
            question_tokens=60,
            output_tokens=30,
        )


def _named() -> Iterator[tuple[str, Case]]:
    for count in (40, 150):
        for tokens in (6_000, 15_000, 30_000, 100_000):
            kv_tokens = 400_000 if tokens == 100_000 else None
            streams = (TOOLS, *_questions(count, tokens, 15.0, 30.0, 45.0))
            yield f"burst-{count}x{tokens}", Case(streams=streams, lasting_s=60.0, kv_tokens=kv_tokens)
    lengths = Stream(
        name="answers",
        prefixes=40,
        prefix_tokens=1500,
        question_tokens=60,
        output_tokens=10,
        long_every=10,
        long_output_tokens=2000,
    )
    for rate in (22.3, 33.5):
        yield (
            f"bimodal-{rate:.0f}",
            Case(streams=(msgspec.structs.replace(lengths, share=rate),), lasting_s=700 / rate),
        )
    fan = Stream(
        name="agents", share=50.0, prefixes=100_000, prefix_tokens=3300, question_tokens=120, turns=2, branches=24
    )
    yield "fan-out", Case(streams=(msgspec.structs.replace(fan, output_tokens=60),), lasting_s=25.0)
    late = tuple(Failure(15.0, FailureKind.ADDED, name) for name in ("late1", "late2"))
    yield (
        "late-slow",
        Case(
            streams=(msgspec.structs.replace(TOOLS, share=25.0),),
            lasting_s=45.0,
            replicas=2,
            failures=late,
            speeds={"late1": 0.4, "late2": 0.4},
        ),
    )
    waves = (msgspec.structs.replace(TOOLS, share=60.0), *_questions(150, 6_000, 10.0, 50.0))
    yield "batch-online", Case(streams=waves, lasting_s=60.0, warm_s=20.0)
    loops = Stream(
        name="clients", share=720.0, until_s=1.0, prefixes=24, prefix_tokens=10_000, question_tokens=60, turns=30
    )
    yield "closed-docs", Case(streams=(msgspec.structs.replace(loops, output_tokens=60),), lasting_s=2.0)
    own = Stream(name="own", share=0.45, prefixes=1, prefix_tokens=0, question_tokens=30_000, output_tokens=40)
    shared = msgspec.structs.replace(TOOLS, name="shared", share=8.55, prefixes=20)
    yield "bimodal-own", Case(streams=(own, shared), lasting_s=80.0)
    documents = Stream(
        name="documents", share=0.135, prefixes=6, prefix_tokens=150_000, question_tokens=100, output_tokens=50
    )
    others = Stream(name="others", share=0.765, prefixes=1, prefix_tokens=300, question_tokens=700, output_tokens=100)
    yield "hugekv", Case(streams=(documents, others), lasting_s=280.0, kv_tokens=450_000)
    yield "hugekv-profile", Case(streams=(documents, others), lasting_s=280.0)
    chats = Stream(name="chats", share=8.82, prefixes=1, prefix_tokens=0, question_tokens=50, output_tokens=120)
    rare = Stream(
        name="documents", share=0.18, prefixes=4, prefix_tokens=100_000, question_tokens=60, output_tokens=100
    )
    yield "chatdoc", Case(streams=(chats, rare), lasting_s=60.0, kv_tokens=250_000)
    yield "chatdoc-profile", Case(streams=(chats, rare), lasting_s=60.0)
    few = Stream(
        name="few", share=40.0, prefixes=40, prefix_tokens=1500, question_tokens=200, output_tokens=40, zipf=1.5
    )
    yield (
        "flip",
        Case(streams=(msgspec.structs.replace(few, flip_s=10.0),), lasting_s=50.0, warm_s=10.0, kv_tokens=60_000),
    )
    news = msgspec.structs.replace(few, prefixes=10, zipf=1.5, renew_s=20.0)
    yield "flip-new", Case(streams=(news,), lasting_s=50.0, warm_s=3.0, kv_tokens=60_000)
    hot = Stream(name="hot", share=60.0, prefixes=1, prefix_tokens=1800, question_tokens=80, output_tokens=40)
    yield "hot-prefix", Case(streams=(hot,), lasting_s=20.0)
    usual = Stream(name="usual", share=18.0, question_tokens=200, output_tokens=40, zipf=1.0, renew_s=120.0)
    yield "drift", Case(streams=(usual,), lasting_s=60.0, warm_s=20.0, kv_tokens=60_000)
    newdoc = Stream(name="document", share=4.0, prefixes=1, prefix_tokens=30_000, from_s=15.0, output_tokens=20)
    yield "new-document", Case(streams=(msgspec.structs.replace(TOOLS), newdoc), lasting_s=60.0, warm_s=20.0)
    rate, requests = 0.14, 2000
    lasting_s = 0.8 * requests / rate
    coding = WorkloadPlan(source="coding", requests=requests, rps=rate)
    yield "coding", Case(plan=coding, lasting_s=lasting_s, warm_s=lasting_s / 4)


NAMED = MappingProxyType(dict(_named()))
