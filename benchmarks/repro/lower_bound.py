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

from preble.errors import ConfigError
from preble.lab.sim.bound.least_costs import LeastCosts
from preble.lab.sim.bound.sharing import Job, Sharing
from preble.lab.sim.config import FailureKind, SimConfig
from preble.lab.workloads import Workload


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


def lower_bound(workload: Workload, config: SimConfig) -> LowerBound:
    """Return the bound of a workload, whose openers have arrival times, on `config`'s cluster. O(tokens).

    **One request.** Before its first token all of its prompt is computed on its replica. What no request has that is
    sent before it has not been computed by then, and so takes `LeastCosts.prefill_s` from then on; all else is taken to
    be cached, in whole blocks and without the last token, as always. Every further token takes an iteration after the
    one before (`LeastCosts.decode_s`).

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
    alone = [_alone(job, sharing, config, costs) for job in sharing.jobs]
    prefills_s = [costs.token_s * (job.num_tokens - sharing.seen_tokens(job, with_ties=True)) for job in sharing.jobs]
    decodes_s = [costs.decode_work_s(job.num_tokens, job.request.output_tokens) for job in sharing.jobs]
    mean_s = partial(_mean_s, sharing.jobs, sum(speeds))
    ttft_mean_s = mean_s([bound.ttft_s for bound in alone], prefills_s)
    e2e_mean_s = mean_s([bound.e2e_s for bound in alone], list(map(add, prefills_s, decodes_s)))
    after_first_s = fmean(bound.e2e_s - bound.ttft_s for bound in alone)
    work_s = sharing.prompt_tokens * costs.token_s + sum(decodes_s)
    return LowerBound(
        requests={job.request.request_id: bound for job, bound in zip(sharing.jobs, alone, strict=True)},
        ttft_mean_s=ttft_mean_s,
        e2e_mean_s=max(e2e_mean_s, ttft_mean_s + after_first_s),
        gpu_s=work_s / max(speeds),
        requests_per_s=len(sharing.jobs) * sum(speeds) / work_s if work_s else inf,
    )


def _alone(job: Job, sharing: Sharing, config: SimConfig, costs: LeastCosts) -> LatencyBound:
    """Return the request's times on an idle replica that cached all that it can have."""
    seen = min(sharing.seen_tokens(job, with_ties=False), job.num_tokens - 1)
    cached = seen // config.block_size * config.block_size
    fastest = max([1.0, *config.speeds.values()])
    ttft_s = config.dispatch_s + costs.prefill_s(job.num_tokens, cached) / fastest
    return LatencyBound(ttft_s, ttft_s + costs.decode_s(job.num_tokens, job.request.output_tokens) / fastest)


def _mean_s(jobs: Sequence[Job], num_replicas: float, alone_s: Sequence[float], work_s: Sequence[float]) -> float:
    """Return the least mean time of jobs on one machine that is as fast as `num_replicas` replicas of the usual speed.

    `alone_s`, `work_s`: what each takes by itself, and the seconds of GPU time that it needs. Of requests whose time of
    sending depends on others only the former is known.
    """
    queued = [(job.sent_s, seconds / num_replicas) for job, seconds in zip(jobs, work_s, strict=True) if job.is_opener]
    openers_s = sum(seconds for job, seconds in zip(jobs, alone_s, strict=True) if job.is_opener)
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
