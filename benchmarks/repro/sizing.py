"""Measure the figures of docs/howto/sizing.md and fill them in; the others are those of docs/performance.md.

    python benchmarks/repro/sizing.py           # four minutes; leave the machine alone meanwhile
    python benchmarks/repro/sizing.py --fill    # only fill the page in from the kept results

Run it with the compiled core (`make native`, then `.native/bin/python`), which users of the wheel have.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import performance
import structlog
import uvloop
from page import filled

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks" / "micro"))

import gateway_cost  # noqa: E402
import place  # noqa: E402
from gateway_parts.prompts import train_tokenizer  # noqa: E402

PAGE = ROOT / "docs" / "howto" / "sizing.md"
RESULT = ROOT / "benchmarks" / "results" / "sizing.json"
QUIET = gateway_cost.Arm(gateway_cost.PREBLE, "preble", is_quiet=True)
FLEETS, BUDGET_MIB = (4, 400), 256.0
PLACED = 5000
QUIET_STREAMS = 256
SEED = 0
IDLE_ARMS = tuple(gateway_cost.Arm(gateway_cost.PREBLE, "preble", workers=count, has_events=False) for count in (0, 1))
IDLE_SETTLE_S, IDLE_S = 20.0, 20.0


async def start_kib(arm: gateway_cost.Arm, folder: Path) -> float:
    """The memory of a gateway that has just started."""
    async with gateway_cost.started(arm, None, folder) as running:
        return running.kib


async def idle_ms(arm: gateway_cost.Arm, replicas: int, folder: Path) -> float:
    """CPU milliseconds a second of a gateway that nobody asks anything: it checks its replicas."""
    async with gateway_cost.started(arm, None, folder, replicas) as running:
        before = await running.cpu_s(IDLE_SETTLE_S)
        return round((await running.cpu_s(IDLE_S) - before) / IDLE_S * 1e3, 2)


def placing(replicas: int) -> place.Result:
    """How fast the default policy places long prompts with all their KV events."""
    return place.Run("video", replicas, PLACED, "events", BUDGET_MIB, SEED, policy="preble").measure()


def measured() -> dict[str, Any]:
    """Return every figure, and how it came about."""
    load = os.getloadavg()[0]
    core = "compiled" if place.global_scheduler.__file__.endswith(".so") else "plain"
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer(Path(folder))
        memory = [uvloop.run(start_kib(arm, Path(folder))) for arm in (gateway_cost.OURS, gateway_cost.DEFAULT)]
        idle = [[uvloop.run(idle_ms(arm, count, Path(folder))) for count in FLEETS] for arm in IDLE_ARMS]
    events = [asdict(placing(count)) for count in FLEETS]
    return {"core": core, "load": round(load, 2), "seed": SEED, "start_kib": memory, "idle_ms": idle, "events": events}


def values(kept: dict[str, Any]) -> dict[str, str]:
    """What the page says, by the names of its markers."""
    costs, added = performance.gateway_rows()
    placed = [asdict(compiled) for compiled, _ in performance.preble_rows()]
    [streams] = [row for row in performance.known("kv_streams")["idle"] if row["streams"] == QUIET_STREAMS]
    by = {(cost.arm, cost.case): cost.request_us for cost in costs}
    ours, default, whole = gateway_cost.OURS, gateway_cost.DEFAULT, gateway_cost.WHOLE
    [added_us] = [r.first_byte_p50_us for r in added if (r.arm, r.case.tokens) == (default, gateway_cost.SHORT)]

    def us(tokens: int = gateway_cost.SHORT, events: int = 0, form: str = "text") -> float:
        return by[ours, gateway_cost.Case(tokens, form, events)]  # type: ignore[arg-type]

    event_us = gateway_cost.event_us(by, ours)
    long_us, ids_us, log_us = us(gateway_cost.LONG) - us(), us(form="ids") - us(), us() - by[QUIET, whole]
    return {
        "whole": ms(us()),
        "whole-per-s": per_s(us()),
        "streamed": ms(us(events=16)),
        "streamed-per-s": per_s(us(events=16)),
        "long-streams-per-s": per_s(us(events=200)),
        "event": ms(event_us),
        "events-per-s": per_s(event_us),
        "tokens-share": f"{2000 * event_us / 1e6:.2f}",
        "long": f"{ms(long_us)} more",
        "ids": f"{ms(abs(ids_us))} {'more' if ids_us > 0 else 'less'}",
        "log": ms(max(log_us, 0.0)),
        **{f"placed-{count}": least(placed, count) for count in FLEETS},
        **{f"events-{count}": least(kept["events"], count) for count in FLEETS},
        "quiet-streams": f"{streams['core']:.1%}".replace("%", " %"),
        "added": ms(added_us),
        "start": f"{kept['start_kib'][0] / 1024:.0f} MB",
        "default-start": f"{kept['start_kib'][1] / 1024:.0f} MB",
        **{f"idle-{count}": share(ms) for count, ms in zip(FLEETS, kept["idle_ms"][0], strict=True)},
        **{f"default-idle-{count}": share(ms) for count, ms in zip(FLEETS, kept["idle_ms"][1], strict=True)},
        "default-whole": ms(by[default, whole]),
        "default-event": ms(gateway_cost.event_us(by, default)),
    }


def ms(us: float) -> str:
    """Milliseconds, to two digits.

    >>> ms(436.0), ms(52.0), ms(1275.0)
    ('0.44 ms', '0.052 ms', '1.3 ms')
    """
    return f"{us / 1e3:.2g} ms"


def share(ms_a_second: float) -> str:
    """CPU milliseconds a second as a share of a core.

    >>> share(0.42), share(18.4)
    ('0.04 %', '1.8 %')
    """
    return f"{ms_a_second / 10:.2g} %"


def per_s(us: float) -> str:
    """How many such things fill a core, to two digits.

    >>> per_s(436.0), per_s(52.0)
    ('2,300', '19,000')
    """
    return f"{float(f'{1e6 / us:.2g}'):,.0f}"


def least(rows: list[dict[str, Any]], replicas: int) -> str:
    """The lower rate of the traces with that many replicas."""
    return per_s(1e6 / min(row["rate"] for row in rows if row["replicas"] == replicas))


def made() -> dict[str, str]:
    """Everything on the page that comes from the kept result, by the name of its marker."""
    kept = msgspec.json.decode(RESULT.read_bytes())
    return {f"value:{name}": text for name, text in values(kept).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fill", action="store_true", help="measure nothing; fill the page in from the kept result")
    if not parser.parse_args().fill:
        RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(measured()), indent=1) + b"\n")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), made()), encoding="utf-8")
    print(f"filled in {PAGE.relative_to(ROOT)} from {RESULT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
