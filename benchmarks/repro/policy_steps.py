"""What each term of the policy `preble` gains, and what its knobs being off by half costs (docs/decisions/0008).

    python benchmarks/repro/policy_steps.py            # about a quarter of an hour on two cores
    python benchmarks/repro/policy_steps.py --draw     # fill in the page from the results that are there

Mean E2E and p99 of TTFT on four A6000 replicas with Mistral-7B near saturation, as multiples of those of `preble`; and
with each knob the rank among the peers' rules that carry most, `e2` and least load.
Seeds 0 and 1; the evaluation reports on others. Results: benchmarks/results/policy_steps.json.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

from preble.core.policies.cost_table import CostTable
from preble.core.policies.e2 import E2
from preble.core.policies.policy import Policy
from preble.core.policies.preble import Preble
from preble.core.policies.registry import make_policy
from preble.core.policies.view import ClusterView
from preble.core.replica_index import ReplicaIndex
from preble.profiles import load_profile
from preble.sim import SimConfig, simulate
from preble.sim.memory import fewer_collections
from preble.workloads import WorkloadPlan

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "policy_steps.json"
PAGE = ROOT / "docs" / "decisions" / "0008-the-policy-preble.md"
SEEDS = (0, 1)
WORKLOADS = {
    "toolbench": WorkloadPlan(source="toolbench", requests=2000, rps=60.0),
    "programming": WorkloadPlan(source="programming", requests=1200, rps=25.0),
    "video": WorkloadPlan(source="video", requests=800, rps=6.0),
    "longdoc": WorkloadPlan(source="longdoc", requests=400, rps=4.0),
    "unshared": WorkloadPlan(source="unshared", requests=1200, rps=15.0),
    "hot prefix": WorkloadPlan(source="toolbench", requests=2000, rps=90.0, num_prefixes=1),
}


class Part(Preble):
    """`preble` with some of its terms only: each is multiplied by 0 or 1."""

    def __init__(self, *, standing: float = 0.0, together: float = 0.0, later: float = 0.0, **knobs: float) -> None:
        super().__init__(**knobs)
        self._standing = standing
        self._together = together
        self._later = later

    def _costs(self, view: ClusterView, matched: list[int], best: int) -> CostTable:
        value = self._ttft_value
        crowd = value * self._crowding * view.requests_per_s / len(view.replicas)
        together_s = self._together * 2.0 * view.cost_model.decode_sequence_s(view.request.num_prompt_tokens)
        loads, prefills = [], []
        for replica, tokens in zip(view.replicas, matched, strict=True):
            waiting_s, in_flight = view.waiting_prefill_s[replica], view.num_requests[replica]
            prefill = self._paid_s(view, tokens, best)
            loads.append(value * waiting_s + together_s * self._output_tokens(view, replica))
            prefills.append(prefill * (value + self._standing * in_flight + crowd * (waiting_s + prefill / 2)))
        return view.table(view.replicas, matched, load_s=loads, prefill_s=prefills)

    def _paid_s(self, view: ClusterView, matched: int, best: int) -> float:
        return (
            self._prefill_s(view, matched, best, view.expected_output_tokens)
            if self._later
            else view.prefill_s(matched)
        )

    def _output_tokens(self, view: ClusterView, replica: ReplicaIndex) -> float:
        """As before answers were learned for each prefix."""
        return view.mean_output_tokens[replica] * view.num_requests[replica]


STEPS: dict[str, Callable[[], Policy]] = {
    "e2": E2,
    "own waiting and prefill": lambda: Part(crowding=0.0),
    "+ who stands still": lambda: Part(standing=1.0, crowding=0.0),
    "+ who comes meanwhile": lambda: Part(standing=1.0),
    "+ decoding together": lambda: Part(standing=1.0, together=1.0),
    "+ later users of a copy": lambda: Part(standing=1.0, together=1.0, later=1.0),
    "+ answers by prefix": Preble,
}
KNOBS: dict[str, Callable[[], Policy]] = {
    "ttft_weight 1.5": lambda: Preble(ttft_weight=1.5),
    "ttft_weight 4.5": lambda: Preble(ttft_weight=4.5),
    "crowding 2": lambda: Preble(crowding=2.0),
    "crowding 6": lambda: Preble(crowding=6.0),
}
RIVALS: dict[str, Callable[[], Policy]] = {
    name: partial(make_policy, name)
    for name in ("sticky_until_saturated", "sglang_cache_aware", "lmetric", "llmd_blend", "least_load")
}
VARIANTS = STEPS | KNOBS | RIVALS
WHOLE = "+ answers by prefix"
"""The step with which the policy is whole."""


def measure(name: str, workload: str, seed: int) -> tuple[float, float]:
    """Mean E2E and p99 of TTFT, in seconds."""
    plan = WORKLOADS[workload]
    requests = WorkloadPlan(
        source=plan.source, requests=plan.requests, rps=plan.rps, num_prefixes=plan.num_prefixes, seed=seed
    ).make()
    config = SimConfig(profile=load_profile("a6000-mistral-7b"), replicas=4, seed=seed)
    with fewer_collections():
        summary = simulate(config, requests, policy=VARIANTS[name]()).summary
    assert summary.e2e is not None and summary.ttft is not None
    return summary.e2e.mean_s, summary.ttft.p99_s


def table(found: dict[str, dict[str, list[float]]], names: list[str]) -> str:
    """Markdown: E2E mean and TTFT p99 of each variant as multiples of those of `preble`."""
    lines = ["| | " + " | ".join(WORKLOADS) + " |", "|---|" + "---|" * len(WORKLOADS)]
    own = found[WHOLE]
    for name in names:
        cells = [f"{found[name][w][0] / own[w][0]:.2f}, {found[name][w][1] / own[w][1]:.2f}" for w in WORKLOADS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ranks(found: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: by mean E2E and by p99 of TTFT, where `preble` with each setting stands among `e2` and the rivals."""

    def rank(variant: str, workload: str, number: int) -> int:
        own = found[variant][workload][number]
        return 1 + sum(found[rival][workload][number] < own for rival in ("e2", *RIVALS))

    lines = ["| | " + " | ".join(WORKLOADS) + " |", "|---|" + "---|" * len(WORKLOADS)]
    for label, variant in {"as it is": WHOLE, **{name: name for name in KNOBS}}.items():
        cells = [f"{rank(variant, w, 0)}, {rank(variant, w, 1)}" for w in WORKLOADS]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """The page with the tables of the kept results between its markers."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    for name, text in (("steps", table(found, [*STEPS])), ("knobs", table(found, [*KNOBS])), ("ranks", ranks(found))):
        between = f"<!-- {name} -->\n{text}\n<!-- end -->"
        page = re.sub(f"<!-- {name} -->\n.*?<!-- end -->", lambda _, text=between: text, page, flags=re.DOTALL)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only fill in the page")
    if not parser.parse_args().draw:
        jobs = list(product(VARIANTS, WORKLOADS, SEEDS))
        with ProcessPoolExecutor() as pool:
            measured = list(pool.map(measure, *zip(*jobs, strict=True)))
        by_job = dict(zip(jobs, measured, strict=True))
        found = {
            name: {w: [fmean(by_job[name, w, seed][i] for seed in SEEDS) for i in (0, 1)] for w in WORKLOADS}
            for name in VARIANTS
        }
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
