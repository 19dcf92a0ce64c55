"""`preble demo`: round robin and the default policy, from cold caches, on real engines. `make demo` runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import click

from preble.cli.options import POSITIVE, POSITIVE_FLOAT
from preble.cli.running import run_cancellable
from preble.errors import ConfigError

if TYPE_CHECKING:
    from preble.bench import BenchResult, BenchSettings
    from preble.engines.launch import LaunchOptions

BASELINE, OURS = "round_robin", "preble"


@dataclass(frozen=True, slots=True)
class Scenario:
    """The demonstration on one kind of engine.

    `num_tools` and `kv_tokens`: one replica's KV cache does not hold all tools, but those of all replicas together do.
    `rps`: a load that the engines can serve under either policy.
    """

    what: str
    replicas: int
    kv_tokens: int
    num_tools: int
    requests: int
    rps: float
    profile: str
    model: Path | None = None


SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        "vllm": Scenario(
            what="real vLLM on the CPU, a tiny Llama",
            replicas=2,
            kv_tokens=16_000,
            num_tools=24,
            requests=400,
            rps=8.0,
            profile="tiny-cpu",
            model=Path(".engines/models/tiny-llama"),
        ),
        "emulator": Scenario(
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


@click.command("demo", hidden=True)
@click.option("--engine", type=click.Choice(tuple(SCENARIOS)), default="vllm", show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("build/demo"),
    show_default=True,
    help="Folder for result.json, result.png, the records and the logs.",
)
@click.option("--requests", type=POSITIVE, help="Requests under each policy.  [default: the engine's]")
@click.option("--rps", type=POSITIVE_FLOAT, help="Requests a second.  [default: the engine's]")
@click.option("--seed", type=int, default=0, show_default=True)
def command(engine: str, out: Path, requests: int | None, rps: float | None, seed: int) -> None:
    """Send one tool-use workload to a small cluster under round robin, then under `preble`, and show the difference.

    Both start from cold caches and get the same requests at the same times.

    \b
    Example:
      preble demo --engine emulator
    """
    from preble.bench import BenchSettings
    from preble.bench.report import results_table
    from preble.workloads import WorkloadPlan

    scenario = SCENARIOS[engine]
    settings = BenchSettings(
        url="(the gateway)",
        plan=WorkloadPlan(
            source="tool_use",
            requests=requests or scenario.requests,
            rps=rps or scenario.rps,
            num_prefixes=scenario.num_tools,
            seed=seed,
        ),
    )
    if scenario.model is not None and not scenario.model.is_dir():
        raise ConfigError(f"no model at {str(scenario.model)!r}; run `make demo` in a checkout of Preble")
    try:
        results = run_cancellable(_run_arms(engine, scenario, settings, out))
    except KeyboardInterrupt:
        _say("interrupted; all that it started is stopped")
        raise
    _write(engine, results, out)
    from rich.console import Console

    Console().print(results_table(results, title=f"{scenario.replicas} replicas: {scenario.what}"))
    _conclude(results, out)


def _conclude(results: Mapping[str, BenchResult], out: Path) -> None:
    from preble.bench.comparison import improvement

    click.echo(f"`{OURS}` against `{BASELINE}`: {improvement(results[OURS], results[BASELINE])}.")
    click.echo(f"The same as {out / 'result.json'} and {out / 'result.png'}.")
    if any(result.summary.errors for result in results.values()):
        _say(f"some requests failed; the logs are in {out}")
        raise click.exceptions.Exit(1)


async def _run_arms(engine: str, scenario: Scenario, settings: BenchSettings, out: Path) -> dict[str, BenchResult]:
    """Run one arm after another and return their results.

    Raises: ConfigError, EngineError: a process did not start or did not answer.
    """
    plan = settings.plan
    _say(f"{plan.requests} requests at {plan.rps:g}/s to {scenario.replicas} replicas ({scenario.what})")
    return {policy: await _run_arm(engine, scenario, settings, policy, out) for policy in (BASELINE, OURS)}


async def _run_arm(engine: str, scenario: Scenario, settings: BenchSettings, policy: str, out: Path) -> BenchResult:
    """Run one policy: new replicas, warmed up with unrelated prompts, and a new gateway."""
    import msgspec

    from preble.bench import BenchRun
    from preble.bench.gateway import started_gateway
    from preble.bench.progress import request_progress
    from preble.bench.warmup import warm_up
    from preble.engines.launch import Fleet

    _say(f"{policy}: starting {scenario.replicas} replicas with empty caches")
    async with Fleet(_launch_options(engine, scenario, out / "logs" / policy)) as fleet:
        _say(f"{policy}: warming the engines up with unrelated prompts")
        await warm_up(fleet.urls)
        log_path = out / "logs" / policy / "gateway.log"
        async with started_gateway(fleet.urls, _gateway_args(scenario, policy), log_path) as gateway:
            here = msgspec.structs.replace(settings, url=gateway.url, replicas=tuple(fleet.urls))
            run = BenchRun(here)
            with request_progress(policy, run.num_requests) as on_record:
                await run.run(on_record)
            return run.result()


def _launch_options(engine: str, scenario: Scenario, log_dir: Path) -> LaunchOptions:
    from preble.engines.launch import LaunchOptions

    return LaunchOptions(
        engine="vllm" if engine == "vllm" else "emulator",
        replicas=scenario.replicas,
        log_dir=log_dir,
        model=None if scenario.model is None else str(scenario.model),
        max_model_len=None if scenario.model is None else 8192,
        profile=scenario.profile,
        kv_tokens=scenario.kv_tokens,
    )


def _gateway_args(scenario: Scenario, policy: str) -> list[str]:
    args = ["--policy", policy, "--profile", scenario.profile]
    return args if scenario.model is None else [*args, "--tokenizer", str(scenario.model)]


def _write(engine: str, results: Mapping[str, BenchResult], out: Path) -> None:
    """Write result.json, result.png, and every request's record."""
    import json

    import msgspec

    from preble.bench.comparison import comparison
    from preble.bench.plot import draw_results

    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps(comparison(engine, results), indent=2) + "\n", encoding="utf-8")
    for policy, result in results.items():
        (out / f"records-{policy}.json").write_bytes(msgspec.json.encode(result))
    note = next(iter(results.values())).workload_note
    draw_results(results, out / "result.png", f"{SCENARIOS[engine].what}: {note}")


def _say(text: str) -> None:
    click.echo(f"demo: {text}", err=True)
