"""Whether it helps to know that a session's next turn will come: to spare its prefix, or to compute it ahead.

    python benchmarks/repro/coming_turns.py          # half an hour on two cores; what is kept is not run again
    python benchmarks/repro/coming_turns.py --draw   # fill in the page from the results that are there

Coding agents with sub-agents, whose turns end in tool calls; a pause later the next turn sends all that was said. The
caches of four replicas hold half of what the sessions that go on have. `spare`: a placement pays for the turns that it
evicts, each by the chance that it comes within the horizon, in place of `preble`'s M. The chance is known, or learned
from the pauses so far. `ahead`: shortly before the next turn comes, a replica on which nothing waits computes what was
said. When it comes is known.
Results: benchmarks/results/coming_turns.json. Page: docs/decisions/0008-what-was-tried.md.
"""

from __future__ import annotations

import random
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from cases import Kept, change, play_and_draw
from page import fill

from preble.core.policies.policy import TTFT_WEIGHT
from preble.core.policies.preble import _Delays, _reason
from preble.core.policies.view import Choice, ClusterView
from preble.core.types import PackedTokens, Request, RequestId
from preble.decisions.settings import make_scheduler
from preble.lab.sim import SimConfig, Simulation
from preble.lab.sim.agenda import Priority
from preble.lab.sim.calls import Call
from preble.lab.sim.memory import fewer_collections
from preble.lab.workloads import Workload, WorkloadRequest
from preble.lab.workloads.generators import coding
from preble.lab.workloads.lengths import Lengths
from preble.lab.workloads.registry import make_workload
from preble.profiles import load_profile

PAGE = Path(__file__).parents[2] / "docs" / "decisions" / "0008-what-was-tried.md"
SEEDS = (10, 11, 12)
REPLICAS = 4
SECONDS, WARM_S = 1500.0, 600.0
ANSWER_S = 4.0
"""How long a turn takes, for the tokens that sessions have at once."""
NEVER = 0.02
"""The share of turns that are the last of their session, as far as nobody knows more."""
LEAST_AHEAD = 1024
"""Fewer missing tokens are not computed ahead."""
LEAD_S = 0.2


@dataclass(frozen=True)
class Case:
    """Requests a second that begin a session or follow, and what a tool returns: None for the generator's own."""

    rate: float
    results: Lengths | None = None


CASES = {
    "coding agents": Case(4.0),
    "coding agents, long results": Case(3.0, Lengths("lognormal", 3600, 6000, low=10, high=60_000)),
}
WAYS = ("as today", "spare, known", "spare, known within 30 s", "spare, learned, within 30 s", "ahead")


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `e2e_s`, `ttft_s`: means. `cached`: the share of all prompt tokens. `ahead`: how many prompts were."""

    case: str
    way: str
    seed: int
    e2e_s: float
    ttft_s: float
    cached: float
    ahead: int
    prompt_tokens: float

    @property
    def key(self) -> tuple[str, str, int]:
        return self.case, self.way, self.seed


@dataclass
class Last:
    """The last turn of one agent: where it ran, how many tokens it left there, and whether and when the next comes."""

    replica: int
    tokens: int
    ended_s: float = inf
    comes: bool = False
    due_s: float = inf


class Books:
    """What each replica has of each agent, least recently used first, and the pauses so far."""

    def __init__(self, workload: Workload, capacity: int) -> None:
        self.capacity = capacity
        self._children = workload.children()
        self._by_replica: list[OrderedDict[str, Last]] = [OrderedDict() for _ in range(REPLICAS)]
        self._last: dict[str, Last] = {}
        self._pauses: list[float] = []
        self._ended = 0

    def placed(self, request_id: str, replica: int, num_tokens: int, now: float) -> None:
        agent, before = agent_of(request_id), self._last.get(agent_of(request_id))
        if before is not None:
            if before.comes:
                insort(self._pauses, now - before.ended_s)
            before.comes = False  # what it left is not the newest
        held = self._by_replica[replica]
        held[agent] = self._last[agent] = Last(replica, num_tokens)
        held.move_to_end(agent)
        for victim, tokens in [*self._victims(replica, sum(last.tokens for last in held.values()) - self.capacity)]:
            held[victim].tokens -= tokens
            if not held[victim].tokens:
                del held[victim]

    def ended(self, request_id: str, output_tokens: int, now: float) -> None:
        agent = agent_of(request_id)
        last, children = self._last[agent], self._children.get(request_id, ())
        own = [child.delay_s for child in children if agent_of(child.request_id) == agent]
        last.ended_s, last.comes, last.tokens = now, bool(children), last.tokens + output_tokens
        last.due_s = now + max(own, default=60.0)
        self._ended += 1
        self._by_replica[last.replica].move_to_end(agent)

    def lost(self, replica: int, num_tokens: int, agent: str, now: float, way: str) -> Iterator[tuple[float, int, int]]:
        """Yield of each agent that so many more tokens evict: the chance that it comes, tokens, and those before."""
        held = self._by_replica[replica]
        for victim, tokens in self._victims(replica, num_tokens):
            last = held[victim]
            if victim == agent or not ("learned" in way or last.comes) or self._last[victim] is not last:
                continue
            horizon_s = 30.0 if "within" in way else inf
            chance = self._chance(now - last.ended_s, horizon_s) if "learned" in way else last.due_s - now <= horizon_s
            yield float(chance), tokens, last.tokens - tokens

    def _victims(self, replica: int, num_tokens: int) -> Iterator[tuple[str, int]]:
        for agent, last in self._by_replica[replica].items():
            if num_tokens <= 0:
                return
            if last.ended_s < inf:
                yield agent, min(last.tokens, num_tokens)
                num_tokens -= min(last.tokens, num_tokens)

    def _chance(self, age_s: float, horizon_s: float) -> float:
        """Return the chance that a turn comes within the horizon which has not come for so long."""
        later = [pause for pause in self._pauses if pause > age_s]
        soon = sum(pause <= age_s + horizon_s for pause in later)
        return (soon + 1.0) / (len(later) + NEVER * self._ended + 1.0)


def agent_of(request_id: str) -> str:
    return request_id.rpartition("-")[0]


class Sparing:
    """`preble`, whose M is what the turns lose that are expected to come."""

    name, ttft_value = "sparing", 1.0 + TTFT_WEIGHT

    def __init__(self, books: Books, way: str) -> None:
        self._books, self._way = books, way

    def choose(self, view: ClusterView, rng: random.Random) -> Choice:
        delays = _Delays(view, self.ttft_value, 4.0)
        delays.least(view, rng)
        costs, agent = [], agent_of(view.request.request_id)
        for i, replica in enumerate(view.replicas):
            found = delays[i]
            more = view.request.num_prompt_tokens + int(view.expected_output_tokens) - found.matched_tokens
            excess = view.held_tokens(replica) + more - self._books.capacity
            lost_s = sum(
                chance * delays._prefill_delay_s(i, replica, view.cost_model.prefill_s(tokens, before))
                for chance, tokens, before in self._books.lost(replica, excess, agent, view.now, self._way)
            )
            costs.append(found.load_s + found.prefill_s + lost_s)
        best = rng.choice([i for i, cost_s in enumerate(costs) if cost_s == min(costs)])
        return Choice(view.replicas[best], _reason(view, delays.matched[best], delays.most_matched), delays)


class Watched(Simulation):
    """Keeps the books, and computes turns ahead where it is told to."""

    books: Books
    computes_ahead = False
    ahead = 0

    def _place(self, call: Call, now: float) -> None:
        super()._place(call, now)
        if call.placement is not None and not is_ahead(call):
            replica = int(call.placement.replica_id[1:])
            self.books.placed(call.asked.request_id, replica, call.request.num_prompt_tokens, now)

    def _end(self, call: Call, now: float, **how: Any) -> None:
        if is_ahead(call):
            del self._calls[call.request.request_id]
            return
        self.books.ended(call.asked.request_id, how.get("output_tokens", 0), now)
        for child in self._script.followers(call.asked) if self.computes_ahead else ():
            if agent_of(child.request_id) == agent_of(call.asked.request_id):
                prompt = PackedTokens(bytes(call.request.prompt) + bytes(call.answer))
                lead_s = self._cost_model.prefill_s(call.request.num_prompt_tokens, 0) + LEAD_S
                at_s = now + max(child.delay_s - lead_s, 0.0)
                self._agenda.at(at_s, Priority.REPORT, partial(self._compute_ahead, child.request_id, prompt))
        super()._end(call, now, **how)

    def _compute_ahead(self, name: str, prompt: PackedTokens, now: float) -> None:
        scheduler, request = self._scheduler, Request(RequestId(f"ahead:{name}"), prompt, 1)
        eligible = scheduler._replicas.eligible(request)
        match = scheduler._tree.match(prompt, request.namespace, request.model)
        view = ClusterView(request, eligible, match, scheduler._cluster, now)
        busy = [replica for replica in view.replicas if view.waiting_prefill_s[replica] > 0]
        missing = request.num_prompt_tokens - max(view.matched_tokens(view.replicas))
        if missing < LEAST_AHEAD or len(busy) == len(view.replicas):
            return
        request = replace(request, avoid=frozenset(scheduler._replicas.replica_id(replica) for replica in busy))
        asked = WorkloadRequest(request.request_id, (), 1)
        call = self._calls[request.request_id] = Call(asked, request, self._script.answer(asked, prompt), now)
        self.ahead += 1
        self._place(call, now)


def is_ahead(call: Call) -> bool:
    return call.asked.request_id.startswith("ahead:")


def workload_of(case: Case, seed: int) -> Workload:
    """Return sessions that begin at random times."""
    own, coding.RESULT_TOKENS = coding.RESULT_TOKENS, case.results or coding.RESULT_TOKENS
    try:
        made = make_workload("coding", int(case.rate * SECONDS), seed)
    finally:
        coding.RESULT_TOKENS = own
    rng, now, times = random.Random(seed), 0.0, []
    for _ in made.openers:
        now += rng.expovariate(len(made.openers) / SECONDS)
        times.append(now)
    return made.with_arrivals(times)


def tokens_at_once(workload: Workload) -> float:
    """Return the tokens of the sessions that go on at once, on average."""
    children, total = workload.children(), 0.0
    for one in workload.requests:
        tokens = sum(segment.num_tokens or 0 for segment in one.segments) + one.output_tokens
        total += tokens * (ANSWER_S + max((child.delay_s for child in children.get(one.request_id, ())), default=0.0))
    return total / SECONDS


def measure(name: str, way: str, seed: int) -> Turns:
    workload = workload_of(CASES[name], seed)
    tokens = int(tokens_at_once(workload) / 2 / REPLICAS) // 16 * 16
    config = SimConfig(profile=load_profile("h100-llama-3-8b"), replicas=REPLICAS, kv_tokens=tokens, seed=seed)
    books = Books(workload, tokens)
    policy: Any = Sparing(books, way) if way.startswith("spare") else None
    scheduler = make_scheduler(config.scheduler_settings, config.told_profile, policy)
    simulation = Watched(config, workload, scheduler=scheduler)
    simulation.books, simulation.computes_ahead = books, way == "ahead"
    with fewer_collections():
        records = [one for one in simulation.run().records if WARM_S <= one.scheduled_s < SECONDS]
    prompts = sum(one.prompt_tokens for one in records)
    return Turns(
        case=name,
        way=way,
        seed=seed,
        e2e_s=fmean(one.e2e_s for one in records),
        ttft_s=fmean(one.ttft_s or 0.0 for one in records),
        cached=sum(one.cached_tokens for one in records) / prompts,
        ahead=simulation.ahead,
        prompt_tokens=prompts / len(records),
    )


KEPT = Kept("coming_turns", Turns, lambda one: (one.case, WAYS.index(one.way), one.seed), str)


def table(found: Mapping[tuple[str, str, int], Turns]) -> str:
    """Markdown: a row for each case and way."""
    rows = [
        "| workload | way | mean E2E | mean TTFT | cached | computed ahead | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in CASES:
        for way in WAYS:
            ones = [found[name, way, seed] for seed in SEEDS if (name, way, seed) in found]
            today = [found[name, WAYS[0], one.seed] for one in ones]
            if ones:
                cells = [name if way == WAYS[0] else "", way]
                for number in ("e2e_s", "ttft_s"):
                    now, then = ([getattr(one, number) for one in its] for its in (ones, today))
                    cells.append(f"{fmean(now):.3g} s" if way == WAYS[0] else change(now, then))
                cells += [f"{fmean(one.cached for one in ones):.1%}", f"{fmean(one.ahead for one in ones):.0f}"]
                rows.append("| " + " | ".join([*cells, ", ".join(str(one.seed) for one in ones)]) + " |")
    return "\n".join(rows)


def play(names: list[str], seeds: tuple[int, ...], jobs: int) -> None:
    KEPT.play(measure, [(name, way, seed) for seed in seeds for name in names for way in WAYS], jobs)


def draw() -> None:
    fill([PAGE], {"coming-turns": table(KEPT.known()) + "\n"})


if __name__ == "__main__":
    play_and_draw(__doc__, CASES, SEEDS, play, draw)
