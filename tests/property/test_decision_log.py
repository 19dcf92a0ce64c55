"""Whatever goes through the door: the log replays to the same placements, with other names and at other times too."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from preble.core.placing.scheduler import GlobalScheduler
from preble.core.policies.registry import policy_names, reads_token_ids
from preble.core.types import Placement, Reason, ReplicaId, ReplicaSpec, Request, RequestId, pack_tokens
from preble.decisions.lines import Event, Header, PlaceLine
from preble.decisions.names import LogNames
from preble.decisions.reader import LogReader
from preble.decisions.settings import SchedulerSettings, make_scheduler
from preble.lab.replay.replay import Replay
from preble.lab.replay.what_if import logged_outcome, what_if
from property.test_global_scheduler import SchedulerMachine
from support.logs import PROFILE, Recording, rewritten

SECRET = LogNames(bytes(range(32)))


class RecordedMachine(SchedulerMachine):
    """Every rule of the scheduler's own machine, recorded; at the end the log is put to the test."""

    @initialize(
        policy=st.sampled_from(policy_names()),
        seed=st.integers(0, 3),
        budget=st.sampled_from([None, None, 2500, 6000]),
        names=st.sampled_from([LogNames(), SECRET]),
        refit=st.booleans(),
    )
    def start(self, policy: str, seed: int, budget: int | None, names: LogNames, refit: bool) -> None:
        if reads_token_ids(policy):
            names = LogNames()
        self.settings = SchedulerSettings(
            policy=policy,
            seed=seed,
            window_s=20.0,
            report_grace_s=2.0,
            belief_ttl_s=30.0,
            index_budget_bytes=budget,
            refit=refit,
        )
        self.recording = Recording(self.settings, names)
        self.scheduler = self.recording.scheduler
        self.begin(budget)

    def teardown(self) -> None:
        if not hasattr(self, "recording"):
            return
        with tempfile.TemporaryDirectory() as folder:
            path = self.recording.written_to(Path(folder) / "log.jsonl")
            placements = count_placements(path)
            for shift_s in (0.0, 2.0**20):  # no time in these logs is too fine for that
                again = Replay(LogReader(rewritten(path, partial(shifted, shift_s))))
                result = again.run()
                assert (result.difference, result.ended_at, result.compared) == (None, None, placements)
                assert self.state(again.scheduler, shift_s) == self.state(self.scheduler, 0.0)
            logged = logged_outcome(path)
            assert logged.placements + logged.failed == placements
            for policy in policy_names():
                outcome = what_if(path, policy)
                assert (outcome.placements, outcome.failed) == (logged.placements, logged.failed)

    def state(self, scheduler: GlobalScheduler, shift_s: float) -> tuple[object, ...]:
        timer = scheduler.next_timer()
        return scheduler.snapshot(), None if timer is None else timer - shift_s


def count_placements(path: Path) -> int:
    return sum(isinstance(numbered.event, PlaceLine) for numbered in LogReader(path))


def shifted(shift_s: float, line: Header | Event) -> Header | Event:
    """The same so much later."""
    return msgspec.structs.replace(line, t=line.t + shift_s)


RecordedMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDecisionLog = RecordedMachine.TestCase


PREFIXES = [tuple(range(100 * i, 100 * i + length)) for i, length in enumerate((40, 23, 17, 9))]
Step = tuple[int, int, int]
steps = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(0, 5)), max_size=30)


def placements_of(policy: str, order: list[int], steps: list[Step], rename: Callable[[int], int]) -> list[Placement]:
    """Requests on three replicas that joined in this order. Each has a load of its own first, so that none are equal.

    A step: the prefix of a prompt, the length of its unique tail, and how many steps ago the request was placed whose
    first token comes now.
    """
    scheduler = make_scheduler(SchedulerSettings(policy=policy), PROFILE)
    for i in order:
        scheduler.add_replica(ReplicaSpec(ReplicaId(f"r{i}"), None, None, 1), 0.0)
    replicas = {ReplicaId(f"r{i}") for i in order}
    for i in range(3):
        own = pack_tokens(map(rename, range(5000 + 100 * i, 5000 + 100 * i + (61, 67, 71)[i])))
        others = frozenset(replicas - {ReplicaId(f"r{i}")})
        scheduler.place(Request(RequestId(f"own{i}"), own, avoid=others), 0.0)
    placements = []
    for n, (prefix, tail, ends) in enumerate(steps):
        tokens = (*PREFIXES[prefix], *range(10_000 + 100 * n, 10_000 + 100 * n + tail))
        request = Request(RequestId(f"q{n}"), pack_tokens(map(rename, tokens)))
        placements.append(scheduler.place(request, float(n)))
        if ends <= n:
            scheduler.on_first_token(placements[n - ends].request_id, float(n))
    return placements


def is_tied(placement: Placement) -> bool:
    costs = [candidate.cost_s for candidate in placement.candidates]
    return len(set(costs)) < len(costs)


def decided(placement: Placement) -> tuple[object, ...]:
    candidates = sorted(placement.candidates, key=lambda candidate: candidate.replica_id)
    return placement.request_id, placement.replica_id, placement.reason, placement.matched_tokens, candidates


@given(st.sampled_from(["e2", "e2_rebalance", "e2_per_request"]), st.permutations([0, 1, 2]), steps)
@settings(deadline=None)
def test_the_order_in_which_replicas_joined_decides_nothing_where_none_are_equal(
    policy: str, order: list[int], steps: list[Step]
) -> None:
    one = placements_of(policy, [0, 1, 2], steps, lambda token: token)
    other = placements_of(policy, order, steps, lambda token: token)
    for here, there in zip(one, other, strict=True):
        # Prefill/decode balance names only the replica that it chose, so that a tie with another one is not seen.
        if is_tied(here) or (here.reason is there.reason is Reason.BALANCE and here.replica_id != there.replica_id):
            break
        assert decided(here) == decided(there)


@given(st.sampled_from([p for p in policy_names() if not reads_token_ids(p)]), steps, st.integers(1, 2**32 - 1))
@settings(deadline=None)
def test_which_tokens_a_prompt_has_decides_nothing_but_which_are_equal(
    policy: str, steps: list[Step], key: int
) -> None:
    one = placements_of(policy, [0, 1, 2], steps, lambda token: token)
    other = placements_of(policy, [0, 1, 2], steps, lambda token: token ^ key)
    assert list(map(decided, one)) == list(map(decided, other))
