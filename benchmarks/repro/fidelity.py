"""How true the simulator is: one trace through the gateway with real replicas, and through the simulator.

    python benchmarks/repro/fidelity.py                     # two real vLLM replicas on the CPU (8 minutes)
    python benchmarks/repro/fidelity.py --engine emulator --rates 8 --requests 40       # to try it out
    python benchmarks/repro/fidelity.py --again                # once more, to be shown as means with what there is
    python benchmarks/repro/fidelity.py --simulate             # simulate again, for the kept measurements
    python benchmarks/repro/fidelity.py --draw                 # docs/fidelity.md from the results

The replicas are profiled as `preble profile` does it, both at the same time; the gateway and the simulator have that
profile. `make engines` sets the engines up. Where it is allowed (to root), replicas, gateway and this process go before
all else on the machine; otherwise nothing else may run meanwhile. Results: benchmarks/results/fidelity.json.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import TYPE_CHECKING

import cpu_engines
import msgspec
from cpu_engines import ENGINES, NUMBERS, ROOT, EngineName, Measured, latency_s
from made_by import note
from page import filled, markdown

from preble.core.costs.model import CostModel, CostProfile
from preble.lab.bench.client import BenchClient
from preble.lab.bench.load import run_load
from preble.lab.metrics import RequestRecord, Summary
from preble.lab.profiling import Fit, Measurements, fit_profile
from preble.lab.report import PALETTE, Drawing, Table, draw
from preble.lab.sim import SimConfig, simulate
from preble.lab.workloads import Workload
from preble.lab.workloads.generators.pieces import Asked

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
IDLE_REQUESTS, IDLE_TOOLS, IDLE_GAP_S, IDLE_SEED = 40, 8, 0.5, 31
"""With which a request's way is measured: prompts of the trace's kind, so far apart that none meets another."""


class Comparison(msgspec.Struct, frozen=True):
    """One policy at one rate: measured, and simulated in four ways.

    `tokens`: as if nothing but its tokens took a replica time, and a request were there at once. `engine`: with a
    request's overhead. `way`: with its way there and back too. `cores`: with that, and replicas slower by what else
    their cores had to do, which is `taken` of their time. `utilisation`: of a replica simulated like that, busy time by
    time.
    """

    policy: str
    rps: float
    measured: Measured
    tokens: Summary
    engine: Summary
    way: Summary
    cores: Summary
    taken: float
    utilisation: float


class Results(msgspec.Struct, frozen=True):
    """One measurement of every case.

    `alone`: fitted while the other replica had nothing to do; `together`: while both were measured, used for all.
    `way_s`: of a request through the gateway to an idle replica and back, beside what the profile says of the replica;
    `direct_s`: of one that is sent to the replica itself.
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
            urls = [replica.url for replica in started]
            direct_s = mean([await way_s(engine, urls, url, fit.profile) for url in urls])
            through_s = await way_s(engine, urls, front.url, fit.profile)
        say(f"a request's overhead is {1000 * fit.profile.request_overhead_s:.2f} ms")
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
        admissions=tuple(times for one in measured for times in one.admissions),
    )
    name = f"{pooled.engine.split()[0]}-tiny"
    return fit_profile(pooled, name=name, source=f"{pooled.engine} on a CPU core, {len(measured)} at the same time")


async def way_s(engine: EngineName, replicas: Sequence[str], url: str, profile: CostProfile) -> float:
    """What a request to idle replicas takes until its first token beside what the profile says: the median, in seconds.

    The caches are empty first; what the profile says goes by what each request then found cached.
    """
    made = cpu_engines.TOOLS(Asked(IDLE_REQUESTS, IDLE_SEED, num_prefixes=IDLE_TOOLS)).requests
    requests = (replace(request, output_tokens=1, arrival_s=IDLE_GAP_S * number) for number, request in enumerate(made))
    records: list[RequestRecord] = []
    await cpu_engines.empty_caches(engine, replicas)
    async with BenchClient(url) as client:
        await client.find_model()
        await run_load(client, Workload("idle", tuple(requests)), records.append)
    model = CostModel(profile)
    return median(
        record.ttft_s - alone_s(model, record.prompt_tokens, record.cached_tokens or 0)
        for record in records
        if record.ttft_s is not None
    )


def alone_s(model: CostModel, prompt_tokens: int, cached_tokens: int) -> float:
    """What an idle replica takes for a prompt, in chunks of its token budget, in seconds."""
    starts = range(cached_tokens, prompt_tokens, cpu_engines.MAX_BATCH_TOKENS)
    chunks = ((min(cpu_engines.MAX_BATCH_TOKENS, prompt_tokens - start), start) for start in starts)
    return model.admission_s(1) + sum(model.prefill_s(*chunk) for chunk in chunks)


# ---- simulated -----------------------------------------------------------------------------------------------------


def simulate_all(results: Results, measured: dict[tuple[str, float], Measured]) -> Results:
    """The results with what the simulator says beside what was measured."""
    found = [compared(results, policy, rps, one) for (policy, rps), one in measured.items()]
    return msgspec.structs.replace(results, comparisons=found)


def compared(results: Results, policy: str, rps: float, measured: Measured) -> Comparison:
    load = cpu_engines.trace(results.requests, rps, results.seed)
    taken = taken_share(measured)
    slowed = slower(results.together, 1 / (1 - taken))
    free = replace(results.together, request_overhead_s=0.0)
    tokens = simulate(sim_config(results, policy, free, 0.0), load)
    engine = simulate(sim_config(results, policy, results.together, 0.0), load)
    way = simulate(sim_config(results, policy, results.together, results.way_s), load)
    cores = simulate(sim_config(results, policy, slowed, results.way_s), load)
    utilisation = cores.gpu_s / cores.summary.duration_s / cpu_engines.REPLICAS
    simulated = (tokens.summary, engine.summary, way.summary, cores.summary)
    return Comparison(policy, rps, measured, *simulated, taken, utilisation)


def taken_share(measured: Measured) -> float:
    """The share of a busy replica's core that the gateway, the load generator and others took from it.

    They run on a core that is idle where there is one, so a replica gives way only while the other one is busy too.
    """
    beside = measured.busy["gateway"] + measured.busy["client"] + measured.disturbed
    return measured.busy["replica"] * beside / cpu_engines.REPLICAS


def slower(profile: CostProfile, factor: float) -> CostProfile:
    """Return the profile with every time multiplied by `factor`."""
    return replace(
        profile,
        prefill_points=tuple((tokens, factor * seconds) for tokens, seconds in profile.prefill_points),
        attention_s_per_pair=factor * profile.attention_s_per_pair,
        attention_s_per_context_token=factor * profile.attention_s_per_context_token,
        decode_base_s=factor * profile.decode_base_s,
        decode_s_per_sequence=factor * profile.decode_s_per_sequence,
        decode_s_per_context_token=factor * profile.decode_s_per_context_token,
        request_overhead_s=factor * profile.request_overhead_s,
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


LABELS = {
    "cores": "simulated",
    "way": "- without the cores' other work",
    "engine": "- nor a request's way",
    "tokens": "- nor its overhead",
}


class Case:
    """One policy at one rate, in every measurement."""

    def __init__(self, measurements: Sequence[Results], policy: str, rps: float) -> None:
        self.policy, self.rps = policy, rps
        runs = [one for results in measurements for one in results.comparisons]
        self.runs = [run for run in runs if (run.policy, run.rps) == (policy, rps)]

    def mean(self, number: Callable[[Comparison], float]) -> float:
        return mean(number(run) for run in self.runs)

    def true_s(self, what: str, number: str) -> float:
        """One of `NUMBERS` as measured, in seconds: the mean over the measurements."""
        return self.mean(lambda run: latency_s(run.measured.summary, what, number))

    def made_s(self, variant: str, what: str, number: str) -> float:
        """The same as simulated."""
        return self.mean(lambda run: latency_s(getattr(run, variant), what, number))

    def off(self, variant: str, what: str, number: str) -> float:
        """How far the simulator is off, relative to what was measured."""
        return self.made_s(variant, what, number) / self.true_s(what, number) - 1


def cases(measurements: Sequence[Results], policy: str) -> list[Case]:
    rates = sorted({run.rps for results in measurements for run in results.comparisons})
    return [Case(measurements, policy, rps) for rps in rates]


def latency_table(measurements: Sequence[Results], policy: str) -> Table:
    """Measured, and how far the simulator is off, at each rate."""
    rows = []
    marked = set()
    for case in cases(measurements, policy):
        true = (f"{1000 * case.true_s(*number):.0f} ms" for number in NUMBERS)
        rows.append((f"{case.rps:g}/s", "measured", *true))
        for variant, label in LABELS.items():
            if variant != "cores":
                marked.add(len(rows))
            rows.append(("", label, *(f"{case.off(variant, *number):+.0%}" for number in NUMBERS)))
    one = measurements[0]
    return Table(
        (f"`{policy}`", "", *(f"{what} {number}" for what, number in NUMBERS)),
        rows,
        caption=f"{one.requests} requests at each rate, seed {one.seed}, means of {len(measurements)} measurements; "
        "simulated: how far off.",
        marked=frozenset(marked),
    )


def busy_table(measurements: Sequence[Results]) -> Table:
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
                case.policy,
                f"{case.rps:g}/s",
                f"{case.mean(lambda run: run.measured.summary.hit_rate or 0.0):.1%}",
                f"{case.mean(lambda run: run.cores.hit_rate or 0.0):.1%}",
                *(f"{case.mean(lambda run, name=name: run.measured.busy[name]):.0%}" for name in shown),
                f"{1000 * case.mean(lambda run: run.measured.summary.lag_p99_s or 0.0):.1f} ms",
            )
            for policy in POLICIES
            for case in cases(measurements, policy)
        ],
        caption="Busy: of one core; a replica is kept on one; others: in time that ours left. Sent late: p99 of how "
        "late the load generator was.",
    )


WORK: dict[str, Callable[[CostModel], float]] = {
    "prefill of 1,000 tokens": lambda model: model.prefill_s(1000),
    "prefill of 150 tokens behind 1,000 cached": lambda model: model.prefill_s(150, 1000),
    "decode of 1 sequence of 1,200 tokens": lambda model: model.iteration_s((), 1, 1200),
    "decode of 8 such sequences": lambda model: model.iteration_s((), 8, 9600),
    "a request's overhead": lambda model: model.admission_s(1),
}


def profile_table(measurements: Sequence[Results]) -> Table:
    """What the same work takes a replica alone, and while the other one computes, in every measurement."""
    models = [CostModel(profile) for one in measurements for profile in (one.alone, one.together)]
    ways = " and ".join(f"{1000 * one.way_s:.1f} ms" for one in measurements)
    direct = " and ".join(f"{1000 * one.direct_s:.1f} ms" for one in measurements)
    return Table(
        ("one iteration", *(name for _ in measurements for name in ("the other idle", "both at once"))),
        [(name, *(f"{1000 * seconds_of(model):.1f} ms" for model in models)) for name, seconds_of in WORK.items()],
        caption=f"Beside that, a request on idle replicas takes {ways} through the gateway, {direct} without it.",
    )


def tables(measurements: Sequence[Results]) -> dict[str, str]:
    """What stands between the markers of the page, by name."""
    made = {policy: markdown(latency_table(measurements, policy)) for policy in POLICIES}
    return made | {"busy": markdown(busy_table(measurements)), "profile": markdown(profile_table(measurements))}


def values(measurements: Sequence[Results]) -> dict[str, str]:
    """What the sentences of the page say, by marker."""
    means, singly = off(measurements, "mean"), [one for kept in measurements for one in off([kept], "mean")]
    pairs = list(zip(cases(measurements, "round_robin"), cases(measurements, "preble"), strict=True))
    first, second = ([one for policy in POLICIES for one in measured_means([kept], policy)] for kept in measurements)
    made = {
        "means-within": f"{math.ceil(100 * max(map(abs, means)))} % of the measured in all {len(means)} cases",
        "singly-near": f"{sum(abs(one) <= 0.15 for one in singly)} of {len(singly)}",
        "singly-lowest": percent(-min(singly)),
        "p99-lowest": percent(-min(off(measurements, "p99"))),
        "apart": percent(max(max(pair) / min(pair) - 1 for pair in zip(first, second, strict=True))),
        "gains-measured": listed([a.true_s("E2E", "mean") / b.true_s("E2E", "mean") for a, b in pairs]),
        "gains-simulated": listed(
            [a.made_s("cores", "E2E", "mean") / b.made_s("cores", "E2E", "mean") for a, b in pairs]
        ),
    }
    return {f"value:{name}": text for name, text in made.items()}


def off(measurements: Sequence[Results], number: str) -> list[float]:
    """How far the simulated number is from the measured one, for TTFT and E2E in every case."""
    found = [case for policy in POLICIES for case in cases(measurements, policy)]
    return [case.off("cores", what, number) for case in found for what in ("TTFT", "E2E")]


def measured_means(measurements: Sequence[Results], policy: str) -> list[float]:
    return [case.true_s(what, "mean") for case in cases(measurements, policy) for what in ("TTFT", "E2E")]


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def listed(numbers: Sequence[float]) -> str:
    """
    >>> listed([1.5, 2.25, 3])
    '1.50, 2.25 and 3.00'
    """
    texts = [f"{number:.2f}" for number in numbers]
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def drawing(measurements: Sequence[Results]) -> Drawing:
    def fill(figure: Figure) -> None:
        for axes, (what, number) in zip(figure.subplots(2, 2).flat, NUMBERS, strict=True):
            for policy, colour in COLOURS.items():
                mine = cases(measurements, policy)
                rates = [case.rps for case in mine]
                real = [case.true_s(what, number) for case in mine]
                made = [case.made_s("cores", what, number) for case in mine]
                axes.plot(rates, real, "o-", color=colour, markersize=4, label=f"{policy}, measured")
                axes.plot(rates, made, "x--", color=colour, markersize=5, label=f"{policy}, simulated")
            axes.set(title=f"{what}, {number}", xlabel="requests/s", ylabel="seconds", ylim=(0, None))
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)

    return draw(fill, width_in=7.6, height_in=6.2)


def known_results() -> list[Results]:
    """Every measurement, in order. Raises: FileNotFoundError: nobody has measured it."""
    return msgspec.json.decode(PATH.read_bytes(), type=list[Results])


def show(measurements: Sequence[Results]) -> None:
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    FIGURE.write_text(drawing(measurements).standalone(), encoding="utf-8")
    made = tables(measurements) | values(measurements)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")


def runs_of(measurements: Sequence[Results]) -> list[Comparison]:
    return [run for results in measurements for run in results.comparisons]


def say(text: str) -> None:
    print(f"fidelity: {text}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description="The same trace on real replicas and in the simulator.")
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="rates, in requests a second")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="requests at each rate")
    parser.add_argument("--quick", action="store_true", help="measure a rough profile, and only print the results")
    parser.add_argument("--again", action="store_true", help="keep earlier measurements, and show means")
    parser.add_argument("--simulate", action="store_true", help="simulate again, for the kept measurements")
    parser.add_argument("--draw", action="store_true", help="fill in the page from the results that are there")
    options = parser.parse_args()
    results = known_results() if options.draw or options.simulate or options.again else []
    if not (options.draw or options.simulate):
        measuring = measure_all(options.engine, options.rates, options.requests, quick=options.quick)
        results.append(asyncio.run(measuring))
    if options.simulate:
        results = [
            simulate_all(one, {(run.policy, run.rps): run.measured for run in one.comparisons}) for one in results
        ]
    if not options.quick:
        PATH.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
        if not options.draw:
            note("fidelity")
        show(results)
    print(*tables(results).values(), sep="\n")


if __name__ == "__main__":
    main()
