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


def memory_rows() -> list[gateway_cost.Memory]:
    return msgspec.convert(known("gateway")["memory"], list[gateway_cost.Memory])


def gateway_values() -> dict[str, str]:
    """What the page says of the gateway's CPU time, as multiples of sglang-router's."""
    by = {(cost.arm, cost.case): cost.request_us for cost in gateway_rows()[0]}
    ours, theirs, quiet, smg = gateway_cost.OURS, gateway_cost.THEIRS, gateway_cost.ARMS[2], gateway_cost.ROUTER_ARMS[2]
    tokens = dict(zip(("8kb", "100kb", "1mb"), (gateway_cost.SHORT, gateway_cost.LONG, gateway_cost.HUGE), strict=True))
    cases = {name: gateway_cost.Case(size, "text", 0) for name, size in tokens.items()}
    cases |= {form: gateway_cost.Case(gateway_cost.SHORT, form, 0) for form in ("ids", "chat")}
    cases |= {
        f"{events}-events": gateway_cost.Case(gateway_cost.SHORT, "text", events) for events in gateway_cost.EVENTS
    }
    values = {f"times-{name}": f"{by[ours, case] / by[theirs, case]:.1f}" for name, case in cases.items()}
    values |= {
        f"smg-times-{name}": f"{by[ours, cases[name]] / by[smg, cases[name]]:.1f}" for name in ("8kb", "50-events")
    }
    crowd = gateway_cost.Case(gateway_cost.SHORT, "text", gateway_cost.EVENTS[1], gateway_cost.CROWDS[-1])
    return values | {
        "times-crowd": f"{by[ours, crowd] / by[theirs, crowd]:.1f}",
        "whole-per-s": f"{1e6 / by[ours, cases['8kb']]:,.0f}",
        "router-whole-per-s": f"{1e6 / by[theirs, cases['8kb']]:,.0f}",
        "log-lines": f"{1 - by[quiet, cases['8kb']] / by[ours, cases['8kb']]:.0%}".replace("%", " %"),
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
    "gateway-memory": lambda: fenced(gateway_cost.memory_table(memory_rows())),
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
