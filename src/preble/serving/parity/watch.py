"""When replicas are checked for parity, and what follows: trust, metrics, warnings, a report on request."""

from __future__ import annotations

import asyncio
import time
from random import Random, SystemRandom
from types import MappingProxyType

import structlog

from preble.background import Backoff
from preble.config import ParityConfig
from preble.core.types import Role
from preble.prompts.tokens import PromptEncoder
from preble.serving.parity.check import EngineIds, ParityCheck
from preble.serving.parity.report import Check, Finding, ParityOutcome, ParityReport, outcome_of
from preble.serving.replicas.live import LiveReplica
from preble.serving.replicas.rotation import Rotation
from preble.serving.telemetry.metrics import Telemetry

_SOURCES = MappingProxyType({Role.MIXED: Role.MIXED, Role.DECODE: Role.PREFILL})
"""Which role another replica must have to send KV to one with this role."""
LONGEST_RETRY = 64
"""Of the first wait before a check is repeated."""


class ParityWatch:
    """Checks live replicas, keeps the last report of each, and has the scheduler trust them or not.

    `tokens`: what makes the gateway's token ids; None where it uses the replicas' own, which are then compared
    with each other: the one that has been live the longest is right. `sends_ids`: whether replicas that answer token
    ids as they answer a text are to get them. `rng`: makes prompts that nobody has sent before.
    """

    def __init__(
        self,
        rotation: Rotation,
        tokens: PromptEncoder | None,
        telemetry: Telemetry,
        settings: ParityConfig,
        *,
        sends_ids: bool,
        rng: Random | None = None,
    ) -> None:
        self._rotation = rotation
        self._tokens = tokens
        self._telemetry = telemetry
        self._settings = settings
        self._sends_ids = sends_ids and tokens is not None
        self._rng = rng or SystemRandom()

    def configure(self, settings: ParityConfig) -> None:
        """Check in this way from now on."""
        self._settings = settings

    async def watch(self, replica: LiveReplica) -> None:
        """Check a replica that has joined, ever less often again until it is verified. The root of a task."""
        if self._settings.enabled:
            self._rotation.copies.allow(replica, allowed=False)  # until one has been seen to be right
        backoff = Backoff(self._settings.retry_s, LONGEST_RETRY * self._settings.retry_s)
        try:
            while self._settings.enabled and (await self.check(replica)).outcome is not ParityOutcome.VERIFIED:
                await backoff.pause()
        except Exception:  # noqa: BLE001 (a task's root: a check that fails must not take the replica down)
            structlog.get_logger().exception("parity_check_failed", replica=replica.engine.replica_id)

    async def check_all(self) -> list[ParityReport]:
        """Check every live replica now, all at the same time."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.check(replica)) for replica in self._rotation.replicas.values()]
        return [task.result() for task in tasks]

    async def check(self, replica: LiveReplica) -> ParityReport:
        """Check one replica now, and act on the result if the replica is still live."""
        started = time.monotonic()
        reference = self._reference(replica)
        source = self._source(replica)
        check = ParityCheck(replica, self._rotation, reference, self._settings, self._sends_ids, self._rng, source)
        findings = await check.run()
        is_known = replica.parity is not None and replica.parity.findings == findings
        if (trusted := self._verdict(findings)) is not None:
            self._rotation.set_trust(replica, trusted)
        for finding in findings:
            if finding.check is Check.IDS:
                self._rotation.replicas.set_takes_ids(replica, finding.outcome is ParityOutcome.VERIFIED)
            if finding.check is Check.COPY and source is not None:
                self._judge_copies(replica, source, finding.outcome)
        report = ParityReport(
            replica=replica.engine.replica_id,
            engine=replica.info.engine,
            outcome=outcome_of(findings),
            trusted=replica.trusted,
            checked_at=time.time(),
            took_s=time.monotonic() - started,
            findings=findings,
        )
        if self._rotation.replicas.get(replica.engine.replica_id) is replica:
            replica.parity = report
            self._telemetry.parity_checked(report, is_known=is_known)
        return report

    def _source(self, replica: LiveReplica) -> LiveReplica | None:
        """Return another replica from which this one may copy, or which computes prompts for it; None for none."""
        group, role = replica.info.spec.transfer_group, _SOURCES.get(replica.info.spec.role)
        others = (other for other in self._rotation.replicas.values() if other is not replica)
        specs = ((other, other.info.spec) for other in others)
        return next((o for o, spec in specs if group and spec.transfer_group == group and spec.role is role), None)

    def _judge_copies(self, replica: LiveReplica, source: LiveReplica, outcome: ParityOutcome) -> None:
        """Let copies be made that were seen to be right, and none that were wrong."""
        if outcome is ParityOutcome.MISMATCH:
            self._rotation.copies.allow(replica, allowed=False)
        elif outcome is ParityOutcome.VERIFIED:
            self._rotation.copies.allow(replica, allowed=True)
            self._rotation.copies.allow(source, allowed=True)

    def _reference(self, replica: LiveReplica) -> PromptEncoder | None:
        if self._tokens is not None:
            return self._tokens
        model = replica.info.models[0]
        oldest = next((other for other in self._rotation.replicas.values() if model in other.info.models), replica)
        return None if oldest is replica else EngineIds(oldest.engine)

    def _verdict(self, findings: list[Finding]) -> bool | None:
        """Return whether to trust the replica; None if nothing could be compared, so that its trust stays as it is."""
        if not self._settings.distrust:
            return True
        if any(finding.misleads for finding in findings):
            return False
        return None if any(finding.outcome is ParityOutcome.UNCHECKED for finding in findings) else True
