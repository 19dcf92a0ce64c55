"""OpenTelemetry spans of requests: the request, tokenizing, its turn, the placement, the replica, the first token.

Nothing of it runs, and the library is not imported, unless `tracing.endpoint` is set. Spans go to the collector in a
thread of the official SDK, which drops them when the collector is too slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from preble import __version__
from preble.config import TracingConfig
from preble.core.types import Candidate, Placement
from preble.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_CANDIDATES = 16
"""How many candidates a span has, the cheapest ones and the chosen one: a fleet may have hundreds."""


def make_tracing(config: TracingConfig) -> Tracing | None:
    """Return what makes the spans, None where none are wanted. Raises: ConfigError: a library is missing."""
    if config.endpoint is None:
        return None
    try:
        return Tracing(config)
    except ImportError as error:
        text = "tracing.endpoint needs OpenTelemetry's SDK: pip install 'preble[otel]'"
        raise ConfigError(f"{text} ({error})") from error


class Tracing:
    """Makes the spans of each request and sends them to `tracing.endpoint`."""

    def __init__(self, config: TracingConfig) -> None:
        """Raises: ImportError: the SDK is not installed."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        sampler = ParentBased(TraceIdRatioBased(config.sample))
        resource = Resource.create({"service.name": config.service, "service.version": __version__})
        self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=config.endpoint)))
        self._tracer = self._provider.get_tracer("preble", __version__)
        self.propagator = TraceContextTextMapPropagator()

    def begin(
        self, path: str, model: str | None, headers: Mapping[bytes, bytes], request_id: str, session: str | None
    ) -> Trace:
        """Begin the trace of a request that has arrived. `headers`: the client's, whose `traceparent` is the parent.
        `session`: None for none.
        """
        carrier = {name: headers[name.encode()].decode("latin-1") for name in _CONTEXT if name.encode() in headers}
        trace = Trace(self, self._start, path, model, self.propagator.extract(carrier), request_id)
        if session is not None:
            trace.of_session(session)
        return trace

    def _start(self, name: str, context: Any, started_ns: int, **more: Any) -> Span:
        return self._tracer.start_span(name, context, start_time=started_ns, **more)

    def close(self) -> None:
        """Send what is left. Blocks for seconds where the collector does not answer."""
        self._provider.shutdown()


_CONTEXT = ("traceparent", "tracestate")


class Trace:
    """The spans of one request. Call each method when what it names is over, unless it says otherwise."""

    def __init__(
        self, tracing: Tracing, start: Any, path: str, model: str | None, context: Any, request_id: str
    ) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        self._propagator = tracing.propagator
        self._start = start
        self._in = set_span_in_context
        self._kind = SpanKind
        self._request: Span = start(f"POST {path}", context, time.time_ns(), kind=SpanKind.SERVER)
        self._request.set_attribute("url.path", path)
        self._request.set_attribute("preble.request_id", request_id)
        if model is not None:
            self._request.set_attribute("gen_ai.request.model", model)
        self._context = set_span_in_context(self._request)

    def of_session(self, session: str) -> None:
        """The client has named the session that the request is of."""
        self._request.set_attribute("gen_ai.conversation.id", session)

    @property
    def is_recording(self) -> bool:
        """Whether anybody will see it; a request that is not sampled only passes its context on."""
        return self._request.is_recording()

    def _child(self, name: str, started_ns: int, ended_ns: int, attributes: Mapping[str, Any] | None = None) -> None:
        self._start(name, self._context, started_ns, attributes=attributes).end(ended_ns)

    def tokenized(self, took_s: float, num_tokens: int) -> None:
        """A prompt has its token ids."""
        now = time.time_ns()
        self._child("tokenize", now - int(took_s * 1e9), now, {"preble.prompt_tokens": num_tokens})

    def placed(self, placement: Placement, waited_s: float, took_s: float) -> None:
        """The request has its replica. `waited_s`: for its turn. `took_s`: for the decision, and to hear of it."""
        now = time.time_ns()
        decided_at = now - int(took_s * 1e9)
        self._child("queue", decided_at - int(waited_s * 1e9), decided_at)
        self._child("place", decided_at, now, _of_placement(placement))

    def sent(self, placement: Placement) -> ReplicaSpan:
        """Begin the span of a request that is about to go to a replica."""
        attributes = {"preble.replica": placement.replica_id}
        now = time.time_ns()
        span = self._start("replica", self._context, now, kind=self._kind.CLIENT, attributes=attributes)
        context = self._in(span)
        headers: dict[str, str] = {}
        self._propagator.inject(headers, context)
        return ReplicaSpan(span, headers, partial(self._start, "first token", context, now))

    def end(self, status: int | None, error: BaseException | None) -> None:
        """The client has its answer, or has gone. `status`: None if it got none."""
        if status is not None:
            self._request.set_attribute("http.response.status_code", status)
        _fail(self._request, error)
        self._request.end()


class ReplicaSpan:
    """The span of one replica's work. `headers`: for the replica, so that its own spans are below this one.

    `until_first`: begins the span that lasts until the first piece of a streamed answer; end it then.
    """

    def __init__(self, span: Span, headers: Mapping[str, str], until_first: Callable[[], Span]) -> None:
        self.headers = headers
        self.until_first = until_first
        self._span = span

    def answered(self, status: int, output_tokens: int, error: BaseException | None) -> None:
        """The replica's answer is over. `status`: 0 if it did not begin."""
        if status:
            self._span.set_attribute("http.response.status_code", status)
        self._span.set_attribute("gen_ai.usage.output_tokens", output_tokens)
        _fail(self._span, error)
        self._span.end()


def _fail(span: Span, error: BaseException | None) -> None:
    from opentelemetry.trace import StatusCode

    if error is not None:
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(StatusCode.ERROR, str(error))


def _of_placement(placement: Placement) -> dict[str, Any]:
    """Return where it goes, why, and what each candidate would cost. Lists are by candidate, the cheapest first."""

    def cost(one: Candidate) -> float:
        return one.cost_s if one.score is None else one.score

    weighed = sorted(placement.candidates, key=lambda one: (one.replica_id != placement.replica_id, cost(one)))
    found: dict[str, Any] = {
        "preble.replica": placement.replica_id,
        "preble.reason": placement.reason.value,
        "preble.prompt_tokens": placement.num_prompt_tokens,
        "preble.matched_tokens": placement.matched_tokens,
        "preble.num_candidates": len(weighed),
    }
    for name in ("predicted_ttft_s", "predicted_ttft_p98_s", "predicted_tpot_s", "predicted_tpot_p98_s"):
        if (predicted_s := getattr(placement, name)) is not None:
            found[f"preble.{name}"] = predicted_s
    for name in ("replica_id", "matched_tokens", "load_s", "eviction_s", "prefill_s"):
        found[f"preble.candidates.{name}"] = [getattr(one, name) for one in weighed[:_CANDIDATES]]
    if weighed and weighed[0].score is not None:
        found["preble.candidates.score"] = [one.score for one in weighed[:_CANDIDATES]]
    return found
