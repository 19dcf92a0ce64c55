"""`preble profile`: measure a running replica and fit a cost profile."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from preble.cli.options import HTTP_URL, POSITIVE, api_key_option, option
from preble.cli.output import DRAWN_FILE, OUTPUT_FILE, json_option, write_json, write_result, writing
from preble.cli.running import run_cancellable
from preble.core.types import Tier
from preble.errors import ConfigError, EngineRefused
from preble.logs import configure_logging

if TYPE_CHECKING:
    from preble.lab.profiling import Fit, FittedTime, Measurements
    from preble.lab.report import Table


@click.command("profile")
@option("--url", "The replica: vLLM, or another server with OpenAI's API.", HTTP_URL)
@option(
    "--transfer",
    "Instead of a replica, measure the link over which replica B gets KV from A.",
    HTTP_URL,
    nargs=2,
    metavar="A B",
)
@option(
    "--profile base",
    "The profile to which --transfer adds the link.  [default: PREBLE_PROFILE, as for serve]",
    metavar="NAME|FILE",
)
@option(
    "--kv-peer kv_peers",
    "HOST:PORT of the p2p tier of A, then of B.  [default: as they say; vLLM in its development mode]",
    nargs=2,
    metavar="A B",
)
@option("-o --output", "File of the profile (.json).", OUTPUT_FILE, required=True, metavar="FILE")
@option("--name", "Name of the profile.  [default: the file's name]")
@option("--plot", "Draw measurements and fit (needs the extra `plot`).", DRAWN_FILE, metavar="PNG")
@option("--raw", "Keep every measured time, as JSON.", OUTPUT_FILE)
@option("--quick", "Fewer lengths, batches and repetitions: a rough profile.", is_flag=True)
@option("--model", "Model to ask for.  [default: the replica's base model]")
@option("--max-tokens", "Longest sequence to measure.  [default: the replica's longest]", POSITIVE)
@option("--kv-tokens", "Size of its KV cache in tokens.  [default: from its metrics]", POSITIVE)
@option(
    "--tier",
    "Measure how long KV is loaded from the host's memory or a store.  [default: do not]",
    click.Choice([tier.value for tier in Tier]),
)
@option("--typical-batch", "Sequences that decode together in service.  [default: up to 16]", POSITIVE)
@option("--machine", "Hardware, kept with the profile.  [default: this processor]", metavar="TEXT")
@option("--seed", "Seed of the random prompts.  [default: a new one]", int)
@api_key_option
@json_option("the profile with its errors")
def command(
    output: Path,
    name: str | None,
    plot: Path | None,
    raw: Path | None,
    typical_batch: int | None,
    json_file: Path | None,
    url: str | None,
    transfer: tuple[str, str] | None,
    base: str | None,
    kv_peers: tuple[str, str] | None,
    **options: Any,
) -> None:
    """Measure how long a replica takes for prefills and decodes, and fit a cost profile.

    Give the replica's own address, not the gateway's, and send it no other requests meanwhile: they would make it look
    slower. A GPU takes a minute or two. Use the profile with `preble serve --profile FILE`,
    `preble emulate --profile FILE` and every other option that names a profile.

    \b
    Examples:
      preble profile --url http://127.0.0.1:8101 -o mine.json --plot mine.png
      preble profile --url http://gpu1:8000 -o h100-llama-3-8b.json --machine "H100 SXM, 80 GB" --raw raw.json
      preble profile --transfer http://gpu1:8000 http://gpu2:8000 --profile mine.json -o linked.json
    """
    from preble.lab.profiling import fit_profile

    configure_logging("error", "console")
    if transfer is not None:
        base = base or os.environ.get("PREBLE_PROFILE")
    if transfer is not None and base is not None:
        from preble.cli.profile_link import measure_link

        of_one = {"--url": url, "--plot": plot, "--typical-batch": typical_batch}
        of_one |= {f"--{field.replace('_', '-')}": options.pop(field) for field in ("tier", "kv_tokens", "machine")}
        if given := [flag for flag, value in of_one.items() if value is not None]:
            raise click.UsageError(f"--transfer measures a link alone: leave out {', '.join(given)}")
        peers = kv_peers or (None, None)
        measure_link(transfer, base, peers, output=output, name=name, raw=raw, json_file=json_file, **options)
        return
    if url is None or transfer is not None or base is not None or kv_peers is not None:
        raise click.UsageError("give either --url, or --transfer A B and --profile, which gets the link")
    measurements = run_cancellable(_measured(url=url, **options))
    fit = fit_profile(
        measurements,
        name=name or output.stem,
        source=measurements.source("`preble profile`"),
        typical_batch=typical_batch,
    )
    _write(fit, measurements, output=output, plot=plot, raw=raw)
    _show(fit, measurements, json_file)


async def _measured(
    *, url: str, api_key: str | None, machine: str | None, seed: int | None, tier: str | None, **options: Any
) -> Measurements:
    from preble.engines import connect
    from preble.lab.profiling.measure import Measuring
    from preble.lab.report.progress import progress

    server = connect(url, api_key=api_key)
    try:
        seed = SystemRandom().randrange(2**32) if seed is None else seed
        wanted = None if tier is None else Tier(tier)
        measuring = Measuring(server, machine=machine or _machine_at(url), seed=seed, tier=wanted, **options)
        try:
            plan = await measuring.prepare()
        except EngineRefused as error:
            raise ConfigError(f"{error}; is it running?") from error
        steps = itertools.count(1)
        with progress(f"measuring {url}", "steps") as tell:
            return await measuring.run(lambda: tell(next(steps), plan.num_steps))
    finally:
        await server.close()


def _machine_at(url: str) -> str:
    """Return this machine's processor if the URL is this machine."""
    if urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1"):
        return "a machine that was not named"
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "this machine"


def _write(fit: Fit, measurements: Measurements, *, output: Path, plot: Path | None, raw: Path | None) -> None:
    import msgspec

    from preble.profiles import profile_json

    write_result(output, profile_json(fit.profile).encode())
    if raw is not None:
        write_result(raw, msgspec.json.format(msgspec.json.encode(measurements)))
    if plot is not None:
        from preble.lab.profiling.plot import draw_fit

        with writing(plot):
            draw_fit(fit, plot)


def _show(fit: Fit, measurements: Measurements, json_file: Path | None) -> None:
    import msgspec
    from rich.console import Console

    from preble.lab.report import print_tables

    times = [{"relative_error": t.relative_error, **msgspec.to_builtins(t)} for t in fit.times]
    shown = {"profile": fit.profile, "overhead_s": fit.overhead_s, "seed": measurements.seed, "times": times}
    if write_json(json_file, shown):
        print_tables(Console(), _table(fit))
    for warning in [*measurements.notes, *fit.warnings()]:
        click.echo(f"preble: {warning}", err=True)


def _table(fit: Fit) -> Table:
    from preble.lab.report import Table
    from preble.lab.report.formats import number

    title = (
        f"{fit.profile.name}: median error {fit.median_error:.1%}, {len(fit.profile.prefill_points)} prefill points; "
        f"{fit.overhead_s * 1000:.2f} ms of every prefill were the request's way, and are left out; a request holds up "
        f"those that run by {fit.profile.request_overhead_s * 1000:.2f} ms beside its tokens"
    )
    rows = [
        (
            _named(t),
            number(1000 * t.measured_s),
            number(1000 * t.fitted_s),
            f"{t.relative_error:+.1%}",
            f"{t.spread:.0%}",
        )
        for t in fit.times
    ]
    return Table(("what", "measured ms", "fitted ms", "error", "spread"), rows, title)


def _named(time: FittedTime) -> str:
    if time.num_sequences:
        return f"decode {time.num_sequences} x {time.context_tokens // time.num_sequences} tokens"
    behind = f" behind {time.context_tokens} cached" if time.context_tokens else ""
    return f"prefill {time.new_tokens} tokens{behind}"
