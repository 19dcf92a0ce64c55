"""Envoy's messages of external processing, with the fields that the picker reads and writes.

On the wire a field is a number, and readers skip those that they do not know, so a part of each message is enough. The
packages that have them whole replace modules of other packages by old copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.struct_pb2 import Struct

Message = Any
"""A message of protobuf, whose classes have no types."""

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
OVERWRITE = 2
"""`HeaderValueOption.append_action`: OVERWRITE_IF_EXISTS_OR_ADD."""
FULL_DUPLEX = 4
"""`ProtocolConfiguration.*_body_mode`: FULL_DUPLEX_STREAMED."""

MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = MappingProxyType(
    {
        "ProcessingRequest": {
            "request_headers": (2, "HttpHeaders"),
            "response_headers": (3, "HttpHeaders"),
            "request_body": (4, "HttpBody"),
            "response_body": (5, "HttpBody"),
            "request_trailers": (6, "HttpTrailers"),
            "response_trailers": (7, "HttpTrailers"),
            "metadata_context": (8, "Metadata"),
            "protocol_config": (11, "ProtocolConfiguration"),
        },
        "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
        "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
        "HttpTrailers": {"trailers": (1, "HeaderMap")},
        "HeaderMap": {"headers": (1, "HeaderValue*")},
        "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
        "Metadata": {"filter_metadata": (1, "FilterMetadataEntry*")},
        "FilterMetadataEntry": {"key": (1, "string"), "value": (2, "Struct")},
        "ProtocolConfiguration": {"request_body_mode": (1, "int32"), "response_body_mode": (2, "int32")},
        "ProcessingResponse": {
            "request_headers": (1, "HeadersResponse"),
            "response_headers": (2, "HeadersResponse"),
            "request_body": (3, "BodyResponse"),
            "response_body": (4, "BodyResponse"),
            "request_trailers": (5, "TrailersResponse"),
            "response_trailers": (6, "TrailersResponse"),
            "immediate_response": (7, "ImmediateResponse"),
            "dynamic_metadata": (8, "Struct"),
        },
        "HeadersResponse": {"response": (1, "CommonResponse")},
        "BodyResponse": {"response": (1, "CommonResponse")},
        "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
        "CommonResponse": {
            "header_mutation": (2, "HeaderMutation"),
            "body_mutation": (3, "BodyMutation"),
            "clear_route_cache": (5, "bool"),
        },
        "HeaderMutation": {"set_headers": (1, "HeaderValueOption*"), "remove_headers": (2, "string*")},
        "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
        "BodyMutation": {"streamed_response": (3, "StreamedBodyResponse")},
        "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
        "ImmediateResponse": {
            "status": (1, "HttpStatus"),
            "headers": (2, "HeaderMutation"),
            "body": (3, "bytes"),
            "details": (5, "string"),
        },
        "HttpStatus": {"code": (1, "int32")},
    }
)
"""The number and type of each field; `*`: a list. Enumerations are numbers, and entries of a map a list of pairs."""
ONE_OF = MappingProxyType({"ProcessingRequest": "request", "ProcessingResponse": "response"})
"""The messages that have one of the fields up to number 7, and what that choice is called."""


def _described() -> FileDescriptorProto:
    file = FileDescriptorProto(name="preble/picker/envoy.proto", package="preble.picker", syntax="proto3")
    file.dependency.append(Struct.DESCRIPTOR.file.name)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        if name in ONE_OF:
            message.oneof_decl.add(name=ONE_OF[name])
        for field, (number, kind) in fields.items():
            _describe(message.field.add(name=field, number=number), kind.rstrip("*"), is_list=kind.endswith("*"))
            if name in ONE_OF and number <= 7:
                message.field[-1].oneof_index = 0
    return file


def _describe(field: Message, kind: str, *, is_list: bool) -> None:
    field.label = FieldDescriptorProto.LABEL_REPEATED if is_list else FieldDescriptorProto.LABEL_OPTIONAL
    if kind[0].islower():
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    else:
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = ".google.protobuf.Struct" if kind == "Struct" else f".preble.picker.{kind}"


def _classes(file: FileDescriptorProto) -> Any:
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    found = {name: pool.FindMessageTypeByName(f"{file.package}.{name}") for name in MESSAGES}
    return SimpleNamespace(**{name: message_factory.GetMessageClass(kind) for name, kind in found.items()})


pb = _classes(_described())
"""The class of each message."""
