"""What gateway_ranking.py shows in benchmarks/EVALUATION.md: policies simulated and through the gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from statistics import correlation, median
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from gateway_ranking_case import POLICIES, SHIFT_S, SHIFTS, WORKLOADS, Pair, Results, Run
from page import EVALUATION, EVALUATION_FIGURES, NOT_RUN, filled, markdown

from preble.lab.metrics.summary import TimeSummary
from preble.lab.report import PALETTE, Drawing, Table, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_, PAGE = EVALUATION
FIGURE = EVALUATION_FIGURES / "gateway-ranking.svg"
SIMULATED, MEASURED = PALETTE[7], PALETTE[0]

Number = Callable[[Run], float]


def number(metric: Literal["ttft", "e2e"], statistic: Literal["mean_s", "p99_s"]) -> Number:
    def of(run: Run) -> float:
        distribution: TimeSummary | None = getattr(run.summary, metric)
        if distribution is None:
            raise ValueError(f"{run.policy}: no request was answered")
        return float(getattr(distribution, statistic))

    return of


E2E_MEAN, TTFT_MEAN = number("e2e", "mean_s"), number("ttft", "mean_s")
NUMBERS: Mapping[str, Number] = MappingProxyType(
    {
        "E2E mean": E2E_MEAN,
        "E2E p99": number("e2e", "p99_s"),
        "TTFT mean": TTFT_MEAN,
        "TTFT p99": number("ttft", "p99_s"),
    }
)

# ---- ranks ---------------------------------------------------------------------------------------------------------


def ranks(values: Sequence[float]) -> list[float]:
    """From 1 for the smallest; equal values share the mean of their ranks."""
    return [sum(other < value for other in values) + (list(values).count(value) + 1) / 2 for value in values]


def rank_correlation(pairs: Sequence[Pair], of: Number) -> float:
    """Spearman's, of the policies simulated and through the gateway: 1 for the same order, -1 for the reverse one."""
    return correlation(ranks([simulated(p, of) for p in pairs]), ranks([of(p.measured) for p in pairs]))


def simulated(pair: Pair, of: Number) -> float:
    """The median of the simulations."""
    return median(map(of, pair.simulated))


def told_apart(pairs: Sequence[Pair], of: Number) -> Iterator[tuple[Pair, Pair]]:
    """Two policies, the faster one first, of which it is the faster one whichever simulations are compared."""
    for one, other in permutations(pairs, 2):
        if max(map(of, one.simulated)) < min(map(of, other.simulated)):
            yield one, other


def swapped(pairs: Sequence[Pair], of: Number) -> list[tuple[Pair, Pair]]:
    """Those of `told_apart` that are in the other order through the gateway."""
    return [(fast, slow) for fast, slow in told_apart(pairs, of) if of(fast.measured) > of(slow.measured)]


# ---- tables --------------------------------------------------------------------------------------------------------


def agreement_table(results: Results) -> Table:
    """How far both agree, number by number."""
    rows = []
    for workload in WORKLOADS:
        pairs = results.pairs(workload)
        for name, of in NUMBERS.items() if pairs else ():
            apart, wrong = list(told_apart(pairs, of)), swapped(pairs, of)
            ratios = [of(pair.measured) / simulated(pair, of) for pair in pairs]
            rows.append(
                (
                    workload,
                    name,
                    f"{rank_correlation(pairs, of):.2f}",
                    f"{len(apart) - len(wrong)} of {len(apart)}",
                    f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                )
            )
    return Table(
        ("workload", "number", "rank correlation", "pairs in the same order", "gateway / simulator"),
        rows,
        caption=f"Rank correlation: Spearman's, over the {len(POLICIES)} policies. Pairs: of policies that the "
        f"simulator distinguishes, whichever of {len(SHIFTS)} simulations is taken of each: one with the arrivals as "
        f"they are, the others with each up to {SHIFT_S * 1000:g} ms later by chance. Gateway / simulator: the median "
        "over the policies, and the least and the most.",
    )


def ranking_table(pairs: Sequence[Pair]) -> Table:
    """Every number of every policy with its rank, in the simulator's order."""
    order = sorted(pairs, key=lambda pair: simulated(pair, E2E_MEAN))
    columns = [column for of in NUMBERS.values() for column in _two_columns(order, of)]
    return Table(
        ("policy", *(f"{name}, {side}" for name in NUMBERS for side in ("simulated", "gateway"))),
        [(pair.policy, *(column[i] for column in columns)) for i, pair in enumerate(order)],
        caption=f"Seconds, and the rank in parentheses; simulated: the median of {len(SHIFTS)}. {_conditions(pairs)}",
    )


def _two_columns(pairs: Sequence[Pair], of: Number) -> Iterator[list[str]]:
    """One number simulated, then through the gateway."""
    for values in ([simulated(pair, of) for pair in pairs], [of(pair.measured) for pair in pairs]):
        yield [f"{value:.3g} ({rank:g})" for value, rank in zip(values, ranks(values), strict=True)]


def _conditions(pairs: Sequence[Pair]) -> str:
    """What was asked, and whether the machine bore it."""
    plan = pairs[0].measured.plan
    cpu = [pair.measured.cpu for pair in pairs if pair.measured.cpu is not None]
    late_ms = [1000 * (pair.measured.summary.lag_p99_s or 0.0) for pair in pairs]
    failed = sum(pair.measured.summary.errors for pair in pairs)
    return (
        f"{plan.requests} requests at {plan.rps:g}/s, seed {plan.seed}; {failed} failed through the gateway. Of "
        f"{cpu[0].processors} processors {min(c.share for c in cpu):.0%} to {max(c.share for c in cpu):.0%} were busy, "
        f"the gateway had {min(c.gateway for c in cpu):.0%} to {max(c.gateway for c in cpu):.0%} of one; p99 of how "
        f"late requests were sent: {min(late_ms):.1f} to {max(late_ms):.1f} ms."
    )


def tables(results: Results) -> dict[str, str]:
    """What stands between the markers of the page, by name."""
    found = {workload: results.pairs(workload) for workload in WORKLOADS}
    made = {
        f"gateway-{workload.replace(' ', '-')}": markdown(ranking_table(pairs)) if pairs else NOT_RUN
        for workload, pairs in found.items()
    }
    return made | {"gateway-agreement": markdown(agreement_table(results)) if all(found.values()) else NOT_RUN}


# ---- the figure ----------------------------------------------------------------------------------------------------


def drawing(results: Results) -> Drawing:
    """Every policy, simulated and through the gateway: a row a number, a column a workload."""

    def fill(figure: Figure) -> None:
        grid = figure.subplots(2, len(WORKLOADS), squeeze=False)
        for row, (name, of) in zip(grid, {"mean E2E": E2E_MEAN, "mean TTFT": TTFT_MEAN}.items(), strict=True):
            for axes, workload in zip(row, WORKLOADS, strict=True):
                _draw_pairs(axes, results.pairs(workload), of)
                axes.set(title=f"{workload}: {name}", xlabel="seconds")
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)

    return draw(fill, width_in=10.0, height_in=6.2)


def _draw_pairs(axes: Axes, pairs: Sequence[Pair], of: Number) -> None:
    """The fastest by the simulator on top."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    ordered = sorted(pairs, key=lambda pair: -simulated(pair, of))
    names = [pair.policy for pair in ordered]
    for pair in ordered:
        values = [of(run) for run in pair.simulated]
        axes.plot(
            [min(values), max(values)],
            [pair.policy] * 2,
            color=SIMULATED,
            linewidth=7,
            alpha=0.5,
            solid_capstyle="butt",
        )
    medians = [simulated(pair, of) for pair in ordered]
    axes.plot(
        medians,
        names,
        "|",
        color=SIMULATED,
        markersize=11,
        markeredgewidth=2,
        label=f"simulated: median of {len(SHIFTS)}, least to most",
    )
    axes.plot(
        [of(pair.measured) for pair in ordered], names, "o", color=MEASURED, markersize=5, label="through the gateway"
    )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def fill_in(results: Results) -> None:
    """Write the tables into the page, and draw the figure if there is all of it."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables(results)), encoding="utf-8")
    if all(results.pairs(workload) for workload in WORKLOADS):
        FIGURE.write_text(drawing(results).standalone(), encoding="utf-8")
