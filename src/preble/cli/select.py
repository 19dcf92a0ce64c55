"""`preble select`: the selection service, for programs that carry the bytes themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from preble.cli.options import PORT, config_options, option, replica_options
from preble.cli.running import configured


@click.command("select")
@replica_options
@option("--host", "Address to listen on.  [default: 127.0.0.1]")
@option("--port", "Port to listen on; 0 lets the system choose.  [default: 8000]", PORT)
@option(
    "--lease selection__lease_s",
    "Seconds that a reservation lasts without a report.  [default: 300]",
    float,
    metavar="S",
)
@config_options
def command(config_path: Path | None, log_level: str, log_format: str, **flags: Any) -> None:
    """Choose a replica for each request of a program that carries the bytes itself.

    The program asks where a request goes (/select_and_reserve), sends it there, and reports when the prompt is computed
    and when the answer is over. A program that dies leaks nothing: its reservations expire. Replicas come from flags
    and the configuration, or are registered over HTTP (/workers). Paths and fields are those of NVIDIA Dynamo's
    standalone selection service where they mean the same (docs/howto/selection-service.md). The service answers all
    that `preble serve` answers, too.

    \b
    Examples:
      preble select --replica http://gpu1:8000 --replica http://gpu2:8000
      preble select --config preble.toml --port 8092
    \b
    Then:
      curl http://127.0.0.1:8000/select_and_reserve -d '{"token_ids": [1, 2, 3], "expected_output_tokens": 16}'
    """
    config, sources, log_losses = configured(config_path, log_level, log_format, flags)
    from preble.gateway.server import run
    from preble.selection.server import selecting

    def tell(url: str) -> None:
        click.echo(f"preble select: listening on {url}")

    run(config, tell, sources=sources, log_losses=log_losses, beside=selecting)
