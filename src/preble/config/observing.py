"""What the gateway shows of itself: metrics, its log, and traces."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from preble.config.knobs import about


class MetricsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What `/metrics` shows beyond what it always does (docs/reference/metrics.md)."""

    tenants: Annotated[
        int,
        about(
            "How many tenants get a label of their own in the metrics `preble_tenant_*`; the others are `other`.",
            unit="tenants",
            why="each tenant adds some forty series",
            ge=0,
            le=1000,
        ),
    ] = 0
    per_replica: Annotated[
        bool,
        about(
            "Show each replica's own series. Without, what has a label `replica` is the sum over all replicas.",
            why="each replica adds some eighteen series: 400 make a scrape of half a megabyte",
        ),
    ] = True
    vllm_names: Annotated[
        bool,
        about(
            "Show metrics that vLLM has too under its names as well, for dashboards and pickers that ask for those.",
            why="a Prometheus that scrapes the replicas too would count twice",
        ),
    ] = False


class RequestLogConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The log's lines about requests: one when each has ended. `--log-level debug` adds one for each placement."""

    requests_per_s: Annotated[
        int,
        about(
            "The most lines a second about requests that went well; the next line says how many were `left_out`.",
            unit="lines/s",
            why="enough to read; each line costs as much CPU as placing the request",
            ge=0,
        ),
    ] = 50


class TracingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Spans of requests, by OpenTelemetry (docs/howto/tracing.md). Needs `pip install 'preble[otel]'`."""

    endpoint: Annotated[
        str | None,
        about(
            "Where spans go: a collector's OTLP address over HTTP, such as `http://collector:4318/v1/traces`.",
            why="most gateways have no collector",
        ),
    ] = None
    sample: Annotated[
        float,
        about(
            "Share of requests that have spans. The sampling flag of a client's `traceparent` takes precedence.",
            why="without sampling every request shows",
            ge=0,
            le=1,
        ),
    ] = 1.0
    service: Annotated[str, about("Name of the service in the spans.", why="the program's name")] = "preble"
