"""Where `preble` loses: random cases of a wide family under every rule, and cases that it once lost.

    python benchmarks/repro/hard_cases.py                      # the named cases
    python benchmarks/repro/hard_cases.py --draw 40            # cases 0 to 39 at random; --first 40 for the next ones
    python benchmarks/repro/hard_cases.py --draw 400 --keep    # keep the distribution and the worst, shrunk
    python benchmarks/repro/hard_cases.py bimodal-22 burst-40x30000 --seeds 3

A case has one to three streams of requests: prompts of 50 to 200,000 tokens, shared by few or many, whose popularity
stays, flips or renews itself; answers as long as chance or their prefix says; sessions that go on and branch; bursts
about something new. Its replicas may differ, join and be lost, and cache from a tenth of the prefixes to all of them.

All rules play the same requests. A rule's run ends as soon as its sums of E2E and of TTFT are both above the best so
far. A ratio is `preble`'s mean / that of the best other rule, or of least load: above 1 is worse. A drawn case that
is lost is played again with other seeds, as the best of many rules is partly chance. Then it is shrunk: whatever can be
left out, halved or evened is, as long as the case stays lost. The same numbers give the same cases and ratios.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from math import exp, inf, log
from pathlib import Path
from random import Random
from statistics import median
from types import MappingProxyType

import msgspec

from preble.core.costs.model import CostModel
from preble.core.policies.policy import Policy
from preble.core.policies.registry import make_policy, policy_names
from preble.lab.metrics.summary import percentile
from preble.lab.sim import Failure, FailureKind, SimConfig, simulate
from preble.lab.sim.memory import fewer_collections
from preble.lab.sim.watch import Glimpse
from preble.lab.workloads import Stream, Workload
from preble.lab.workloads.streams import stream_workload
from preble.profiles import load_profile

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "hard_cases.json"
DECISIONS = ROOT / "tests" / "golden" / "simulation.preble.jsonl"
"""What `preble` decides in a small run, as a test keeps it: two policies that decide alike are one."""
PROFILE = load_profile("a6000-mistral-7b")
COSTS = CostModel(PROFILE)
ABLATION = ("e2_per_request", "e2_rebalance")
BLOCK_TOKENS = 64
REQUESTS = (250, 600)
"""Of a drawn case, about."""
LOST = 1.05
"""A ratio from which a case counts as lost."""
KEPT = 10
TRIES = 12
"""Smaller cases that are played at most."""


class Case(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Streams on a cluster. A stream's `share` is its requests a second. `warm_s`: see `stream_workload`.

    Requests come for `lasting_s` after that, and count then. `kv_tokens`: of a replica, None for the profile's.
    """

    streams: tuple[Stream, ...]
    lasting_s: float
    warm_s: float = 0.0
    replicas: int = 4
    kv_tokens: int | None = None
    speeds: dict[str, float] = {}
    failures: tuple[Failure, ...] = ()

    def workload(self, seed: int) -> Workload:
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


class Numbers(msgspec.Struct, frozen=True):
    """Means and p99 in seconds of what was sent after the warm-up, by stream and of all together (""); failures."""

    e2e_s: dict[str, float]
    ttft_s: dict[str, float]
    ttft_p99_s: dict[str, float]
    failed: int


class Outcome(msgspec.Struct, frozen=True):
    """What the rules made of a case: by name; without those whose runs ended early."""

    seed: int
    by_rule: dict[str, Numbers]

    def ratio(self, number: str, stream: str = "", rule: str | None = None) -> float:
        """`preble`'s number / the lowest of any other rule, or of `rule`."""
        of = {name: getattr(its, number)[stream] for name, its in self.by_rule.items()}
        best = min([value for name, value in of.items() if name != "preble"] if rule is None else [of[rule]])
        return float(of["preble"] / best)

    def best(self) -> str:
        return min((its.e2e_s[""], name) for name, its in self.by_rule.items() if name != "preble")[1]


class _NoLongerBest:
    """Ends a run whose sums are above `limits`, of E2E and of TTFT."""

    every_s = 5.0

    def __init__(self, from_s: float, limits: tuple[float, float]) -> None:
        self._from_s, self._limits = from_s, limits
        self._seen, self._sums = 0, [0.0, 0.0]

    def has_seen_enough(self, glimpse: Glimpse) -> bool:
        for record in glimpse.records[self._seen :]:
            if record.scheduled_s >= self._from_s:
                self._sums[0] += record.e2e_s
                self._sums[1] += record.ttft_s or 0.0
        self._seen = len(glimpse.records)
        return self._sums[0] > self._limits[0] and self._sums[1] > self._limits[1]


def play(case: Case, workload: Workload, policy: Policy, seed: int, limits: tuple[float, float]) -> Numbers | None:
    """Return what a rule makes of the case; None if it ended early."""
    watch = _NoLongerBest(case.warm_s, limits)
    with fewer_collections():
        result = simulate(case.config(seed), workload, policy=policy, watch=watch)
    if result.stopped_s is not None:
        return None
    stream_of = {request.request_id: request.group or "" for request in workload.requests}
    e2e: dict[str, list[float]] = {}
    ttft: dict[str, list[float]] = {}
    for record in result.records:
        if record.ok and record.scheduled_s >= case.warm_s:
            for name in ("", stream_of[record.request_id]):
                e2e.setdefault(name, []).append(record.e2e_s)
                ttft.setdefault(name, []).append(record.ttft_s or 0.0)
    return Numbers(
        {name: sum(values) / len(values) for name, values in e2e.items()},
        {name: sum(values) / len(values) for name, values in ttft.items()},
        {name: percentile(values, 99) for name, values in ttft.items()},
        sum(not record.ok for record in result.records),
    )


def outcome(case: Case, seed: int, rules: tuple[str, ...] = (), make: Callable[[], Policy] | None = None) -> Outcome:
    """Play the case under `preble`, least load and all rules, or these. `make`: another policy in `preble`'s place."""
    workload = case.workload(seed)
    count = len(workload.requests)
    found: dict[str, Numbers] = {}
    limits = (inf, inf)
    for name in dict.fromkeys(("preble", "least_load", *(rules or (n for n in policy_names() if n not in ABLATION)))):
        policy = make() if make is not None and name == "preble" else make_policy(name)
        numbers = play(case, workload, policy, seed, (inf, inf) if len(found) < 2 else limits)
        if numbers is not None:
            found[name] = numbers
        if numbers is not None and name != "preble":
            limits = (min(limits[0], numbers.e2e_s[""] * count), min(limits[1], numbers.ttft_s[""] * count))
    return Outcome(seed, found)


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
    population = sum(stream.prefixes * stream.prefix_tokens for stream in streams)
    longest = max(_longest(stream) for stream in streams)
    held = rng.choice((0.1, 0.3, 0.6, 1.0, 1.0, 4.0))
    kv_tokens = int(min(max(held * population / replicas + 20_000, 1.3 * longest), max(800_000, 1.3 * longest)))
    share = min(1.0, kv_tokens * replicas / (population + 1))
    rest, load = rng.choice(("even", "random")), rng.uniform(0.3, 0.95)
    weights = [1.0 if rest == "even" else rng.random() + 0.05 for _ in streams]
    power = replicas - len(speeds) + sum(speeds.values())
    timed = [
        msgspec.structs.replace(stream, share=load * power * weight / sum(weights) / _work_s(stream, 1 - 0.8 * share))
        for stream, weight in zip(streams, weights, strict=True)
    ]
    lasting_s = min(max(rng.uniform(*REQUESTS) / sum(stream.share for stream in timed), 20.0), 600.0)
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
    chats = Stream(name="chats", share=8.82, prefixes=1, prefix_tokens=0, question_tokens=50, output_tokens=120)
    rare = Stream(
        name="documents", share=0.18, prefixes=4, prefix_tokens=100_000, question_tokens=60, output_tokens=100
    )
    yield "chatdoc", Case(streams=(chats, rare), lasting_s=60.0, kv_tokens=250_000)
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


NAMED = MappingProxyType(dict(_named()))


# -- shrinking --------------------------------------------------------------------------------------------------------


def loss(case: Case, seeds: tuple[int, ...], rules: tuple[str, ...] = ()) -> float:
    """The mean over the seeds of `preble`'s mean E2E / the best rule's."""
    return sum(outcome(case, seed, rules).ratio("e2e_s") for seed in seeds) / len(seeds)


def _smaller(case: Case) -> Iterator[Case]:
    """The case with one thing less each."""
    change = msgspec.structs.replace
    if len(case.streams) > 1:
        for i in range(len(case.streams)):
            yield change(case, streams=case.streams[:i] + case.streams[i + 1 :])
    if case.failures:
        joined = {failure.replica for failure in case.failures}
        yield change(case, failures=(), speeds={k: v for k, v in case.speeds.items() if k not in joined})
    if case.speeds:
        yield change(case, speeds={})
    if case.warm_s:
        yield change(case, warm_s=0.0)
    if case.kv_tokens is not None and case.kv_tokens < PROFILE.kv_capacity_tokens:
        yield change(case, kv_tokens=None)
    if all(stream.from_s < case.lasting_s / 2 for stream in case.streams):
        yield change(case, lasting_s=case.lasting_s / 2)
    evens = {"zipf": 0.0, "flip_s": None, "renew_s": None, "branches": 1, "turns": 1, "pause_s": 0.0}
    for i, stream in enumerate(case.streams):
        simpler = [{name: value} for name, value in evens.items() if getattr(stream, name) != value]
        if stream.long_every:
            simpler.append({"long_every": 0, "long_output_tokens": 0})
        for fields in simpler:
            yield change(case, streams=(*case.streams[:i], change(stream, **fields), *case.streams[i + 1 :]))


def shrunk(case: Case, seeds: tuple[int, ...], rules: tuple[str, ...], say: Callable[[str], None]) -> Case:
    """The smallest case found, in `TRIES`, that still loses at least half as much to these rules."""
    least = 1 + max(loss(case, seeds, rules) - 1, LOST - 1) / 2
    found, tries = True, 0
    while found:
        found = False
        for smaller in _smaller(case):
            if tries == TRIES:
                break
            tries += 1
            try:
                keeps = loss(smaller, seeds, rules) >= least
            except (ArithmeticError, ValueError, KeyError):  # nothing is left of it
                keeps = False
            if keeps:
                case, found = smaller, True
                say(f"  smaller: {msgspec.json.encode(case).decode()}")
                break
    return case


# -- the command ------------------------------------------------------------------------------------------------------


def policy_digest() -> str:
    """A digest of what `preble` decides today."""
    return sha256(DECISIONS.read_bytes()).hexdigest()[:12]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


class Kept(msgspec.Struct, frozen=True):
    """A drawn case that loses: its ratio over the best rule with each seed, and the smallest case like it."""

    number: int
    ratios: list[float]
    best: str
    smallest: Case


class Result(msgspec.Struct, frozen=True):
    """`policy`: the digest of the one that made it; `commit`: on which it was made. `drawn`: how many cases. `ratios`:
    of what against whom -> 5th percentile, median and 95th. `worst`: the cases that lose most."""

    policy: str
    commit: str
    drawn: int
    ratios: dict[str, list[float]]
    worst: list[Kept]


def row(name: str, of: Outcome) -> str:
    preble = of.by_rule["preble"]
    return (
        f"{name:22}{of.seed:4} {preble.e2e_s['']:8.2f}{of.ratio('e2e_s'):7.3f}{of.ratio('ttft_s'):7.3f}"
        f"{of.ratio('ttft_p99_s'):7.3f}  {of.ratio('e2e_s', rule='least_load'):6.3f}"
        f"{of.ratio('ttft_s', rule='least_load'):7.3f}  {of.best()}"
        + (f"  failed {preble.failed}" if preble.failed else "")
    )


HEADER = f"{'case':22}seed  E2E, s    E2E   TTFT    p99  LL E2E   TTFT  best other"


def _drawn_outcome(number: int) -> Outcome:
    return outcome(drawn(number), number)


def search(numbers: range, jobs: int) -> Result:
    """Play the cases of these numbers, and look closer at those that lose most."""
    print(HEADER)
    found: dict[int, Outcome] = {}
    with ProcessPoolExecutor(jobs) as pool:
        for number, of in zip(numbers, pool.map(_drawn_outcome, numbers), strict=True):
            found[number] = of
            print(row(f"drawn-{number}", of), flush=True)
    ratios = {
        f"{label} over {'the best rule' if rule is None else 'least load'}": _spread(
            [of.ratio(name, rule=rule) for of in found.values()]
        )
        for label, name in (("mean E2E", "e2e_s"), ("mean TTFT", "ttft_s"))
        for rule in (None, "least_load")
    }
    for label, (low, middle, high) in ratios.items():
        print(f"{label}: 5 % {low:.3f}, median {middle:.3f}, 95 % {high:.3f}")
    worst = sorted(found, key=lambda number: -_worst(found[number]))[:KEPT]
    return Result(
        policy_digest(),
        _commit(),
        len(numbers),
        ratios,
        [_closer(number, found[number]) for number in worst if _worst(found[number]) >= LOST],
    )


def _worst(of: Outcome) -> float:
    return max(of.ratio("e2e_s"), of.ratio("e2e_s", rule="least_load"))


def _closer(number: int, of: Outcome) -> Kept:
    seeds = tuple(number + 1000 * i for i in (1, 2, 3))
    again = [outcome(drawn(number), seed) for seed in seeds]
    ratios = [round(one.ratio("e2e_s"), 3) for one in (of, *again)]
    print(f"drawn-{number}: {ratios} of {of.best()}", flush=True)
    smallest = drawn(number)
    if sum(ratios) / len(ratios) >= LOST:
        smallest = shrunk(smallest, seeds[:2], (of.best(),), lambda text: print(text, flush=True))
    return Kept(number, ratios, of.best(), smallest)


def _spread(values: list[float]) -> list[float]:
    return [round(value, 4) for value in (percentile(values, 5), median(values), percentile(values, 95))]


def _named_outcome(asked: tuple[str, int]) -> Outcome:
    return outcome(NAMED[asked[0]], asked[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(NAMED)}")
    parser.add_argument("--seeds", type=int, default=1, help="of the named cases")
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="N cases at random instead")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="of the drawn cases")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    if unknown := set(options.cases) - set(NAMED):
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    if options.draw:
        result = search(range(options.first, options.first + options.draw), options.jobs)
        if options.keep:
            RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        return
    print(HEADER)
    asked = [(name, seed) for name in options.cases or NAMED for seed in range(options.seeds)]
    with ProcessPoolExecutor(options.jobs) as pool:
        for (name, _), of in zip(asked, pool.map(_named_outcome, asked), strict=True):
            print(row(name, of), flush=True)


if __name__ == "__main__":
    sys.exit(main())
