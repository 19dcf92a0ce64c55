"""`preble simulate`: a cluster without GPUs, on a virtual clock."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from preble.cli.cluster_options import cluster_options, simulated_cluster
from preble.cli.failure import CommandFailure
from preble.cli.options import POSITIVE_FLOAT, option, policy_option
from preble.cli.output import OUTPUT_FILE, STDOUT, json_option, write_json, writing
from preble.cli.workload_options import DEFAULT_RPS, workload_options, workload_plan
from preble.errors import ConfigError
from preble.logs import configure_logging

if TYPE_CHECKING:
    from rich.console import Console

    from preble.decisions.writer import LogWriter
    from preble.lab.sim import SimConfig, SimResult

DEFAULT_REQUESTS = 1000
"""Of a named workload, which has no end of its own."""


@click.command("simulate")
@workload_options(DEFAULT_REQUESTS)
@policy_option("preble")
@cluster_options
@option("--sample-s", "Seconds between samples of each replica's state (--json).", POSITIVE_FLOAT)
@json_option("the result with every record")
@option(
    "--decision-log",
    "Log every decision, for `preble explain --log` and `preble replay` (docs/howto/explain.md).",
    OUTPUT_FILE,
)
def command(
    json_file: Path | None,
    decision_log: Path | None,
    workload: str,
    requests: int | None,
    seed: int,
    **options: Any,
) -> None:
    """Play a workload on a simulated cluster: Preble's real schedulers, and iterations as long as a profile says.

    Same seed, same result, to the last digit. Replicas are named r0, r1 and so on.

    \b
    Examples:
      preble simulate --workload tool_use --rps 20 --replicas 4 --policy e2
      preble simulate --workload trace.jsonl.gz --policy round_robin --json result.json
      preble simulate --rps 20 --fail 30:lost:r1 --fail 60:added:r1 --decision-log decisions.jsonl
    """
    import msgspec

    from preble.lab.bench.run import request_progress
    from preble.lab.sim import simulate
    from preble.lab.sim.memory import fewer_collections

    plan, of_cluster = workload_plan(workload, requests, DEFAULT_REQUESTS, DEFAULT_RPS, seed=seed, **options)
    config, made = simulated_cluster(seed=seed, **of_cluster), plan.make()
    with (
        request_progress(f"{made.name}, {config.policy}", len(made.requests)) as on_record,
        fewer_collections(),
        _logging(decision_log, config) as log,
    ):
        result = simulate(config, made, on_record, log=log)
    _deliver(msgspec.structs.replace(result, plan=plan), json_file)
    if log is not None and log.num_dropped:
        raise CommandFailure(f"{log.num_dropped} decisions are missing from {decision_log}")
    if result.summary.errors == result.summary.requests:
        raise click.exceptions.Exit(1)


@contextmanager
def _logging(file: Path | None, config: SimConfig) -> Iterator[LogWriter | None]:
    """Write a log of what the global scheduler decides inside, all of it; None for no file.

    Token ids are written as they are: the same seed, the same log. Its times count from 0. Raises: ConfigError.
    """
    if file is None:
        yield None
        return
    if file == STDOUT:
        raise ConfigError("a decision log needs a file (--decision-log)")
    from preble.decisions.lines import header_line
    from preble.decisions.names import LogNames
    from preble.decisions.writer import LogFile, LogWriter

    configure_logging("warning", "console")
    with writing(file):
        sink = LogFile(file)
    names = LogNames()
    header = header_line(names, 0.0, 0.0, config.scheduler_settings, config.told_profile)
    log = LogWriter(sink, header, names, max_bytes=sys.maxsize, waits=True)
    try:
        yield log
    finally:
        log.close(timeout_s=None)


def _deliver(result: SimResult, json_file: Path | None) -> None:
    from rich.console import Console

    if write_json(json_file, result):
        _print(Console(), result)


def _print(console: Console, result: SimResult) -> None:
    from preble.lab.bench.report import print_cells, summary_cells

    config = result.config
    duration_s = result.summary.duration_s * max(len(result.replicas), 1)
    cells = {
        **summary_cells(result.summary),
        "GPU seconds": f"{result.gpu_s:.1f} ({result.gpu_s / duration_s if duration_s else 0.0:.0%} busy)",
        "GPU seconds per replica": " / ".join(f"{totals.gpu_s:.1f}" for totals in result.replicas.values()),
        "preemptions": str(sum(totals.preemptions for totals in result.replicas.values())),
        "requests, by reason": ", ".join(f"{count} {reason}" for reason, count in result.reasons.items()),
    }
    if result.replications:  # of a policy that rebalances
        cells["replicas added to a prefix between requests"] = str(sum(change.added for change in result.replications))
        cells["and given up again"] = str(sum(not change.added for change in result.replications))
    title = f"simulated: {config.replicas} x {config.profile.name}, {config.num_blocks * config.block_size:,} KV tokens"
    print_cells(console, {config.policy: cells}, f"{title}, seed {config.seed}\n{result.workload_note}")
