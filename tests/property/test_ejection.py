"""Whatever happens to requests: never too many replicas are out, and none stays out."""

from __future__ import annotations

import copy

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from preble.config import EjectionConfig
from preble.core.types import ReplicaId, RequestId
from preble.rules.ejection import EjectionTable, Standing

CONFIG = EjectionConfig()
NAMES = tuple(ReplicaId(name) for name in "abcde")
REPLICAS = st.sampled_from(NAMES)


class Ejection(RuleBasedStateMachine):
    """Requests sent to whichever replica is not avoided, and ended in any order and way."""

    def __init__(self) -> None:
        super().__init__()
        self.table = EjectionTable(CONFIG)
        self.now = 0.0
        self.count = 0
        self.running: dict[RequestId, ReplicaId] = {}
        for name in NAMES:
            self.table.add(name)

    @rule(replica=REPLICAS)
    def send(self, replica: ReplicaId) -> None:
        if replica not in self.table.avoided(self.now):
            self.count += 1
            request = RequestId(str(self.count))
            self.running[request] = replica
            self.table.sent(replica, request, self.now)

    @rule(pick=st.randoms(use_true_random=False), how=st.sampled_from(["succeeded", "failed", "dropped", "refused"]))
    def end(self, pick: object, how: str) -> None:
        if not self.running:
            return
        request = pick.choice(sorted(self.running))  # type: ignore[attr-defined]
        replica = self.running.pop(request)
        match how:
            case "refused":
                self.table.refused(replica, request, 3.0, self.now)
            case "failed":
                self.table.failed(replica, request, self.now)
            case _:
                getattr(self.table, how)(replica, request, self.now)

    @rule(replica=REPLICAS, times=st.integers(1, 6))
    def fail_at_once(self, replica: ReplicaId, times: int) -> None:
        for _ in range(times):
            if replica not in self.table.avoided(self.now):
                self.send(replica)
                request = RequestId(str(self.count))
                self.table.failed(self.running.pop(request), request, self.now)

    @rule(seconds=st.floats(0.0, 400.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def check(self) -> None:
        waiting_at = set(self.running.values())
        assert set(self.table.check({}, self.now)) <= waiting_at

    @rule(replica=REPLICAS)
    def rejoin(self, replica: ReplicaId) -> None:
        self.table.remove(replica)
        self.table.add(replica)
        self.running = {request: at for request, at in self.running.items() if at != replica}

    @invariant()
    def most_are_in(self) -> None:
        out = [name for name in NAMES if self.table.standing(name) is not Standing.IN]
        assert len(out) <= CONFIG.largest_share * len(NAMES)

    @invariant()
    def nobody_is_out_without_end(self) -> None:
        later = copy.deepcopy(self.table).avoided(self.now + CONFIG.longest_out_s)
        assert later <= set(self.running.values()), "only a replica at its probe is still avoided"


TestEjection = Ejection.TestCase
