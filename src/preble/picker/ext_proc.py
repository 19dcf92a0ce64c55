"""The messages of Envoy's external processing: reads a gateway's, encodes ours. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct, Value

from preble.picker.envoy import FULL_DUPLEX, OVERWRITE, Message, pb
from preble.prompts.endpoints import ErrorForm, ErrorStyle

Headers = Mapping[bytes, bytes]

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
_LB = "envoy.lb"
_SUBSET_HINT = "envoy.lb.subset_hint"
_PIECE_BYTES = 62_000
"""The most bytes of a body in one message: gateways take messages of 64 KiB."""

decode = pb.ProcessingRequest.FromString


def is_full_duplex(request: Message) -> bool:
    """Return whether the gateway streams both bodies through us. We assume so of one that does not say."""
    modes = request.protocol_config
    both = modes.request_body_mode == modes.response_body_mode == FULL_DUPLEX
    return both or not request.HasField("protocol_config")


def headers_of(headers: Message) -> dict[bytes, bytes]:
    """Return the headers by name. New Envoys send bytes, others text."""
    return {h.key.encode(): h.raw_value or h.value.encode() for h in headers.headers.headers}


def status_of(headers: Headers) -> int:
    """Return an answer's status, 200 if none is given.

    Raises: DecodeError: it is no number of three digits, as it is in HTTP. So it has few values as a metric's label.
    """
    text = headers.get(b":status", b"200")
    if len(text) != 3 or not text.isdigit():
        raise DecodeError(f"the status {text[:20]!r} is no number of three digits")
    return int(text)


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
    for entry in request.metadata_context.filter_metadata:
        if entry.key == namespace and key in entry.value.fields:
            return entry.value.fields[key]
    return None


def to_endpoint(destination: str, changed: Headers, removed: Iterable[str] = ()) -> bytes:
    """Send the request to the first endpoint of `destination` that can be reached, with these headers changed."""
    mutation = _mutation({DESTINATION.encode(): destination.encode(), **changed}, removed)
    common = pb.CommonResponse(header_mutation=mutation, clear_route_cache=True)
    chosen = Struct(fields={DESTINATION: Value(string_value=destination)})
    return _encoded(
        request_headers=pb.HeadersResponse(response=common),
        dynamic_metadata=Struct(fields={_LB: Value(struct_value=chosen)}),
    )


def answer_headers(changed: Headers) -> bytes:
    """Pass the head of an answer on, with these headers changed."""
    common = pb.CommonResponse(header_mutation=_mutation(changed))
    return _encoded(response_headers=pb.HeadersResponse(response=common))


def request_body(body: bytes, *, ends: bool) -> Iterator[bytes]:
    """Give a request's body back. `ends`: no trailers follow."""
    for start in range(0, max(1, len(body)), _PIECE_BYTES):
        piece = body[start : start + _PIECE_BYTES]
        yield _encoded(request_body=_body(piece, ends and start + _PIECE_BYTES >= len(body)))


def answer_body(piece: bytes, *, ends: bool) -> bytes:
    """Pass a piece of an answer on."""
    return _encoded(response_body=_body(piece, ends))


def _body(piece: bytes, ends: bool) -> Message:
    streamed = pb.StreamedBodyResponse(body=piece, end_of_stream=ends)
    mutation = pb.BodyMutation(streamed_response=streamed)
    return pb.BodyResponse(response=pb.CommonResponse(body_mutation=mutation))


def trailers(kind: str) -> bytes:
    """Pass trailers on. `kind`: `request_trailers` or `response_trailers`."""
    return _encoded(**{kind: pb.TrailersResponse()})


def refusal(form: ErrorForm, style: ErrorStyle) -> bytes:
    """Have the gateway answer with an error itself."""
    headers = {name: value for name, value in form.headers() if name != b"connection"}
    immediate = pb.ImmediateResponse(
        status=pb.HttpStatus(code=form.status),
        headers=_mutation(headers),
        body=form.body(style),
        details=form.code,
    )
    return _encoded(immediate_response=immediate)


def _mutation(changed: Headers, removed: Iterable[str] = ()) -> Message:
    options = [
        pb.HeaderValueOption(header=pb.HeaderValue(key=name.decode(), raw_value=value), append_action=OVERWRITE)
        for name, value in changed.items()
    ]
    return pb.HeaderMutation(set_headers=options, remove_headers=removed)


def _encoded(**fields: Message) -> bytes:
    encoded: bytes = pb.ProcessingResponse(**fields).SerializeToString()
    return encoded
