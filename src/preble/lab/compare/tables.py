"""A comparison as tables, for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from preble.lab.compare.numbers import E2E_MEAN, columns, headline_rate, settling
from preble.lab.compare.plan import BASELINE
from preble.lab.compare.result import CompareResult, PolicyStanding, Run
from preble.lab.metrics.capacity import Bound, CapacitySlo
from preble.lab.metrics.estimates import Estimate, estimate
from preble.lab.metrics.goodput import Goodput
from preble.lab.report import Table
from preble.lab.report.formats import significant

TOO_FEW_SEEDS = "too few seeds"
"""In the place of an interval that would reach below zero."""

WORSE = f" ▼: less than {BASELINE}; ▽: less, but within the 95 % interval."


def ranking_table(result: CompareResult, workload: str) -> Table:
    """Return the policies by capacity, and against the baseline if that is known; those that carry less are marked."""
    standings = result.standings_of(workload)
    baseline = next((one for one in standings if one.policy == BASELINE), None)
    rows = [(one.policy, _capacity(one), f"{one.share_of_best:.0%}", _against(one, baseline)) for one in standings]
    width = 4 if any(row[3] != "-" for row in rows) else 3
    return Table(
        ("policy", "capacity, requests/s", "of the best", f"against {BASELINE}")[:width],
        [row[:width] for row in rows],
        caption=f"Capacity: the highest rate with {_slo_text(result.plan.slo_of(workload))}.{_worse(result)}",
        marked=frozenset(number for number, one in enumerate(standings) if one.is_worse),
    )


def rate_table(result: CompareResult, workload: str, rps: float, *, with_intervals: bool = True) -> Table:
    """Return every number at one rate, the policies in the order of their capacity; a longer mean E2E than the
    baseline's is marked.
    """
    policies = [standing.policy for standing in result.standings_of(workload)]
    runs = {policy: result.runs_of(workload, policy)[rps] for policy in policies}
    slower = _slower_than_baseline(runs)
    shown = columns(run for of_policy in runs.values() for run in of_policy)
    settles = any(settling(of_policy) for of_policy in runs.values())
    return Table(
        ("policy", *(number.heading for number in shown), *(["settles"] if settles else [])),
        [
            (
                policy,
                *(number.cell(runs[policy], with_interval=with_intervals) for number in shown),
                *([settling(runs[policy])] if settles else []),
            )
            for policy in policies
        ],
        caption=f"At {rps:.4g} requests/s." + (f" Marked: a longer mean E2E than {BASELINE}." if slower else ""),
        marked=frozenset(number for number, policy in enumerate(policies) if policy in slower),
    )


def goodput_table(result: CompareResult, workload: str, rps: float) -> Table:
    """Return goodput at one rate where requests have targets, of each class and tenant too; the most first."""
    plan = result.plan
    runs = {policy: result.runs_of(workload, policy)[rps] for policy in (*plan.contenders, *plan.promising)}
    classes = plan.workloads[workload].classes or ("",)
    tenants = tuple(dict.fromkeys(plan.workloads[workload].tenants.values()))

    def goodput(policy: str) -> Estimate:
        return estimate([run.goodput[""].per_s for run in runs[policy]])

    def group(found: Sequence[Goodput]) -> str:
        rate, share = fmean(one.per_s for one in found), fmean(one.share for one in found)
        return f"{share:.1%}, {significant(rate, 3)}/s"

    def part(policy: str, share: Callable[[Goodput], float]) -> str:
        return f"{fmean(share(run.goodput['']) for run in runs[policy]):.1%}"

    def row(policy: str) -> tuple[str, ...]:
        found = goodput(policy)
        interval = "" if found.half_width is None else f" ± {significant(found.half_width, 2)}"
        of_class = [group([run.goodput[name] for run in runs[policy]]) for name in classes]
        of_tenant = [group([run.goodput_of_tenants[name] for run in runs[policy]]) for name in tenants]
        refused = part(policy, lambda one: 1 - one.answered / one.asked if one.asked else 0.0)
        kept = part(policy, lambda one: one.kept)
        return policy, f"{significant(found.mean, 3)}{interval}", *of_class, *of_tenant, refused, kept

    groups = (*classes, *(f"tenant {name}" for name in tenants))
    headings = (f"{name} in time" if name else "in time" for name in groups)
    return Table(
        ("policy", "goodput, requests/s", *headings, "refused or failed", "of the answered in time"),
        [row(policy) for policy in sorted(runs, key=lambda policy: -goodput(policy).mean)],
        caption=f"{workload}: goodput at {rps:.4g} requests/s. {_targets_text(result, workload)}",
    )


def _targets_text(result: CompareResult, workload: str) -> str:
    targets, classes = result.plan.targets, result.plan.workloads[workload].classes
    others = "" if not any(name in classes for name in targets) else "others: "
    texts = []
    for name, target in targets.items():
        if not name or name in classes:
            bounds = (("TTFT", target.ttft_s), ("TPOT", target.tpot_s))
            asked = ", ".join(f"{what} ≤ {bound:g} s" for what, bound in bounds if bound is not None)
            texts.append(f"{name + ': ' if name else others}{asked}")
    return f"Targets: {'; '.join(texts) or 'none'}."


def _worse(result: CompareResult) -> str:
    return WORSE if BASELINE in result.plan.contenders else ""


def overview_table(result: CompareResult) -> Table:
    """Return every policy on every workload: its capacity as a share of the best one's; the best on average first."""
    shares = {
        policy: {one.workload: one for one in result.standings if one.policy == policy}
        for policy in result.plan.contenders
    }
    workloads = list(result.plan.workloads)
    means = {policy: fmean(one.share_of_best for one in of_it.values()) for policy, of_it in shares.items()}
    return Table(
        ("policy", *workloads, "mean", "worst"),
        [
            (
                policy,
                *(share_cell(shares[policy][workload]) for workload in workloads),
                f"{means[policy]:.0%}",
                f"{min(one.share_of_best for one in shares[policy].values()):.0%}",
            )
            for policy in sorted(shares, key=lambda policy: -means[policy])
        ],
        caption=f"Capacity as a share of the best policy's on the same workload.{_worse(result)}",
    )


def _slo_text(slo: CapacitySlo) -> str:
    bounds = (("TTFT p99", slo.ttft_p99_s), ("mean E2E", slo.e2e_mean_s))
    return ", ".join(f"{name} ≤ {bound:g} s" for name, bound in bounds if bound is not None) + " and no failure"


def terminal_table(result: CompareResult, workload: str) -> Table:
    """Return the ranking with the numbers at one telling rate beside it."""
    ranking = ranking_table(result, workload)
    rps = headline_rate(result, workload)
    numbers = rate_table(result, workload, rps, with_intervals=False)
    return Table(
        ("policy", "capacity", *ranking.columns[3:], *numbers.columns[1:]),
        [(*place[:2], *place[3:], *row[1:]) for place, row in zip(ranking.rows, numbers.rows, strict=True)],
        caption=f"{workload}. {ranking.caption} The other numbers: at {rps:.4g} requests/s.",
        marked=ranking.marked,
    )


def _capacity(standing: PolicyStanding) -> str:
    estimate = standing.capacity_rps
    if estimate.is_vague and not standing.bound:
        return f"{significant(estimate.mean, 3)} ({TOO_FEW_SEEDS})"
    interval = "" if estimate.half_width is None or standing.bound else f" ± {significant(estimate.half_width, 2)}"
    return f"{standing.bound}{significant(estimate.mean, 3)}{interval}"


def _against(standing: PolicyStanding, baseline: PolicyStanding | None) -> str:
    against = standing.versus_baseline
    if against is None or baseline is None or standing is baseline:
        return "-"
    if Bound.EXACT is not standing.bound or Bound.EXACT is not baseline.bound:
        return f"{_mark(standing)}{'≤' if standing.is_worse else '≥'} {against.mean:+.0%}"
    interval = "" if against.half_width is None else f" ± {against.half_width:.0%}"
    return f"{_mark(standing)}{against.mean:+.0%}{interval}"


def share_cell(standing: PolicyStanding) -> str:
    """Return its capacity as a share of the best one's, marked if it is less than the baseline's, or only bounded."""
    at_most = "< " if standing.bound is Bound.BELOW else ""
    return f"{_mark(standing)}{at_most}{standing.share_of_best:.0%}"


def _mark(standing: PolicyStanding) -> str:
    return "▼ " if standing.is_surely_worse else "▽ " if standing.is_worse else ""


def _slower_than_baseline(runs: dict[str, list[Run]]) -> set[str]:
    times = {policy: E2E_MEAN.over(of_policy) for policy, of_policy in runs.items()}
    baseline = times.get(BASELINE)
    return {
        policy for policy, time in times.items() if baseline is not None and (time is None or time.mean > baseline.mean)
    }
