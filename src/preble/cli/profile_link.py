"""`preble profile --transfer`: measure the link between two running replicas, and add it to a profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import SystemRandom
from statistics import median
from typing import Any

import msgspec
from rich.console import Console

from preble.cli.output import write_json, write_result
from preble.cli.running import run_cancellable
from preble.core.costs.model import CostModel, CostProfile
from preble.engines import connect
from preble.lab.profiling.link import LinkMeasurements, LinkMeasuring, with_link
from preble.lab.report import Table, print_tables
from preble.lab.report.formats import number
from preble.lab.report.progress import progress
from preble.profiles import load_profile, profile_json


def measure_link(
    urls: tuple[str, str],
    base: str,
    kv_peers: tuple[str | None, str | None],
    *,
    output: Path,
    name: str | None,
    raw: Path | None,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Measure copies from the first replica to the second, and write the profile with the link."""
    profile = load_profile(base)
    measured = run_cancellable(_measured(urls, kv_peers, **options))
    linked = with_link(replace(profile, name=name or output.stem), measured)
    write_result(output, profile_json(linked).encode())
    if raw is not None:
        write_result(raw, msgspec.json.format(msgspec.json.encode(measured)))
    if write_json(json_file, {"profile": linked, "copies": measured.copies, "seed": measured.seed}):
        print_tables(Console(), _table(linked, measured))


async def _measured(
    urls: tuple[str, str],
    kv_peers: tuple[str | None, str | None],
    *,
    api_key: str | None,
    seed: int | None,
    quick: bool,
    model: str | None,
    max_tokens: int | None,
) -> LinkMeasurements:
    source, target = (connect(url, api_key=api_key, kv_peer=peer) for url, peer in zip(urls, kv_peers, strict=True))
    seed = SystemRandom().randrange(2**32) if seed is None else seed
    measuring = LinkMeasuring(source, target, seed=seed, quick=quick, model=model, max_tokens=max_tokens)
    try:
        with progress(f"copying from {urls[0]} to {urls[1]}", "copies") as tell:
            return await measuring.run(tell)
    finally:
        await source.close()
        await target.close()


def _table(profile: CostProfile, measured: LinkMeasurements) -> Table:
    rate = (profile.link_bytes_per_s or 0.0) / 1e9
    title = (
        f"{profile.name}: {profile.kv_bytes_per_token} bytes a token, {rate:.4g} GB/s, and "
        f"{number(1000 * profile.link_latency_s)} ms for each copy"
    )
    rows: list[tuple[str, ...]] = []
    model = CostModel(profile)
    for times in measured.copies:
        fitted_s = profile.link_latency_s + model.link_s(times.tokens)
        times_s = (median(times.computed_s), median(times.copied_s), fitted_s)
        rows.append((str(times.tokens), *(number(1000 * time_s) for time_s in times_s)))
    return Table(("tokens", "computed ms", "copied ms", "fitted ms"), rows, title)
