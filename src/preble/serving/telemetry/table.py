"""Every metric of the gateway, declared once. The page, the dashboard and the alerts are made from this table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from types import MappingProxyType

SHORT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Of the gaps between two tokens: fine where engines' iterations are."""
TINY_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)


class Kind(StrEnum):
    """What a metric's numbers do: a counter only grows, a gauge goes up and down, a histogram counts by size."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric. `labels`: names, in the order in which their values are given. `bounds`: of a histogram's buckets.

    `same_as`: the name under which vLLM, and the Gateway API Inference Extension's protocol for model servers, know a
    metric of the same meaning; "" for none. `adds_up`: the sum over replicas says something.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    same_as: str = ""
    adds_up: bool = True

    @property
    def cell_size(self) -> int:
        """How many numbers a series has: a histogram has its buckets' counts, one more without a bound, and the sum."""
        return len(self.bounds) + 2 if self.kind is Kind.HISTOGRAM else 1


def _counter(name: str, text: str, *labels: str, same_as: str = "") -> Declared:
    return Declared(f"preble_{name}_total", Kind.COUNTER, text, labels, same_as=same_as)


def _gauge(name: str, text: str, *labels: str, same_as: str = "", adds_up: bool = True) -> Declared:
    return Declared(f"preble_{name}", Kind.GAUGE, text, labels, same_as=same_as, adds_up=adds_up)


def _seconds(name: str, text: str, *labels: str, bounds: tuple[float, ...] = SHORT_S, same_as: str = "") -> Declared:
    return Declared(f"preble_{name}_seconds", Kind.HISTOGRAM, text, labels, bounds, same_as)


ROOMS: Mapping[str, tuple[Declared, ...]] = MappingProxyType(
    {
        "Requests": (
            _counter("responses", "Answers to clients; 499: the client went away.", "path", "status", "model"),
            _counter(
                "finished",
                "Placements that ended: ok, aborted, engine_gone and so on.",
                "model",
                "outcome",
            ),
            _seconds(
                "ttft",
                "From a request's arrival, with its whole body, to the first byte of a streamed answer.",
                "model",
                same_as="vllm:time_to_first_token_seconds",
            ),
            _seconds(
                "e2e",
                "From a request's arrival, with its whole body, to the end of a good answer.",
                "model",
                same_as="vllm:e2e_request_latency_seconds",
            ),
            _seconds(
                "itl",
                "Gaps between the pieces of streamed answers, each mostly one token, as replicas send them.",
                "model",
                bounds=GAP_S,
                same_as="vllm:inter_token_latency_seconds",
            ),
            _seconds(
                "tokenizing",
                "Part of TTFT and E2E: making one prompt's token ids, with waiting.",
                "model",
                bounds=TINY_S,
            ),
            _seconds(
                "queueing",
                "Part of TTFT and E2E: until a tenant's prompt had its turn.",
                "model",
                bounds=TINY_S + SHORT_S[8:],
            ),
            _seconds("placing", "Part of TTFT and E2E: one placement decision.", bounds=TINY_S),
            _seconds("replica_ttft", "Part of TTFT: from placing to the first byte.", "replica", "model"),
            _seconds(
                "ttft_error", "Between the measured time from placing to the first byte and the predicted one.", "model"
            ),
            _counter(
                "ttft_p98",
                "First tokens within the time that 98 of 100 were predicted to keep, and over it.",
                "model",
                "outcome",
            ),
            _seconds(
                "tpot_error",
                "Between the measured and the predicted time for each further token, of streamed answers of 16 tokens "
                "or more.",
                "model",
                bounds=GAP_S,
            ),
            _counter(
                "tpot_p98",
                "Such answers at the pace that 98 of 100 were predicted to keep, and over it.",
                "model",
                "outcome",
            ),
            _counter(
                "targets",
                "Targets of streamed answers that were kept or broken, and of requests that were refused for them; "
                "`ttft` or `tpot`.",
                "tenant",
                "model",
                "target",
                "outcome",
            ),
            _gauge("prompts_admitted", "Prompts between admission and the end of their answer."),
            _gauge(
                "prompts_queued",
                "Prompts of tenants that wait for their turn to be placed.",
                "model",
                same_as="vllm:num_requests_waiting",
            ),
            _gauge("body_bytes", "Bytes of requests that arrive or are being served."),
        ),
        "Placements": (
            _counter("placements", "Requests placed, by reason.", "replica", "model", "reason"),
            _gauge(
                "in_flight",
                "Requests placed and not finished.",
                "replica",
                "model",
                same_as="vllm:num_requests_running",
            ),
            _counter("prompt_tokens", "Prompt tokens placed.", "replica", "model", same_as="vllm:prompt_tokens_total"),
            _counter("matched_tokens", "Prompt tokens believed to be cached when placed.", "replica", "model"),
            _counter(
                "cached_tokens",
                "Prompt tokens that the replica reported as cached.",
                "replica",
                "model",
                same_as="vllm:prompt_tokens_cached_total",
            ),
            _counter("output_tokens", "Tokens generated.", "replica", "model", same_as="vllm:generation_tokens_total"),
            _counter("copies", "Copies of a prefix to a replica, by outcome.", "replica", "model", "outcome"),
            _counter("copied_tokens", "Prompt tokens copied from other replicas.", "replica", "model"),
            _counter(
                "splits",
                "Requests whose prompt another replica was to compute, also in pairs of fixed roles: ok or failed.",
                "replica",
                "model",
                "outcome",
            ),
            _counter("split_tokens", "Prompt tokens that came from the other replica in these.", "replica", "model"),
            _counter("moves", "Requests that left a replica for another one.", "replica", "model"),
            _counter("retries_denied", "Requests not moved because the retry budget was spent."),
            _counter("engine_errors", "Failures of replicas, by kind.", "replica", "model", "kind"),
            _counter("prefix_replications", "Prefixes that got a further replica or lost one.", "replica", "change"),
        ),
        "Load and capacity": (
            _gauge(
                "work_waiting_seconds",
                "GPU seconds of work that waits in the whole cluster, at replicas and for its turn, by base model:"
                " scale by it.",
                "model",
            ),
            _gauge("waiting_prefill_seconds", "GPU seconds to compute prompts of requests without a token.", "replica"),
            _gauge("waiting_prefill_tokens", "Prompt tokens to compute, of requests without a token.", "replica"),
            _gauge("load_seconds", "L: seconds of work placed on a replica in the window.", "replica"),
            _gauge("load_window_seconds", "Length of the window of preble_load_seconds."),
            _gauge("engine_running", "Requests that the engine says it runs, with other clients' requests.", "replica"),
            _gauge(
                "engine_waiting", "Requests that the engine says are waiting, with other clients' requests.", "replica"
            ),
            _gauge("cost_factor", "Factor by which live requests correct the cost profile's times.", "work"),
        ),
        "Caches": (
            _gauge("believed_cached_tokens", "KV tokens believed to be held.", "replica"),
            _gauge("in_use_tokens", "KV tokens of requests in flight, each token once.", "replica"),
            _gauge("kv_capacity_tokens", "Size of the replica's KV cache, where it is known.", "replica"),
            _gauge(
                "kv_in_use_ratio",
                "Part of the KV cache that requests in flight use, where its size is known.",
                "replica",
                same_as="vllm:kv_cache_usage_perc",
                adds_up=False,
            ),
            _gauge("engine_kv_tokens", "Tokens of KV cache that the engine reports as in use.", "replica"),
            _counter("kv_events", "Changes of prefix caches that replicas reported.", "replica", "kind"),
            _counter("kv_blocks_unlocated", "Stored-block events whose parent block is unknown.", "replica"),
            _gauge(
                "kv_events_arrive",
                "1 while a replica's KV events arrive, 0 while its cache is estimated instead.",
                "replica",
            ),
            _counter("kv_resyncs", "Requests to a KV event stream to start over.", "replica"),
            _counter(
                "drift_predicted_tokens",
                "Prompt tokens believed cached, of requests whose replica reported them.",
                "replica",
            ),
            _counter(
                "drift_reported_tokens",
                "Prompt tokens that replicas reported as cached for the same requests.",
                "replica",
            ),
            _gauge("replicated_prefixes", "Prefixes that rebalancing serves from replicas of its choice."),
            _gauge("index_bytes", "Memory of the prefix index."),
            _gauge("index_tokens", "Tokens in the prefix index."),
            _counter("unindexed", "Prompts and blocks that found no room in the index."),
        ),
        "Replicas": (
            _gauge("replica_up", "1 while a replica is in the rotation.", "replica"),
            _gauge(
                "replica_state",
                "1 for the state of each watched replica: joining, live, down, draining or drained.",
                "replica",
                "state",
            ),
            _gauge("replica_ejected", "1 while the gateway keeps requests away from a replica.", "replica"),
            _gauge("replica_trusted", "1 while a replica's believed cache counts in placements.", "replica"),
            _gauge(
                "replica_parity",
                "Last check of a replica's token ids and cache: 1 as predicted, 0 not, -1 unchecked.",
                "replica",
                "check",
                adds_up=False,
            ),
            _gauge("replica_safe_to_remove", "1 for a replica that is drained and runs nothing.", "replica"),
            _gauge("source_replicas", "Replicas that a source names.", "source"),
            _gauge("source_current", "1 while a source's list of replicas is current.", "source"),
        ),
        "Peers": (
            _gauge("peers", "Other gateways of the group that this one hears."),
            _gauge("peers_connected", "1 while NATS connects the gateways; 0: each places on its own."),
            _gauge("peers_warm", "1 once this gateway knows what replicas cache and peers have in flight."),
            _gauge("assumed_in_flight", "Requests in flight that other gateways have placed."),
            _counter("peer_messages", "Messages between the gateways.", "direction"),
            _counter("peer_bytes", "Bytes sent to the other gateways."),
            _counter(
                "peer_bad_packets",
                "Packets that were not taken: malformed (also of another version), unsigned (no key of this group), or "
                "replayed.",
                "reason",
            ),
            _counter("peer_unknown_prompts", "Placements of peers whose prompt was unknown here: they count as load."),
        ),
        "Endpoint picker": (
            _gauge("picker_leading", "1 while this picker holds the lease that several share, so that it is asked."),
            _counter(
                "picker_refusals",
                "What the picker has refused to gateways, by reason: broken protocol, flood, too much memory, silent "
                "connection, too many connections, message that cannot be decoded.",
                "reason",
            ),
        ),
        "Selection service": (
            _gauge("reservations", "Reservations that have not ended."),
            _counter("reservations_expired", "Reservations whose caller reported nothing for a whole lease."),
        ),
        "Keys and tenants": (
            _counter("key_requests", "Placements that ended, by key.", "key"),
            _counter(
                "key_tokens",
                "Tokens of a key, by kind: cached ones are also prompt. A moved request counts once.",
                "key",
                "kind",
            ),
            _seconds(
                "tenant_ttft",
                "As preble_ttft_seconds, for each tenant, if `metrics.tenants` is set.",
                "tenant",
                "model",
            ),
            _counter(
                "tenant_finished",
                "As preble_finished_total, for each tenant, if `metrics.tenants` is set.",
                "tenant",
                "model",
                "outcome",
            ),
            _counter(
                "tenant_tokens",
                "Tokens of a tenant, by kind as of a key, if `metrics.tenants` is set.",
                "tenant",
                "model",
                "kind",
            ),
        ),
        "The gateway itself": (
            _gauge(
                "build_info",
                "Always 1; its labels say what runs here. core: compiled or plain.",
                "version",
                "commit",
                "policy",
                "python",
                "core",
            ),
            _counter("process_cpu_seconds", "CPU time of each process of the gateway.", "process"),
            _gauge("process_resident_bytes", "Memory of each process of the gateway, on Linux.", "process"),
            _gauge("log_lines_lost", "Log lines that stderr did not take: its disk is full or nobody reads it."),
            _counter("decision_log_lines", "Lines in the decision log."),
            _counter("decision_log_dropped", "Lines missing from the decision log."),
        ),
    }
)
"""The metrics by what they are about."""
TABLE = tuple(chain.from_iterable(ROOMS.values()))
BY_NAME = MappingProxyType({declared.name: declared for declared in TABLE})
