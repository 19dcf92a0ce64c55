"""The Grafana dashboard. Its panels' descriptions are those of the metrics; a test looks up each metric and label."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from preble.serving.telemetry.table import BY_NAME

_RATE = "[$__rate_interval]"
_ON = '{job=~"$job"}'
_MODEL = '{job=~"$job", model=~"$model"}'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}

Query = tuple[str, str]
"""An expression, and its legend."""


def quantiles(metric: str) -> list[Query]:
    """Its median, 90th and 99th percentile."""
    buckets = f"sum by (le) (rate({metric}_bucket{_MODEL}{_RATE}))"
    return [(f"histogram_quantile({q}, {buckets})", name) for q, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))]


def mean(metric: str, matcher: str = _MODEL) -> str:
    """The mean of a histogram."""
    return f"sum(rate({metric}_sum{matcher}{_RATE})) / sum(rate({metric}_count{matcher}{_RATE}))"


def of_replicas(metric: str, by: str = "replica") -> str:
    """A gauge of each replica, once: every gateway of a group has all replicas."""
    return f"max by ({by}) ({metric}{_ON})"


def rate(metric: str, by: str = "", matcher: str = _ON) -> str:
    """How fast a counter grows, over everything or by a label."""
    return f"sum {f'by ({by}) ' if by else ''}(rate({metric}{matcher}{_RATE}))"


def share(part: str, whole: str) -> str:
    """One counter's rate as a part of another's."""
    return f"{rate(part, matcher=_MODEL)} / {rate(whole, matcher=_MODEL)}"


_LOAD = f"max by (replica) (preble_load_seconds{_ON} / on (instance) group_left () preble_load_window_seconds{_ON})"
_CACHED = share("preble_cached_tokens_total", "preble_prompt_tokens_total")
_ERRORS = '{job=~"$job", model=~"$model", status=~"5.."}'

# title, unit, kind of panel, queries; a width of 24 is a row's whole width
ROWS: dict[str, list[tuple[str, str, str, int, list[Query]]]] = {
    "At a glance": [
        ("Requests", "reqps", "stat", 4, [(rate("preble_responses_total", matcher=_MODEL), "")]),
        ("Time to first token, p99", "s", "stat", 4, [quantiles("preble_ttft_seconds")[2]]),
        (
            "Answers 5xx",
            "percentunit",
            "stat",
            4,
            [
                (
                    f"(sum(rate(preble_responses_total{_ERRORS}{_RATE})) or vector(0))"
                    f" / {rate('preble_responses_total', matcher=_MODEL)}",
                    "",
                )
            ],
        ),
        ("Prompt tokens from caches", "percentunit", "stat", 4, [(_CACHED, "")]),
        ("Work waiting", "s", "stat", 4, [(f"sum(max by (job, model) (preble_work_waiting_seconds{_MODEL}))", "")]),
        ("Replicas up", "short", "stat", 4, [(f"sum({of_replicas('preble_replica_up')})", "")]),
    ],
    "Requests": [
        (
            "Answers, by status",
            "reqps",
            "timeseries",
            8,
            [(rate("preble_responses_total", "status", _MODEL), "{{status}}")],
        ),
        ("Time to first token", "s", "timeseries", 8, quantiles("preble_ttft_seconds")),
        ("Time to the end", "s", "timeseries", 8, quantiles("preble_e2e_seconds")),
        ("Gaps between tokens", "s", "timeseries", 8, quantiles("preble_itl_seconds")),
        (
            "Parts of the time to first token (means)",
            "s",
            "stacked",
            8,
            [
                (mean("preble_tokenizing_seconds"), "tokenizing"),
                (mean("preble_queueing_seconds"), "waiting for its turn"),
                (mean("preble_placing_seconds", _ON), "placing"),
                (mean("preble_replica_ttft_seconds"), "replica"),
            ],
        ),
        (
            "Ends, by outcome",
            "reqps",
            "timeseries",
            8,
            [(rate("preble_finished_total", "outcome", _MODEL), "{{outcome}}")],
        ),
        (
            "Prompts",
            "short",
            "timeseries",
            8,
            [
                (f"sum(preble_prompts_admitted{_ON})", "admitted"),
                (f"sum(preble_prompts_queued{_MODEL})", "wait for their turn"),
                (f"sum(preble_in_flight{_MODEL})", "at replicas"),
            ],
        ),
    ],
    "Placements and caches": [
        (
            "Placements, by reason",
            "reqps",
            "stacked",
            8,
            [(rate("preble_placements_total", "reason", _MODEL), "{{reason}}")],
        ),
        (
            "Prompt tokens from caches",
            "percentunit",
            "timeseries",
            8,
            [
                (share("preble_matched_tokens_total", "preble_prompt_tokens_total"), "as believed"),
                (_CACHED, "as reported"),
            ],
        ),
        (
            "Tokens",
            "short",
            "timeseries",
            8,
            [
                (rate("preble_prompt_tokens_total", matcher=_MODEL), "prompt"),
                (rate("preble_output_tokens_total", matcher=_MODEL), "output"),
            ],
        ),
        (
            "Reported / predicted cached tokens, by replica",
            "percentunit",
            "timeseries",
            8,
            [
                (
                    f"{rate('preble_drift_reported_tokens_total', 'replica')}"
                    f" / {rate('preble_drift_predicted_tokens_total', 'replica')}",
                    "{{replica}}",
                )
            ],
        ),
        ("KV cache in use", "percentunit", "timeseries", 8, [(of_replicas("preble_kv_in_use_ratio"), "{{replica}}")]),
        (
            "Hot prefixes",
            "short",
            "timeseries",
            8,
            [
                (f"sum(max by (job) (preble_replicated_prefixes{_ON}))", "on several replicas by choice"),
                (rate("preble_prefix_replications_total", "change"), "{{change}} a second"),
            ],
        ),
        (
            "Copies and splits",
            "reqps",
            "timeseries",
            12,
            [
                (rate("preble_copies_total", "outcome", _MODEL), "copies {{outcome}}"),
                (rate("preble_splits_total", "outcome", _MODEL), "splits {{outcome}}"),
            ],
        ),
        (
            "Prompt tokens sent between replicas",
            "short",
            "timeseries",
            12,
            [
                (rate("preble_copied_tokens_total", matcher=_MODEL), "by copies"),
                (rate("preble_split_tokens_total", matcher=_MODEL), "by splits"),
            ],
        ),
    ],
    "Replicas": [
        ("Load: placed work / window", "percentunit", "timeseries", 8, [(_LOAD, "{{replica}}")]),
        (
            "Imbalance: busiest / mean",
            "short",
            "timeseries",
            8,
            [(f"max(preble_load_seconds{_ON}) / avg(preble_load_seconds{_ON})", "")],
        ),
        (
            "Prefill that waits",
            "s",
            "timeseries",
            8,
            [(of_replicas("preble_waiting_prefill_seconds"), "{{replica}}")],
        ),
        (
            "Requests at each replica",
            "short",
            "timeseries",
            8,
            [(f"sum by (replica) (preble_in_flight{_MODEL})", "{{replica}}")],
        ),
        (
            "Failures and moves",
            "short",
            "timeseries",
            8,
            [
                (rate("preble_engine_errors_total", "replica, kind", _MODEL), "{{replica}} {{kind}}"),
                (rate("preble_moves_total", "replica", _MODEL), "left {{replica}}"),
                (rate("preble_retries_denied_total"), "moves denied"),
            ],
        ),
        (
            "States",
            "short",
            "timeseries",
            8,
            [
                (f"sum by (state) ({of_replicas('preble_replica_state', 'replica, state')})", "{{state}}"),
                (f"sum({of_replicas('preble_replica_ejected')})", "ejected"),
                (f"sum(min by (replica) (preble_kv_events_arrive{_ON}) == bool 0)", "without KV events"),
            ],
        ),
    ],
    "Keys and the gateway": [
        (
            "Tokens, by key",
            "short",
            "timeseries",
            6,
            [(rate("preble_key_tokens_total", "key, kind"), "{{key}} {{kind}}")],
        ),
        (
            "CPU, by process",
            "percentunit",
            "timeseries",
            6,
            [(rate("preble_process_cpu_seconds_total", "instance, process"), "{{instance}} {{process}}")],
        ),
        (
            "Memory",
            "bytes",
            "timeseries",
            6,
            [
                (f"sum by (instance, process) (preble_process_resident_bytes{_ON})", "{{instance}} {{process}}"),
                (f"sum(preble_index_bytes{_ON})", "prefix index"),
                (f"sum(preble_body_bytes{_ON})", "bodies"),
            ],
        ),
        (
            "Lost or left out",
            "short",
            "timeseries",
            6,
            [
                (f"sum(preble_log_lines_lost{_ON})", "log lines"),
                (rate("preble_decision_log_dropped_total"), "decisions a second"),
                (rate("preble_unindexed_total"), "prompts without room in the index, a second"),
            ],
        ),
    ],
}


def queries() -> Iterator[str]:
    """Every expression of the dashboard."""
    for panels in ROWS.values():
        for _, _, _, _, of_panel in panels:
            yield from (expression for expression, _ in of_panel)


def dashboard() -> str:
    """The dashboard as JSON, to be imported or provisioned."""
    page = {
        "uid": "preble",
        "title": "Preble",
        "tags": ["llm", "inference"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }
    return json.dumps(page, indent=1) + "\n"


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    for name, query in (
        ("job", "label_values(preble_build_info, job)"),
        ("model", 'label_values(preble_in_flight{job=~"$job"}, model)'),
    ):
        yield {
            "name": name,
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for row, panels in ROWS.items():
        number += 1
        yield {"id": number, "type": "row", "title": row, "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}, "panels": []}
        top += 1
        left, height = 0, 0
        for title, unit, kind, width, of_panel in panels:
            number += 1
            tall = 4 if kind == "stat" else 8
            if left + width > 24:
                left, top = 0, top + height
            height = tall
            yield _panel(number, title, unit, kind, of_panel) | {
                "gridPos": {"x": left, "y": top, "w": width, "h": tall}
            }
            left += width
        top += height


def _panel(number: int, title: str, unit: str, kind: str, of_panel: list[Query]) -> dict[str, Any]:
    custom = {"fillOpacity": 30, "stacking": {"mode": "normal"}} if kind == "stacked" else {"fillOpacity": 8}
    return {
        "id": number,
        "title": title,
        "description": _description(of_panel),
        "type": "stat" if kind == "stat" else "timeseries",
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}} if kind != "stat" else {},
        "targets": [
            {"refId": chr(65 + i), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for i, (expression, legend) in enumerate(of_panel)
        ],
    }


def _description(of_panel: list[Query]) -> str:
    """What the metrics of a panel mean, in the table's words."""
    text = " ".join(expression for expression, _ in of_panel)
    names = dict.fromkeys(re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"preble_\w+", text))
    return "\n\n".join(f"{name}: {BY_NAME[name].text}" for name in names)
