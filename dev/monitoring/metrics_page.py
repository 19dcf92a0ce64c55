"""The page of all metrics, from their table."""

from __future__ import annotations

from preble.serving.telemetry.table import ROOMS, Declared, Kind

_HEAD = """\
# Metrics

<!-- Made by `make reference` from src/preble/serving/telemetry/table.py; a test compares. -->

`GET /metrics` has every metric below, in Prometheus' text form. Where there are keys it needs an admin key
([`auth.metrics_need_key`](configuration.md)); Prometheus sends one with `authorization: {credentials: KEY}`.
[Watch a gateway](../howto/monitoring.md) has a dashboard, alerts and recipes for autoscaling.

- `model` is the name that the client gave, or the replica's first name if it gave none. Requests for other names are
  refused first, so there are at most as many values as your replicas have names of models and adapters.
  `preble_responses_total` has "" for pages and for requests that were refused before their model was known.
  `preble_work_waiting_seconds` has the base model instead, since its replicas serve the adapters too.
- `replica` is the replica's address, with `#RANK` for one data-parallel rank. A removed replica's series end.
- Times to the first token and to the end count from the moment when the whole request had arrived. So they contain
  tokenizing, waiting for a turn, the decision, and the replica's own time, each of which has its own metric.
- `tenant` is a label only where you ask for it: `metrics.tenants = 20` gives the first twenty tenants one each and
  calls all others `other`.
- Where a gateway is several processes, `/metrics` shows their sums, whichever of them is asked.
- The metrics of Python's client are there too: `process_*` (CPU, memory, open files) and `python_gc_*`.

A scrape reads the numbers while the gateway serves; a gateway with 400 replicas has some ten thousand lines, so scrape
it every 15 s rather than every second.
"""
_ALIASES = """\
## The names of vLLM and of the Gateway API Inference Extension

These mean the same as vLLM's metrics, summed over the replicas. The
[protocol for model servers](https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/main/docs/proposals/003-model-server-protocol)
of the Gateway API Inference Extension asks for the first three by vLLM's names: with them a picker, or a dashboard made
for vLLM, can take a gateway for one large model server. `metrics.vllm_names = true` shows them under both names, with
the model as `model_name`. It is off by default: a Prometheus that also scrapes the replicas would count twice.

| protocol | vLLM | here |
| --- | --- | --- |
"""
_PROTOCOL = {
    "vllm:num_requests_waiting": "TotalQueuedRequests",
    "vllm:num_requests_running": "TotalRunningRequests",
    "vllm:kv_cache_usage_perc": "KVCacheUtilization",
}


def metrics_page() -> str:
    """The page in Markdown. Pure; the same text for the same table."""
    parts = [_HEAD]
    for room, metrics in ROOMS.items():
        rows = "\n".join(map(_row, metrics))
        parts.append(f"## {room}\n\n| metric | kind | labels | meaning |\n| --- | --- | --- | --- |\n{rows}\n")
    same = {one.same_as: one for metrics in ROOMS.values() for one in metrics if one.same_as}
    names = [*_PROTOCOL, *(name for name in same if name not in _PROTOCOL)]
    rows = "\n".join(f"| {_PROTOCOL.get(name, '')} | `{name}` | `{same[name].name}` |" for name in names)
    return "\n".join([*parts, f"{_ALIASES}{rows}\n"])


def _row(one: Declared) -> str:
    labels = ", ".join(f"`{label}`" for label in one.labels)
    kind = f"{one.kind}, {one.bounds[0]:g} to {one.bounds[-1]:g} s" if one.kind is Kind.HISTOGRAM else one.kind
    return f"| `{one.name}` | {kind} | {labels} | {one.text} |"
