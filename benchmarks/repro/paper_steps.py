"""Where each of the paper's steps matters: its two schedulers whole, and with one step left out or changed at a time.

    python benchmarks/repro/paper_steps.py           # what the result has not yet: an hour on the compiled core
    python benchmarks/repro/paper_steps.py hot video --seeds 1
    python benchmarks/repro/paper_steps.py --draw    # fill in the page from the kept results

The paper's five workloads on four A6000 with Mistral-7B, simulated, at two loads, as Poisson arrivals and as those of
Azure's code trace (`azure2023_code.csv.gz` in the folder `PREBLE_DATA`), then cases made so that a step must act. Whole
is E2 with priority groups on each replica and H of 180 s. The first fifth of each run warms up. A step that made no
decision in a run changes nothing in it, so it is not run without it.
Result: benchmarks/results/paper_steps.json. Page: benchmarks/EVALUATION.md.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from made_by import note
from page import EVALUATION, fill, markdown

from preble.core.policies.e2 import E2, RebalanceSettings
from preble.core.policies.policy import Policy
from preble.core.replica.waiting_queue import QueueOrder
from preble.lab.metrics import summarize
from preble.lab.report import Table
from preble.lab.sim import SimConfig, simulate
from preble.lab.sim.memory import fewer_collections
from preble.lab.workloads import Stream, WorkloadPlan
from preble.profiles import load_profile

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "paper_steps.json"
DATA = Path(os.environ.get("PREBLE_DATA", "data"))
SEEDS = (40, 41, 42)
"""Nothing of E2 was chosen on them."""
WARM = 0.2
"""Part of a run's arrivals that does not count."""
H_S = 180.0
LASTING_S = 240.0
STRETCH = 2000
"""Requests of the trace whose gaps one seed takes."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Requests at a rate. `loads`: requests/s. `source`, `options`: of the workload's plan."""

    title: str
    loads: tuple[float, ...]
    source: str = "streams"
    options: dict[str, Any] = {}
    bursts: bool = False

    def plan(self, rate: float, seed: int) -> WorkloadPlan:
        first = STRETCH * (seed - SEEDS[0])
        arrivals = f"{DATA}/azure2023_code.csv.gz[{first}:{first + STRETCH}]" if self.bursts else "poisson"
        options = self.options if self.options.get("streams") else self.options | {"arrivals": arrivals}
        return WorkloadPlan(source=self.source, requests=int(LASTING_S * rate), rps=rate, seed=seed, **options)


def _paper() -> Iterator[tuple[str, Case]]:
    """Loads: a half and nine tenths of what the evaluation's least load carries; of `preble` where prompts are long."""
    for source, title, loads, options in (
        ("toolbench", "tool use", (33.0, 60.0), {}),
        ("agent", "embodied agent", (60.0, 110.0), {}),
        ("programming", "programming", (8.6, 15.4), {}),
        ("video", "video", (3.9, 7.0), {"num_prefixes": 116}),
        ("longdoc", "long documents", (2.4, 4.3), {"num_prefixes": 40}),
    ):
        for bursts in (False, True):
            name, arrivals = (f"{source}-azure", "Azure's arrivals") if bursts else (source, "Poisson")
            yield (
                name,
                Case(title=f"{title}, {arrivals}", loads=loads, source=source, options=options, bursts=bursts),
            )


def _made() -> Iterator[tuple[str, Case]]:
    """Each for one step."""

    def case(title: str, loads: tuple[float, ...], *streams: Stream) -> Case:
        return Case(title=title, loads=loads, options={"streams": streams})

    writers = Stream(name="writers", share=1.0, prefixes=1, question_tokens=50, output_tokens=1000)
    readers = Stream(name="readers", share=12.0, prefixes=1, prefix_tokens=0, question_tokens=2000, output_tokens=8)
    yield (
        "writers",
        case("one prefix with answers of 1,000 tokens, beside unshared prompts", (6.0, 10.0), writers, readers),
    )
    hit = Stream(name="hit", share=3.0, prefixes=1, question_tokens=20, output_tokens=100)
    unshared = Stream(name="unshared", share=5.0, prefixes=1, prefix_tokens=0, question_tokens=2000, output_tokens=100)
    yield "decoders", case("three of eight prompts hit one prefix, the others are unshared", (5.0, 9.0), hit, unshared)
    usual = Stream(name="usual", share=20.0, prefixes=24, question_tokens=300, zipf=1.1)
    hot = Stream(name="hot", share=20.0, prefixes=1, question_tokens=600, from_s=120.0)
    yield "hot", case("one prefix that becomes too hot for one replica", (15.0, 20.0), usual, hot)
    hits = Stream(name="hits", share=4.0, prefixes=40, question_tokens=200, zipf=1.0)
    misses = Stream(name="misses", share=1.0, prefixes=1, prefix_tokens=0, question_tokens=2200)
    yield "misses", case("four of five prompts hit, the fifth is unshared", (30.0, 38.0), hits, misses)


PAPER = MappingProxyType(dict(_paper()))
MADE = MappingProxyType(dict(_made()))
CASES = MappingProxyType({**MADE, **PAPER})
REASONS = ("exploit", "explore", "redirect", "balance", "replicate")


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """The paper's scheduler, changed in one thing. `acts`: the decisions without which it changes nothing; empty if it
    may always change something."""

    policy: Callable[[], Policy] = E2
    order: QueueOrder = QueueOrder.GROUPS
    window_s: float = H_S
    acts: tuple[str, ...] = ()


WHOLE = "whole"
VARIANTS = MappingProxyType(
    {
        WHOLE: Variant(),
        "no balance": Variant(policy=lambda: E2(mix_decode=False), acts=("balance",)),
        "no replication": Variant(
            policy=lambda: E2(settings=RebalanceSettings(replicate=False)), acts=("replications",)
        ),
        "no redirects, no replication": Variant(
            policy=lambda: E2(rebalance=False), acts=("redirect", "replicate", "replications")
        ),
        "most cached first": Variant(order=QueueOrder.LPM),
        "first come first": Variant(order=QueueOrder.FCFS),
        "H 60 s": Variant(window_s=60.0),
        "H 540 s": Variant(window_s=540.0),
    }
)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run, times in seconds. `made`: placements by reason, and `replications`."""

    case: str
    rate: float
    variant: str
    seed: int
    e2e_s: float
    ttft_p99_s: float
    made: dict[str, int]

    @property
    def key(self) -> tuple[str, float, str, int]:
        return self.case, self.rate, self.variant, self.seed


def play(name: str, rate: float, variant: str, seed: int) -> Run:
    of = VARIANTS[variant]
    config = SimConfig(profile=load_profile("a6000-mistral-7b"), order=of.order, window_s=of.window_s, seed=seed)
    workload = CASES[name].plan(rate, seed).make()
    with fewer_collections():
        result = simulate(config, workload, policy=of.policy())
    from_s = WARM * max(record.scheduled_s for record in result.records)
    summary = summarize([record for record in result.records if record.scheduled_s >= from_s])
    assert summary.e2e is not None and summary.ttft is not None
    return Run(
        case=name,
        rate=rate,
        variant=variant,
        seed=seed,
        e2e_s=summary.e2e.mean_s,
        ttft_p99_s=summary.ttft.p99_s,
        made=result.reasons | {"replications": sum(one.added for one in result.replications)},
    )


def known() -> list[Run]:
    return msgspec.json.decode(RESULT.read_bytes(), type=list[Run]) if RESULT.exists() else []


def run_missing(cases: Sequence[str], seeds: Sequence[int]) -> None:
    """Play what is missing of these, and keep each run at once."""
    runs = {run.key: run for run in known()}
    for seed in seeds:
        for name in cases:
            for rate in CASES[name].loads:
                for variant in VARIANTS:
                    whole = runs.get((name, rate, WHOLE, seed))
                    if (name, rate, variant, seed) in runs or (whole and not _decided(variant, whole)):
                        continue
                    run = play(name, rate, variant, seed)
                    runs[run.key] = run
                    print(f"{name:20}{rate:6g} {variant:30}{seed:4}{run.e2e_s:8.2f}{run.ttft_p99_s:8.2f}", flush=True)
                    lines = b",\n ".join(msgspec.json.encode(one) for one in runs.values())
                    RESULT.write_bytes(b"[\n %s\n]\n" % lines)


# -- the page ---------------------------------------------------------------------------------------------------------

Runs = dict[tuple[str, float, str, int], Run]


def _decided(variant: str, whole: Run) -> bool:
    """Return whether the whole decided anything that the variant leaves out."""
    acts = VARIANTS[variant].acts
    return not acts or any(whole.made.get(act) for act in acts)


def _rows(cases: Sequence[str], runs: Runs) -> Iterator[tuple[str, list[Run]]]:
    """Yield each case and load, and its runs of the whole of the seeds of which nothing is missing."""
    for name in cases:
        for rate in CASES[name].loads:
            whole = [runs[name, rate, WHOLE, seed] for seed in SEEDS if (name, rate, WHOLE, seed) in runs]
            complete = [
                one
                for one in whole
                if all((name, rate, other, one.seed) in runs for other in VARIANTS if _decided(other, one))
            ]
            if complete:
                yield f"{CASES[name].title}, {rate:g}/s", complete


def gained(cases: Sequence[str], runs: Runs) -> str:
    """Return what each step gains in these cases, as Markdown."""
    others = [variant for variant in VARIANTS if variant != WHOLE]
    rows = [[title, *(_cell(one, whole, runs) for one in others)] for title, whole in _rows(cases, runs)]
    caption = "Mean E2E over the whole's, seed by seed; above 1 is slower than the whole. Never: it decided nothing."
    return markdown(Table(("case", *others), rows, caption))


def _cell(variant: str, whole: Sequence[Run], runs: Runs) -> str:
    if not any(_decided(variant, one) for one in whole):
        return "never"
    others = [runs.get((one.case, one.rate, variant, one.seed), one) for one in whole]
    return ", ".join(f"{other.e2e_s / one.e2e_s:.2f}" for other, one in zip(others, whole, strict=True))


def decided(runs: Runs) -> str:
    """Return how the whole placed, as Markdown."""
    rows = []
    for title, whole in _rows([*CASES], runs):
        placed = sum(sum(one.made.values()) - one.made["replications"] for one in whole)
        shares = [sum(one.made.get(reason, 0) for one in whole) / placed for reason in REASONS]
        first = [f"{sum(one.made['replications'] for one in whole) / len(whole):.1f}"]
        rows.append([title, *(f"{share:.2%}" for share in shares), *first])
    caption = (
        "Of all placements of the whole; replications: of a prefix to a further replica, in a run of four minutes."
    )
    return markdown(Table(("case", *REASONS, "replications"), rows, caption))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many")
    parser.add_argument("--draw", action="store_true", help="only fill in the page")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    if not options.draw:
        run_missing(options.cases or [*CASES], SEEDS[: options.seeds])
        note("paper_steps")
    runs = {run.key: run for run in known()}
    fill(
        EVALUATION,
        {
            "paper-steps": gained([*PAPER], runs),
            "paper-steps-made": gained([*MADE], runs),
            "paper-steps-decided": decided(runs),
        },
    )


if __name__ == "__main__":
    main()
