"""The highest rate that any scheduler could sustain when the caches together hold only a part of the prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from preble.core.prefixes.radix_tree import Node
from preble.errors import ConfigError
from preble.lab.sim.bound.least_costs import LeastCosts
from preble.lab.sim.bound.sharing import Sharing
from preble.lab.sim.config import SimConfig
from preble.lab.workloads import Workload


def steady_rate(workload: Workload, config: SimConfig, *, patience_s: float) -> float:
    """Return a rate of such requests that no scheduler can sustain, even if it knows them all in advance.

    `patience_s`: nobody waits longer for a first token. The workload has arrival times; it should be long, for what is
    asked for the first time has to be computed, and in the long run nothing is new. O(tokens + uses log uses).

    A token that was computed before is a hit only if some cache held it ever since its last use. So a use takes as many
    token seconds of all caches together as its tokens times the seconds since the last use, less `patience_s`, for a
    request may be served so much later than it was sent. The caches have their size times the length of the run. The
    most hits are those of the shortest uses (PFOO-L, Berger et al. 2018). All else is computed, at the least that a
    token can cost at its place in the prompt, and replicas have a second of GPU time a second.

    Raises: ConfigError: there is no replica, or no request that one can hold.
    """
    costs = LeastCosts(config)
    sharing = Sharing(workload, config, costs)
    replicas = config.initial_replicas
    if not (replicas and sharing.jobs):
        raise ConfigError(f"workload {workload.name!r} has no bound: no request fits into any replica")
    uses = sorted(_uses(sharing, costs, patience_s))
    first_s = sum(seconds for since_s, _, seconds in uses if since_s == inf)
    repeated = [use for use in uses if use[0] < inf]
    lasting_s = max(job.sent_s for job in sharing.jobs) - min(job.sent_s for job in sharing.jobs)
    room = sum(config.blocks_of(replica) for replica in replicas) * config.block_size * lasting_s
    decode_s = sum(costs.decode_work_s(job.num_tokens, job.request.output_tokens) for job in sharing.jobs)
    work_s = first_s + _missed_s(repeated, room) + decode_s
    speed = sum(config.speeds.get(replica, 1.0) for replica in replicas)
    return len(sharing.jobs) * speed / work_s if work_s else inf


def _uses(sharing: Sharing, costs: LeastCosts, patience_s: float) -> Iterator[tuple[float, int, float]]:
    """Yield each use of a node by a prompt: seconds since the last one, tokens, seconds that it takes to compute them.

    Infinite seconds for the first use; one that an answer made before takes nothing and is left out.
    """
    last_s: dict[Node, float] = {}
    for job in sorted(sharing.jobs, key=lambda job: job.sent_s):
        for node in job.end.ancestors():
            since_s = inf if node not in last_s else max(job.sent_s - last_s[node] - patience_s, 0.0)
            last_s[node] = job.sent_s
            if since_s < inf or not sharing.is_answered(node):
                yield since_s, node.num_tokens, costs.compute_s(node.start, node.end)


def _missed_s(uses: list[tuple[float, int, float]], room: float) -> float:
    """Return seconds to compute what is no hit, where the uses that need the least room are."""
    missed_s = 0.0
    for since_s, tokens, seconds in uses:
        need = since_s * tokens
        share = 1.0 if need <= room else room / need
        room = max(room - need, 0.0)
        missed_s += (1.0 - share) * seconds
    return missed_s
