"""`preble serve`: the gateway in front of running replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from preble.cli.options import PORT, config_options, option, replica_options
from preble.cli.running import configured


@click.command("serve")
@replica_options
@option("--host", "Address to listen on.  [default: 127.0.0.1]")
@option("--port", "Port to listen on; 0 lets the system choose.  [default: 8000]", PORT)
@option(
    "--workers",
    "Front-end processes that share the port, plus one scheduler process; 0: one process does all.  "
    "[default: cores - 1, at most 4]",
    click.IntRange(0),
    metavar="N",
)
@click.option(
    "--check",
    "checks_only",
    is_flag=True,
    help="Read the configuration, the keys, the policy, the profile and the tokenizer's folder, say whether they are "
    "usable and the libraries that they need installed, and end. Asks no replica.",
)
@config_options
def command(config_path: Path | None, log_level: str, log_format: str, checks_only: bool, **flags: Any) -> None:
    """Serve the OpenAI API in front of running replicas.

    Each request goes to the replica where it costs least: where its prefix is cached, unless waiting there costs more
    than computing the prefix elsewhere. The gateway also starts when some replicas are down; they join when they come
    up. A file can also name replicas through DNS or Kubernetes, and /replicas adds, drains and removes them
    (docs/howto/fleet.md). Several gateways in front of the same replicas need --peers (docs/howto/several-gateways.md).

    \b
    Examples:
      preble serve --replica http://gpu1:8000 --replica http://gpu2:8000 --tokenizer mistralai/Mistral-7B-v0.1
      preble serve --config preble.toml --port 9000
      preble serve --config preble.toml --check
    \b
    Then:
      curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
           -d '{"model": "NAME", "prompt": "Hello", "max_tokens": 16}'
    """
    config, sources, log_losses = configured(config_path, log_level, log_format, flags)
    if checks_only:
        from preble.gateway.server import check

        check(config)
        click.echo(f"{config_path or 'the configuration'} is usable")
        return
    from preble.gateway.workers.count import num_front_ends

    if count := num_front_ends(config):
        from preble.gateway.workers.supervisor import run_workers

        run_workers(config, count, sources=sources, log=(log_level, log_format))
    else:
        from preble.gateway.server import run

        run(config, sources=sources, log_losses=log_losses)
