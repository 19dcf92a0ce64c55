"""The messages of Envoy's external processing: reads a gateway's, encodes ours. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct, Value

from preble.serving import ErrorForm, ErrorStyle

Message = Any
"""A message of protobuf, whose classes have no types."""
Headers = Mapping[bytes, bytes]

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
_LB = "envoy.lb"
_SUBSET_HINT = "envoy.lb.subset_hint"
_PIECE_BYTES = 62_000
"""The most bytes of a body in one message: gateways take messages of 64 KiB."""
_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

decode = external_processor_pb2.ProcessingRequest.FromString


def is_full_duplex(request: Message) -> bool:
    """Return whether the gateway streams both bodies through us. We assume so of one that does not say."""
    modes = request.protocol_config
    full = ProcessingMode.FULL_DUPLEX_STREAMED
    return not request.HasField("protocol_config") or modes.request_body_mode == modes.response_body_mode == full


def headers_of(headers: Message) -> dict[bytes, bytes]:
    """Return the headers by name. New Envoys send bytes, others text."""
    return {h.key.encode(): h.raw_value or h.value.encode() for h in headers.headers.headers}


def subset_of(request: Message) -> frozenset[str] | None:
    """Return the endpoints that the gateway allows, None if it allows all."""
    value = _metadata(request, _SUBSET_HINT, SUBSET)
    if value is None:
        return None
    texts = [v.string_value for v in value.list_value.values] if value.HasField("list_value") else [value.string_value]
    return frozenset(part.strip() for text in texts for part in text.split(",") if part.strip())


def served_of(request: Message) -> str:
    """Return the endpoint that the gateway says has answered, "" if it does not say."""
    value = _metadata(request, _LB, SERVED)
    return value.string_value if value is not None else ""


def _metadata(request: Message, namespace: str, key: str) -> Message | None:
    found = request.metadata_context.filter_metadata
    return found[namespace].fields[key] if namespace in found and key in found[namespace].fields else None


def to_endpoint(destination: str, changed: Headers, removed: Iterable[str] = ()) -> bytes:
    """Send the request to the first endpoint of `destination` that can be reached, with these headers changed."""
    mutation = _mutation({DESTINATION.encode(): destination.encode(), **changed}, removed)
    common = external_processor_pb2.CommonResponse(header_mutation=mutation, clear_route_cache=True)
    chosen = Struct(fields={DESTINATION: Value(string_value=destination)})
    return _encoded(
        request_headers=external_processor_pb2.HeadersResponse(response=common),
        dynamic_metadata=Struct(fields={_LB: Value(struct_value=chosen)}),
    )


def answer_headers(changed: Headers) -> bytes:
    """Pass the head of an answer on, with these headers changed."""
    common = external_processor_pb2.CommonResponse(header_mutation=_mutation(changed))
    return _encoded(response_headers=external_processor_pb2.HeadersResponse(response=common))


def request_body(body: bytes, *, ends: bool) -> Iterator[bytes]:
    """Give a request's body back. `ends`: no trailers follow."""
    for start in range(0, max(1, len(body)), _PIECE_BYTES):
        piece = body[start : start + _PIECE_BYTES]
        yield _encoded(request_body=_body(piece, ends and start + _PIECE_BYTES >= len(body)))


def answer_body(piece: bytes, *, ends: bool) -> bytes:
    """Pass a piece of an answer on."""
    return _encoded(response_body=_body(piece, ends))


def _body(piece: bytes, ends: bool) -> Message:
    streamed = external_processor_pb2.StreamedBodyResponse(body=piece, end_of_stream=ends)
    mutation = external_processor_pb2.BodyMutation(streamed_response=streamed)
    return external_processor_pb2.BodyResponse(response=external_processor_pb2.CommonResponse(body_mutation=mutation))


def trailers(kind: str) -> bytes:
    """Pass trailers on. `kind`: `request_trailers` or `response_trailers`."""
    return _encoded(**{kind: external_processor_pb2.TrailersResponse()})


def refusal(form: ErrorForm, style: ErrorStyle) -> bytes:
    """Have the gateway answer with an error itself."""
    headers = {name: value for name, value in form.headers() if name != b"connection"}
    immediate = external_processor_pb2.ImmediateResponse(
        status=HttpStatus(code=form.status), headers=_mutation(headers), body=form.body(style), details=form.code
    )
    return _encoded(immediate_response=immediate)


def _mutation(changed: Headers, removed: Iterable[str] = ()) -> Message:
    options = [
        HeaderValueOption(header=HeaderValue(key=name.decode(), raw_value=value), append_action=_OVERWRITE)
        for name, value in changed.items()
    ]
    return external_processor_pb2.HeaderMutation(set_headers=options, remove_headers=removed)


def _encoded(**fields: Message) -> bytes:
    encoded: bytes = external_processor_pb2.ProcessingResponse(**fields).SerializeToString()
    return encoded
