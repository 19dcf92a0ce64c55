"""What the gateway shows of itself: metrics, its log, and traces."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from preble.config.knobs import ZeroOrMore


class MetricsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What `/metrics` shows beyond what it always does (docs/reference/metrics.md)."""

    tenants: Annotated[int, Meta(ge=0, le=1000)] = 0
    """[tenants] How many tenants get a label of their own in the metrics `preble_tenant_*`; the others are `other`.
    Why: each tenant adds some forty series."""
    per_replica: bool = True
    """Show each replica's own series. Without, what has a label `replica` is the sum over all replicas. Why: each
    replica adds some eighteen series: 400 make a scrape of half a megabyte."""
    vllm_names: bool = False
    """Show metrics that vLLM has too under its names as well, for dashboards and pickers that ask for those. Why: a
    Prometheus that scrapes the replicas too would count twice."""


class RequestLogConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The log's lines about requests: one when each has ended. `--log-level debug` adds one for each placement."""

    requests_per_s: ZeroOrMore = 50
    """[lines/s] The most lines a second about requests that went well; the next line says how many were `left_out`.
    Why: enough to read; each line costs as much CPU as placing the request."""


class TracingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Spans of requests, by OpenTelemetry (docs/howto/tracing.md). Needs `pip install 'preble[otel]'`."""

    endpoint: str | None = None
    """Where spans go: a collector's OTLP address over HTTP, such as `http://collector:4318/v1/traces`. Why: most
    gateways have no collector."""
    sample: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share of requests that have spans. The sampling flag of a client's `traceparent` takes precedence. Why: without
    sampling every request shows."""
    service: str = "preble"
    """Name of the service in the spans. Why: the program's name."""
