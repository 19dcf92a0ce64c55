"""Ray Serve's own request router and Preble's, with one and with three ingress replicas.

    python benchmarks/repro/ray_serve.py                # about five minutes; writes the result and draws it
    python benchmarks/repro/ray_serve.py --draw

Starts Ray from .servers/ray (`python3 dev/setup.py ray`) and runs examples/ray_serve/ray_example.py there.
Result: benchmarks/results/ray_serve.json. Drawn into docs/howto/ray-serve.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec
from page import filled, markdown

from preble.lab.report import Table

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "ray_serve.json"
PAGE = ROOT / "docs" / "howto" / "ray-serve.md"
EXAMPLE = [str(ROOT / "examples" / "ray_serve" / "ray_example.py"), "--requests", "400", "--ingresses", "1,3", "--json"]
BAR = 0.02
"""How much lower the hits may be with three ingress replicas than with one."""


def run() -> list[dict[str, Any]]:
    """Run the example on a Ray of its own."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.ray_cluster import ray_cluster

    with ray_cluster() as cluster:
        return cluster.run(*EXAMPLE)


def read() -> list[dict[str, Any]]:
    """Return the kept outcomes."""
    outcomes: list[dict[str, Any]] = msgspec.json.decode(RESULT.read_bytes())
    return outcomes


def drawn(outcomes: list[dict[str, Any]]) -> dict[str, str]:
    """Return the page's table by its marker."""
    columns = ("", "requests", "failed", "hits", "busiest replica / mean", "mean TTFT", "in flight after")
    rows = []
    for one in outcomes:
        name = f"{one['router']}, {one['ingresses']} ingress replica{'s' if one['ingresses'] > 1 else ''}"
        shares = (f"{one['hits']:.3f}", f"{one['busiest']:.2f}", f"{1000 * one['ttft_mean_s']:.0f} ms")
        rows.append((name, str(one["requests"]), str(one["failed"]), *shares, str(one["in_flight"])))
    return {"ray-serve": markdown(Table(columns, rows))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only draw the kept result")
    if not parser.parse_args().draw:
        RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(run()), indent=1) + b"\n")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), drawn(read())), encoding="utf-8")


if __name__ == "__main__":
    main()
