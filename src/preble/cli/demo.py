"""`preble demo`: round robin and the default policy in turns, from cold caches, on real engines."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import click

from preble.cli.options import POSITIVE, POSITIVE_FLOAT, option
from preble.cli.output import OUTPUT_FILE, write_result, writing
from preble.cli.running import reported_waiting, run_cancellable
from preble.errors import ConfigError

if TYPE_CHECKING:
    from preble.engines.starting.launch import LaunchOptions
    from preble.lab.bench import BenchResult
    from preble.lab.workloads import Workload, WorkloadPlan

    Turns = Mapping[str, Sequence[BenchResult]]

BASELINE, OURS = POLICIES = "round_robin", "preble"
RESULT, DRAWING, RECORDS = "result.json", "result.png", "records-{}.json"
ROUNDS = 2
"""Each policy has one turn in a round, so that what else the machine does meanwhile meets both."""


@dataclass(frozen=True, slots=True)
class DemoScenario:
    """The demonstration on one kind of engine.

    `num_tools` and `kv_tokens`: one replica's KV cache does not hold all tools, but those of all replicas together do.
    `rps`: a load that the engines can serve under either policy. `requests`: under each policy, in all its turns.
    """

    what: str
    replicas: int
    kv_tokens: int
    num_tools: int
    requests: int
    rps: float
    profile: str
    model: Path | None = None


SCENARIOS: Mapping[str, DemoScenario] = MappingProxyType(
    {
        "vllm": DemoScenario(
            what="real vLLM on the CPU, a tiny Llama",
            replicas=2,
            kv_tokens=16_000,
            num_tools=24,
            requests=400,
            rps=8.0,
            profile="tiny-cpu",
            model=Path(".engines/models/tiny-llama"),
        ),
        "emulator": DemoScenario(
            what="emulated, Mistral 7B on an A6000",
            replicas=4,
            kv_tokens=24_000,
            num_tools=64,
            requests=600,
            rps=24.0,
            profile="a6000-mistral-7b",
        ),
    }
)


@click.command("demo")
@click.option("--engine", type=click.Choice(tuple(SCENARIOS)), default="vllm", show_default=True)
@option(
    "--out",
    "Folder for result.json, result.png, the records and the logs.",
    click.Path(path_type=Path, file_okay=False),
    default=Path("build/demo"),
)
@option("--requests", "Requests under each policy.  [default: the engine's]", POSITIVE)
@option("--rps", "Requests a second.  [default: the engine's]", POSITIVE_FLOAT)
@click.option("--seed", type=int, default=0, show_default=True)
def command(engine: str, out: Path, requests: int | None, rps: float | None, seed: int) -> None:
    """Send one tool-use workload to a small cluster under round robin and under `preble`, and show the difference.

    Each policy has replicas of its own, which begin with empty caches. The two take turns, twice; in each round both
    get the same requests at the same times. The KV cache of a replica is small on purpose: it holds a part of the
    tools, and only all caches together hold all of them, as where traffic shares more than one GPU can keep.

    \b
    Example:
      preble demo --engine emulator
    """
    from preble.lab.bench.report import print_results
    from preble.lab.report import require_matplotlib
    from preble.lab.workloads import WorkloadPlan

    require_matplotlib()
    scenario = SCENARIOS[engine]
    if scenario.model is not None and not scenario.model.is_dir():
        raise ConfigError(f"no model at {str(scenario.model)!r}; run `make demo` in a checkout of Preble")
    _check(out)
    plan = WorkloadPlan(
        source="tool_use",
        requests=requests or scenario.requests,
        rps=rps or scenario.rps,
        num_prefixes=scenario.num_tools,
        seed=seed,
    )
    try:
        turns = run_cancellable(_run_turns(engine, scenario, plan, out))
    except KeyboardInterrupt:
        _say("interrupted; all that it started is stopped")
        raise
    from rich.console import Console

    from preble.lab.bench.comparison import joined

    results = {policy: joined(of_policy) for policy, of_policy in turns.items()}
    print_results(Console(), results, f"{scenario.replicas} replicas: {scenario.what}")
    _conclude(turns)
    _write(engine, turns, out)
    click.echo(f"The same as {out / RESULT} and {out / DRAWING}.")
    if any(result.summary.errors for result in results.values()):
        _say(f"some requests failed; the logs are in {out}")
        raise click.exceptions.Exit(1)


def _rounds(plan: WorkloadPlan) -> list[Workload]:
    """Return the plan's requests in ROUNDS parts, each from its own time 0."""
    whole = plan.make()
    size = math.ceil(len(whole.requests) / ROUNDS)
    parts = [whole.requests[first : first + size] for first in range(0, len(whole.requests), size)]
    return [
        replace(
            whole,
            requests=tuple(replace(one, arrival_s=(one.arrival_s or 0.0) - (part[0].arrival_s or 0.0)) for one in part),
        )
        for part in parts
    ]


def _conclude(turns: Turns) -> None:
    from preble.lab.bench.comparison import improvement, too_busy

    click.echo(f"`{OURS}` against `{BASELINE}`: {improvement(turns[OURS], turns[BASELINE])}.")
    if warning := too_busy(turns):
        click.echo(f"Beware: {warning}.")


async def _run_turns(engine: str, scenario: DemoScenario, plan: WorkloadPlan, out: Path) -> Turns:
    """Start replicas and a gateway for each policy, and run one turn of each policy in each round.

    Raises: ConfigError, EngineError: a process did not start or did not answer.
    """
    from preble.engines.starting.launch import Fleet
    from preble.lab.bench import BenchRun, BenchSettings
    from preble.lab.bench.gateway import started_gateway
    from preble.lab.bench.run import run_with_progress
    from preble.lab.bench.warmup import warm_up

    rounds, options = _rounds(plan), _launch_options(engine, scenario, out / "logs")
    _say(f"{plan.requests} requests at {plan.rps:g}/s under each policy, in {len(rounds)} turns; {scenario.what}")
    _say(f"a replica caches {scenario.kv_tokens:,} tokens, on purpose too few for all {scenario.num_tools} tools")
    turns: dict[str, list[BenchResult]] = {BASELINE: [], OURS: []}
    async with AsyncExitStack() as stack:
        _say(f"starting {scenario.replicas} replicas for each policy; logs in {options.log_dir}")
        async with reported_waiting(_say, options.ready_timeout_s):
            fleet = await stack.enter_async_context(Fleet(options))
            _say("warming the engines up with unrelated prompts")
            await warm_up(fleet.urls)
            urls = {policy: tuple(fleet.urls[first :: len(POLICIES)]) for first, policy in enumerate(turns)}
            gateways = {
                policy: await stack.enter_async_context(
                    started_gateway(own, _gateway_args(scenario, policy), options.log_dir / f"gateway-{policy}.log")
                )
                for policy, own in urls.items()
            }
        for number, workload in enumerate(rounds, 1):
            for policy, results in turns.items():
                settings = BenchSettings(url=gateways[policy].url, plan=plan, replicas=urls[policy])
                name = f"{policy}, turn {number} of {len(rounds)}"
                run = BenchRun(settings, workload=workload)
                await run_with_progress(run, name)
                results.append(run.result())
    return turns


def _launch_options(engine: str, scenario: DemoScenario, log_dir: Path) -> LaunchOptions:
    from preble.engines.starting.launch import LaunchOptions

    return LaunchOptions(
        engine="vllm" if engine == "vllm" else "emulator",
        replicas=scenario.replicas * len(POLICIES),
        threads=max((os.cpu_count() or 1) // scenario.replicas, 1),  # the replicas of one policy work at a time
        ready_timeout_s=600.0,
        log_dir=log_dir,
        model=None if scenario.model is None else str(scenario.model),
        max_model_len=None if scenario.model is None else 8192,
        profile=scenario.profile,
        kv_tokens=scenario.kv_tokens,
    )


def _gateway_args(scenario: DemoScenario, policy: str) -> list[str]:
    args = ["--policy", policy, "--profile", scenario.profile, "--workers", "0"]  # two gateways share this machine
    return args if scenario.model is None else [*args, "--tokenizer", str(scenario.model)]


def _check(out: Path) -> None:
    """Make the folder, and check that it takes the results. Raises: ConfigError, click's BadParameter: it does not."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    for name in (RESULT, DRAWING, *map(RECORDS.format, POLICIES)):
        OUTPUT_FILE.convert(str(out / name), None, None)


def _write(engine: str, turns: Turns, out: Path) -> None:
    """Write the result, its drawing, and every request's record. Raises: ConfigError."""
    import json

    import msgspec

    from preble.lab.bench.comparison import comparison, joined
    from preble.lab.bench.plot import draw_results

    write_result(out / RESULT, f"{json.dumps(comparison(engine, turns), indent=2)}\n".encode())
    results = {policy: joined(of_policy) for policy, of_policy in turns.items()}
    note = next(iter(results.values())).workload_note
    with writing(out):
        for policy, result in results.items():
            (out / RECORDS.format(policy)).write_bytes(msgspec.json.encode(result))
        draw_results(results, out / DRAWING, f"{SCENARIOS[engine].what}: {note}")


def _say(text: str) -> None:
    click.echo(f"demo: {text}", err=True)
