"""A comparison as figures. Needs matplotlib: the extra `plot`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from preble.lab.compare.numbers import CACHING, E2E_MEAN, LATENCIES, SECONDS, TTFT_P99, Number, shown_rates
from preble.lab.compare.plan import BASELINE
from preble.lab.compare.result import CompareResult, PolicyStanding
from preble.lab.compare.tables import TOO_FEW_SEEDS
from preble.lab.report import PALETTE, Drawing, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OWN_COLOURS = MappingProxyType(
    {"round_robin": PALETTE[3], BASELINE: PALETTE[1], "e2": PALETTE[0], "preble": PALETTE[2]}
)
"""The policies that every comparison turns on have the same colour everywhere."""
_OTHER_COLOURS = (PALETTE[4], PALETTE[5], PALETTE[6], PALETTE[2])
_GREY = PALETTE[7]
_OTHERS = "the others"
_LEGEND_COLUMNS = 76
_APART = 0.01
"""How far apart policies are drawn at one rate, as a part of it."""


@dataclass(frozen=True, slots=True)
class Look:
    """How a policy is drawn. `is_grey`: one of too many to distinguish; tables and bars name it."""

    colour: str
    is_grey: bool = False


def policy_looks(policies: Sequence[str]) -> dict[str, Look]:
    """Return a look for each policy. If there are more of the less known than colours, all of those are grey."""
    others = [policy for policy in policies if policy not in _OWN_COLOURS]
    colours = [colour for colour in _OTHER_COLOURS if colour != _OWN_COLOURS["preble"] or "preble" not in policies]
    looks = {policy: Look(colour) for policy, colour in _OWN_COLOURS.items() if policy in policies}
    if len(others) > len(colours):
        return looks | {policy: Look(_GREY, is_grey=True) for policy in others}
    return looks | {policy: Look(colour) for policy, colour in zip(others, colours, strict=False)}


def workload_drawings(result: CompareResult, workload: str) -> list[Drawing]:
    """Return capacity, then every latency and what the caches did against the rate, then what happened over time."""
    curves = [curve_drawing(result, workload, number) for number in (*LATENCIES, *CACHING)]
    over_time = [series_drawing(result, workload, rps) for rps in shown_rates(result, workload)]
    return [capacity_drawing(result, workload), *curves, *(one for one in over_time if one is not None)]


def series_drawing(result: CompareResult, workload: str, rps: float) -> Drawing | None:
    """Return the requests in the system and the hit rate over time at one rate, with the first seed; None where no run
    tells.

    Lines that still rise when the requests end, or hit rates that still fall, are of rates that are not carried.
    """
    found = {policy: result.runs_of(workload, policy)[rps][0].steady for policy in result.plan.contenders}
    looks = policy_looks(result.plan.contenders)
    ranked = [one.policy for one in result.standings_of(workload)]
    known = {policy: one.series for policy in ranked if (one := found[policy]) is not None}
    first_grey = next((policy for policy in known if looks[policy].is_grey), None)
    if not known:
        return None

    def fill(figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        for policy, series in known.items():
            times = [series.slice_s * (place + 0.5) for place in range(len(series.in_system))]
            look = looks[policy]
            label = policy if not look.is_grey else "_" if policy != first_grey else _OTHERS
            above.plot(times, series.in_system, color=look.colour, label=label)
            hits = [math.nan if value is None else value for value in series.hit_rate]
            below.plot(times, hits, color=look.colour)
        above.set(title=f"{workload}: over time at {rps:.4g} requests/s", ylabel="requests in the system")
        above.set_yscale("symlog", linthresh=10)
        below.set(xlabel="seconds", ylabel="hit rate")
        figure.legend(loc="outside lower center", ncols=3)

    return draw(fill, height_in=4.6)


def capacity_drawing(result: CompareResult, workload: str) -> Drawing:
    """Return a bar a policy, the best on top, with 95 % intervals."""
    standings = result.standings_of(workload)[::-1]
    looks = policy_looks(result.plan.contenders)

    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        means = [one.capacity_rps.mean for one in standings]
        vague = [bool(one.bound) or one.capacity_rps.is_vague for one in standings]
        halves = [one.capacity_rps.half_width or 0.0 for one in standings]
        spread = whiskers(means, [0.0 if skip else half for skip, half in zip(vague, halves, strict=True)])
        names = [one.policy for one in standings]
        bars = axes.barh(
            names,
            means,
            xerr=spread if any(spread[1]) else None,
            color=[looks[name].colour for name in names],
            error_kw={"ecolor": "gray", "capsize": 2.5},
        )
        axes.bar_label(bars, [_bar_label(one) for one in standings], padding=3, fontsize=8)
        axes.set(title=f"{workload}: capacity", xlabel="requests/s within the SLO")
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.14)

    return draw(fill, height_in=max(3.5, 1.2 + 0.24 * len(standings)))


def _bar_label(standing: PolicyStanding) -> str:
    estimate = standing.capacity_rps
    note = f" ({TOO_FEW_SEEDS})" if estimate.is_vague and not standing.bound else ""
    return f" {standing.bound}{estimate.mean:.3g}{note}"


def curve_drawing(result: CompareResult, workload: str, number: Number) -> Drawing:
    """Return one number of every policy against the rate, with 95 % intervals for the policies that have a colour.

    Who surely carries less than the baseline is named.
    """
    ranked = [one.policy for one in result.standings_of(workload)]
    harmful = [one.policy for one in result.standings_of(workload) if one.is_surely_worse]

    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        looks = policy_looks(result.plan.contenders)
        shifts = _shifts([policy for policy in ranked if not looks[policy].is_grey])
        for policy in ranked:
            shift = shifts.get(policy, 1.0)
            _draw_policy(axes, result, workload, policy, looks[policy], number, shift, is_harmful=policy in harmful)
        slo = result.plan.slo_of(workload)
        bound = {TTFT_P99.name: slo.ttft_p99_s, E2E_MEAN.name: slo.e2e_mean_s}.get(number.name)
        if bound is not None:
            axes.axhline(bound, color="gray", linestyle=":", linewidth=1.2, label="SLO")
        axes.set(title=f"{workload}: {number.name}", xlabel="requests/s", ylabel=number.axis)
        if number in LATENCIES:
            _log_seconds(axes)
        figure.legend(loc="outside lower center", ncols=3, title=_harm_note(harmful), title_fontsize="small")

    return draw(fill)


def _harm_note(harmful: Sequence[str]) -> str | None:
    if not harmful:
        return None
    return textwrap.fill(f"dashed: less capacity than {BASELINE}: {', '.join(harmful)}", _LEGEND_COLUMNS)


def _shifts(policies: Sequence[str]) -> dict[str, float]:
    """Return by what to multiply each policy's rates, so that their whiskers stand beside each other.

    >>> _shifts(["a", "b", "c"])
    {'a': 0.99, 'b': 1.0, 'c': 1.01}
    """
    return {policy: 1 + _APART * (place - (len(policies) - 1) / 2) for place, policy in enumerate(policies)}


def _draw_policy(
    axes: Axes,
    result: CompareResult,
    workload: str,
    policy: str,
    look: Look,
    number: Number,
    shift: float,
    *,
    is_harmful: bool,
) -> None:
    style = "--" if is_harmful else "-"
    found = {rps: number.over(runs) for rps, runs in result.runs_of(workload, policy).items()}
    points = {rps: estimate for rps, estimate in found.items() if estimate is not None}
    means = [estimate.mean for estimate in points.values()]
    if look.is_grey:
        label = f"{_OTHERS}, with less capacity" if is_harmful else _OTHERS
        if any(line.get_label() == label for line in axes.get_lines()):
            label = "_"
        axes.plot(list(points), means, color=look.colour, linestyle=style, linewidth=0.9, zorder=1, label=label)
        return
    places = [rps * shift for rps in points]
    axes.plot(places, means, color=look.colour, linestyle=style, marker="o", markersize=3.5, label=policy, zorder=3)
    # A symmetric interval may reach down to zero, which has no place on a logarithmic scale.
    least = min(means, default=0.0) / 2 if number.axis == SECONDS else 0.0
    spread = whiskers(means, [estimate.half_width or 0.0 for estimate in points.values()], least, number.most)
    axes.errorbar(places, means, spread, fmt="none", ecolor=look.colour, elinewidth=1.0, alpha=0.45, zorder=2)


def whiskers(
    means: Sequence[float], halves: Sequence[float], least: float = 0.0, most: float = math.inf
) -> tuple[list[float], list[float]]:
    """Return how far intervals reach below and above their means, cut where no value can be.

    >>> whiskers([0.75, 0.25], [0.5, 0.5], most=1.0)
    ([0.5, 0.25], [0.25, 0.5])
    """
    below = [min(half, mean - least) for mean, half in zip(means, halves, strict=True)]
    return below, [min(half, most - mean) for mean, half in zip(means, halves, strict=True)]


def _log_seconds(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
