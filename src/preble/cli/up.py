"""`preble up`: replicas and gateway on this machine, one Ctrl-C stops all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from preble.cli.options import PORT, POSITIVE, log_options, option, policy_option
from preble.cli.running import reported_waiting, run_cancellable
from preble.errors import ConfigError
from preble.logs import LogLosses, configure_logging

if TYPE_CHECKING:
    from preble.core.types import Role
    from preble.engines.starting.launch import Fleet, LaunchOptions
    from preble.gateway.server import Gateway


EMULATED_PROFILE = "a6000-mistral-7b"
ASSUMED_LINK_BYTES_PER_S = 12.5e9
ASSUMED_KV_BYTES = 131_072
"""Of a token, where the profile says neither: those of a model with 7 billion parameters."""


@click.command("up")
@option("--engine", "What the replicas run.", click.Choice(("vllm", "sglang", "emulator")), required=True)
@option("--model", "A folder or a name on the hub; emulated: any name.", metavar="PATH|NAME")
@option("--replicas num_replicas", "How many to start.", POSITIVE, default=2)
@option("--prefill", "Start this many that only prefill, and those of --decode, instead.", POSITIVE)
@option("--decode", "Start this many that only decode.", POSITIVE)
@option(
    "--transfer",
    "Replicas send each other KV: p2p copies prefixes, nixl also splits requests (vLLM, emulated).",
    click.Choice(("p2p", "nixl")),
)
@option("--host", "Address of the gateway.  [default: 127.0.0.1]")
@option("--port", "Port of the gateway; 0 lets the system choose.  [default: 8000]", PORT)
@policy_option(default=None)
@option(
    "--profile",
    f"Cost profile: how emulated replicas behave (default {EMULATED_PROFILE}), and the gateway's cost model.",
    metavar="NAME|FILE",
)
@option("--kv-tokens", "KV cache of a replica in tokens.  [default: the engine's choice]", POSITIVE)
@option(
    "--log-dir", "Where each replica's log goes.", click.Path(path_type=Path, file_okay=False), default=Path("build/up")
)
@log_options
@click.argument("engine_arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    engine: Literal["vllm", "sglang", "emulator"],
    model: str | None,
    num_replicas: int,
    prefill: int | None,
    decode: int | None,
    transfer: Literal["p2p", "nixl"] | None,
    profile: str | None,
    kv_tokens: int | None,
    log_dir: Path,
    log_level: str,
    log_format: str,
    engine_arguments: tuple[str, ...],
    **flags: Any,
) -> None:
    """Start replicas on this machine and the gateway in front of them. Ctrl-C stops all of it.

    A replica that ends by itself is started again, after a pause that grows each time.

    vLLM and SGLang are taken from `.engines/` (made by `make engines` in a checkout) or from the PATH. Where there are
    GPUs, each replica gets one, or as many as its tensor, pipeline and data parallel sizes ask for. What follows `--`
    is passed on to every engine.

    \b
    Examples:
      preble up --engine emulator --replicas 4
      preble up --engine vllm --model mistralai/Mistral-7B-v0.1 --replicas 2
      preble up --engine vllm --model org/large --replicas 2 -- --tensor-parallel-size 4
      preble up --engine vllm --model .engines/models/tiny-llama -- --max-num-seqs 8
      preble up --engine sglang --model .engines/models/tiny-llama
      preble up --engine emulator --prefill 2 --decode 6
      preble up --engine emulator --transfer p2p
    """
    from preble.engines.starting.launch import LaunchOptions

    roles = _roles(prefill, decode)
    if engine == "emulator":
        profile = profile or EMULATED_PROFILE
        if model is not None:
            engine_arguments = ("--model", model, *engine_arguments)  # it loads none
    elif model is None:
        raise ConfigError(f"{engine} needs a model: give --model, a folder or a name on the Hugging Face hub")
    else:
        flags["tokenizer"] = model
    if transfer is not None or (roles and engine == "vllm"):
        profile = _linked(profile or os.environ.get("PREBLE_PROFILE"), log_dir)
    flags["profile"] = profile
    _check(flags)
    options = LaunchOptions(
        engine=engine,
        replicas=len(roles) or num_replicas,
        roles=roles,
        transfer=transfer,
        log_dir=log_dir,
        model=model,
        profile=profile,
        kv_tokens=kv_tokens,
        extra_args=engine_arguments,
    )
    run_cancellable(_start_and_serve(options, flags, configure_logging(log_level, log_format)))


def _roles(prefill: int | None, decode: int | None) -> tuple[Role, ...]:
    """Return the role of each replica, none where they are not fixed. Raises: ConfigError: one kind is missing."""
    from preble.core.types import Role

    if (prefill is None) != (decode is None):
        raise ConfigError("give --prefill and --decode together: one cannot serve without the other")
    return (Role.PREFILL,) * (prefill or 0) + (Role.DECODE,) * (decode or 0)


def _linked(name: str | None, folder: Path) -> str:
    """Return the profile's name, or the file of one that has a link in addition: without one, no KV would be sent."""
    from preble.profiles import load_profile, profile_json, with_kv_size
    from preble.serving.scheduler_setup import DEFAULT_PROFILE

    profile = with_kv_size(load_profile(name or DEFAULT_PROFILE))
    if profile.link_bytes_per_s is not None and profile.kv_bytes_per_token is not None:
        return profile.name if name is None else name
    file = folder / "profile.json"
    size = profile.kv_bytes_per_token or ASSUMED_KV_BYTES
    linked = replace(profile, kv_bytes_per_token=size, link_bytes_per_s=ASSUMED_LINK_BYTES_PER_S)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(profile_json(linked), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}; give another --log-dir") from error
    _say(
        f"assuming links of {ASSUMED_LINK_BYTES_PER_S / 1e9:g} GB/s ({file}); what they take is "
        "learned while serving, and `preble profile --transfer` measures it"
    )
    return str(file)


def _check(flags: Mapping[str, object]) -> None:
    """Check what can be checked before anything starts: replicas may take minutes. Raises: ConfigError."""
    from preble.config.load import load
    from preble.profiles import load_profile
    from preble.web.server.listening import listen

    # The replicas' URLs are known only once they run.
    config = load(None, os.environ, {**flags, "replicas": ["http://127.0.0.1:1"]})
    if config.profile is not None:
        load_profile(config.profile)
    listen(config.host, config.port).close()


async def _start_and_serve(options: LaunchOptions, flags: Mapping[str, object], log_losses: LogLosses) -> None:
    from preble.config import ReplicaConfig
    from preble.config.load import load
    from preble.engines.starting.launch import Fleet
    from preble.gateway.server import serving

    plural = "" if options.replicas == 1 else "s"
    _say(f"starting {options.replicas} replica{plural} ({options.engine}); logs in {options.log_dir}")
    starting = Fleet(options, on_ready=lambda replica: _say(f"{replica.name} is ready at {replica.url}"))
    async with AsyncExitStack() as stack:
        async with reported_waiting(_say, options.ready_timeout_s):
            fleet = await stack.enter_async_context(starting)
        roles = options.roles if options.engine == "vllm" else ()  # others say theirs themselves
        replicas = [ReplicaConfig(url, role=role) for url, role in zip_longest(fleet.urls, roles)]
        config = load(None, os.environ, {**flags, "replicas": replicas})
        async with serving(config, log_losses=log_losses) as gateway, _kept_running(fleet, options.ready_timeout_s):
            stop = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, _on_signal, stop, gateway)
            click.echo(f"preble up: listening on {gateway.url}")
            await stop.wait()
            _say("stopping; once more Ctrl-C does not wait for running requests")


def _on_signal(stop: asyncio.Event, gateway: Gateway) -> None:
    if stop.is_set():
        gateway.hurry()
    stop.set()


@asynccontextmanager
async def _kept_running(fleet: Fleet, ready_timeout_s: float) -> AsyncIterator[None]:
    """Start a replica that ends again, within the context; the gateway goes on with the others meanwhile."""
    from preble.engines.starting.launch import keep_running

    async with asyncio.TaskGroup() as tasks:
        watches = [tasks.create_task(keep_running(replica, ready_timeout_s, _say)) for replica in fleet.replicas]
        yield
        for watch in watches:
            watch.cancel()


def _say(text: str) -> None:
    click.echo(f"preble up: {text}", err=True)
