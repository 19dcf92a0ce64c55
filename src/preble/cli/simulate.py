"""`preble simulate`: a cluster without GPUs, on a virtual clock."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from preble.cli.options import POSITIVE, POSITIVE_FLOAT, workload_options
from preble.core.policies import policy_names
from preble.core.waiting_queue import QueueOrder
from preble.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from preble.sim import SimConfig, SimResult
    from preble.workloads import WorkloadPlan

FILE = click.Path(path_type=Path, dir_okay=False, writable=True)
DEFAULT_REQUESTS = 1000
"""Of a named workload, which has no end of its own."""
GC_THRESHOLD = 200_000
"""Allocations between two collections while a simulation runs."""


@click.command("simulate", short_help="A whole cluster without GPUs, faster than real time.")
@workload_options(DEFAULT_REQUESTS)
@click.option("--policy", type=click.Choice(policy_names()), default="e2", show_default=True, help="Who gets what.")
@click.option("--replicas", type=POSITIVE, default=4, show_default=True, help="How many: r0, r1, and so on.")
@click.option(
    "--profile",
    default="a6000-mistral-7b",
    show_default=True,
    metavar="NAME|FILE",
    help="Cost profile: which GPU and model a replica behaves like.",
)
@click.option("--kv-tokens", type=POSITIVE, help="KV cache of one replica, in tokens.  [default: the profile's]")
@click.option(
    "--order",
    type=click.Choice([order.value for order in QueueOrder]),
    default=QueueOrder.FCFS.value,
    show_default=True,
    help="Who is served first on a replica.",
)
@click.option(
    "--fail",
    "failures",
    multiple=True,
    metavar="T:KIND:REPLICA",
    help="At T seconds the replica is lost, added or restarted; as often as needed.",
)
@click.option("--dispatch-s", type=click.FloatRange(min=0), default=0.0, help="Delay of a request to its replica.")
@click.option("--sample-s", type=POSITIVE_FLOAT, help="Sample every replica's state so often, for --json.")
@click.option("--json", "save", type=FILE, metavar="FILE", help="Write the result with every record; - for stdout.")
def command(save: Path | None, **options: Any) -> None:
    """Play a workload on a simulated cluster: Preble's real schedulers, and iterations as long as a profile says.

    Same seed, same result, to the last digit. Replicas are named r0, r1 and so on.

    \b
    Examples:
      preble simulate --workload tool_use --rps 20 --replicas 4 --policy e2
      preble simulate --workload trace.jsonl.gz --policy round_robin --json result.json
      preble simulate --rps 20 --fail 30:lost:r1 --fail 60:added:r1
    """
    import msgspec

    from preble.bench.progress import request_progress
    from preble.sim import simulate

    config, plan = _settings(**options)
    workload = plan.make()
    with (
        request_progress(f"{workload.name}, {config.policy}", len(workload.requests)) as on_record,
        _fewer_collections(),
    ):
        result = simulate(config, workload, on_record)
    _deliver(msgspec.structs.replace(result, plan=plan), save)
    if result.summary.errors == result.summary.requests:
        raise click.exceptions.Exit(1)


@contextmanager
def _fewer_collections() -> Iterator[None]:
    """Let the garbage collector look less often: a simulation keeps much and leaves little behind."""
    usual = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _settings(
    *,
    workload: str,
    requests: int | None,
    profile: str,
    order: str,
    failures: tuple[str, ...],
    seed: int,
    **rest: Any,
) -> tuple[SimConfig, WorkloadPlan]:
    """Everything that decides the run."""
    from preble.profiles import load_profile
    from preble.sim import Failure, SimConfig
    from preble.workloads import WorkloadPlan, workload_names

    if requests is None and workload in workload_names():
        requests = DEFAULT_REQUESTS
    of_plan = {name: rest.pop(name) for name in ("rps", "arrivals", "cv", "zipf", "num_prefixes")}
    plan = WorkloadPlan(source=workload, requests=requests, seed=seed, **of_plan)
    script = tuple(Failure.parse(text) for text in failures)
    config = SimConfig(profile=load_profile(profile), order=QueueOrder(order), failures=script, seed=seed, **rest)
    return config, plan


def _deliver(result: SimResult, save: Path | None) -> None:
    import msgspec
    from rich.console import Console

    if save is not None and str(save) != "-":
        try:
            save.parent.mkdir(parents=True, exist_ok=True)
            save.write_bytes(msgspec.json.encode(result))
        except OSError as error:
            raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error
    if save is not None and str(save) == "-":
        click.echo(msgspec.json.encode(result))
    else:
        Console().print(_table(result))


def _table(result: SimResult) -> Table:
    from preble.bench.report import cells_table, summary_cells

    config = result.config
    duration_s = result.summary.duration_s * max(len(result.replicas), 1)
    cells = {
        **summary_cells(result.summary),
        "GPU seconds": f"{result.gpu_s:.1f} ({result.gpu_s / duration_s if duration_s else 0.0:.0%} busy)",
        "GPU seconds per replica": " / ".join(f"{totals.gpu_s:.1f}" for totals in result.replicas.values()),
        "preemptions": str(sum(totals.preemptions for totals in result.replicas.values())),
        "placed by": ", ".join(f"{count} {reason}" for reason, count in result.reasons.items()),
        "prefixes replicated": str(sum(home.added for home in result.homes)),
        "replicas retired": str(sum(not home.added for home in result.homes)),
    }
    title = f"simulated: {config.replicas} x {config.profile.name}, {config.num_blocks * config.block_size:,} KV tokens"
    return cells_table({config.policy: cells}, f"{title}, seed {config.seed}\n{result.workload_note}")
