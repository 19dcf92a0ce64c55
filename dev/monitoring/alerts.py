"""The alert rules for Prometheus: what somebody should be woken for, or look at in the morning, and what to do then."""

from __future__ import annotations

from typing import NamedTuple

import yaml

_DOCS = "https://github.com/preble-project/preble/tree/main/docs"
_WHICH = "{{ with $labels.replica }}{{ . }} is{{ else }}{{ $value }} of the replicas are{{ end }}"
"""The replica, or how many where `metrics.per_replica` is false."""


class Alert(NamedTuple):
    """One rule. `lasts`: for how long it must be so. `page`: where to read on, below docs/."""

    name: str
    severity: str
    expression: str
    lasts: str
    summary: str
    advice: str
    page: str


def _share(part: str) -> str:
    matching = f'sum by (job) (rate(preble_responses_total{{status=~"{part}"}}[5m]))'
    return f"{matching} / sum by (job) (rate(preble_responses_total[5m]))"


ALERTS = [
    Alert(
        "PrebleGone",
        "critical",
        "absent(preble_build_info)",
        "2m",
        "No gateway is scraped.",
        "Look whether the process runs and whether Prometheus has a valid key.",
        "howto/monitoring.md",
    ),
    Alert(
        "PrebleNoReplicaUp",
        "critical",
        "sum by (job) (preble_replica_up) == 0",
        "1m",
        "{{ $labels.job }} has no replica: every request gets a 503.",
        "GET /replicas says for each of them why it is not up.",
        "howto/fleet.md",
    ),
    Alert(
        "PrebleNoPickerLeads",
        "critical",
        "max by (job) (preble_picker_leading) == 0",
        "1m",
        "No picker of {{ $labels.job }} holds the lease: gateways get no placements.",
        "Their logs have `lease_unknown` with the reason; their role must let them get, create and update leases.",
        "howto/kubernetes-gateway.md",
    ),
    Alert(
        "PrebleErrors",
        "critical",
        f"{_share('5..')} > 0.02",
        "5m",
        "{{ $value | humanizePercentage }} of the answers of {{ $labels.job }} are errors of status 5xx.",
        "preble_engine_errors_total names the replicas and the kind; the log has `request_failed` and `engine_error`.",
        "reference/failures.md",
    ),
    Alert(
        "PrebleRefuses",
        "warning",
        f"{_share('429')} > 0.05",
        "10m",
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.job }} are refused: there is no room.",
        "Add replicas, or raise the limits of the keys that are refused (preble_key_requests_total).",
        "howto/tenants.md",
    ),
    Alert(
        "PrebleSlowFirstToken",
        "warning",
        "histogram_quantile(0.99, sum by (job, model, le) (rate(preble_ttft_seconds_bucket[5m]))) > 10",
        "10m",
        "One request in a hundred to {{ $labels.model }} waits {{ $value | humanizeDuration }} for its first token.",
        "The parts say where: preble_tokenizing_seconds, preble_queueing_seconds, preble_replica_ttft_seconds.",
        "howto/monitoring.md",
    ),
    Alert(
        "PrebleWorkWaits",
        "warning",
        "sum by (job) (preble_work_waiting_seconds) / sum by (job) (preble_replica_up) > 10",
        "10m",
        "{{ $value | humanizeDuration }} of work wait for each replica of {{ $labels.job }}.",
        "The fleet is too small for this load; scale by this metric.",
        "howto/monitoring.md",
    ),
    Alert(
        "PrebleReplicaDown",
        "warning",
        'sum without (state) (preble_replica_state{state=~"down|joining"}) > 0',
        "10m",
        f"{_WHICH} not in the rotation.",
        "GET /replicas has its last error.",
        "howto/fleet.md",
    ),
    Alert(
        "PrebleReplicaEjected",
        "warning",
        "min_over_time(preble_replica_ejected[10m]) > 0",
        "5m",
        f"{_WHICH} kept out: requests fail there, are slow, or get no answer.",
        "The log has `replica_ejected` with the reason; restart the engine if it does not recover.",
        "reference/failures.md",
    ),
    Alert(
        "PrebleUnbalanced",
        "warning",
        "max by (job, instance) (preble_load_seconds) > 2.5 * avg by (job, instance) (preble_load_seconds)"
        " and max by (job, instance) (preble_load_seconds) > 30",
        "15m",
        "The busiest replica of {{ $labels.instance }} has more than 2.5 times the mean load.",
        "preble explain shows why requests go there; a replica that was just added is lighter for a window's length.",
        "howto/explain.md",
    ),
    Alert(
        "PrebleCacheDrift",
        "warning",
        "rate(preble_drift_reported_tokens_total[30m]) < 0.7 * rate(preble_drift_predicted_tokens_total[30m])"
        " and rate(preble_drift_predicted_tokens_total[30m]) > 100",
        "30m",
        "{{ $labels.replica }} has much less cached than predicted.",
        "preble check compares its token ids and cache with the gateway's.",
        "howto/parity.md",
    ),
    Alert(
        "PrebleParityMismatch",
        "warning",
        "preble_replica_parity == 0",
        "5m",
        "{{ $labels.replica }} tokenizes or caches otherwise than predicted ({{ $labels.check }}).",
        "preble check shows everything that was found; the tokenizer may be another model's.",
        "howto/parity.md",
    ),
    Alert(
        "PrebleKvEventsLost",
        "warning",
        "preble_kv_events_arrive == 0",
        "10m",
        "The KV events of {{ $labels.replica }} do not arrive; its cache is estimated.",
        "A firewall or a wrong port is the usual reason; the log has `kv_events_lost`.",
        "howto/vllm.md",
    ),
    Alert(
        "PrebleSourceStale",
        "warning",
        "preble_source_current == 0",
        "15m",
        "What {{ $labels.source }} names as replicas may be out of date.",
        "GET /replicas has the source's error; the log has `members_unknown`.",
        "howto/fleet.md",
    ),
    Alert(
        "PreblePeersDisconnected",
        "warning",
        "preble_peers_connected == 0",
        "1m",
        "{{ $labels.instance }} does not reach the bus to its peers, and places on its own.",
        "Several gateways that do not hear each other compute the same prefixes twice; see whether NATS is up.",
        "howto/several-gateways.md",
    ),
    Alert(
        "PrebleRetriesDenied",
        "warning",
        "rate(preble_retries_denied_total[5m]) > 0.1",
        "5m",
        "Requests of {{ $labels.instance }} fail that could have moved: the retry budget is spent.",
        "Several replicas fail at once; preble_engine_errors_total names them.",
        "reference/failures.md",
    ),
    Alert(
        "PrebleGatewayBusy",
        "warning",
        "rate(preble_process_cpu_seconds_total[5m]) > 0.85",
        "10m",
        "A process of {{ $labels.instance }} ({{ $labels.process }}) uses a whole core, which delays every request.",
        "Start more workers, or another gateway with --peers.",
        "performance.md",
    ),
    Alert(
        "PrebleIndexFull",
        "info",
        "rate(preble_unindexed_total[15m]) > 1",
        "30m",
        "The prefix index of {{ $labels.instance }} has no room for what is cached.",
        "Raise scheduler.index_budget_mib; the log has `index_budget_small` with a figure.",
        "reference/configuration.md",
    ),
    Alert(
        "PrebleLogLost",
        "info",
        "delta(preble_log_lines_lost[15m]) > 0 or increase(preble_decision_log_dropped_total[15m]) > 0",
        "5m",
        "{{ $labels.instance }} loses lines of its log or decision log.",
        "A disk is full or too slow, or nobody reads stderr.",
        "reference/failures.md",
    ),
]


def rules() -> str:
    """The rules as Prometheus reads them."""
    group = {"name": "preble", "rules": [_rule(alert) for alert in ALERTS]}
    head = "# Alert rules for a Preble gateway, made by `make reference`; see docs/howto/monitoring.md\n"
    return head + yaml.safe_dump({"groups": [group]}, sort_keys=False, width=110, allow_unicode=True)


def _rule(alert: Alert) -> dict[str, object]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.lasts,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.advice,
            "runbook_url": f"{_DOCS}/{alert.page}",
        },
    }
