"""Fill in docs/performance.md and benchmarks/PERFORMANCE.md from the kept results of benchmarks/micro.

python benchmarks/repro/performance.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import packages
import send_ids
from page import NOT_RUN, fenced, fill, markdown

from preble.lab.report import Table

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks" / "micro"))

import gateway_calls  # noqa: E402
import gateway_cluster  # noqa: E402
import gateway_cost  # noqa: E402
import gateway_rate  # noqa: E402
import gateway_turns  # noqa: E402
import place  # noqa: E402
import simulate  # noqa: E402
import workers_cost  # noqa: E402

PAGES = (ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "PERFORMANCE.md")
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
    """What the page says of the gateway's CPU time."""
    by = {(cost.arm, cost.case): cost.request_us for cost in gateway_rows()[0]}
    ours, theirs, whole = gateway_cost.OURS, gateway_cost.THEIRS, gateway_cost.WHOLE
    quiet = gateway_cost.Arm(gateway_cost.PREBLE, "preble", is_quiet=True)
    added = {(row.arm, row.case.tokens): row.first_byte_p50_us for row in gateway_rows()[1]}
    usual = gateway_cost.DEFAULT if (gateway_cost.DEFAULT, whole) in by else ours
    return {
        "whole-ms": f"{by[usual, whole] / 1e3:.2f} ms",
        "event-us": f"{gateway_cost.event_us(by, usual):.0f} µs",
        "added-ms": f"{added[usual, gateway_cost.SHORT] / 1e3:.1f} ms",
        "whole-per-s": f"{1e6 / by[ours, whole]:,.0f}",
        "router-whole-per-s": f"{1e6 / by[theirs, whole]:,.0f}",
        "log-lines": f"{1 - by[quiet, whole] / by[ours, whole]:.0%}".replace("%", " %"),
    }


COMPARED = {
    "8 KB of text, whole answer": (gateway_cost.WHOLE, "1.0 × sglang-router"),
    "100 KB of text": (gateway_cost.Case(gateway_cost.LONG, "text", 0), "0.6 × sglang-router"),
    "1 MB of text": (gateway_cost.Case(gateway_cost.HUGE, "text", 0, 8), ""),
    "8 KB, half of it new": (gateway_cost.Case(gateway_cost.SHORT, "text", 0, shared=gateway_cost.HALF), ""),
    "100 KB, half of it new": (gateway_cost.Case(gateway_cost.LONG, "text", 0, shared=gateway_cost.HALF), ""),
    "8 KB as token ids": (gateway_cost.Case(gateway_cost.SHORT, "ids", 0), ""),
    "a chat of 8 KB with tools": (gateway_cost.Case(gateway_cost.SHORT, "chat", 0), ""),
    "8 KB, 16 events": (gateway_cost.Case(gateway_cost.SHORT, "text", 16), ""),
    "8 KB, 50 events": (gateway_cost.Case(gateway_cost.SHORT, "text", 50), "0.8 × sglang-router"),
    "8 KB, 200 events": (gateway_cost.Case(gateway_cost.SHORT, "text", 200), ""),
    "8 KB, 512 at once": (gateway_cost.Case(gateway_cost.SHORT, "text", 0, 512), ""),
    "50 events, 512 at once": (gateway_cost.Case(gateway_cost.SHORT, "text", 50, 512), ""),
}
"""What the page compares first, and our goal."""


def verdict_table() -> Table:
    """Preble beside the routers: CPU time of a request, and the first byte of an idle replica's answer."""
    costs, added = gateway_rows()
    by = {(cost.arm, cost.case): cost.request_us for cost in costs}
    by_added = {(row.arm, row.case.tokens): row.first_byte_p50_us for row in added}
    rows = [(name, *_compared(by, case), goal) for name, (case, goal) in COMPARED.items()]
    for name, tokens, goal in (("8 KB", gateway_cost.SHORT, "1.0 × SMG"), ("100 KB", gateway_cost.LONG, "")):
        rows.append((f"added to the first byte, {name}", *_compared(by_added, tokens), goal))
    columns = ("", "Preble", "Preble, 1 worker", "sglang-router", "SMG", "× sglang-router", "× SMG", "goal, at most")
    return Table(columns, rows, caption=_conditions(known("gateway")))


VERDICT = (gateway_cost.OURS, gateway_cost.DEFAULT, gateway_cost.THEIRS, gateway_cost.SHEPHERD)
"""In the order of the table's columns."""


def _compared(by: Mapping[tuple[gateway_cost.Arm, Any], float], case: Any) -> Iterator[str]:
    """The microseconds of each gateway, then Preble's as multiples of each router's: in one process / by default."""
    us = {arm: by[arm, case] for arm in VERDICT if (arm, case) in by}
    yield from (f"{us[arm]:,.0f} µs" if arm in us else "-" for arm in VERDICT)
    for router in VERDICT[2:]:
        yield " / ".join(f"{us[arm] / us[router]:.2f}" for arm in VERDICT[:2] if arm in us)


def _conditions(kept: dict[str, Any]) -> str:
    """How a result of the gateway's benchmarks came about."""
    beside = f", load {kept['load']:.1f} before it began" if "load" in kept else ""
    events = "replicas publish KV events" if kept.get("kv_events") else "replicas publish no KV events"
    rounds = len(kept["costs"][0]["rounds_us"])
    return (
        f"Preble with the {kept['core']} core, in one process and with one worker, the default on two cores; multiples "
        f"are of both; {kept['router']}, {kept['smg']}; {events}; {gateway_cost.CONNECTIONS} requests at once; nine "
        f"tenths of a prompt are shared; seed {kept['seed']}; the cheapest of {rounds} rounds{beside}."
    )


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


def rate_table() -> str:
    """The rate that each gateway bears, and what it adds at half of it."""
    kept = kept_or_none("gateway_rate")
    if kept is None:
        return NOT_RUN
    searches = msgspec.convert(kept["searches"], list[gateway_rate.Search])
    return fenced(gateway_rate.table(kept["direct_ms"], searches))


def cluster_table() -> str:
    """Hits, balance, times and throughput of gateways in front of replicas that cache."""
    kept = kept_or_none("gateway_cluster")
    if kept is None:
        return NOT_RUN
    runs = msgspec.convert(kept["runs"], list[gateway_cluster.Run])
    rows, busy = gateway_cluster.rows_of(runs), [run.busy / kept["processors"] for run in runs]
    caption = (
        f"{gateway_cost.REPLICAS} emulated replicas ({kept['profile']}); {kept['router']}, {kept['smg']}; runs of "
        f"each: {len(runs) // len(rows)}, from seed {kept['seed']}; {min(busy):.0%} to {max(busy):.0%} of "
        f"{kept['processors']} processors were busy."
    )
    return markdown(Table(gateway_cluster.COLUMNS, rows, caption))


def calls_table() -> str:
    """Calls and CPU time of a request with the compiled core and without it."""
    kept = [kept_or_none(f"gateway_calls.{core}") for core in ("compiled", "plain")]
    if None in kept:
        return NOT_RUN
    both = [msgspec.convert(run["calls"], list[gateway_calls.Calls]) for run in kept]
    rows = [
        (
            compiled.case,
            f"{compiled.calls:,.0f}",
            f"{plain.calls:,.0f}",
            f"{compiled.cpu_us:,.0f} µs",
            f"{plain.cpu_us:,.0f} µs",
            f"{plain.cpu_us / compiled.cpu_us:.2f}",
        )
        for compiled, plain in zip(*both, strict=True)
    ]
    columns = ("one request", "calls, compiled", "calls, plain", "CPU, compiled", "CPU, plain", "plain / compiled")
    return markdown(Table(columns, rows, caption="The cheapest batch of each; the replicas publish KV events."))


def workers_table() -> str:
    """What each process of a gateway with workers spends on a request."""
    kept = kept_or_none("workers")
    if kept is None:
        return NOT_RUN
    costs = msgspec.convert(kept["costs"], list[workers_cost.Cost])
    one = {cost.case: cost.full_at for cost in costs if cost.workers == 1}
    rows = [
        (
            cost.case,
            str(cost.workers),
            *(f"{us:,.0f}" for us in (cost.total_us, cost.scheduler_us, cost.front_us)),
            f"{cost.full_at:,.0f} requests/s",
            f"{cost.full_at / one[cost.case]:.2f}",
        )
        for cost in costs
    ]
    processes = ("all processes", "scheduler process", "front ends together")
    columns = ("answer", "`--workers`", *processes, "a core is full at", "× one worker")
    return markdown(Table(columns, rows, caption=f"µs of CPU time a request, {kept.get('core', 'plain')} core."))


def turns_table() -> str:
    """Whether requests cost more than with an earlier commit."""
    kept = kept_or_none("gateway_turns")
    if kept is None:
        return NOT_RUN
    rows = msgspec.convert(kept["turns"], list[gateway_turns.Turns])
    columns = ("one request", "before", "after", "ratio of pairs, median", "95 of 100 draws")
    caption = (
        f"µs of CPU time, {kept['core']} core; {len(rows[0].before_us)} pairs, {kept['before']} and {kept['after']}"
    )
    cells = [gateway_turns.cells_of(row) for row in rows]
    return markdown(Table(columns, cells, caption=f"{caption}; load of the machine {kept['load']:.0f}."))


def kept_or_none(name: str) -> Any:
    """The kept result of that name, if there is one."""
    return known(name) if (RESULTS / f"{name}.json").exists() else None


def packages_table() -> str:
    """Sizes and starts of what PyPI gets."""
    kept = kept_or_none("packages")
    return NOT_RUN if kept is None else markdown(packages.table(msgspec.convert(kept, packages.Packages)))


MADE: dict[str, Callable[[], str]] = {
    "place": lambda: fenced("\n".join([place.HEADER, *map(place.row, place_rows())])),
    "place-preble": lambda: markdown(preble_table()),
    "kv-streams": kv_stream_tables,
    "simulate": lambda: fenced("\n".join(map(str, simulator_rows()))),
    "gateway-verdict": lambda: markdown(verdict_table()),
    "gateway-cost": lambda: fenced(gateway_cost.cost_table(gateway_rows()[0])),
    "gateway-added": lambda: fenced(gateway_cost.added_table(gateway_rows()[1])),
    "send-ids": lambda: markdown(send_ids.table(send_ids.kept())),
    "gateway-memory": lambda: fenced(gateway_cost.memory_table(memory_rows())),
    "gateway-rate": rate_table,
    "gateway-cluster": cluster_table,
    "gateway-calls": calls_table,
    "gateway-turns": turns_table,
    "workers": workers_table,
    "packages": packages_table,
}


def made() -> dict[str, str]:
    """Everything on the page that comes from results, by the name of its marker."""
    values = {f"value:{name}": text for name, text in gateway_values().items()}
    values["value:compiled"] = spread([compiled.rate / plain.rate for compiled, plain in preble_rows()])
    return {name: make() for name, make in MADE.items()} | values


def main() -> None:
    fill(PAGES, made())


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
