"""What is counted as things happen, and one `finished` log line for each placement, up to a rate.

Above `log.requests_per_s`, lines of requests that went well are left out. No line contains the prompt. A line below the
configured log level costs a call that does nothing. The numbers of one replica and model are looked up once: finding
them costs more than counting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, GCCollector, ProcessCollector, generate_latest

from preble.config import MetricsConfig, RequestLogConfig
from preble.core.placing.snapshot import SchedulerState
from preble.core.placing.timing_samples import MIN_OUTPUT_TOKENS
from preble.core.types import Placement, PrefixReplication, Reason, ReplicaId, TransferKind
from preble.core.types.life import Ended, Fact, FirstToken, Moved, Outcome, Started, TransferFailed, Transferred
from preble.logs import LogLosses
from preble.rules.callers import Caller
from preble.rules.ejection import Change, Standing
from preble.serving.parity.report import Check, ParityOutcome, ParityReport
from preble.serving.placed import LocalPlaced
from preble.serving.telemetry.exposition import in_text
from preble.serving.telemetry.numbers import Numbers, Reading, note
from preble.serving.telemetry.readings import of_process
from preble.serving.telemetry.table import GAP_S, SHORT_S, TINY_S
from preble.serving.terms import Terms

METRICS_CONTENT_TYPE = CONTENT_TYPE_LATEST
OTHER_TENANTS = "other"
"""The label of tenants beyond the number that `metrics.tenants` names."""
_PARITY_HINT = "see docs/howto/parity.md; `preble check` shows everything that was found"
_PARITY = MappingProxyType({ParityOutcome.VERIFIED: 1, ParityOutcome.MISMATCH: 0, ParityOutcome.UNCHECKED: -1})


_USUAL = (Outcome.OK, Outcome.ABORTED)
"""Outcomes whose lines may be left out."""


class LineRate:
    """Lets at most `lines_per_s` lines through in each second. `num_left_out`: those held back."""

    def __init__(self, lines_per_s: int) -> None:
        self._lines_per_s = lines_per_s
        self._second = 0
        self._num_lines = 0
        self.num_left_out = 0

    def lets_through(self, now: float) -> bool:
        """Return whether to write one more line. `now`: in seconds, of a clock that does not go back."""
        if int(now) != self._second:
            self._second, self._num_lines = int(now), 0
        self._num_lines += 1
        self.num_left_out += self._num_lines > self._lines_per_s
        return self._num_lines <= self._lines_per_s


class _OfReplica:
    """The numbers of one model on one replica."""

    def __init__(self, numbers: Numbers, replica: ReplicaId, model: str) -> None:
        def tokens(kind: str) -> list[float]:
            return numbers.cell(f"preble_{kind}_tokens_total", replica, model)

        self.reasons = {r: numbers.cell("preble_placements_total", replica, model, r.value) for r in Reason}
        self.prompt, self.matched, self.cached, self.output = map(tokens, ("prompt", "matched", "cached", "output"))
        self.running = numbers.cell("preble_in_flight", replica, model)
        self.placed_s = numbers.cell("preble_replica_ttft_seconds", replica, model)
        self.ttft = numbers.cell("preble_ttft_seconds", model)
        self.ttft_error = numbers.cell("preble_ttft_error_seconds", model)
        self.within_p98 = numbers.cell("preble_ttft_p98_total", model, "within")
        self.over_p98 = numbers.cell("preble_ttft_p98_total", model, "over")
        self.tpot_error = numbers.cell("preble_tpot_error_seconds", model)
        self.within_tpot_p98 = numbers.cell("preble_tpot_p98_total", model, "within")
        self.over_tpot_p98 = numbers.cell("preble_tpot_p98_total", model, "over")
        self.e2e = numbers.cell("preble_e2e_seconds", model)
        self.ok = numbers.cell("preble_finished_total", model, "ok")


class Telemetry:
    """The numbers and log of one `Serving`, in one process of the gateway. Several can be in one process.

    `numbers`: a carrier counts its own here. `others`: asked at each scrape for the numbers of the gateway's other
    processes. `registry`: a scrape's further metrics, such as those that a carrier registers.
    """

    def __init__(
        self,
        log_losses: LogLosses | None = None,
        config: MetricsConfig | None = None,
        *,
        log: RequestLogConfig | None = None,
        process: str = "gateway",
        others: Callable[[], Iterable[Iterable[Reading]]] = tuple,
    ) -> None:
        """`log_losses`: of the log that this process writes, None where nobody counts them. `process`: its label.

        `log`: settings of the lines about requests."""
        config = config or MetricsConfig()
        self.numbers = numbers = Numbers()
        self.others = others
        self.registry = CollectorRegistry()
        self.log: Any = structlog.get_logger().bind()
        self._logs_placements = self.log.is_enabled_for(logging.DEBUG)
        self._lines = LineRate((log or RequestLogConfig()).requests_per_s)
        self._tenants: set[str] = set()
        self._placing = numbers.cell("preble_placing_seconds")
        self._of: dict[tuple[ReplicaId, str], _OfReplica] = {}
        numbers.read(lambda: of_process(process))
        if log_losses is not None:
            numbers.read(lambda: [("preble_log_lines_lost", (), [float(log_losses.num_lines)])])
        self._config = config
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def exposition(self) -> bytes:
        """Return every metric in Prometheus' text form."""
        states = chain([self.numbers.state()], self.others())
        shown = in_text(states, per_replica=self._config.per_replica, vllm_names=self._config.vllm_names)
        return shown.encode() + generate_latest(self.registry)

    def _of_replica(self, replica: ReplicaId, model: str) -> _OfReplica:
        if (found := self._of.get((replica, model))) is None:
            found = self._of[replica, model] = _OfReplica(self.numbers, replica, model)
        return found

    # requests

    def gaps(self, model: str) -> Callable[[float], None]:
        """Return what counts a gap between two tokens, in seconds."""
        return partial(note, self.numbers.cell("preble_itl_seconds", model), GAP_S)

    def target_refused(self, terms: Terms, model: str) -> None:
        """A request was refused, since its target could not be kept."""
        for what, target_s in (("ttft", terms.ttft_target_s), ("tpot", terms.tpot_target_s)):
            if target_s is not None:
                self._target(terms, model, what, "refused")

    def _target(self, terms: Terms, model: str, what: str, outcome: str) -> None:
        self.numbers.add("preble_targets_total", self._label(terms.caller), model, what, outcome)

    def on(self, placed: LocalPlaced, fact: Fact, now: float) -> None:
        """Count what happens to a placement, and log its end."""
        replica, model = placed.placement.replica_id, placed.model
        of_replica = self._of.get((replica, model)) or self._of_replica(replica, model)
        if isinstance(fact, Ended):
            self._ended(placed, fact, of_replica, now - placed.arrived_at)
            if placed.begun_at is not None and fact.outcome is Outcome.OK:
                self._note_pace(placed, of_replica, fact.output_tokens or 0, now - placed.begun_at)
        elif isinstance(fact, Started):
            self._started(placed.placement, of_replica, fact.took_s)
        elif isinstance(fact, FirstToken):
            note(of_replica.ttft, SHORT_S, ttft_s := now - placed.arrived_at)
            note(of_replica.placed_s, SHORT_S, waited_s := now - placed.placed_at)
            if (predicted_s := placed.placement.predicted_ttft_s) is not None:
                note(of_replica.ttft_error, SHORT_S, abs(waited_s - predicted_s))
            if (p98_s := placed.placement.predicted_ttft_p98_s) is not None:
                (of_replica.within_p98 if waited_s <= p98_s else of_replica.over_p98)[0] += 1
            if tenant := self._label(placed.terms.caller):
                self.numbers.observe("preble_tenant_ttft_seconds", tenant, model, value=ttft_s)
            if (ttft_target_s := placed.terms.ttft_target_s) is not None:
                self._target(placed.terms, model, "ttft", "kept" if ttft_s <= ttft_target_s else "broken")
        elif isinstance(fact, Transferred | TransferFailed):
            transfer = placed.placement.transfer
            if transfer is None or transfer.kind is not TransferKind.COPY:
                return
            outcome = "failed"
            if isinstance(fact, Transferred):
                outcome = "overtaken" if fact.overtaken else "ok"
            self.numbers.add("preble_copies_total", replica, model, outcome)
            if outcome == "ok":
                self.numbers.add("preble_copied_tokens_total", replica, model, by=transfer.tokens)
        elif isinstance(fact, Moved) and fact.source is not None:
            self.placed_again(fact.source, model)
            self._of_replica(fact.source, model).running[0] -= 1
            of_replica.running[0] += 1

    def _note_pace(self, placed: LocalPlaced, of_replica: _OfReplica, output_tokens: int, took_s: float) -> None:
        """Compare the pace of a streamed answer with what was predicted and what was asked for."""
        if output_tokens < 2:
            return
        tpot_s = took_s / (output_tokens - 1)
        if output_tokens >= MIN_OUTPUT_TOKENS and (predicted_s := placed.placement.predicted_tpot_s) is not None:
            note(of_replica.tpot_error, GAP_S, abs(tpot_s - predicted_s))
            if (p98_s := placed.placement.predicted_tpot_p98_s) is not None:
                (of_replica.within_tpot_p98 if tpot_s <= p98_s else of_replica.over_tpot_p98)[0] += 1
        if (target_s := placed.terms.tpot_target_s) is not None:
            self._target(placed.terms, placed.model, "tpot", "kept" if tpot_s <= target_s else "broken")

    def _started(self, placement: Placement, of_replica: _OfReplica, took_s: float) -> None:
        note(self._placing, TINY_S, took_s)
        of_replica.reasons[placement.reason][0] += 1
        of_replica.prompt[0] += placement.num_prompt_tokens
        of_replica.matched[0] += placement.matched_tokens
        of_replica.running[0] += 1
        if self._logs_placements:
            self.log.debug(
                "placed",
                request_id=placement.request_id,
                replica=placement.replica_id,
                reason=str(placement.reason),
                prompt_tokens=placement.num_prompt_tokens,
                matched_tokens=placement.matched_tokens,
            )

    def _ended(self, placed: LocalPlaced, end: Ended, of_replica: _OfReplica, e2e_s: float) -> None:
        placement, outcome = placed.placement, end.outcome
        is_left_out = outcome in _USUAL and not self._lines.lets_through(time.monotonic())
        of_replica.running[0] -= 1
        of_replica.output[0] += end.output_tokens or 0
        if end.cached_tokens is not None:
            of_replica.cached[0] += end.cached_tokens
        if outcome is Outcome.OK:
            note(of_replica.e2e, SHORT_S, e2e_s)
            of_replica.ok[0] += 1
        else:
            self.numbers.add("preble_finished_total", placed.model, outcome)
        if placement.prefill_source is not None:
            self._split_ended(placed, outcome)
        if outcome.blames_replica:
            self.numbers.add("preble_engine_errors_total", placed.blamed, placed.model, outcome)
            self.log.warning("engine_error", replica=placed.blamed, kind=str(outcome), error=end.text)
        if placed.terms.caller.name:
            self._used(placed, end)
        if is_left_out:
            return
        left_out, self._lines.num_left_out = self._lines.num_left_out, 0
        self.log.info(
            "finished",
            request_id=placement.request_id,
            replica=placement.replica_id,
            reason=str(placement.reason),
            prompt_tokens=placement.num_prompt_tokens,
            matched_tokens=placement.matched_tokens,
            outcome=str(outcome),
            output_tokens=end.output_tokens,
            cached_tokens=end.cached_tokens,
            e2e_s=round(e2e_s, 6),
            **({"left_out": left_out} if left_out else {}),
        )

    def _split_ended(self, placed: LocalPlaced, outcome: Outcome) -> None:
        """Count a split that has brought its tokens or has failed. One that ends otherwise, as by its client, has done
        neither.
        """
        placement, failed = placed.placement, placed.transfer_failed or outcome.blames_replica
        if failed or outcome is Outcome.OK:
            word = "failed" if failed else "ok"
            self.numbers.add("preble_splits_total", placement.replica_id, placed.model, word)
        if not failed and outcome is Outcome.OK and placement.transfer is not None:
            tokens = placement.transfer.tokens
            self.numbers.add("preble_split_tokens_total", placement.replica_id, placed.model, by=tokens)

    def _used(self, placed: LocalPlaced, end: Ended) -> None:
        """What the holder of a key has used. A placement that gave nothing because of its replica costs no tokens:
        the request moves, and the one that answers it counts them. A request that no replica answers counts none.
        """
        caller, model = placed.terms.caller, placed.model
        numbers, tenant = self.numbers, self._label(caller)
        numbers.add("preble_key_requests_total", caller.name)
        if tenant:
            numbers.add("preble_tenant_finished_total", tenant, model, end.outcome)
        if not end.output_tokens and (end.outcome.blames_replica or end.outcome is Outcome.REFUSED):
            return
        tokens = (placed.placement.num_prompt_tokens, end.cached_tokens or 0, end.output_tokens or 0)
        for kind, count in zip(("prompt", "cached", "output"), tokens, strict=True):
            numbers.add("preble_key_tokens_total", caller.name, kind, by=count)
            if tenant:
                numbers.add("preble_tenant_tokens_total", tenant, model, kind, by=count)

    def retry_denied(self) -> None:
        """A request would move, but the fleet's budget is spent."""
        self.numbers.add("preble_retries_denied_total")

    def placed_again(self, tried: ReplicaId, model: str) -> None:
        """A request that a replica failed was placed on another one."""
        self.numbers.add("preble_moves_total", tried, model)

    def _label(self, caller: Caller) -> str:
        """Return the tenant's label: its name, `other` beyond `metrics.tenants` names, "" if that is 0."""
        tenant = caller.tenant
        if not self._config.tenants or not tenant or tenant in self._tenants:
            return tenant if self._config.tenants else ""
        if len(self._tenants) == self._config.tenants:
            return OTHER_TENANTS
        self._tenants.add(tenant)
        return tenant

    # replicas

    def models_changed(self, replica: ReplicaId, models: tuple[str, ...]) -> None:
        """A replica serves other models than before."""
        self.log.info("models_changed", replica=replica, models=models)

    def block_size_learned(self, replica: ReplicaId, block_size: int) -> None:
        """A replica's KV events are of blocks of another size than it says."""
        self.log.warning("kv_block_size_differs", replica=replica, block_size=block_size, consequence="it joins again")

    def events_lost(self, replica: ReplicaId, *, lost: bool) -> None:
        """A replica's KV events do not arrive any more, or (`lost` False) they do again."""
        self.numbers.set("preble_kv_events_arrive", replica, to=not lost)
        if lost:
            self.log.warning(
                "kv_events_lost", replica=replica, consequence="what it caches is estimated until they arrive"
            )
        else:
            self.log.info("kv_events_back", replica=replica)

    def kv_event(self, replica: ReplicaId, kind: str) -> None:
        """A replica has reported a change of its cache."""
        self.numbers.add("preble_kv_events_total", replica, kind)

    def unlocated(self, replica: ReplicaId) -> None:
        """A replica has stored blocks behind one that is unknown."""
        self.numbers.add("preble_kv_blocks_unlocated_total", replica)

    def resynced(self, replica: ReplicaId) -> None:
        """A replica's KV events, which build on unknown blocks, were asked to start over."""
        self.numbers.add("preble_kv_resyncs_total", replica)
        self.log.warning("kv_events_resync", replica=replica, reason="blocks were stored behind unknown ones")

    def prefixes_replicated(self, changes: Iterable[PrefixReplication]) -> None:
        """Prefixes were replicated or retired."""
        for change in changes:
            kind = "added" if change.added else "retired"
            self.numbers.add("preble_prefix_replications_total", change.replica_id, kind)
            self.log.info(
                "prefix_replicated" if change.added else "prefix_retired",
                replica=change.replica_id,
                prefix_tokens=change.prefix_tokens,
                replicas=change.num_replicas,
            )

    def standing_changed(self, change: Change) -> None:
        """A replica was ejected, is probed, or is back."""
        is_out = change.standing is Standing.EJECTED
        self.numbers.set("preble_replica_ejected", change.replica_id, to=is_out)
        if is_out:
            reason = str(change.reason)  # in words: the console shows an enumeration as code
            self.log.warning("replica_ejected", replica=change.replica_id, reason=reason, back_off_s=change.back_off_s)
        else:
            self.log.info(
                "replica_probed" if change.standing is Standing.PROBING else "replica_back", replica=change.replica_id
            )

    def forget_replica(self, replica: ReplicaId) -> None:
        """Drop a replica's metrics: it is gone for good, and over months a fleet has many."""
        self._of = {key: known for key, known in self._of.items() if key[0] != replica}
        if not self._config.per_replica:
            self.numbers.keep_counts(replica)
        self.numbers.forget_replica(replica)

    def replica_expected(self, replica: ReplicaId) -> None:
        """A replica is configured: it counts as down until it is up."""
        self.numbers.set("preble_replica_up", replica, to=0)

    def replica_up(self, replica: ReplicaId, **details: object) -> None:
        server = replica.partition("#")[0]
        if server != replica:  # one of several on a server, whose own name is no replica's
            self.numbers.remove("preble_replica_up", server)
        self.numbers.set("preble_replica_up", replica, to=1)
        self.numbers.set("preble_replica_ejected", replica, to=0)
        if details.get("events"):
            self.numbers.set("preble_kv_events_arrive", replica, to=1)
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
            self.numbers.set("preble_replica_parity", report.replica, finding.check, to=_PARITY[finding.outcome])
        if is_known:
            return
        log = self.log.bind(replica=report.replica, trusted=report.trusted)
        for finding in report.findings:
            if finding.outcome is ParityOutcome.MISMATCH:
                log.warning("parity_mismatch", check=finding.check.value, detail=finding.detail, hint=_PARITY_HINT)
        unchecked = {f.check.value: f.detail for f in report.findings if f.outcome is ParityOutcome.UNCHECKED}
        if unchecked:
            log.warning("parity_unchecked", **unchecked)
        if report.outcome is ParityOutcome.VERIFIED:
            log.info("parity_verified", took_s=round(report.took_s, 3))

    def replica_down(self, replica: ReplicaId, reason: str | None, orphans: int) -> None:
        """A replica left the rotation. `reason`: None at shutdown."""
        self.numbers.set("preble_replica_up", replica, to=0)
        self.numbers.remove("preble_kv_events_arrive", replica)
        self.numbers.set("preble_replica_ejected", replica, to=0)
        for check in Check:
            self.numbers.remove("preble_replica_parity", replica, check)
        if reason is not None:
            self.log.warning("replica_down", replica=replica, reason=reason, requests_in_flight=orphans)
