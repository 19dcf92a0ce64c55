"""What each term of the policy `preble` gains (docs/decisions/0008).

    python benchmarks/repro/policy_steps.py            # six minutes of CPU with the compiled core (`make native`)
    python benchmarks/repro/policy_steps.py --draw     # fill in the page from the results that are there

Mean E2E and p99 of TTFT on four A6000 replicas with Mistral-7B, as multiples of those of `preble` with the same seed,
of the requests of the last `MEASURED` of each run: with warm caches, and on the longer runs with the policy's window
full. Results: benchmarks/results/policy_steps.json.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from made_by import note

from preble.core.policies.cost_table import CostTable
from preble.core.policies.e2 import E2
from preble.core.policies.policy import Policy
from preble.core.policies.preble import Preble, _Delays
from preble.core.policies.registry import make_policy
from preble.core.policies.view import Choice, ClusterView
from preble.core.replica_index import ReplicaIndex
from preble.core.types import Reason
from preble.lab.metrics import summarize
from preble.lab.metrics.estimates import estimate
from preble.lab.sim import SimConfig, simulate
from preble.lab.sim.memory import fewer_collections
from preble.lab.workloads import Stream, WorkloadPlan
from preble.profiles import load_profile

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "policy_steps.json"
PAGE = ROOT / "docs" / "decisions" / "0008-the-policy-preble.md"
SEEDS = (30, 31, 32)
"""The terms were chosen on others; see decision 0008."""
VALUE = 4.0
"""Of a second before the first token, in seconds of decoding: the default of `Preble`."""
MEASURED = 0.4
"""Part of a run's arrivals, from the end."""


@dataclass(frozen=True)
class Case:
    """`workload`, `cluster`: fields of `WorkloadPlan` and `SimConfig`."""

    requests: int
    rps: float
    workload: dict[str, Any]
    cluster: dict[str, Any] = field(default_factory=dict)

    def plan(self, seed: int) -> WorkloadPlan:
        return WorkloadPlan(requests=self.requests, rps=self.rps, seed=seed, **{"source": "streams"} | self.workload)


def streams(**stream: Any) -> dict[str, Any]:
    return {"streams": (Stream(**stream),)}


CASES = {
    "tools, caches full": Case(8000, 45.0, {"source": "toolbench", "num_prefixes": 77}, {"kv_tokens": 40_000}),
    "video": Case(3000, 5.5, {"source": "video", "num_prefixes": 116}),
    "flip": Case(
        4000,
        40.0,
        streams(prefixes=40, prefix_tokens=1500, question_tokens=200, zipf=1.5, flip_s=10.0),
    ),
    "answers": Case(
        4500,
        22.0,
        streams(
            prefixes=40,
            prefix_tokens=1500,
            output_tokens=10,
            long_every=10,
            long_output_tokens=2000,
        ),
    ),
}


class Part:
    """`preble` with some of its terms only: each is multiplied by 0 or 1. M is E2's.

    It is a class of its own, since a plain class cannot inherit from a compiled one.
    """

    name = "preble"

    def __init__(
        self,
        *,
        crowding: float = 4.0,
        standing: float = 0.0,
        together: float = 0.0,
        later: float = 0.0,
        answers: float = 0.0,
    ) -> None:
        self._crowding = crowding
        self._standing = standing
        self._together = together
        self._later = later
        self._answers = answers

    def choose(self, view: ClusterView, rng: Random) -> Choice:
        matched = view.matched_tokens(view.replicas)
        costs = self._costs(view, matched, max(matched))
        return Choice(costs.cheapest(rng), Reason.POLICY, costs)

    def _costs(self, view: ClusterView, matched: list[int], best: int) -> CostTable:
        crowd = VALUE * self._crowding * view.requests_per_s / len(view.replicas)
        together_s = self._together * 2.0 * view.cost_model.decode_sequence_s(view.request.num_prompt_tokens)
        loads, prefills = [], []
        for replica, tokens in zip(view.replicas, matched, strict=True):
            waiting_s, in_flight = (
                view.waiting_prefill_s[replica],
                view.num_requests[replica],
            )
            prefill = self._paid_s(view, tokens, best)
            loads.append(VALUE * waiting_s + together_s * self._output_tokens(view, replica))
            prefills.append(prefill * (VALUE + self._standing * in_flight + crowd * (waiting_s + prefill / 2)))
        return CostTable(view, view.replicas, matched, load_s=loads, prefill_s=prefills)

    def _paid_s(self, view: ClusterView, matched: int, best: int) -> float:
        if not self._later or matched == best:
            return view.prefill_s(matched)
        return _Delays(view, VALUE, 4.0)._shared_prefill_s(view, matched)[1]  # without the limit

    def _output_tokens(self, view: ClusterView, replica: ReplicaIndex) -> float:
        if not self._answers:
            return view.mean_output_tokens[replica] * view.num_requests[replica]
        return min(
            view.expected_output_tokens * view.num_requests[replica],
            view.output_tokens_in_flight[replica],
        )


STEPS: dict[str, Callable[[], Policy]] = {
    "e2": E2,
    "own waiting, all others stand still": lambda: Part(standing=1.0, crowding=0.0),
    "+ who comes meanwhile": lambda: Part(standing=1.0),
    "+ decoding together": lambda: Part(standing=1.0, together=1.0),
    "+ later users of a copy": lambda: Part(standing=1.0, together=1.0, later=1.0),
    "+ answers by prefix": lambda: Part(standing=1.0, together=1.0, later=1.0, answers=1.0),
    "+ what is evicted": Preble,
}
RIVALS: dict[str, Callable[[], Policy]] = {name: partial(make_policy, name) for name in ("sticky_until_saturated",)}
KNOBS: dict[str, Callable[[], Policy]] = {
    "`ttft_weight` 1.5": lambda: Preble(ttft_weight=1.5),
    "`ttft_weight` 6": lambda: Preble(ttft_weight=6.0),
    "`crowding` 2": lambda: Preble(crowding=2.0),
    "`crowding` 8": lambda: Preble(crowding=8.0),
}
VARIANTS = STEPS | RIVALS | KNOBS
WHOLE = "+ what is evicted"
"""The step with which the policy is whole."""
Measured = dict[str, dict[str, list[list[float]]]]
"""Variant -> case -> for each seed, mean E2E and p99 of TTFT in seconds."""


def measure(name: str, case: Case, seed: int) -> list[float]:
    """Mean E2E and p99 of TTFT, in seconds."""
    config = SimConfig(profile=load_profile("a6000-mistral-7b"), replicas=4, seed=seed, **case.cluster)
    with fewer_collections():
        records = simulate(config, case.plan(seed).make(), policy=VARIANTS[name]()).records
    from_s = (1 - MEASURED) * max(record.scheduled_s for record in records)
    summary = summarize([record for record in records if record.scheduled_s >= from_s])
    assert summary.e2e is not None and summary.ttft is not None
    print(f"{name:36}{seed:4}{summary.e2e.mean_s:8.2f}{summary.ttft.p99_s:8.2f}", flush=True)
    return [summary.e2e.mean_s, summary.ttft.p99_s]


def table(found: Measured, names: list[str]) -> str:
    """Markdown: E2E mean and TTFT p99 of each variant as multiples of those of `preble`, over the seeds."""
    lines = ["| | " + " | ".join(CASES) + " |", "|---|" + "---|" * len(CASES)]
    for name in names:
        cells = [", ".join(_times(found, name, case, place) for place in (0, 1)) for case in CASES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _times(found: Measured, name: str, case: str, place: int) -> str:
    ratios = [its[place] / own[place] for its, own in zip(found[name][case], found[WHOLE][case], strict=True)]
    mean, half = estimate(ratios).mean, estimate(ratios).half_width or 0.0
    return f"{mean:.0f}" if mean >= 10 else f"{mean:.2f}" if name == WHOLE else f"{mean:.2f} ± {half:.2f}"


def filled(page: str) -> str:
    """The page with the tables of the kept results between its markers."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    for name, variants in (("steps", STEPS), ("rivals", RIVALS), ("knobs", KNOBS)):
        between = f"<!-- {name} -->\n{table(found, [*variants])}\n<!-- end -->"
        page = re.sub(f"<!-- {name} -->\n.*?<!-- end -->", lambda _, text=between: text, page, flags=re.DOTALL)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only fill in the page")
    if not parser.parse_args().draw:
        found = {
            name: {label: [measure(name, case, seed) for seed in SEEDS] for label, case in CASES.items()}
            for name in VARIANTS
        }
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        note("policy_steps")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
