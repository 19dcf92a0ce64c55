"""How true the simulator is: one trace through the gateway with real replicas, and through the simulator.

    python benchmarks/repro/fidelity.py                     # two real vLLM replicas on the CPU (15 minutes)
    python benchmarks/repro/fidelity.py --engine emulator --rates 8 --requests 40       # to try it out
    python benchmarks/repro/fidelity.py --simulate             # simulate anew, beside what was measured before
    python benchmarks/repro/fidelity.py --draw                 # docs/fidelity.md from the results

The replicas are profiled as `preble profile` does it, both at the same time; the gateway and the simulator have that
profile. `make engines` sets the engines up; nothing else may run meanwhile. Results: benchmarks/results/fidelity.json.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median
from typing import TYPE_CHECKING

import cpu_engines
import msgspec
from cpu_engines import ENGINES, NUMBERS, ROOT, EngineName, Measured, latency_s
from page import filled, markdown

from preble.bench.client import BenchClient
from preble.bench.load import run_load
from preble.core.cost_model import CostModel, CostProfile
from preble.metrics import RequestRecord, Summary
from preble.profiling import Fit, Measurements, fit_profile
from preble.report import PALETTE, Drawing, Table, draw
from preble.sim import SimConfig, simulate
from preble.workloads import Segment, Workload, WorkloadRequest
from preble.workloads.trace import own_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PATH = cpu_engines.RESULTS / "fidelity.json"
PAGE = ROOT / "docs" / "fidelity.md"
FIGURE = ROOT / "docs" / "fidelity" / "fidelity.svg"

POLICIES = ("round_robin", "preble")
"""The first places alike whatever the times are; the second goes by them."""

RATES = (3.0, 6.0, 9.0, 12.0)
REQUESTS = 200
SEED = 30
IDLE_REQUESTS, IDLE_TOKENS, IDLE_GAP_S = 40, 32, 0.1
"""With which a request's way is measured."""


class Comparison(msgspec.Struct, frozen=True):
    """One policy at one rate: measured, and simulated in three ways.

    `engine`: as if a request were at the replica at once. `way`: with a request's way there and back. `cores`: with
    that, and replicas slower by what else their cores had to do, which is `taken` of their time. `utilisation`: of a
    replica simulated like that, busy time by time.
    """

    policy: str
    rps: float
    measured: Measured
    engine: Summary
    way: Summary
    cores: Summary
    taken: float
    utilisation: float


class Results(msgspec.Struct, frozen=True):
    """`alone`: fitted while the other replica had nothing to do; `together`: while both were measured, used for all.

    `way_s`: of a request through the gateway to an idle replica and back, beside the replica's own iteration;
    `direct_s`: of one that is sent to the replica itself; `intake_s`: the part of that which the replica's own server
    takes, as the profile's fit finds it.
    """

    engine: EngineName
    engine_version: str
    date: str
    requests: int
    seed: int
    alone: CostProfile
    together: CostProfile
    way_s: float
    direct_s: float
    intake_s: float
    comparisons: list[Comparison]


# ---- measured ------------------------------------------------------------------------------------------------------


async def measure_all(engine: EngineName, rates: Sequence[float], requests: int, *, quick: bool) -> Results:
    async with cpu_engines.replicas(engine, cpu_engines.LOGS / engine) as started:
        urls = [replica.url for replica in started]
        alone = await cpu_engines.measurements(urls[0], SEED, quick=quick)
        both = await asyncio.gather(*(cpu_engines.measurements(url, SEED + 1, quick=quick) for url in urls))
        fit = fitted(both)
        say(f"profile: {fit.median_error:.1%} median error; {' '.join(fit.warnings())}")
        async with cpu_engines.gateway(started, "round_robin", fit.profile, refit=False) as front:
            direct_s = mean([await way_s(replica.url, replica.name, fit.profile) for replica in started])
            through_s = await way_s(front.url, "gateway", fit.profile)
        say(f"the way takes {1000 * through_s:.1f} ms, without the gateway {1000 * direct_s:.1f} ms")
        measured = {}
        for rps in rates:
            load = cpu_engines.trace(requests, rps, SEED)
            for policy in POLICIES:
                measured[policy, rps] = await cpu_engines.measure(
                    engine, started, policy, fit.profile, load, refit=False
                )
                say(f"{policy} at {rps:g}/s: {measured[policy, rps].busy}")
    return simulate_all(
        Results(
            engine=engine,
            engine_version=both[0].engine,
            date=both[0].date,
            requests=requests,
            seed=SEED,
            alone=fitted([alone]).profile,
            together=fit.profile,
            way_s=through_s,
            direct_s=direct_s,
            intake_s=fit.overhead_s,
            comparisons=[],
        ),
        measured,
    )


def fitted(measured: Sequence[Measurements]) -> Fit:
    """One profile of all replicas together: every time of each counts."""
    pooled = msgspec.structs.replace(
        measured[0],
        prefill=tuple(times for one in measured for times in one.prefill),
        decode=tuple(times for one in measured for times in one.decode),
    )
    name = f"{pooled.engine.split()[0]}-tiny"
    return fit_profile(pooled, name=name, source=f"{pooled.engine} on a CPU core, {len(measured)} at the same time")


async def way_s(url: str, name: str, profile: CostProfile) -> float:
    """What a request on an idle replica takes until its first token beside the iteration, in seconds: the median."""
    ids = [f"idle {name} {number}" for number in range(IDLE_REQUESTS)]
    requests = (
        WorkloadRequest(text, (Segment(tokens=own_tokens(text, IDLE_TOKENS)),), 1, arrival_s=IDLE_GAP_S * number)
        for number, text in enumerate(ids)
    )
    records: list[RequestRecord] = []
    async with BenchClient(url) as client:
        await client.find_model()
        await run_load(client, Workload("idle", tuple(requests)), records.append)
    times = [record.ttft_s for record in records if record.ttft_s is not None]
    return median(times) - CostModel(profile).prefill_s(IDLE_TOKENS)


# ---- simulated -----------------------------------------------------------------------------------------------------


def simulate_all(results: Results, measured: dict[tuple[str, float], Measured]) -> Results:
    """The results with what the simulator says beside what was measured."""
    found = [compared(results, policy, rps, one) for (policy, rps), one in measured.items()]
    return msgspec.structs.replace(results, comparisons=found)


def compared(results: Results, policy: str, rps: float, measured: Measured) -> Comparison:
    load = cpu_engines.trace(results.requests, rps, results.seed)
    taken = taken_share(results, measured)
    slowed = slower(results.together, 1 / (1 - taken))
    engine = simulate(sim_config(results, policy, results.together, 0.0), load)
    way = simulate(sim_config(results, policy, results.together, results.way_s), load)
    cores = simulate(sim_config(results, policy, slowed, results.way_s), load)
    utilisation = cores.gpu_s / cores.summary.duration_s / cpu_engines.REPLICAS
    return Comparison(policy, rps, measured, engine.summary, way.summary, cores.summary, taken, utilisation)


def taken_share(results: Results, measured: Measured) -> float:
    """The share of the replicas' cores that did something else than iterations.

    It was used by the gateway, the load generator, others, and by the replicas' own servers to take requests in.
    """
    beside = sum(measured.busy[name] for name in ("gateway", "client", "others"))
    intake = measured.summary.requests_per_s * results.intake_s
    return (beside + intake) / cpu_engines.REPLICAS


def slower(profile: CostProfile, factor: float) -> CostProfile:
    """Everything takes so many times as long."""
    return replace(
        profile,
        prefill_points=tuple((tokens, factor * seconds) for tokens, seconds in profile.prefill_points),
        attention_s_per_pair=factor * profile.attention_s_per_pair,
        attention_s_per_context_token=factor * profile.attention_s_per_context_token,
        decode_base_s=factor * profile.decode_base_s,
        decode_s_per_sequence=factor * profile.decode_s_per_sequence,
        decode_s_per_context_token=factor * profile.decode_s_per_context_token,
    )


def sim_config(results: Results, policy: str, profile: CostProfile, dispatch_s: float) -> SimConfig:
    return SimConfig(
        profile=profile,
        replicas=cpu_engines.REPLICAS,
        policy=policy,
        kv_tokens=cpu_engines.KV_TOKENS,
        block_size=cpu_engines.BLOCK_SIZES[results.engine],
        max_batch_tokens=cpu_engines.MAX_BATCH_TOKENS,
        max_running=cpu_engines.MAX_RUNNING,
        seed=results.seed,
        dispatch_s=dispatch_s,
    )


# ---- what is shown -------------------------------------------------------------------------------------------------

COLOURS = {"round_robin": PALETTE[3], "preble": PALETTE[2]}


VARIANTS = ("cores", "way", "engine")
LABELS = {"engine": "- nor a request's way", "way": "- without the cores' other work", "cores": "simulated"}


def latency_table(results: Results, policy: str) -> Table:
    """Measured, and how far the simulator is off, at each rate."""
    rows = []
    marked = set()
    for one in results.comparisons:
        if one.policy == policy:
            true = [latency_s(one.measured.summary, *number) for number in NUMBERS]
            rows.append((f"{one.rps:g}/s", "measured", *(f"{1000 * seconds:.0f} ms" for seconds in true)))
            for variant in VARIANTS:
                made = [latency_s(getattr(one, variant), *number) for number in NUMBERS]
                if variant != "cores":
                    marked.add(len(rows))
                rows.append(("", LABELS[variant], *(f"{m / t - 1:+.0%}" for m, t in zip(made, true, strict=True))))
    return Table(
        (f"`{policy}`", "", *(f"{what} {number}" for what, number in NUMBERS)),
        rows,
        caption=f"{results.requests} requests at each rate, seed {results.seed}; simulated: how far off.",
        marked=frozenset(marked),
    )


def busy_table(results: Results) -> Table:
    """What the caches did, and what the cores' time went to."""
    shown = ("replica", "gateway", "client", "others")
    return Table(
        (
            "policy",
            "rate",
            "hit rate",
            "simulated",
            "a replica",
            "gateway",
            "load generator",
            "others",
            "sent late, p99",
        ),
        [
            (
                one.policy,
                f"{one.rps:g}/s",
                f"{one.measured.summary.hit_rate or 0.0:.1%}",
                f"{one.cores.hit_rate or 0.0:.1%}",
                *(f"{one.measured.busy[name]:.0%}" for name in shown),
                f"{1000 * (one.measured.summary.lag_p99_s or 0.0):.1f} ms",
            )
            for one in results.comparisons
        ],
        caption="Busy: of one core; a replica is kept on one. Sent late: p99 of how late the load generator was.",
    )


def profile_table(results: Results) -> Table:
    """What the same work takes a replica alone, and while the other one computes."""
    models = [CostModel(profile) for profile in (results.alone, results.together)]
    work = {
        "prefill of 1,000 tokens": [model.prefill_s(1000) for model in models],
        "prefill of 150 tokens behind 1,000 cached": [model.prefill_s(150, 1000) for model in models],
        "decode of 1 sequence of 1,200 tokens": [model.iteration_s((), 1, 1200) for model in models],
        "decode of 8 such sequences": [model.iteration_s((), 8, 9600) for model in models],
    }
    return Table(
        ("one iteration", "the other idle", "both at once"),
        [(name, *(f"{1000 * seconds:.1f} ms" for seconds in times)) for name, times in work.items()],
        caption=f"Beside its iteration, a request on idle replicas takes {1000 * results.way_s:.1f} ms through the "
        f"gateway, {1000 * results.direct_s:.1f} ms without it.",
    )


def tables(results: Results) -> dict[str, str]:
    """What stands between the markers of the page, by name."""
    made = {policy: markdown(latency_table(results, policy)) for policy in POLICIES}
    return made | {"busy": markdown(busy_table(results)), "profile": markdown(profile_table(results))}


def drawing(results: Results) -> Drawing:
    def fill(figure: Figure) -> None:
        for axes, (what, number) in zip(figure.subplots(1, len(NUMBERS)), NUMBERS, strict=True):
            for policy, colour in COLOURS.items():
                mine = [one for one in results.comparisons if one.policy == policy]
                rates = [one.rps for one in mine]
                real = [latency_s(one.measured.summary, what, number) for one in mine]
                made = [latency_s(one.cores, what, number) for one in mine]
                axes.plot(rates, real, "o-", color=colour, markersize=4, label=f"{policy}, measured")
                axes.plot(rates, made, "x--", color=colour, markersize=5, label=f"{policy}, simulated")
            axes.set(title=f"{what}, {number}", xlabel="requests/s", ylim=(0, None))
        figure.axes[0].set_ylabel("seconds")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)

    return draw(fill, width_in=11, height_in=3.4)


def known_results() -> Results:
    """Raises: FileNotFoundError: nobody has measured it."""
    return msgspec.json.decode(PATH.read_bytes(), type=Results)


def show(results: Results) -> None:
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    FIGURE.write_text(drawing(results).standalone(), encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables(results)), encoding="utf-8")


def runs_of(results: Results) -> list[Comparison]:
    return results.comparisons


def say(text: str) -> None:
    print(f"fidelity: {text}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description="The same trace on real replicas and in the simulator.")
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="requests a second")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="at each rate")
    parser.add_argument("--quick", action="store_true", help="a rough profile, and only print the results")
    parser.add_argument("--simulate", action="store_true", help="simulate anew, beside what was measured before")
    parser.add_argument("--draw", action="store_true", help="fill in the page from the results that are there")
    options = parser.parse_args()
    if options.draw or options.simulate:
        results = known_results()
    else:
        measuring = measure_all(options.engine, options.rates, options.requests, quick=options.quick)
        results = asyncio.run(measuring)
    if options.simulate:
        results = simulate_all(results, {(one.policy, one.rps): one.measured for one in results.comparisons})
    if not options.quick:
        PATH.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
        show(results)
    print(*tables(results).values(), sep="\n")


if __name__ == "__main__":
    main()
