"""`prefix_oracle`: prompts that begin alike go together, as somebody would place them who knew all requests before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import ceil
from operator import attrgetter, itemgetter
from random import Random

from preble.core.costs.model import CostModel
from preble.core.policies.policy import Choice
from preble.core.policies.scoring import unweighed
from preble.core.policies.view import ClusterView
from preble.core.prefixes.radix_tree import Node
from preble.core.types import ReplicaId
from preble.sim.config import PREFIX_ORACLE, SimConfig
from preble.sim.oracle.least_costs import LeastCosts
from preble.sim.oracle.sharing import Job, Sharing
from preble.workloads import Workload
from preble.workloads.study.prefixes import key_portion

Session = Sequence[Job]
"""An opener and all that waits for it, in order."""


class Assigned:
    """A policy that cannot serve: it places by request id, as was decided beforehand.

    `replica_of`: request id -> replica.
    """

    def __init__(self, name: str, replica_of: Mapping[str, ReplicaId]) -> None:
        self.name = name
        self._replica_of = replica_of

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        """The replica that was decided on; where that one is not there, the one with the least load cost."""
        decided = self._replica_of.get(view.request.request_id)
        replica = next((replica for replica in view.replicas if view.replica_id(replica) == decided), None)
        if replica is None:
            replica = view.costs(view.replicas).cheapest(rng)
        return unweighed(view, replica)


class PrefixOracle(Assigned):
    """Made from the whole workload: prompts that begin alike go together, and work is even at all times.

    Sessions whose openers have the same key portion are a group; one with more than `max_share` of the work that a
    replica gets on average is split, session by session. The parts, the one with the most work first, each get the
    replica where the work of every `slice_s` seconds stays most even: where the sum of its squares grows least. Work is
    seconds of prefill and decoding, from when a request is sent on; what sessions share is computed once on each
    replica, by the first of them.

    Not regarded: that a cache can be full; and how long requests queue, so that those which wait for others are taken
    to be sent at their earliest time. So it is a reference for placing by prefix, and no bound.
    """

    def __init__(self, workload: Workload, config: SimConfig, *, slice_s: float = 1.0, max_share: float = 0.5) -> None:
        """O(tokens + requests x replicas x depth). The replicas are those that `config` has at the start.

        Raises: ValueError: `slice_s` or `max_share` is not positive.
        """
        if slice_s <= 0 or max_share <= 0:
            raise ValueError(f"slice_s and max_share must be positive, got {slice_s} and {max_share}")
        sharing = Sharing(workload, config, LeastCosts(config))
        homes = _Homes(config.initial_replicas, CostModel(config.profile), slice_s)
        homes.fill(_groups(sharing.jobs), max_share)
        super().__init__(PREFIX_ORACLE, homes.of_request)


def _groups(jobs: Iterable[Job]) -> list[list[Session]]:
    """Sessions by the key portion of their opener, in order."""
    session_of: dict[str, list[Job]] = {}
    groups: dict[Node, list[Session]] = {}
    for job in jobs:
        if job.request.parent is None:
            session = session_of[job.request.request_id] = [job]
            groups.setdefault(key_portion(job.end), []).append(session)
        else:
            session = session_of[job.request.request_id] = session_of[job.request.parent]
            session.append(job)
    return list(groups.values())


class _Homes:
    """Replicas, with the seconds of work in each slice of time and the nodes that are cached there.

    `of_request`: request id -> its replica.
    """

    def __init__(self, replicas: Sequence[ReplicaId], cost_model: CostModel, slice_s: float) -> None:
        self.of_request: dict[str, ReplicaId] = {}
        self._replicas = replicas
        self._cost_model = cost_model
        self._slice_s = slice_s
        self._work_s: list[defaultdict[int, float]] = [defaultdict(float) for _ in replicas]
        self._cached: list[set[Node]] = [set() for _ in replicas]

    def fill(self, groups: Iterable[Sequence[Session]], max_share: float) -> None:
        """Find a replica for every session, once."""
        sized = [(sum(self._added_s(_in_order(group), set()).values()), group) for group in groups]
        most_s = max_share * sum(work_s for work_s, _ in sized) / max(len(self._replicas), 1)
        parts: list[tuple[float, Sequence[Session]]] = []
        for work_s, group in sized:
            num_parts = max(1, min(ceil(work_s / most_s), len(group))) if most_s else 1
            parts += [(work_s / num_parts, group[i::num_parts]) for i in range(num_parts)]
        for _, part in sorted(parts, key=itemgetter(0), reverse=True):
            self._place(_in_order(part))

    def _place(self, jobs: Sequence[Job]) -> None:
        if not self._replicas:
            return
        added = [self._added_s(jobs, cached) for cached in self._cached]
        growth = [
            sum(more_s * (2 * work_s[i] + more_s) for i, more_s in more.items())
            for work_s, more in zip(self._work_s, added, strict=True)
        ]
        home = growth.index(min(growth))
        for i, more_s in added[home].items():
            self._work_s[home][i] += more_s
        for job in jobs:
            self._cached[home].update(job.answer_end.ancestors())
            self.of_request[job.request.request_id] = self._replicas[home]

    def _added_s(self, jobs: Iterable[Job], cached: set[Node]) -> dict[int, float]:
        """Seconds of work, by slice, that the jobs are where these nodes are cached."""
        added: defaultdict[int, float] = defaultdict(float)
        new: set[Node] = set()
        for job in jobs:
            hit = next((node.end for node in job.end.ancestors() if node in new or node in cached), 0)
            prefill_s = self._cost_model.prefill_s(job.num_tokens - hit, hit)
            decode_s = self._cost_model.decode_s(job.request.output_tokens, job.num_tokens)
            self._spread(added, job.sent_s, prefill_s + decode_s)
            new.update(job.answer_end.ancestors())
        return added

    def _spread(self, work_s: defaultdict[int, float], start_s: float, seconds: float) -> None:
        """Add so much work, which fills each slice from the one of `start_s` on."""
        i = int(start_s / self._slice_s)
        while seconds > 0:
            work_s[i] += min(seconds, self._slice_s)
            seconds -= self._slice_s
            i += 1


def _in_order(sessions: Iterable[Session]) -> list[Job]:
    """The jobs of several sessions as they are sent."""
    return sorted(chain.from_iterable(sessions), key=attrgetter("sent_s", "index"))
