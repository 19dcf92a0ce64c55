"""`preble epp`: the endpoint picker that a Kubernetes gateway asks."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click

from preble.cli.options import PORT, config_option, log_options, option, replica_options
from preble.config import GroupConfig
from preble.errors import ConfigError
from preble.gateway import signals
from preble.logs import configure_logging


@click.command("epp")
@option("--pool", "Name of the InferencePool whose pods are the replicas.")
@option("--namespace", "Namespace of the pool and the lease.  [default: the picker's own]")
@replica_options
@option("--host", "Address to listen on.  [default: 127.0.0.1]")
@option("--grpc-port", "Port that gateways ask.  [default: 9002]", PORT)
@option("--port", "Port of /metrics, /debug and the other pages.  [default: 8000]", PORT)
@option("--lease", "Kubernetes Lease that several pickers share; only its holder is ready.", metavar="NAME")
@config_option
@log_options
def command(
    config_path: Path | None,
    log_level: str,
    log_format: str,
    pool: str | None,
    namespace: str | None,
    grpc_port: int | None,
    lease: str | None,
    peers: tuple[str, ...],
    **flags: Any,
) -> None:
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
    signals.hold()  # before the imports, which take long
    from preble.config.load import ConfigSources

    flags |= {"picker.port": grpc_port, "picker.lease": lease, "picker.namespace": namespace}
    flags["peers.servers"] = peers
    if pool is not None:
        flags["groups"] = (GroupConfig(pool=pool, namespace=namespace),)
    sources = ConfigSources(config_path, os.environ, flags)
    config = sources.load()
    log_losses = configure_logging(log_level, log_format)

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
