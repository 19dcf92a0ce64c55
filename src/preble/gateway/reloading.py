"""Reloads of the configuration: what starts one, and what the log says of it.

Files are watched by their contents, not by times or names: that sees swapped links (Kubernetes ConfigMaps), network
file systems and bind mounts. A change counts once the contents have stayed the same for an interval, so nobody reads a
half-written file.
Which settings a reload changes: `preble.config.reloading`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from preble.config import GatewayConfig
from preble.config.load import ConfigSources, changed_settings
from preble.config.reloading import is_changeable

Contents = list[bytes | None]

_OFF_S = 60.0
PAUSE_S = 1.0
"""Between two reloads: each one may keep requests waiting for as long as it takes to read the files."""


def _files(config: GatewayConfig, sources: ConfigSources | None) -> list[str | Path]:
    """Return the files that a configuration comes from."""
    named = (sources.path if sources is not None else None, config.auth.keys_file, config.peers.secret_file)
    return [file for file in named if file is not None]


async def contents(config: GatewayConfig, sources: ConfigSources | None) -> Contents:
    """Return what the files hold that a configuration comes from; None for one that cannot be read."""
    files = _files(config, sources)
    return await asyncio.to_thread(lambda: [_content(file) for file in files]) if files else []


def _content(file: str | Path) -> bytes | None:
    try:
        return Path(file).expanduser().read_bytes()
    except OSError:
        return None


async def reload_on_change(
    config: Callable[[], GatewayConfig], sources: ConfigSources | None, known: Contents, reload: Callable[[], object]
) -> None:
    """Call `reload` when a file's contents have changed and then stayed the same for one interval. Never returns.

    `config`: returns the one in force, which may name another file or interval; an interval of 0 turns the watch off.
    `known`: what the files held when they were last read.
    """
    last = known
    while True:
        interval_s = config().discovery.file_interval_s if _files(config(), sources) else 0.0
        await asyncio.sleep(interval_s or _OFF_S)
        if not interval_s:
            continue
        now = await contents(config(), sources)
        if now == last and now != known:
            known = now
            reload()
        last = now


async def reload_whenever(wanted: asyncio.Event, reload: Callable[[], Awaitable[None]]) -> None:
    """Reload whenever it is wanted, at most once in `PAUSE_S`. Never returns."""
    while True:
        await wanted.wait()
        wanted.clear()
        await reload()
        await asyncio.sleep(PAUSE_S)


def tell_of_reload(old: GatewayConfig, new: GatewayConfig, num_keys: int) -> None:
    """Log what a reload has changed, and what it could not."""
    log = structlog.get_logger()
    changed = changed_settings(old, new)
    log.info("reloaded", keys=num_keys, changed=changed)
    if fixed := [key for key in changed if not is_changeable(key)]:
        log.warning("restart_needed", settings=fixed, consequence="what runs keeps the old values until then")
