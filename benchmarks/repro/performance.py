"""Fill in docs/performance.md from the kept results of the benchmarks in benchmarks/micro.

python benchmarks/repro/performance.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from page import fenced, filled, markdown

from preble.report import Table

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks" / "micro"))

import gateway_cost  # noqa: E402
import place  # noqa: E402
import simulate  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
ANSWER_EVENTS = 200
"""Events of the streamed answer whose rate the page names."""


def known(name: str) -> Any:
    """The kept result of that name."""
    return msgspec.json.decode((RESULTS / f"{name}.json").read_bytes())


def place_rows() -> list[place.Result]:
    return msgspec.convert(known("place")["results"], list[place.Result])


def preble_rows() -> list[tuple[place.Result, place.Result]]:
    """Each case with the core compiled, and on plain Python."""
    compiled, plain = (msgspec.convert(run["results"], list[place.Result]) for run in known("place_preble"))
    return list(zip(compiled, plain, strict=True))


def simulator_rows() -> list[simulate.Row]:
    return msgspec.convert(known("simulate")["rows"], list[simulate.Row])


def preble_table() -> Table:
    """What the default policy costs, with 4, 64 and 400 replicas."""
    return Table(
        ("trace", "replicas", "per s, compiled", "p50", "p99", "longest timer", "per s, plain Python"),
        [
            (
                compiled.trace,
                str(compiled.replicas),
                f"{round(compiled.rate, -2):,.0f}",
                f"{compiled.place_p50_us:.0f} us",
                f"{compiled.place_p99_us:.0f} us",
                f"{compiled.timer_max_us:.0f} us",
                f"{round(plain.rate, -2):,.0f}",
            )
            for compiled, plain in preble_rows()
        ],
        caption=f"{preble_rows()[0][0].requests:,} requests, one run each, on an idle machine.",
    )


def gateway_rows() -> tuple[list[gateway_cost.Cost], list[gateway_cost.Added]]:
    kept = known("gateway")
    return msgspec.convert(kept["costs"], list[gateway_cost.Cost]), msgspec.convert(
        kept["added"], list[gateway_cost.Added]
    )


def gateway_values() -> dict[str, str]:
    """What the page says of the gateway's CPU time beside sglang-router's."""
    by = {(cost.arm, cost.case): cost.request_us for cost in gateway_rows()[0]}
    (ours, preble, quiet), (theirs, cache_aware) = gateway_cost.ARMS, gateway_cost.ROUTER_ARMS
    small, text = gateway_cost.Case(100, False, 0), gateway_cost.Case(2000, False, 0)

    def ratios(*, as_ids: bool, events: int) -> str:
        cases = [gateway_cost.Case(tokens, as_ids, events) for tokens in gateway_cost.LENGTHS]
        return spread([by[ours, case] / by[theirs, case] for case in cases])

    def event_ratio(one: gateway_cost.Arm, other: gateway_cost.Arm) -> str:
        return f"{gateway_cost.event_us(by, one) / gateway_cost.event_us(by, other):.1f}"

    def answers_per_s(arm: gateway_cost.Arm) -> float:
        few = by[arm, gateway_cost.Case(2000, False, gateway_cost.EVENTS)]
        return 1e6 / (few + (ANSWER_EVENTS - gateway_cost.EVENTS) * gateway_cost.event_us(by, arm))

    return {
        "text-whole": ratios(as_ids=False, events=0),
        "text-events": ratios(as_ids=False, events=gateway_cost.EVENTS),
        "ids-whole": ratios(as_ids=True, events=0),
        "ids-events": ratios(as_ids=True, events=gateway_cost.EVENTS),
        "event": event_ratio(ours, theirs),
        "event-cache-aware": event_ratio(preble, cache_aware),
        "whole-per-s": f"{1e6 / by[preble, text]:,.0f}",
        "router-whole-per-s": f"{1e6 / by[cache_aware, text]:,.0f}",
        "answers-per-s": f"{answers_per_s(preble):.0f}",
        "router-answers-per-s": f"{answers_per_s(cache_aware):.0f}",
        "events-per-s": f"{round(ANSWER_EVENTS * answers_per_s(preble), -2):,.0f}",
        "log-lines": f"{1 - by[quiet, small] / by[preble, small]:.0%}".replace("%", " %"),
    }


def spread(numbers: list[float]) -> str:
    """The least and the largest, or the one number that both are.

    >>> spread([1.24, 0.9]), spread([2.31, 2.33])
    ('0.9 to 1.2', '2.3')
    """
    return " to ".join(dict.fromkeys(f"{of(numbers):.1f}" for of in (min, max)))


def kv_stream_tables() -> str:
    """What following events costs, and how long a large message holds up the event loop."""
    kept = known("kv_streams")
    idle = Table(
        ("replicas", "share of a core", "threads", "open files"),
        [
            (str(row["streams"]), f"{row['core']:.1%}".replace("%", " %"), str(row["threads"]), str(row["files"]))
            for row in kept["idle"]
        ],
    )
    stall = Table(
        ("tokens in one message", "KiB", "longest wait of another task"),
        [(f"{row['tokens']:,}", f"{row['kib']:,}", f"{row['stall_ms']:.1f} ms") for row in kept["stall"]],
    )
    return f"{markdown(idle).strip()}\n\n{markdown(stall).strip()}\n"


MADE: dict[str, Callable[[], str]] = {
    "place": lambda: fenced("\n".join([place.HEADER, *map(place.row, place_rows())])),
    "place-preble": lambda: markdown(preble_table()),
    "kv-streams": kv_stream_tables,
    "simulate": lambda: fenced("\n".join(map(str, simulator_rows()))),
    "gateway-cost": lambda: fenced(gateway_cost.cost_table(gateway_rows()[0])),
    "gateway-added": lambda: fenced(gateway_cost.added_table(gateway_rows()[1])),
}


def made() -> dict[str, str]:
    """Everything on the page that comes from results, by the name of its marker."""
    values = {f"value:{name}": text for name, text in gateway_values().items()}
    values["value:compiled"] = spread([compiled.rate / plain.rate for compiled, plain in preble_rows()])
    return {name: make() for name, make in MADE.items()} | values


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), made()), encoding="utf-8")


if __name__ == "__main__":
    main()
