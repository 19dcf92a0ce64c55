"""Two real vLLM and two real SGLang replicas behind the gateway, the same trace under each policy.

    python benchmarks/repro/backends.py                        # both engines, on the CPU (a quarter of an hour)
    python benchmarks/repro/backends.py --engine sglang        # one of them
    python benchmarks/repro/backends.py --engine emulator --requests 40       # to try it out; keeps nothing
    python benchmarks/repro/backends.py --draw                 # docs/fidelity.md from the results

Round robin is what an engine's replicas are without a scheduler in front of them. Every run starts from empty caches.
`make engines` sets the engines up; nothing else may run meanwhile. Results: benchmarks/results/backends.json.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING

import cpu_engines
import msgspec
from cpu_engines import ENGINES, NUMBERS, ROOT, EngineName, Measured, latency_s
from made_by import note
from page import filled, markdown

from preble.lab.profiling import fit_profile
from preble.lab.report import PALETTE, Drawing, Table, draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PATH = cpu_engines.RESULTS / "backends.json"
PAGE = ROOT / "docs" / "fidelity.md"
FIGURE = ROOT / "docs" / "fidelity" / "backends.svg"

COLOURS = {"round_robin": PALETTE[3], "e2": PALETTE[0], "preble": PALETTE[2]}
POLICIES = tuple(COLOURS)
RATES: dict[EngineName, tuple[float, ...]] = {"vllm": (8.0, 12.0), "sglang": (8.0, 12.0), "emulator": (8.0,)}
"""Requests a second: what round robin bears well, and what it hardly bears."""

TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
REQUESTS = 240
SEEDS = (40,)


class Run(msgspec.Struct, frozen=True):
    """One policy on one engine under one seed."""

    policy: str
    rps: float
    seed: int
    measured: Measured


class Backend(msgspec.Struct, frozen=True):
    """Every run on one engine. `requests`: of a run."""

    engine: EngineName
    engine_version: str
    date: str
    requests: int
    runs: list[Run]

    def select(self, policy: str, rps: float) -> list[Run]:
        return [run for run in self.runs if (run.policy, run.rps) == (policy, rps)]

    @property
    def rates(self) -> list[float]:
        return sorted({run.rps for run in self.runs})


# ---- measured ------------------------------------------------------------------------------------------------------


async def measure_backend(engine: EngineName, requests: int, seeds: Sequence[int]) -> Backend:
    runs = []
    async with cpu_engines.replicas(engine, cpu_engines.LOGS / engine) as started:
        measured = await cpu_engines.measurements(started[0].url, seeds[0], quick=True)
        profile = fit_profile(measured, name=f"{engine}-tiny", source="a quick measurement").profile
        for rps in RATES[engine]:
            for seed in seeds:
                load = cpu_engines.trace(requests, rps, seed)
                for policy in POLICIES:
                    one = await cpu_engines.measure(engine, started, policy, profile, load, refit=True)
                    runs.append(Run(policy, rps, seed, one))
                    times = " ".join(f"{latency_s(one.summary, *number):.3f}" for number in NUMBERS)
                    what = f"{engine}, {policy} at {rps:g}/s, seed {seed}: {times}; others {one.busy['others']:.0%}"
                    print(f"backends: {what}", file=sys.stderr)
    return Backend(engine, measured.engine, measured.date, requests, runs)


# ---- what is shown -------------------------------------------------------------------------------------------------


def latencies_s(runs: Sequence[Run]) -> list[float]:
    """Each of `NUMBERS`, the mean over the seeds, in seconds."""
    return [mean(latency_s(run.measured.summary, *number) for run in runs) for number in NUMBERS]


def latency_table(backends: Sequence[Backend]) -> Table:
    """Round robin's latencies, and how many times less the others' are."""
    rows = []
    for backend in backends:
        for rps in backend.rates:
            basis = latencies_s(backend.select("round_robin", rps))
            for policy in POLICIES:
                runs = backend.select(policy, rps)
                cells = [
                    f"{1000 * mine:.0f} ms" + ("" if policy == "round_robin" else f" ({theirs / mine:.2f})")
                    for mine, theirs in zip(latencies_s(runs), basis, strict=True)
                ]
                hits = mean(run.measured.summary.hit_rate or 0.0 for run in runs)
                rows.append((f"{TITLES[backend.engine]}, {rps:g}/s", policy, *cells, f"{hits:.0%}"))
    seeds = ", ".join(str(seed) for seed in sorted({run.seed for backend in backends for run in backend.runs}))
    return Table(
        ("engine, rate", "policy", *(f"{what} {number}" for what, number in NUMBERS), "hit rate"),
        rows,
        caption=f"{backends[0].requests} requests a run, seed {seeds}. In brackets: round robin's divided by this; "
        "above 1 is faster.",
    )


def drawing(backends: Sequence[Backend]) -> Drawing:
    """A row of bars for each engine and rate: latencies relative to round robin's."""
    groups = [(backend, rps) for backend in backends for rps in backend.rates]

    def fill(figure: Figure) -> None:
        panels = figure.subplots(2, 2, sharey=True).flat
        for place, (axes, (what, number)) in enumerate(zip(panels, NUMBERS, strict=True)):
            for group, (backend, rps) in enumerate(groups):
                basis = latencies_s(backend.select("round_robin", rps))[place]
                for i, (policy, colour) in enumerate(COLOURS.items()):
                    height = latencies_s(backend.select(policy, rps))[place] / basis
                    x = group + 0.27 * (i - 1)
                    axes.bar(x, height, 0.25, color=colour, label=policy if group == 0 else None)
            axes.set_xticks(range(len(groups)), [f"{TITLES[b.engine]}\n{rps:g}/s" for b, rps in groups])
            axes.set(title=f"{what}, {number}", ylabel="times round robin's")
            axes.grid(axis="x", visible=False)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)

    return draw(fill, width_in=7.6, height_in=6.0)


def tables(backends: Sequence[Backend]) -> dict[str, str]:
    """What stands between the markers of the page, by name."""
    return {"backends": markdown(latency_table(backends))}


def values(backends: Sequence[Backend]) -> dict[str, str]:
    """What the sentences of the page say, by marker: round robin's latency / that of `preble`."""
    e2e, ttft = ("E2E", "mean"), ("TTFT", "mean")
    names = {"vllm-12": e2e, "sglang-12": e2e, "vllm-8": e2e, "sglang-8": e2e, "sglang-8-ttft": ttft}
    return {f"value:{name}": f"{_gain(backends, name, number):.2f}" for name, number in names.items()}


def _gain(backends: Sequence[Backend], name: str, number: tuple[str, str]) -> float:
    engine, rate, *_ = name.split("-")
    backend = next(one for one in backends if one.engine == engine)
    runs = (backend.select(policy, float(rate)) for policy in ("preble", "round_robin"))
    ours_s, theirs_s = (latencies_s(of_policy)[list(NUMBERS).index(number)] for of_policy in runs)
    return theirs_s / ours_s


def known_results() -> list[Backend]:
    """Raises: FileNotFoundError: it was not measured yet."""
    return msgspec.json.decode(PATH.read_bytes(), type=list[Backend])


def runs_of(backends: Sequence[Backend]) -> list[Run]:
    return [run for backend in backends for run in backend.runs]


def keep(backend: Backend) -> None:
    """Replace the results of that engine."""
    others = [one for one in (known_results() if PATH.exists() else []) if one.engine != backend.engine]
    ordered = sorted([*others, backend], key=lambda one: list(TITLES).index(one.engine))
    PATH.write_bytes(msgspec.json.format(msgspec.json.encode(ordered)))
    note("backends")


def main() -> None:
    parser = argparse.ArgumentParser(description="Real engines under each policy.")
    parser.add_argument("--engine", choices=ENGINES, help="only this engine")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="requests of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--draw", action="store_true", help="fill in the page from the results that are there")
    options = parser.parse_args()
    if not options.draw:
        for engine in [options.engine] if options.engine else TITLES:
            backend = asyncio.run(measure_backend(engine, options.requests, options.seeds))
            if engine in TITLES:
                keep(backend)
    results = known_results()
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    FIGURE.write_text(drawing(results).standalone(), encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables(results) | values(results)), encoding="utf-8")
    print(markdown(latency_table(results)))


if __name__ == "__main__":
    main()
