"""What the evaluation shows of the grid: the map of who is first where, and its tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from carried_rate import carried_rate
from grid import CELLS, EVERYBODY, LOADS, SCREEN, SCREEN_LOADS, Cell

from preble.errors import ConfigError
from preble.lab.compare import CompareResult, Run
from preble.lab.compare.numbers import E2E_MEAN, E2E_P99, TTFT_MEAN, TTFT_P99, Number, settling
from preble.lab.metrics.estimates import estimate
from preble.lab.report import Drawing, Table, draw
from preble.lab.report.formats import significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OWN, BASE = "preble", "least_load"
LEVEL = 0.02
"""Capacities that differ by less are level: the search's rates are 9 % apart, and what lies between is interpolated."""
HARM = 1.05
SLOW = 1.1
CACHES = ((4.0, "all,\neach of them"), (1.0, "all,\ntogether"), (0.5, "half,\ntogether"), (0.1, "a tenth,\ntogether"))
Results = Mapping[str, CompareResult]


def tables(results: Results) -> dict[str, Table | None]:
    """The page's tables by the name of their markers; None for those without results."""
    mapped, cases, harmed = (_known(results, group) for group in ("map", "case", "harm"))
    everybody = [cell for cell in mapped if EVERYBODY[-1] in results[cell.name].plan.policies]
    return {
        "grid-capacity": capacity_table(results, mapped) if mapped else None,
        "grid-latency": latency_table(results, mapped) if mapped else None,
        "grid-cases": capacity_table(results, cases) if cases else None,
        "grid-cases-latency": latency_table(results, cases) if cases else None,
        "grid-harm": harm_table(results, harmed) if harmed else None,
        "grid-pure": pure_table(results["pure"]) if "pure" in results else None,
        "grid-everybody": capacity_table(results, everybody, EVERYBODY) if everybody else None,
        "grid-everybody-latency": latency_table(results, everybody, LOADS) if everybody else None,
        "grid-left-out": left_out_table(results),
    }


def values(results: Results) -> dict[str, str]:
    """The numbers that sentences of the page quote, by the name of their markers."""
    made = {name: value for group in ("map", "case") for name, value in _group_values(results, group)}
    made["value:slower"] = "; ".join(slower(results)) or "nowhere"
    made["value:behind"] = "; ".join(behind(results)) or "none"
    for name, policy in (("own", OWN), ("sticky", "sticky_until_saturated")):
        ratios = [
            over_base(results[cell.name], cell, policy, number)
            for cell in _known(results, "harm")
            for number in (E2E_MEAN, E2E_P99)
        ]
        made |= {f"value:harm-{name}": f"{max(ratios):.2f}"} if ratios else {}
    return made


def _group_values(results: Results, group: str) -> Iterator[tuple[str, str]]:
    """How `preble` compares with the best of the others in a group of cells, and the baseline with the best."""
    found = [results[cell.name] for cell in _known(results, group)]
    if not found:
        return
    leads = [lead(result) for result in found]
    shares = [capacities(result)[BASE] / max(capacities(result).values()) for result in found]
    yield f"value:{group}-cells", str(len(found))
    yield f"value:{group}-first", str(sum(ahead >= LEVEL for ahead in leads))
    yield f"value:{group}-level", str(sum(abs(ahead) < LEVEL for ahead in leads))
    yield f"value:{group}-behind", str(sum(ahead <= -LEVEL for ahead in leads))
    yield f"value:{group}-worst", f"{min(leads):+.0%}"
    yield f"value:{group}-best", f"{max(leads):+.0%}"
    yield f"value:{group}-baseline", f"{min(shares):.0%} to {max(shares):.0%}"


def _known(results: Results, group: str) -> list[Cell]:
    """The cells of a group that have results."""
    return [cell for cell in CELLS.values() if cell.name in results and cell.name.startswith(f"{group}-")]


def capacities(result: CompareResult) -> dict[str, float]:
    """Policy -> what it carries in steady state, the most first."""
    found = {one.policy: one.capacity_rps.mean for one in result.standings}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def lead(result: CompareResult) -> float:
    """By how much `preble` carries more than the best of the others; negative where it carries less."""
    found = capacities(result)
    return found[OWN] / max(rps for policy, rps in found.items() if policy != OWN) - 1


def first(result: CompareResult) -> str:
    """Who carries most; level where the best of the others is too close to tell."""
    found = capacities(result)
    best = next(policy for policy in found if policy != OWN)
    return "level" if abs(lead(result)) < LEVEL else OWN if lead(result) > 0 else best


def capacity_table(results: Results, cells: Sequence[Cell], policies: Sequence[str] = SCREEN) -> Table:
    def row(cell: Cell) -> tuple[str, ...]:
        standings = {one.policy: one for one in results[cell.name].standings}
        shown = [standings[policy] for policy in policies]
        told = (f"{one.bound}{significant(one.capacity_rps.mean, 3)}" for one in shown)
        most = () if not has_bound else ("" if (rps := bounds[cell.name]) is None else significant(rps, 3),)
        return (cell.title, *told, *most, first(results[cell.name]), f"{lead(results[cell.name]):+.0%}")

    bounds = {cell.name: bound_rps(cell) for cell in cells}
    has_bound = any(rps is not None for rps in bounds.values())
    explained = " Bound: what no policy carries if nobody waits longer than that." if has_bound else ""
    return Table(
        ("case", *policies, *(["bound"] if has_bound else []), "first", f"{OWN} against the best other"),
        [row(cell) for cell in cells],
        caption=f"Requests/s in steady state: TTFT p99 ≤ {_bounds(cells)} after the warm-up, and neither queues nor "
        f"misses that grow.{explained} Level: within {LEVEL:.0%}. {_seeds(results, cells)}",
    )


def bound_rps(cell: Cell) -> float | None:
    """Return a rate that no policy carries in steady state; None for populations that change, and for sessions."""
    try:
        return carried_rate(cell.workload.streams, cell.cluster, patience_s=cell.slo.ttft_p99_s or 0.0)
    except ConfigError:
        return None


def latency_table(results: Results, cells: Sequence[Cell], loads: Sequence[float] = SCREEN_LOADS) -> Table:
    """Mean TTFT and E2E of `preble` over the best policy's, at parts of the best capacity."""

    def cell_of(cell: Cell, number: Number, load: float) -> str:
        result = results[cell.name]
        return f"{over_best(result, number, load):.2f}" if load in result.plan.loads else ""

    numbers = [(number, load) for number in (TTFT_MEAN, E2E_MEAN) for load in loads]
    return Table(
        ("case", *(f"{number.name} at {load:.0%}" for number, load in numbers)),
        [(cell.title, *(cell_of(cell, number, load) for number, load in numbers)) for cell in cells],
        caption=f"{OWN}'s latency over that of the quickest other policy, at parts of the best capacity: less than 1 "
        "is quicker.",
    )


def over_best(result: CompareResult, number: Number, load: float) -> float:
    """`preble`'s number over the lowest of the others', at a part of the best capacity."""
    [name] = result.plan.workloads
    rate = sorted(result.rates[name])[sorted(result.plan.loads).index(load)]
    runs = {policy: result.runs_of(name, policy)[float(rate or 0.0)] for policy in result.plan.policies}
    values = {policy: found.mean for policy in runs if (found := number.over(runs[policy])) is not None}
    return values[OWN] / min(value for policy, value in values.items() if policy != OWN)


def behind(results: Results) -> list[str]:
    """Where another policy carries more than `preble`, and by how much `preble` falls short of it."""
    cells = [cell for cell in (*_known(results, "map"), *_known(results, "case")) if lead(results[cell.name]) <= -LEVEL]
    return [f"{cell.title} ({lead(results[cell.name]):+.0%} against {first(results[cell.name])})" for cell in cells]


def slower(results: Results) -> list[str]:
    """Where the mean TTFT of `preble` is more than `SLOW` times the lowest of the others', at 60 or 80 %."""
    found = []
    for cell in (*_known(results, "map"), *_known(results, "case")):
        result = results[cell.name]
        ratio, load = max((over_best(result, TTFT_MEAN, load), load) for load in SCREEN_LOADS)
        if ratio > SLOW:
            found.append(f"{cell.title} ({ratio:.2f} at {load:.0%})")
    return found


def over_base(result: CompareResult, cell: Cell, policy: str, number: Number) -> float:
    """A policy's number over the baseline's on the same requests, on average over the seeds."""
    runs, base = (_at(result, cell, name) for name in (policy, BASE))
    return fmean(_value(number, a) / _value(number, b) for a, b in zip(runs, base, strict=True))


def harm_table(results: Results, cells: Sequence[Cell]) -> Table:
    """Each policy's latencies over those of the baseline, seed by seed, where a policy for caches may do harm."""

    def told(result: CompareResult, cell: Cell, policy: str) -> str:
        ratios = [over_base(result, cell, policy, number) for number in (E2E_MEAN, E2E_P99, TTFT_P99)]
        state = settling(_at(result, cell, policy)).partition(" (")[0]
        settles = "" if state == "steady" else f", {state}"
        mark = "▼ " if max(ratios[:2]) > HARM else ""
        return f"{mark}{' / '.join(f'{value:.2f}' for value in ratios)}{settles}"

    policies = [policy for policy in results[cells[0].name].plan.policies if policy != BASE]
    return Table(
        ("case", "rate, /s", *policies, f"{BASE}: TTFT p99, s"),
        [
            (
                cell.title,
                f"{cell.rates[0]:g}",
                *(told(results[cell.name], cell, policy) for policy in policies),
                significant(estimate([_value(TTFT_P99, run) for run in _at(results[cell.name], cell, BASE)]).mean, 3),
            )
            for cell in cells
        ],
        caption=f"E2E mean / E2E p99 / TTFT p99, each over {BASE}'s; less than 1 is better. ▼: a mean or p99 of E2E "
        f"more than {HARM - 1:.0%} above {BASE}'s. {_seeds(results, cells)}",
    )


def pure_table(result: CompareResult) -> Table:
    """The case in which the default policy once destroyed its own caches, quarter by quarter."""
    rows = []
    for policy in result.plan.policies:
        [run, *_] = _at(result, CELLS["pure"], policy)
        assert run.steady is not None
        times = [value for value in run.steady.series.ttft_mean_s if value is not None]
        parts = [times[len(times) * i // 4 : len(times) * (i + 1) // 4] for i in range(4)]
        means = [significant(fmean(part), 3) for part in parts]
        rows.append((policy, *means, f"{run.judged.hit_rate or 0.0:.1%}", settling([run])))
    return Table(
        ("policy", *(f"TTFT mean, {name} quarter, s" for name in ("1st", "2nd", "3rd", "4th")), "hit rate", "settles"),
        rows,
        caption=f"100 prefixes x 2,000 tokens, uniform, 60,000 KV tokens on each of four replicas, "
        f"{CELLS['pure'].rates[0]:g} requests/s.",
    )


def left_out_table(results: Results) -> Table:
    missing = [cell for cell in CELLS.values() if cell.name not in results]
    few = [cell for cell in CELLS.values() if cell.name in results and len(results[cell.name].plan.seeds) < 3]
    many = [result for result in results.values() if set(SCREEN) < set(result.plan.policies)]
    rows = [("not run", "; ".join(cell.title for cell in missing) or "nothing")]
    rows += [("one seed", f"{len(few)} of {len(results)} cells")]
    rows += [("few policies", f"all but {len(many)} cells: {', '.join(SCREEN)}")]
    return Table(("what", "which"), rows, caption="What the screen left out; `grid.py --full` runs it.")


def map_drawing(results: Results) -> Drawing:
    """Who is first where: a row a population, a column for how much the caches hold."""
    rows: dict[str, dict[float, str]] = {}
    for cell in CELLS.values():
        if cell.caches and cell.name in results:
            rows.setdefault(_row_name(cell), {})[cell.caches] = cell.name

    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        for y, cells in enumerate(rows.values()):
            for x, (caches, _) in enumerate(CACHES):
                result = results.get(cells.get(caches, ""))
                _square(axes, x, y, result)
        axes.set_xticks(range(len(CACHES)), [name for _, name in CACHES])
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set(xlim=(-0.5, len(CACHES) - 0.5), ylim=(len(rows) - 0.5, -0.5))
        axes.set(
            title="preble's capacity against the best other policy's", xlabel="how many of the prefixes the caches hold"
        )
        axes.grid(visible=False)

    return draw(fill, height_in=1.4 + 0.52 * len(rows))


def _square(axes: object, x: int, y: int, result: CompareResult | None) -> None:
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle

    assert isinstance(axes, Axes)
    if result is None:
        return
    ahead = lead(result)
    colour = "#dddddd" if abs(ahead) < LEVEL else "#9fd8b4" if ahead > 0 else "#f3b995"
    axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=colour))
    name = "" if first(result) in ("level", OWN) else f"\n{first(result)}"
    axes.text(x, y, f"{ahead:+.0%}{name}", ha="center", va="center", fontsize=9, color="black")


def _row_name(cell: Cell) -> str:
    popularity = " (Zipf 1)" if cell.workload.streams[0].zipf else ""
    replicas = "" if cell.replicas == 4 else f", {cell.replicas} replicas"
    return f"{cell.population:,} prefixes{popularity}{replicas}"


def _at(result: CompareResult, cell: Cell, policy: str) -> list[Run]:
    return result.runs_of(cell.name, policy)[cell.rates[0]]


def _value(number: Number, run: Run) -> float:
    value = number.of(run)
    assert value is not None, "a run of a harm case serves requests"
    return value


def _bounds(cells: Iterable[Cell]) -> str:
    """The SLO's bounds on TTFT, the most usual first."""
    bounds = [cell.slo.ttft_p99_s or 0.0 for cell in cells]
    ordered = sorted(set(bounds), key=lambda bound: (-bounds.count(bound), bound))
    return " or ".join(f"{bound:g} s" for bound in ordered)


def _seeds(results: Results, cells: Iterable[Cell]) -> str:
    counts = sorted({len(results[cell.name].plan.seeds) for cell in cells})
    return f"Seeds a cell: {' or '.join(map(str, counts))}."
