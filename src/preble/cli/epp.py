"""`preble epp`: the endpoint picker that a Kubernetes gateway asks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click

from preble.cli.options import PORT, config_options, option, replica_options
from preble.cli.running import configured
from preble.config import GroupConfig
from preble.errors import ConfigError


@click.command("epp")
@option("--pool", "Name of the InferencePool whose pods are the replicas.")
@option("--namespace picker__namespace", "Namespace of the pool and the lease.  [default: the picker's own]")
@replica_options
@option("--host", "Address to listen on.  [default: 127.0.0.1]")
@option("--grpc-port picker__port", "Port that gateways ask.  [default: 9002]", PORT)
@option("--port", "Port of /metrics, /debug and the other pages.  [default: 8000]", PORT)
@option(
    "--lease picker__lease", "Kubernetes Lease that several pickers share; only its holder is ready.", metavar="NAME"
)
@config_options
def command(config_path: Path | None, log_level: str, log_format: str, pool: str | None, **flags: Any) -> None:
    """Choose a replica for each request of a Kubernetes gateway (Gateway API Inference Extension).

    The gateway (Envoy, or one built on it) carries the bytes. It asks the picker where each request goes, and streams
    the request and its answer through it, so that the picker follows each placement to its end. The picker asks the
    engines for block size, model and capacity. Without a cluster, name the replicas by their addresses
    (docs/howto/kubernetes-gateway.md). Needs more libraries: pip install 'preble[epp]'.

    \b
    Examples:
      preble epp --pool vllm-llama3 --host 0.0.0.0 --lease preble-epp --tokenizer meta-llama/Llama-3.1-8B
      preble epp --replica http://127.0.0.1:8101 --replica http://127.0.0.1:8102
    """
    if pool is not None:
        flags["groups"] = (GroupConfig(pool=pool, namespace=flags["picker__namespace"]),)
    config, sources, log_losses = configured(config_path, log_level, log_format, flags)
    from preble.gateway.server import Gateway, run

    try:
        from preble.picker.server import picking
    except ImportError as error:
        raise ConfigError(f"preble epp needs more libraries ({error}): pip install 'preble[epp]'") from error

    @asynccontextmanager
    async def beside(gateway: Gateway) -> AsyncIterator[None]:
        async with picking(gateway) as picker:
            click.echo(f"preble epp: listening on {gateway.url} with pages, and on port {picker.port} for gateways")
            yield

    run(config, lambda url: None, sources=sources, log_losses=log_losses, beside=beside)
