"""The tables of docs/bursts.md and of the pages of its details."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from evaluation_cases import CASES, Case
from evaluation_extras import JUST_AFTER_S, Loss
from evaluation_extras import Bound as WorkloadBound

from preble.lab.compare import CompareResult, Run, Standing
from preble.lab.compare.numbers import E2E_MEAN, E2E_P99, TTFT_MEAN, TTFT_P99, Number, significant
from preble.lab.compare.plan import BASELINE
from preble.lab.compare.tables import WORSE, ranking_table, share_cell
from preble.lab.metrics.capacity import Bound
from preble.lab.metrics.estimates import Estimate, estimate
from preble.lab.report import Table

LOADS = (0.5, 0.8, 0.95)
"""Parts of the best policy's capacity at which latencies are shown."""
OWN = "preble"
SLOWER = 1.05
"""A mean E2E that is more than this times the baseline's is named."""

BOUNDED = "<: at most that; with some seed no rate that was run keeps the SLO"

Results = Mapping[str, CompareResult]


def of_group(results: Results, *groups: str) -> list[Case]:
    """The cases of these groups that were run."""
    return [case for case in CASES.values() if case.group in groups and case.name in results]


def measured(found: Estimate | None) -> str:
    """A mean with half of its interval: 1.52 ± 0.031."""
    if found is None:
        return "-"
    interval = "" if found.half_width is None else f" ± {significant(found.half_width, 2)}"
    return significant(found.mean, 3) + interval


def at_rate(number: Number, runs_by_rate: Mapping[float, Sequence[Run]], rate: float) -> list[float]:
    """A latency with each seed at a rate that need not have been run: its logarithm is taken to be straight between
    the two nearest that were, for latencies grow faster than rates. Outside of them it is that of the nearest."""
    rates = list(runs_by_rate)
    position = bisect_left(rates, rate)
    low, high = rates[max(position - 1, 0)], rates[min(position, len(rates) - 1)]
    share = 0.0 if low == high else (rate - low) / (high - low)
    pairs = zip(_seconds(number, runs_by_rate[low]), _seconds(number, runs_by_rate[high]), strict=True)
    return [math.exp((1 - share) * math.log(below) + share * math.log(above)) for below, above in pairs]


def load_rates(result: CompareResult, workload: str) -> list[float]:
    """`LOADS` times the capacity of the best policy, but not below the lowest rate that was run."""
    standings = result.standings_of(workload)
    best = max(one.capacity_rps.mean for one in standings)
    lowest = min(result.runs_of(workload, standings[0].policy))
    return sorted({max(load * best, lowest) for load in LOADS})


def detail_table(result: CompareResult, case: Case) -> Table:
    """Capacity, and the latencies at parts of the best one's; where replicas are lost, only those, as they were run."""
    workload = case.workload
    policies = [standing.policy for standing in result.standings_of(workload)]
    runs = {policy: result.runs_of(workload, policy) for policy in policies}
    has_capacity = case.group != "loss"
    rates = load_rates(result, workload) if has_capacity else list(runs[OWN])
    shown = [(number, rate) for number in (E2E_MEAN, TTFT_P99) for rate in rates]
    ranking = ranking_table(result, workload)
    columns = [1, *range(3, len(ranking.columns))] if has_capacity else []
    best = max(one.capacity_rps.mean for one in result.standings_of(workload))
    loads = ", ".join(f"{rate / best:.0%}" for rate in rates)
    interpolated = (
        f"Latencies in seconds at {loads} of the best capacity, interpolated (their logarithms, seed by seed) between "
        "the rates that were run."
    )
    return Table(
        (
            "policy",
            *(ranking.columns[column] for column in columns),
            *(f"{number.name} at {significant(rate, 3)}/s" for number, rate in shown),
        ),
        [
            (
                policy,
                *(row[column] for column in columns),
                *(measured(estimate(at_rate(number, runs[policy], rate))) for number, rate in shown),
            )
            for policy, row in zip(policies, ranking.rows, strict=True)
        ],
        caption=f"{ranking.caption} {interpolated}"
        if has_capacity
        else "Latencies in seconds; failed requests have none.",
        marked=ranking.marked if has_capacity else frozenset(),
    )


def overview_table(results: Results, group: str) -> Table:
    """Capacity as a share of the best policy's, a row a policy."""
    cases = of_group(results, group)
    standings = _by_policy(results, cases)
    means = {
        policy: sum(one.share_of_best for one in of_it.values()) / len(of_it) for policy, of_it in standings.items()
    }
    return Table(
        ("policy", *(case.title for case in cases), "mean", "worst"),
        [
            (
                policy,
                *(share_cell(standings[policy][case.name]) for case in cases),
                f"{means[policy]:.0%}",
                _worst(of_it),
            )
            for policy, of_it in sorted(standings.items(), key=lambda pair: -means[pair[0]])
        ],
        caption=f"Capacity at the SLO as a share of the best policy's. {WORSE}. {BOUNDED}.",
    )


def harm_table(results: Results) -> Table:
    """Who does harm on each of the cases that were made for it."""
    rows = []
    for case in of_group(results, "harm"):
        result = results[case.name]
        standings = [one for one in result.standings_of(case.workload) if one.policy != BASELINE]
        rate = _baseline_load(result, case.workload)
        rows.append(
            (
                case.title,
                _names(_less(one) for one in standings if one.is_surely_worse),
                _names(_less(one) for one in standings if one.is_worse and not one.is_surely_worse),
                f"{significant(rate, 3)}/s: " + _names(_slower(result, case.workload, rate)),
            )
        )
    return Table(
        (
            "case",
            f"carries less than {BASELINE}",
            "less, but within the 95 % interval",
            f"mean E2E longer by more than {SLOWER - 1:.0%} at 80 % of what {BASELINE} carries",
        ),
        rows,
        caption=f"Capacity and mean E2E against {BASELINE}; the last column names those whose whole 95 % interval is "
        f"above {SLOWER - 1:.0%}.",
    )


def distance_table(results: Results, bounds: Sequence[WorkloadBound]) -> Table:
    """The bounds that none can beat, and how many times as much `preble` and the nearest policy take."""
    rows = []
    for name, of_case in groupby(bounds, key=lambda bound: bound.case):
        found = list(of_case)
        rate = found[0].workload.rps
        assert rate is not None, "the main cases have rates"
        result, case = results[name], CASES[name]
        for number, floors in (
            (TTFT_MEAN, [bound.ttft_mean_s for bound in found]),
            (E2E_MEAN, [bound.e2e_mean_s for bound in found]),
        ):
            times = {
                policy: estimate(
                    [
                        value / floor
                        for value, floor in zip(
                            at_rate(number, result.runs_of(case.workload, policy), rate), floors, strict=True
                        )
                    ]
                )
                for policy in result.plan.policies
            }
            nearest = min(times, key=lambda policy: times[policy].mean)
            least = significant(estimate(floors).mean, 3)
            rows.append(
                (
                    f"{case.title}, {significant(rate, 3)}/s",
                    f"{number.name}, s",
                    least,
                    measured(times[OWN]),
                    f"{measured(times[nearest])} ({nearest})",
                )
            )
        most = estimate([bound.requests_per_s for bound in found])
        standings = {one.policy: one for one in result.standings_of(case.workload)}
        best = result.standings_of(case.workload)[0]
        rows.append(
            (
                case.title,
                "requests/s",
                significant(most.mean, 3),
                _share_of(standings[OWN], most),
                f"{_share_of(best, most)} ({best.policy})",
            )
        )
    return Table(
        ("workload", "of", "the bound", OWN, "the nearest policy"),
        rows,
        caption="Latencies: times the bound, at the highest rate that some policy carries. Requests/s: capacity at the "
        "SLO as a share of the rate that no scheduler can sustain.",
    )


def loss_table(losses: Sequence[Loss]) -> Table:
    """Latencies before, just after and later than the loss of a replica, those that recover best first."""
    runs: dict[str, list[Loss]] = {}
    for loss in losses:
        runs.setdefault(loss.policy, []).append(loss)
    just_after = {policy: [run.just_after.ttft_p99_s for run in of_it] for policy, of_it in runs.items()}
    policies = sorted(runs, key=lambda policy: estimate(just_after[policy]).mean)

    def cells(of_it: Sequence[Loss]) -> Iterable[str]:
        yield measured(estimate([float(run.failed) for run in of_it]))
        stretches = [(run.before, run.just_after, run.later) for run in of_it]
        for stretch in zip(*stretches, strict=True):
            yield measured(estimate([one.ttft_p99_s for one in stretch]))
        for stretch in zip(*stretches, strict=True):
            yield measured(estimate([one.e2e_mean_s for one in stretch]))

    when = ("before", f"{JUST_AFTER_S:g} s after", "later")
    return Table(
        ("policy", "failed", *(f"TTFT p99 {part}" for part in when), *(f"E2E mean {part}" for part in when)),
        [(policy, *cells(runs[policy])) for policy in policies],
        caption=f"At {losses[0].workload.rps:g} requests/s, by when requests were sent; seconds. Failed: requests that "
        "were being answered when their replica was lost; they have no latency. Marked: a longer p99 of TTFT just "
        f"after the loss than {BASELINE}'s, the whole 95 % interval.",
        marked=frozenset(
            number for number, policy in enumerate(policies) if _ratio(just_after[policy], just_after[BASELINE]).low > 1
        ),
    )


def paper_table(results: Results) -> Table:
    """Round robin's latencies as multiples of ours, where that is most, beside the paper's."""
    rows = [
        (
            case.full_title,
            policy,
            _where_it_is_carried(results[case.name], case.workload, policy),
            *_ratios(results[case.name], case.workload, policy),
            case.paper,
        )
        for case in CASES.values()
        if case.paper and case.name in results
        for policy in ("e2", OWN)
    ]
    return Table(
        (
            "case",
            "policy",
            "mean E2E at the most that round robin carries",
            "largest at, /s",
            "mean E2E",
            "p99 E2E",
            "the paper: mean, p99",
        ),
        rows,
        caption="Round robin's latency divided by the policy's, seed by seed: at round robin's own capacity, and, as "
        "the paper does, at the rate where the mean ratio is largest among those at which the policy keeps the SLO. "
        "There round robin is mostly overloaded, so that these ratios grow with the length of the run.",
    )


def _where_it_is_carried(result: CompareResult, workload: str, policy: str) -> str:
    """The ratio of the mean E2E at the highest rate that round robin carries; interpolated."""
    standing = next(one for one in result.standings_of(workload) if one.policy == "round_robin")
    if standing.bound is Bound.BELOW:
        return f"it carries less than {standing.capacity_rps.mean:.3g}/s"
    rate = standing.capacity_rps.mean
    own, other = (at_rate(E2E_MEAN, result.runs_of(workload, name), rate) for name in (policy, "round_robin"))
    return f"{measured(_ratio(other, own))} ({rate:.3g}/s)"


def _ratios(result: CompareResult, workload: str, policy: str) -> tuple[str, str, str]:
    """The rate, and the ratios of mean and p99; at the lowest rate if the policy keeps the SLO at none."""
    own, other = (result.runs_of(workload, name) for name in (policy, "round_robin"))
    slo = result.plan.slo_of(workload)
    kept = [rate for rate, runs in own.items() if all(slo.is_met_by(run.summary) for run in runs)]

    def ratio(number: Number, rate: float) -> Estimate:
        return _ratio(_seconds(number, other[rate]), _seconds(number, own[rate]))

    rate = max(kept or [min(own)], key=lambda rate: ratio(E2E_MEAN, rate).mean)
    past = "" if kept else " (past the SLO)"
    return f"{rate:g}{past}", measured(ratio(E2E_MEAN, rate)), measured(ratio(E2E_P99, rate))


def _by_policy(results: Results, cases: Iterable[Case]) -> dict[str, dict[str, Standing]]:
    """Policy -> case -> its standing."""
    found: dict[str, dict[str, Standing]] = {}
    for case in cases:
        for standing in results[case.name].standings_of(case.workload):
            found.setdefault(standing.policy, {})[case.name] = standing
    return found


def _worst(standings: Mapping[str, Standing]) -> str:
    return f"{min(one.share_of_best for one in standings.values()):.0%}"


def _baseline_load(result: CompareResult, workload: str) -> float:
    """80 % of what the baseline carries, but not below the lowest rate that was run."""
    baseline = next(one for one in result.standings_of(workload) if one.policy == BASELINE)
    return max(0.8 * baseline.capacity_rps.mean, min(result.runs_of(workload, BASELINE)))


def _slower(result: CompareResult, workload: str, rate: float) -> Iterable[str]:
    baseline = at_rate(E2E_MEAN, result.runs_of(workload, BASELINE), rate)
    ratios = {
        policy: _ratio(at_rate(E2E_MEAN, result.runs_of(workload, policy), rate), baseline)
        for policy in result.plan.policies
    }
    slower = {policy: found for policy, found in ratios.items() if found.low > SLOWER}
    for policy, found in sorted(slower.items(), key=lambda pair: -pair[1].mean):
        yield f"{policy} ({found.mean - 1:+.0%})"


def _less(standing: Standing) -> str:
    assert standing.versus_baseline is not None, "it is worse than the baseline"
    return f"{standing.policy} ({'≤ ' if standing.bound else ''}{standing.versus_baseline.mean:+.0%})"


def _names(texts: Iterable[str]) -> str:
    return ", ".join(texts) or "nobody"


def _share_of(standing: Standing, most: Estimate) -> str:
    return f"{standing.bound}{standing.capacity_rps.mean / most.mean:.0%}"


def _ratio(values: Sequence[float], others: Sequence[float]) -> Estimate:
    return estimate([value / other for value, other in zip(values, others, strict=True)])


def _seconds(number: Number, runs: Sequence[Run]) -> list[float]:
    """With each seed; infinite where a run served nothing."""
    return [math.inf if (value := number.of(run)) is None else value for run in runs]
