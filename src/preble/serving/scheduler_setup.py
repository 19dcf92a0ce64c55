"""The scheduler as configured, with its decision log."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import structlog

from preble.config import GatewayConfig
from preble.core.costs.model import CostProfile
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import NOTHING_LEARNED, Learned
from preble.decisions.lines import header_line
from preble.decisions.names import KEY_BYTES, LogNames
from preble.decisions.recent import RecentDecisions
from preble.decisions.settings import SchedulerSettings, make_scheduler
from preble.decisions.writer import DecisionRecorder, LogFile, LogWriter, MiB
from preble.profiles import load_profile, with_kv_size
from preble.serving.learned_file import LearnedFile

DEFAULT_PROFILE = "a100-mistral-7b"


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Who decides, and where decisions are kept. `log`, `learned_file`: None where none is written."""

    scheduler: GlobalScheduler
    recent: RecentDecisions
    log: LogWriter | None
    learned_file: LearnedFile | None

    async def close(self) -> None:
        """Write what was learned, and the rest of the log."""
        if self.learned_file is not None:
            await self.learned_file.close()
        if self.log is not None:
            await asyncio.to_thread(self.log.close)


def start_scheduling(config: GatewayConfig, scheduler: GlobalScheduler | None = None) -> Scheduling:
    """Return the scheduler and its log. Call it in a running event loop, whose clock the scheduler then uses.

    `scheduler`: made as configured unless given; one that is given is not logged, and what it learns is not kept.
    Raises: ConfigError: no such policy or profile; the log or the file of what is learned cannot be written.
    """
    log = learned_file = None
    if scheduler is None:
        path, learned = config.scheduler.learned_file, NOTHING_LEARNED
        if path is not None:
            learned_file = LearnedFile(Path(path), config.profile or DEFAULT_PROFILE)
            learned = learned_file.read()
        scheduler = build_scheduler(config, learned)
        log = _open_log(config, learned)
        if log is not None:
            scheduler.listen(DecisionRecorder(log))
        if learned_file is not None:
            learned_file.keep(scheduler)
    unix_offset_s = time.time() - asyncio.get_running_loop().time()
    recent = RecentDecisions(scheduler.policy.name, config.decisions.remembered, unix_offset_s=unix_offset_s)
    return Scheduling(scheduler, recent, log, learned_file)


def build_scheduler(config: GatewayConfig, learned: Learned = NOTHING_LEARNED) -> GlobalScheduler:
    """Raises: ConfigError: no such policy or profile."""
    return make_scheduler(scheduler_settings(config), _profile(config), learned=learned)


def _profile(config: GatewayConfig) -> CostProfile:
    """Raises: ConfigError: there is none of that name."""
    profile = load_profile(config.profile or DEFAULT_PROFILE)
    return profile if profile.link_bytes_per_s is None else with_kv_size(profile)


def scheduler_settings(config: GatewayConfig) -> SchedulerSettings:
    """Return what the configuration says of the scheduler."""
    return SchedulerSettings(
        policy=config.policy,
        seed=config.seed + crc32(gateway_name(config).encode()),  # gateways of a group break ties differently
        window_s=config.scheduler.window_s,
        report_grace_s=config.scheduler.report_grace_s,
        belief_ttl_s=config.scheduler.belief_ttl_s,
        index_budget_bytes=config.scheduler.index_budget_mib * MiB,
        refit=config.scheduler.refit,
    )


def gateway_name(config: GatewayConfig) -> str:
    """Return what this gateway is called in its group; "" where it has no peers."""
    if config.peers.name or not config.peers.servers:
        return config.peers.name
    return f"{socket.gethostname()}:{os.getpid()}"


def _open_log(config: GatewayConfig, learned: Learned) -> LogWriter | None:
    """Raises: ConfigError: the file cannot be written."""
    decisions = config.decisions
    if decisions.log is None:
        return None
    names = LogNames(secrets.token_bytes(KEY_BYTES) if decisions.log_tokens == "renamed" else None)
    if names.renames_tokens:  # the digests are of tokens that the log must not show
        learned = replace(learned, lengths=())
    profile = _profile(config)
    now = asyncio.get_running_loop().time()
    header = header_line(names, now, time.time(), scheduler_settings(config), profile, gateway_name(config), learned)
    log = LogWriter(LogFile(Path(decisions.log)), header, names, max_bytes=decisions.log_max_mib * MiB)
    structlog.get_logger().warning(
        "decision_log", path=decisions.log, tokens=header.tokens, consequence="every prompt's token ids are written"
    )
    return log
