"""Chaos: replicas are killed, hang, are slow and lie, the disk is full, tenants flood, gateways follow one another.

    python -m chaos --minutes 5                       # with tests/ on PYTHONPATH, as `make chaos` has it
    python -m chaos --minutes 60 --rate 278 --vllm 0 --json chaos.json   # an hour, a million requests

Clients of three tenants send requests at a steady rate and check each answer; a script that follows from the seed goes
wrong in every way, again and again. At the end a table. Status 1 if a request failed, an answer was wrong or lost
without its replica having been killed, stopped or told to cut it, or if anything is left over.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import msgspec

from chaos.fleet import vllm_is_here
from chaos.run import Plan, Result, run
from chaos.script import KINDS


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def rows(result: Result) -> dict[str, str]:
    """Return the values of a result by their names, in words."""
    before, after = result.last_idle
    return {
        "requests": f"{result.requests:,} in {result.seconds:.0f} s ({result.requests / result.seconds:.0f} a second)",
        "faults": f"{sum(result.faults.values()):,} of {len(result.faults)} kinds",
        "answered, as they had to be": f"{result.ends.get('ok', 0):,}",
        "left by the client": f"{result.ends.get('left', 0):,}",
        "lost: begun on a failing replica": str(result.lost),
        "lost otherwise": str(len(result.lost_otherwise)),
        "failed": str(result.failed),
        "refused": str(result.refused),
        "wrong answers": str(result.wrong),
        "the flood's": ", ".join(f"{number:,} {end}" for end, number in sorted(result.flood.items())) or "none",
        "in flight afterwards": str(result.left_over or "none"),
        "gateways, one after the other": str(after.generation),
        "memory, first gateway idle": f"{result.first_idle.memory_mb} MB",
        "memory, last gateway": f"{before.memory_mb} MB, idle at the end {after.memory_mb} MB",
        "open files": f"{result.first_idle.open_files}, at the end {after.open_files}",
        "first byte p50, p99": f"{result.first_byte_p50_s} s, {result.first_byte_p99_s} s",
        "whole answer p50, p99": f"{result.whole_p50_s} s, {result.whole_p99_s} s",
        "sent late at most": f"{result.late_s} s",
    }


def table(result: Result) -> str:
    """Return the rows as lines, with examples of what was bad."""
    lines = [f"{name:34}{value}" for name, value in rows(result).items()]
    return "\n".join([*lines, *(f"  {example}" for example in result.examples)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the script and of the requests")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long; the step that runs then is finished")
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second")
    parser.add_argument("--at-once", type=int, default=400, help="requests in flight at most")
    parser.add_argument("--replicas", type=int, default=4, help="emulated replicas")
    parser.add_argument("--vllm", type=int, default=int(vllm_is_here()), help="real vLLM replicas beside them")
    parser.add_argument("--hold", type=int, default=200, help="requests that end while one thing is wrong")
    parser.add_argument("--calm", type=int, default=200, help="requests that end before the next")
    parser.add_argument("--speed", type=float, default=1.0, help="of the emulated replicas, times their profile's")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--logs", type=Path, help="where to keep the logs of all processes")
    given = vars(parser.parse_args())
    given["kinds"] = tuple(given["kinds"])
    path, logs = given.pop("json"), given.pop("logs")
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(run(Plan(**given), Path(logs or folder), say))
    say(table(result))
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
