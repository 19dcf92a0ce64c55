"""`preble simulate`: a cluster without GPUs, on a virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from preble.cli.cluster import cluster_options, simulated_cluster, workload_plan
from preble.cli.options import POSITIVE_FLOAT, policy_option, workload_options
from preble.cli.output import OUTPUT_FILE, write_result

if TYPE_CHECKING:
    from rich.console import Group

    from preble.sim import SimConfig, SimResult
    from preble.workloads import WorkloadPlan

DEFAULT_REQUESTS = 1000
"""Of a named workload, which has no end of its own."""


@click.command("simulate", short_help="A whole cluster without GPUs, faster than real time.")
@workload_options(DEFAULT_REQUESTS)
@policy_option("preble")
@cluster_options
@click.option("--sample-s", type=POSITIVE_FLOAT, help="Sample every replica's state so often, for --json.")
@click.option("--json", "save", type=OUTPUT_FILE, help="Write the result with every record; - for stdout.")
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
    from preble.sim.memory import fewer_collections

    config, plan = _settings(**options)
    workload = plan.make()
    with (
        request_progress(f"{workload.name}, {config.policy}", len(workload.requests)) as on_record,
        fewer_collections(),
    ):
        result = simulate(config, workload, on_record)
    _deliver(msgspec.structs.replace(result, plan=plan), save)
    if result.summary.errors == result.summary.requests:
        raise click.exceptions.Exit(1)


def _settings(*, workload: str, requests: int | None, seed: int, **rest: Any) -> tuple[SimConfig, WorkloadPlan]:
    """Everything that decides the run."""
    plan, rest = workload_plan(workload, requests, DEFAULT_REQUESTS, seed=seed, **rest)
    return simulated_cluster(seed=seed, **rest), plan


def _deliver(result: SimResult, save: Path | None) -> None:
    import msgspec
    from rich.console import Console

    if save is not None:
        write_result(save, msgspec.json.encode(result))
    if str(save) != "-":
        Console().print(_table(result))


def _table(result: SimResult) -> Group:
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
