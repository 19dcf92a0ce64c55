"""`preble emulate`: one emulated replica."""

from __future__ import annotations

from typing import Any

import click

from preble.cli.options import PORT, POSITIVE, POSITIVE_FLOAT, log_options, order_option
from preble.core.replica.waiting_queue import QueueOrder
from preble.logs import configure_logging


@click.command("emulate")
@click.option("--profile", required=True, metavar="NAME|FILE", help="Cost profile: the GPU and model to imitate.")
@click.option("--port", type=PORT, required=True, help="Port to listen on; 0 lets the system choose.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--kv-tokens", type=POSITIVE, help="Size of the KV cache in tokens.  [default: the profile's]")
@click.option("--events-port", type=PORT, help="Publish KV events over ZMQ on this port.  [default: no events]")
@click.option("--model", metavar="NAME", help="Name of the model to serve.  [default: the profile's]")
@click.option(
    "--max-model-len",
    type=click.IntRange(min=2),
    help="Longest prompt and answer together, in tokens.  [default: what the KV cache holds]",
)
@order_option("Order of its waiting requests.")
@click.option(
    "--max-running",
    type=POSITIVE,
    default=256,
    show_default=True,
    help="The most requests that run at once; others wait.",
)
@click.option(
    "--data-parallel-size",
    type=POSITIVE,
    default=1,
    show_default=True,
    help="Data-parallel ranks, each with a cache of its own.",
)
@click.option(
    "--image-tokens",
    type=POSITIVE,
    default=64,
    show_default=True,
    help="Tokens of each image, video or sound in a chat.",
)
@click.option(
    "--host-tokens", type=click.IntRange(min=0), default=0, show_default=True, help="KV that it keeps on its host, too."
)
@click.option("--store", metavar="FOLDER", help="Where it shares KV with other emulated replicas.  [default: nowhere]")
@click.option("--block-size", type=POSITIVE, default=16, show_default=True, help="Tokens of a KV block.")
@click.option("--metrics-block-size", type=POSITIVE, help="Block size that its metrics report.  [default: its own]")
@click.option(
    "--replay-batches", type=POSITIVE, default=10_000, show_default=True, help="Batches of KV events kept for replay."
)
@click.option("--said-events-port", type=PORT, help="Port that it reports for its KV events.  [default: the real one]")
@click.option("--drops-last-block", is_flag=True, help="Compute the last cached block again, as some speculation does.")
@click.option(
    "--speed", type=POSITIVE_FLOAT, default=1.0, show_default=True, help="Run this many times faster than the profile."
)
@click.option("--tokenizer", metavar="PATH", help="Folder with tokenizer.json.  [default: a built-in one]")
@log_options
def command(log_level: str, log_format: str, order: str, **settings: Any) -> None:
    """Run one emulated replica until it is interrupted.

    It speaks vLLM's HTTP API, keeps a prefix cache, batches requests, and takes the time that the profile predicts.
    Only its answers are made up, and each of them says so. Once it listens, it prints a line with its URL on stdout.

    \b
    Examples:
      preble emulate --profile a6000-mistral-7b --port 8001
      preble emulate --profile tiny-cpu --port 0 --kv-tokens 20000 --events-port 5557
    """
    from preble.emulator import EmulatorConfig, run

    configure_logging(log_level, log_format)
    run(EmulatorConfig(order=QueueOrder(order), **settings))
