"""What no scheduler can beat on a workload: mean latencies and a rate, each argued."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf
from operator import add
from statistics import fmean

import numpy as np

from preble.core.costs.model import CostModel
from preble.core.prefixes.radix_tree import Node
from preble.errors import ConfigError
from preble.lab.sim.bound.least_costs import LeastCosts
from preble.lab.sim.bound.sharing import Job, Sharing
from preble.lab.sim.config import FailureKind, SimConfig
from preble.lab.workloads import Workload, WorkloadRequest


@dataclass(frozen=True, slots=True)
class LatencyBound:
    """What one request takes at least, in seconds, from when it is sent."""

    ttft_s: float
    e2e_s: float


@dataclass(frozen=True, slots=True)
class LowerBound:
    """What holds of every run of a workload on a cluster, whoever places its requests and in whichever order they run.

    `requests`: of each request, by id. `ttft_mean_s`, `e2e_mean_s`: over all of them; more than the means of
    `requests` where the queue alone takes more. `gpu_s`: seconds of GPU time of all replicas together.
    `requests_per_s`: finished requests a second over the whole run, and so the rate at which requests like these can
    arrive without end.

    For runs in which no request fails but those that no replica can hold, which are left out here.
    """

    requests: dict[str, LatencyBound]
    ttft_mean_s: float
    e2e_mean_s: float
    gpu_s: float
    requests_per_s: float


class LeastPrefills:
    """Seconds that no schedule undercuts, of prompts on `config`'s replicas."""

    def __init__(self, config: SimConfig) -> None:
        self._profile = config.profile
        self._budget = config.max_batch_tokens
        model = CostModel(config.profile)
        tokens = np.arange(1, self._budget + 1)
        seconds = np.array([model.prefill_s(int(n)) for n in tokens])
        # by tokens; the first is for no token
        self._least_per_token = np.minimum.accumulate(np.concatenate((seconds[:1], seconds / tokens)))

    def prefill_s(self, num_tokens: int, seen_tokens: int) -> float:
        """Return seconds from when a prompt is sent to its first token, on an idle replica that cached all that was
        seen.

        The tokens after the first `seen_tokens` are computed between these two times on the replica, by whichever
        request, for nobody computed them before. Of all the chunks that do so, let the first begin after s tokens; s is
        at most `seen_tokens`. Then
        - all tokens after s go through iterations of at most `max_batch_tokens`: each of them costs at least as much as
          in the batch, no larger than they are together, in which a token is cheapest;
        - the token at position p is in a chunk that begins after s tokens or later, and not earlier than
          `max_batch_tokens` before p: that is the context which the chunk's tokens have to attend to.
        The cost is computed for every s, and the least one counts. O(seen tokens).
        """
        profile, budget = self._profile, self._budget
        before = np.arange(seen_tokens + 1)
        new = num_tokens - before
        over = np.maximum(new - budget, 0)
        pairs = before * new + over * (over + 1) / 2
        attention = profile.attention_s_per_pair * pairs
        attention += profile.attention_s_per_context_token * np.maximum(before, pairs / budget)
        return float((new * self._least_per_token[np.minimum(new, budget)] + attention).min())


@dataclass(slots=True)
class _Users:
    """The requests whose prompts go through a node.

    `first`: the least (earliest time of sending, index) of them. `low`, `high`: the least and the highest index.
    """

    first: tuple[float, int] = (inf, 0)
    low: float = inf
    high: float = -inf

    def add(self, sent_s: float, index: int) -> None:
        self.first = min(self.first, (sent_s, index))
        self.low = min(self.low, index)
        self.high = max(self.high, index)


class PromptUsers:
    """Which requests can have been first to compute the parts of prompts.

    `prompt_tokens`: those of the prompts that are distinct, and in no answer.
    """

    def __init__(self, workload: Workload, sharing: Sharing) -> None:
        self._sharing = sharing
        self._indices = _indices(workload.requests)
        self._users: dict[Node, _Users] = {}
        for job in sharing.jobs:
            index, _ = self._indices[job.request.request_id]
            for node in job.end.ancestors():
                self._users.setdefault(node, _Users()).add(job.sent_s, index)
        self.prompt_tokens = sum(node.num_tokens for node in self._users if not sharing.is_answered(node))

    def seen_tokens(self, job: Job, *, with_ties: bool) -> int:
        """Return leading tokens of its prompt that a replica may have computed before it is sent; all others are its
        own.

        Of an opener: what prompts have that can be sent earlier. Of any other request, whose time is not known: what
        prompts have but those that wait for it. And what is answered by anybody. `with_ties`: what several requests
        share that are sent in one instant is seen by all of them but one. O(depth).
        """
        index, last = self._indices[job.request.request_id]
        since = (job.sent_s, index if with_ties else 0)
        seen = job.num_tokens
        for node in job.end.ancestors():
            users = self._users[node]
            is_first = _is_opener(job) and users.first >= since
            is_alone = index <= users.low and users.high <= last
            if self._sharing.is_answered(node) or not (is_first or is_alone):
                break
            seen = node.start
        return seen


def _is_opener(job: Job) -> bool:
    return job.request.parent is None


def _indices(requests: Sequence[WorkloadRequest]) -> dict[str, tuple[int, int]]:
    """Request id -> its index and that of the last one which waits for it, directly or not; parents come first."""
    sizes = {request.request_id: 1 for request in requests}
    for request in reversed(requests):
        if request.parent is not None:
            sizes[request.parent] += sizes[request.request_id]
    indices: dict[str, tuple[int, int]] = {}
    free: dict[str | None, int] = {None: 0}
    for request in requests:
        index = free[request.parent]
        free[request.parent] = free_after = index + sizes[request.request_id]
        free[request.request_id] = index + 1
        indices[request.request_id] = (index, free_after - 1)
    return indices


def lower_bound(workload: Workload, config: SimConfig) -> LowerBound:
    """Return the bound of a workload, whose openers have arrival times, on `config`'s cluster. O(tokens).

    **One request.** Before its first token all of its prompt is computed on its replica. What no request has that is
    sent before it has not been computed by then, and so takes `LeastPrefills.prefill_s` from then on; all else is taken
    to be cached, in whole blocks and without the last token, as always. Every further token takes an iteration after
    the one before (`LeastCosts.decode_s`).

    **All requests.** The tokens that are a request's own are computed after it is sent and before its first token, and
    each takes its share of an iteration (`LeastCosts.token_s`). So the requests that wait for no other are jobs with
    release times, for as many machines as there are replicas. One machine as fast as all of them could do the same in
    the same times, and on one machine no order has a lower sum of times than always running the job of
    which least is left. For E2E the decoding belongs to the job.

    **Work.** Each distinct token of the prompts is computed once at least, or else was answered; and each token of an
    answer, but for the first, adds to the iteration that makes it (`LeastCosts.decode_work_s`). Replicas have a second
    of GPU time a second.

    Raises: ConfigError: there is no replica, or no request that one can hold.
    """
    costs = LeastCosts(config)
    sharing = Sharing(workload, config, costs)
    joined = [failure.replica for failure in config.failures if failure.kind is FailureKind.ADDED]
    speeds = [config.speeds.get(replica, 1.0) for replica in (*config.initial_replicas, *joined)]
    if not (speeds and sharing.jobs):
        raise ConfigError(
            f"workload {workload.name!r} has no bound: no request fits into any of {len(speeds)} replicas"
        )
    users = PromptUsers(workload, sharing)
    prefills = LeastPrefills(config)
    alone = [_alone(job, users, config, costs, prefills) for job in sharing.jobs]
    prefills_s = [costs.token_s * (job.num_tokens - users.seen_tokens(job, with_ties=True)) for job in sharing.jobs]
    decodes_s = [costs.decode_work_s(job.num_tokens, job.request.output_tokens) for job in sharing.jobs]
    mean_s = partial(_mean_s, sharing.jobs, sum(speeds))
    ttft_mean_s = mean_s([bound.ttft_s for bound in alone], prefills_s)
    e2e_mean_s = mean_s([bound.e2e_s for bound in alone], list(map(add, prefills_s, decodes_s)))
    after_first_s = fmean(bound.e2e_s - bound.ttft_s for bound in alone)
    work_s = users.prompt_tokens * costs.token_s + sum(decodes_s)
    return LowerBound(
        requests={job.request.request_id: bound for job, bound in zip(sharing.jobs, alone, strict=True)},
        ttft_mean_s=ttft_mean_s,
        e2e_mean_s=max(e2e_mean_s, ttft_mean_s + after_first_s),
        gpu_s=work_s / max(speeds),
        requests_per_s=len(sharing.jobs) * sum(speeds) / work_s if work_s else inf,
    )


def _alone(job: Job, users: PromptUsers, config: SimConfig, costs: LeastCosts, prefills: LeastPrefills) -> LatencyBound:
    """Return the request's times on an idle replica that cached all that it can have."""
    seen = min(users.seen_tokens(job, with_ties=False), job.num_tokens - 1)
    cached = seen // config.block_size * config.block_size
    fastest = max([1.0, *config.speeds.values()])
    ttft_s = config.dispatch_s + prefills.prefill_s(job.num_tokens, cached) / fastest
    return LatencyBound(ttft_s, ttft_s + costs.decode_s(job.num_tokens, job.request.output_tokens) / fastest)


def _mean_s(jobs: Sequence[Job], num_replicas: float, alone_s: Sequence[float], work_s: Sequence[float]) -> float:
    """Return the least mean time of jobs on one machine that is as fast as `num_replicas` replicas of the usual speed.

    `alone_s`, `work_s`: what each takes by itself, and the seconds of GPU time that it needs. Of requests whose time of
    sending depends on others only the former is known.
    """
    queued = [
        (job.sent_s, seconds / num_replicas) for job, seconds in zip(jobs, work_s, strict=True) if _is_opener(job)
    ]
    openers_s = sum(seconds for job, seconds in zip(jobs, alone_s, strict=True) if _is_opener(job))
    return (sum(alone_s) + max(least_flow_s(queued) - openers_s, 0.0)) / len(alone_s)


def least_flow_s(jobs: Iterable[tuple[float, float]]) -> float:
    """Return the least possible sum, over jobs of one machine, of the seconds from a job's release to its end.

    `jobs`: (release time, seconds of work) of each. The machine always goes on with the job of which least is left.
    O(n log n).

    >>> least_flow_s([(0.0, 5.0), (1.0, 1.0)])  # from 0 to 6 and from 1 to 2
    7.0
    """
    total_s = now = 0.0
    left: list[float] = []
    for release_s, work_s in chain(sorted(jobs), [(inf, 0.0)]):
        while left and now < release_s:
            spent_s = min(left[0], release_s - now)
            total_s += spent_s * len(left)
            now += spent_s
            if spent_s == left[0]:
                heapq.heappop(left)
            else:
                heapq.heapreplace(left, left[0] - spent_s)
        now = max(now, release_s)
        heapq.heappush(left, work_s)
    return total_s
