"""`preble emulate`: one emulated replica."""

from __future__ import annotations

from typing import Any

import click

from preble.cli.options import PORT, POSITIVE, POSITIVE_FLOAT, log_options, option, order_option
from preble.core.replica.waiting_queue import QueueOrder
from preble.logs import configure_logging


@click.command("emulate")
@option("--profile", "Cost profile: the GPU and model to imitate.", required=True, metavar="NAME|FILE")
@option("--port", "Port to listen on; 0 lets the system choose.", PORT, required=True)
@option("--host", "Address to listen on.", default="127.0.0.1")
@option("--kv-tokens", "Size of the KV cache in tokens.  [default: the profile's]", POSITIVE)
@option("--events-port", "Publish KV events over ZMQ on this port.  [default: no events]", PORT)
@option("--model", "Name of the model to serve.  [default: the profile's]", metavar="NAME")
@option(
    "--max-model-len",
    "Longest prompt and answer together, in tokens.  [default: what the KV cache holds]",
    click.IntRange(min=2),
)
@order_option("Order of its waiting requests.")
@option("--max-running", "The most requests that run at once; others wait.", POSITIVE, default=256)
@option("--data-parallel-size", "Data-parallel ranks, each with a cache of its own.", POSITIVE, default=1)
@option("--image-tokens", "Tokens of each image, video or sound in a chat.", POSITIVE, default=64)
@option("--host-tokens", "KV that it keeps on its host, too.", click.IntRange(min=0), default=0)
@option("--store", "Where it shares KV with other emulated replicas.  [default: nowhere]", metavar="FOLDER")
@option("--p2p", "Copy KV from other emulated replicas, as vLLM's p2p tier does.", is_flag=True)
@option("--nixl", "Compute prompts that others fetch and decode, as vLLM with NIXL does.", is_flag=True)
@option("--lease-s", "How long it keeps such a prompt.", POSITIVE_FLOAT, default=30.0)
@option(
    "--role",
    "Only prefill for others, or only decode, as SGLang with --disaggregation-mode.",
    click.Choice(("mixed", "prefill", "decode")),
    default="mixed",
)
@option("--bootstrap-port", "Where those that decode find one that prefills.", PORT, default=0)
@option("--decode-caches", "One that decodes keeps a prefix cache.", is_flag=True)
@option("--failures", "Share of the transfers to one that decodes that fail.", click.FloatRange(0, 1), default=0.0)
@option("--mooncake", "One that failed is followed by no others from the same replica, as with Mooncake.", is_flag=True)
@option("--block-size", "Tokens of a KV block.", POSITIVE, default=16)
@option("--metrics-block-size", "Block size that its metrics report.  [default: its own]", POSITIVE)
@option("--replay-batches", "Batches of KV events kept for replay.", POSITIVE, default=10_000)
@option("--said-events-port", "Port that it reports for its KV events.  [default: the real one]", PORT)
@option("--drops-last-block", "Compute the last cached block again, as some speculation does.", is_flag=True)
@option("--speed", "Run this many times faster than the profile.", POSITIVE_FLOAT, default=1.0)
@option("--tokenizer", "Folder with tokenizer.json.  [default: a built-in one]", metavar="PATH")
@log_options
def command(log_level: str, log_format: str, order: str, role: str, **settings: Any) -> None:
    """Run one emulated replica until it is interrupted.

    It speaks vLLM's HTTP API, keeps a prefix cache, batches requests, and takes the time that the profile predicts.
    Only its answers are made up, and each of them says so. Once it listens, it prints a line with its URL on stdout.

    \b
    Examples:
      preble emulate --profile a6000-mistral-7b --port 8001
      preble emulate --profile tiny-cpu --port 0 --kv-tokens 20000 --events-port 5557
    """
    from preble.core.types import Role
    from preble.emulator import EmulatorConfig, run

    configure_logging(log_level, log_format)
    run(EmulatorConfig(order=QueueOrder(order), role=Role(role), **settings))
