"""The numbers that a comparison shows of its runs: what each is called, how it is read and written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from preble.lab.compare.result import CompareResult, PolicyStanding, Run
from preble.lab.metrics.capacity import Bound, CapacitySlo
from preble.lab.metrics.estimates import Estimate, estimate
from preble.lab.metrics.itl import Itl
from preble.lab.metrics.steady import Verdict
from preble.lab.metrics.summary import TimeSummary

DEFINITIONS = (
    "TTFT = first token − scheduled; E2E = end − scheduled; ITL = gap between two tokens, every gap of "
    "every answer; hit rate = prompt tokens from a cache / prompt tokens; "
    "imbalance = busy GPU seconds of the busiest replica / of the average one; computed = prompt tokens that replicas "
    "computed, again after a preemption included, a request. Times in seconds. ±: half of the 95 % interval of the "
    "mean over the seeds (Student's t). Settles: whether queues and hit rate stay as they are after the warm-up, which "
    "the other numbers leave out; a rate at which they do not is not carried."
)
GOODPUT_DEFINITIONS = (
    "Goodput = requests in time a second of the time in which they came; in time: first token within its target, and "
    "(end − first token) / (output tokens − 1) within that of each further one; of a class or tenant: requests in "
    "time a second, and their share of what it asked for. Promising: requests wait in the "
    "gateway, the urgent first, go where their target is kept, and are refused where none keeps it."
)


@dataclass(frozen=True, slots=True)
class Number:
    """One number of a run.

    `axis`: what it is measured in. `of`: None where a run has none. `text`: how it is shown. `most`: it cannot be more.
    """

    name: str
    axis: str
    of: Callable[[Run], float | None]
    text: Callable[[float], str]
    most: float = math.inf

    @property
    def heading(self) -> str:
        return f"{self.name}, s" if self.axis == SECONDS else self.name

    def over(self, runs: Sequence[Run]) -> Estimate | None:
        """Return the estimate over the seeds; None if a run has no such thing."""
        values = [value for run in runs if (value := self.of(run)) is not None]
        return estimate(values) if values and len(values) == len(runs) else None

    def cell(self, runs: Sequence[Run], *, with_interval: bool = True) -> str:
        """Return the mean over the seeds as text, with ± half of its interval if there are several."""
        found = self.over(runs)
        if found is None:
            return "-"
        if found.half_width is None or not with_interval:
            return self.text(found.mean)
        return f"{self.text(found.mean)} ± {self.text(found.half_width)}"


def short_seconds(value: float) -> str:
    """
    >>> short_seconds(0.0421), short_seconds(12.34), short_seconds(1234.5)
    ('0.042', '12.34', '1,234')
    """
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _time(metric: str, statistic: str) -> Callable[[Run], float | None]:
    def of(run: Run) -> float | None:
        distribution: TimeSummary | Itl | None = getattr(run.judged, metric)
        return None if distribution is None else float(getattr(distribution, statistic))

    return of


SECONDS = "seconds"
TTFT_MEAN = Number("TTFT mean", SECONDS, _time("ttft", "mean_s"), short_seconds)
TTFT_P99 = Number("TTFT p99", SECONDS, _time("ttft", "p99_s"), short_seconds)
E2E_MEAN = Number("E2E mean", SECONDS, _time("e2e", "mean_s"), short_seconds)
ITL_P99 = Number("ITL p99", SECONDS, _time("itl", "p99_s"), short_seconds)
E2E_P99 = Number("E2E p99", SECONDS, _time("e2e", "p99_s"), short_seconds)
LATENCIES = (TTFT_MEAN, TTFT_P99, E2E_MEAN, E2E_P99)
HIT_RATE = Number("hit rate", "share of prompt tokens", lambda run: run.judged.hit_rate, "{:.1%}".format, most=1.0)
IMBALANCE = Number("imbalance", "busiest / average replica", lambda run: run.load_imbalance, "{:.2f}".format)
COMPUTED = Number(
    "computed", "tokens a request", lambda run: run.computed_tokens / run.summary.requests, "{:,.0f}".format
)
CACHING = (HIT_RATE, IMBALANCE, COMPUTED)
FAILED = Number("failed", "requests", lambda run: float(run.summary.errors), "{:.3g}".format)


def settling(runs: Sequence[Run]) -> str:
    """Return what runs of several seeds say of a service that never ends: the worst verdict of them; "" if none has
    one.
    """
    found = [run.steady for run in runs if run.steady is not None]
    worst = [Verdict.GROWING, Verdict.SHORT, Verdict.WARMING, Verdict.STEADY]
    return str(min(found, key=lambda one: worst.index(one.verdict))) if found else ""


def columns(runs: Iterable[Run]) -> tuple[Number, ...]:
    """Return what a table of these runs shows; failures only if there are any, ITL only if every run has it."""
    runs = list(runs)
    failed = (FAILED,) if any(run.summary.errors for run in runs) else ()
    shown = (*LATENCIES, ITL_P99) if all(run.judged.itl is not None for run in runs) else LATENCIES
    return (*shown, *CACHING, *failed)


def headline_rate(result: CompareResult, workload: str) -> float:
    """Return the highest of the compared rates at which some policy keeps the SLO with every seed; the lowest if none
    does.
    """
    rates = shown_rates(result, workload)
    policies = [result.runs_of(workload, policy) for policy in result.plan.contenders]
    slo = result.plan.slo_of(workload)
    kept = [rps for rps in rates if any(all(run.is_carried(slo) for run in runs[rps]) for runs in policies)]
    return max(kept, default=min(rates))


def shown_rates(result: CompareResult, workload: str) -> list[float]:
    """Return the compared rates, ascending; where a trace came at its own times, the rate at which it did."""
    runs_by_rate = result.runs_of(workload, result.plan.contenders[0])
    return sorted(rps for rps, runs in runs_by_rate.items() if runs[0].workload.rps in result.rates[workload])


def caution(result: CompareResult, workload: str) -> str:
    """Return a sentence where the capacities found say little, why, and what to do; "" where they are to be trusted."""
    best, slo = result.standings_of(workload)[0], result.plan.slo_of(workload)
    ranked = result.plan.contenders  # others refuse on purpose
    runs = [run for run in result.runs if run.label == workload and run.policy in ranked]
    if failing := _ended_by_failures(runs, slo):
        num_all = len({(run.policy, run.seed) for run in runs})
        kinds = sorted({kind for run in failing for kind in run.summary.errors_by_kind})
        return (
            f"{workload}: {len(failing)} of {num_all} capacities (one a policy and seed) end where requests fail "
            f"({', '.join(kinds)}), not where they take too long. Compare latencies at fixed rates (--rps) instead."
        )
    if best.bound is Bound.BELOW:
        return (
            f"{workload}: no policy keeps the SLO at any rate that was tried, down to {best.capacity_rps.mean:.3g} "
            f"requests/s; some requests may take longer whoever serves them. Loosen the SLO, of this workload alone if "
            "it should hold for others, or try lower rates."
        )
    if best.bound is Bound.AT_LEAST and result.plan.is_search:
        return (
            f"{workload}: the SLO is kept up to {best.capacity_rps.mean:.3g} requests/s and further: all requests "
            "together do not fill the replicas, or sessions wait for their own answers. Give more requests."
        )
    if short := _only_from_cold(runs, best, slo, result.plan.cluster.window_s):
        return short
    lasting_s = runs[0].summary.requests / best.capacity_rps.mean
    patience_s = slo.ttft_p99_s or slo.e2e_mean_s or 0.0
    if lasting_s >= _MANY * patience_s or runs[0].steady is not None:
        return ""
    return (
        f"{workload}: at the best capacity all requests arrive within {lasting_s:.1f} s, too short for queues to grow; "
        f"capacities come out too high. {_more(_MANY * patience_s * best.capacity_rps.mean)}"
    )


def _only_from_cold(runs: Sequence[Run], best: PolicyStanding, slo: CapacitySlo, window_s: float) -> str:
    """Return where the best policy's capacity rests on runs that are too short."""
    kept = [run for run in runs if run.policy == best.policy and run.is_carried(slo) and run.steady is not None]
    highest = max(kept, key=lambda run: run.rps, default=None)
    if highest is None or highest.steady is None or highest.steady.verdict is not Verdict.SHORT:
        return ""
    return (
        f"{highest.label}: at {highest.rps:.3g} requests/s all requests arrive within {highest.steady.lasted_s:.0f} s, "
        "less than the policy's window: a burst from cold, whose capacity no service keeps. "
        f"{_more(window_s * highest.rps)}"
    )


def _more(num_requests: float) -> str:
    return f"Give more requests, {math.ceil(num_requests)}; of a trace that has fewer, --requests draws them again."


def _ended_by_failures(runs: Sequence[Run], slo: CapacitySlo) -> list[Run]:
    """Return the runs that end the capacity of a policy and seed only because requests failed."""
    broken = sorted((run for run in runs if not run.is_carried(slo)), key=lambda run: -run.rps)
    lowest = {(run.policy, run.seed): run for run in broken}
    failing = [run for run in lowest.values() if run.summary.errors]
    return [run for run in failing if slo.is_met_by(msgspec.structs.replace(run.summary, errors=0))]


_MANY = 20
"""How many times the SLO's bound a run has to last for its capacity to mean something."""
