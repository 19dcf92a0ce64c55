"""Prometheus metrics of placements and replicas, and one `placed` and one `finished` log line for each placement.

No line contains the prompt. A line below the configured log level costs a call that does nothing. The metrics of one
replica are looked up once: finding a labelled metric costs more than counting with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from preble.core.placing.snapshot import SchedulerState
from preble.core.types import Placement, PrefixReplication, Reason, ReplicaId
from preble.errors import EngineError
from preble.logs import LogLosses
from preble.serving.parity.report import Check, Outcome, ParityReport
from preble.serving.replicas.ejection import Change, Standing

METRICS_CONTENT_TYPE = CONTENT_TYPE_LATEST
_PARITY_HINT = "see docs/howto/parity.md; `preble check` shows everything that was found"
_PARITY = MappingProxyType({Outcome.VERIFIED: 1, Outcome.MISMATCH: 0, Outcome.UNCHECKED: -1})
_SHORT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TINY_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)


class _OfReplica:
    """The metrics of one replica."""

    __slots__ = (
        "cached_tokens",
        "e2e",
        "matched_tokens",
        "output_tokens",
        "prompt_tokens",
        "reasons",
        "running",
        "ttft",
    )

    def __init__(self, everything: Telemetry, replica: ReplicaId) -> None:
        self.reasons = {reason: everything.placements.labels(replica, reason.value) for reason in Reason}
        self.prompt_tokens = everything.prompt_tokens.labels(replica)
        self.matched_tokens = everything.matched_tokens.labels(replica)
        self.cached_tokens = everything.cached_tokens.labels(replica)
        self.output_tokens = everything.output_tokens.labels(replica)
        self.running = everything.running.labels(replica)
        self.ttft = everything.ttft.labels(replica)
        self.e2e = everything.e2e.labels(replica)


class Telemetry:
    """The metrics and log of one `Serving`. Each has a registry of its own, so that several can run in one process."""

    def __init__(self, log_losses: LogLosses | None = None) -> None:
        """`log_losses`: of the log that this process writes, None where nobody counts them."""
        self.registry = registry = CollectorRegistry()
        self.log: Any = structlog.get_logger().bind()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"preble_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"preble_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str, *labels: str, buckets: tuple[float, ...] = _SHORT_S) -> Histogram:
            return Histogram(f"preble_{name}_seconds", text, labels, registry=registry, buckets=buckets)

        self.placements = counter("placements", "Requests placed, by reason.", "replica", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens placed.", "replica")
        self.matched_tokens = counter("matched_tokens", "Prompt tokens believed to be cached when placed.", "replica")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that the replica reported as cached.", "replica")
        self.output_tokens = counter("output_tokens", "Tokens generated.", "replica")
        self.engine_errors = counter("engine_errors", "Failures of replicas, by kind.", "replica", "kind")
        self.moves = counter("moves", "Requests that left a replica for another one.", "replica")
        self.retries_denied = counter("retries_denied", "Requests not moved since the retry budget was spent.")
        self.ejected = gauge("replica_ejected", "1 while requests keep away from a replica.", "replica")
        self.kv_events = counter("kv_events", "Changes of prefix caches that replicas reported.", "replica", "kind")
        self.unlocated = counter("kv_blocks_unlocated", "Stored-block events whose parent block is unknown.", "replica")
        self.events_arrive = gauge(
            "kv_events_arrive",
            "1 while a replica's KV events arrive, 0 while its cache is estimated instead.",
            "replica",
        )
        self.resyncs = counter("kv_resyncs", "Requests to a KV event stream to start over.", "replica")
        self.prefix_replications = counter(
            "prefix_replications", "Prefixes that got a further replica or lost one.", "replica", "change"
        )
        self.parity = gauge(
            "replica_parity",
            "Last check of a replica's token ids and cache: 1 as predicted, 0 not, -1 unchecked.",
            "replica",
            "check",
        )
        self.up = gauge("replica_up", "1 while a replica is in the rotation.", "replica")
        self.running = gauge("in_flight", "Requests placed and not finished.", "replica")
        self.waiting = gauge("prompts_admitted", "Prompts between admission and the end of their answer.")
        self.key_requests = counter("key_requests", "Placements that ended, by key.", "key")
        self.key_tokens = counter("key_tokens", "Tokens of a key, by kind: cached ones are also prompt.", "key", "kind")
        self.queued = gauge("prompts_queued", "Prompts of tenants that wait for their turn to be placed.")
        self.ttft = seconds("ttft", "From placing to the first byte of a streamed answer.", "replica")
        self.e2e = seconds("e2e", "From placing to the end of the answer.", "replica")
        self.placing = seconds("placing", "One placement decision.", buckets=_TINY_S)
        self._replicas: dict[ReplicaId, _OfReplica] = {}
        if log_losses is not None:
            lost = gauge("log_lines_lost", "Log lines that stderr did not take: its disk is full or nobody reads it.")
            lost.set_function(lambda: log_losses.num_lines)
        self.tokenizing = seconds("tokenizing", "Making token ids of one prompt, waiting included.", buckets=_TINY_S)

        self._of_one_replica = [m for m in vars(self).values() if "replica" in getattr(m, "_labelnames", ())]

    def exposition(self) -> bytes:
        """Every metric in Prometheus' text form."""
        return generate_latest(self.registry)

    def _of(self, replica: ReplicaId) -> _OfReplica:
        found = self._replicas.get(replica)
        if found is None:
            found = self._replicas[replica] = _OfReplica(self, replica)
        return found

    def placed(self, placement: Placement, took_s: float) -> None:
        of_replica = self._of(placement.replica_id)
        self.placing.observe(took_s)
        of_replica.reasons[placement.reason].inc()
        of_replica.prompt_tokens.inc(placement.num_prompt_tokens)
        of_replica.matched_tokens.inc(placement.matched_tokens)
        of_replica.running.inc()
        self.log.info(
            "placed",
            request_id=placement.request_id,
            replica=placement.replica_id,
            reason=placement.reason.value,
            prompt_tokens=placement.num_prompt_tokens,
            matched_tokens=placement.matched_tokens,
        )

    def moved(self, source: ReplicaId, to: ReplicaId) -> None:
        """The carrier sent a request to another replica."""
        self.moves.labels(source).inc()
        self._of(source).running.dec()
        self._of(to).running.inc()

    def first_byte(self, replica: ReplicaId, ttft_s: float) -> None:
        self._of(replica).ttft.observe(ttft_s)

    def finished(
        self, placement: Placement, *, outcome: str, output_tokens: int, cached_tokens: int | None, e2e_s: float
    ) -> None:
        """The end of one placement. `outcome`: "ok", "aborted", or the class of an error."""
        of_replica = self._of(placement.replica_id)
        of_replica.running.dec()
        of_replica.output_tokens.inc(output_tokens)
        if cached_tokens is not None:
            of_replica.cached_tokens.inc(cached_tokens)
        if outcome == "ok":
            of_replica.e2e.observe(e2e_s)
        self.log.info(
            "finished",
            request_id=placement.request_id,
            replica=placement.replica_id,
            outcome=outcome,
            output_tokens=output_tokens,
            cached_tokens=cached_tokens,
            e2e_s=round(e2e_s, 6),
        )

    def models_changed(self, replica: ReplicaId, models: tuple[str, ...]) -> None:
        """A replica serves other models than before."""
        self.log.info("models_changed", replica=replica, models=models)

    def block_size_learned(self, replica: ReplicaId, block_size: int) -> None:
        """A replica's KV events are of blocks of another size than it says."""
        self.log.warning("kv_block_size_differs", replica=replica, block_size=block_size, consequence="it joins again")

    def events_lost(self, replica: ReplicaId, *, lost: bool) -> None:
        """A replica's KV events do not arrive any more, or (`lost` False) they do again."""
        self.events_arrive.labels(replica).set(not lost)
        if lost:
            self.log.warning(
                "kv_events_lost", replica=replica, consequence="what it caches is estimated until they arrive"
            )
        else:
            self.log.info("kv_events_back", replica=replica)

    def key_used(self, key: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """A placement of a key has ended."""
        self.key_requests.labels(key).inc()
        for kind, count in (("prompt", prompt_tokens), ("cached", cached_tokens), ("output", output_tokens)):
            self.key_tokens.labels(key, kind).inc(count)

    def resynced(self, replica: ReplicaId) -> None:
        """A replica's KV events, which build on unknown blocks, were asked to start over."""
        self.resyncs.labels(replica).inc()
        self.log.warning("kv_events_resync", replica=replica, reason="blocks were stored behind unknown ones")

    def prefixes_replicated(self, changes: Iterable[PrefixReplication]) -> None:
        """Prefixes were replicated or retired."""
        for change in changes:
            self.prefix_replications.labels(change.replica_id, "added" if change.added else "retired").inc()
            self.log.info(
                "prefix_replicated" if change.added else "prefix_retired",
                replica=change.replica_id,
                prefix_tokens=change.prefix_tokens,
                replicas=change.num_replicas,
            )

    def engine_failed(self, replica: ReplicaId, error: EngineError) -> None:
        self.engine_errors.labels(replica, type(error).__name__).inc()
        self.log.warning("engine_error", replica=replica, kind=type(error).__name__, error=str(error))

    def standing_changed(self, change: Change) -> None:
        """A replica was ejected, is probed, or is back."""
        self.ejected.labels(change.replica_id).set(change.standing is Standing.EJECTED)
        if change.standing is Standing.EJECTED:
            reason = str(change.reason)  # in words: the console shows an enumeration as code
            self.log.warning("replica_ejected", replica=change.replica_id, reason=reason, back_off_s=change.back_off_s)
        else:
            self.log.info(
                "replica_probed" if change.standing is Standing.PROBING else "replica_back", replica=change.replica_id
            )

    def forget_replica(self, replica: ReplicaId) -> None:
        """Show a replica no more: it is gone for good, and fleets change for months."""
        self._replicas.pop(replica, None)
        for metric in self._of_one_replica:
            metric.remove_by_labels({"replica": replica})

    def replica_expected(self, replica: ReplicaId) -> None:
        """A replica is configured: it counts as down until it is up."""
        self.up.labels(replica).set(0)

    def replica_up(self, replica: ReplicaId, **details: object) -> None:
        server = replica.partition("#")[0]
        if server != replica:  # one of several on a server, whose own name is no replica's
            with contextlib.suppress(KeyError):
                self.up.remove(server)
        self.up.labels(replica).set(1)
        if details.get("events"):
            self.events_arrive.labels(replica).set(1)
        self.log.info("replica_up", replica=replica, **details)

    def index_may_be_short(self, before: SchedulerState, after: SchedulerState) -> None:
        """A replica has joined. Warn if the caches can hold more now than the prefix index, and could not before."""
        budget = after.index_budget_bytes
        if budget is not None and before.enough_index_bytes <= budget < after.enough_index_bytes:
            share = budget / after.enough_index_bytes
            advice = f"scheduler.index_budget_mib: {-(-after.enough_index_bytes // 2**20)} is enough for all"
            self.log.warning("index_budget_small", holds=f"{share:.0%} of what the replicas can cache", advice=advice)

    def parity_checked(self, report: ParityReport, *, is_known: bool) -> None:
        """A replica's token ids and cache were checked. `is_known`: the last check found the same."""
        for finding in report.findings:
            self.parity.labels(report.replica, finding.check).set(_PARITY[finding.outcome])
        if is_known:
            return
        log = self.log.bind(replica=report.replica, trusted=report.trusted)
        for finding in report.findings:
            if finding.outcome is Outcome.MISMATCH:
                log.warning("parity_mismatch", check=finding.check.value, detail=finding.detail, hint=_PARITY_HINT)
        unchecked = {f.check.value: f.detail for f in report.findings if f.outcome is Outcome.UNCHECKED}
        if unchecked:
            log.warning("parity_unchecked", **unchecked)
        if report.outcome is Outcome.VERIFIED:
            log.info("parity_verified", took_s=round(report.took_s, 3))

    def replica_down(self, replica: ReplicaId, reason: str | None, orphans: int) -> None:
        """A replica left the rotation. `reason`: None at shutdown."""
        self.up.labels(replica).set(0)
        with contextlib.suppress(KeyError):  # it reports none
            self.events_arrive.remove(replica)
        self.ejected.labels(replica).set(0)
        for check in Check:
            with contextlib.suppress(KeyError):  # never checked
                self.parity.remove(replica, check)
        if reason is not None:
            self.log.warning("replica_down", replica=replica, reason=reason, requests_in_flight=orphans)
