"""The picker's messages have the numbers and types of Envoy's own."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

from preble.picker import envoy
from support.servers import require_server

DESCRIBE = """
def describe(message, found):
    if message.name in found:
        return
    form, found[message.name] = DescriptorProto(), {}
    message.CopyToProto(form)
    for field in form.field:
        group = form.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
        found[message.name][field.name] = [field.number, field.type, field.label, field.type_name.split(".")[-1], group]
    for field in message.fields:
        if field.message_type:
            describe(field.message_type, found)
"""
ENVOYS = f"""
import json, sys
from google.protobuf.descriptor_pb2 import DescriptorProto
from envoy.service.ext_proc.v3 import external_processor_pb2 as whole
from envoy.config.core.v3.base_pb2 import HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
{DESCRIBE}
found = {{}}
describe(whole.ProcessingRequest.DESCRIPTOR, found)
describe(whole.ProcessingResponse.DESCRIPTOR, found)
numbers = [HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD, ProcessingMode.FULL_DUPLEX_STREAMED]
json.dump([found, numbers], sys.stdout)
"""
ENUMERATION, NUMBER = FieldDescriptorProto.TYPE_ENUM, FieldDescriptorProto.TYPE_INT32
Described = dict[str, dict[str, list[Any]]]


def described(message: Any) -> Described:
    """What `DESCRIBE` finds in a message and those in it."""
    scope: dict[str, Any] = {"DescriptorProto": DescriptorProto}
    exec(DESCRIBE, scope)
    found: Described = {}
    scope["describe"](message.DESCRIPTOR, found)
    return found


@pytest.fixture(scope="module")
def envoys() -> Any:
    python = require_server("envoy", "python")
    return json.loads(subprocess.run([str(python), "-c", ENVOYS], check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize("message", envoy.MESSAGES)
def test_each_field_is_that_of_envoy(message: str, envoys: Any) -> None:
    for field, ours in described(getattr(envoy.pb, message))[message].items():
        number, kind, label, inner, group = envoys[0][message][field]
        theirs = [number, kind, label, inner, group if message in envoy.ONE_OF else None]
        if kind == ENUMERATION:
            theirs[1], theirs[3] = NUMBER, ""
        assert ours == theirs, field


def test_each_choice_is_that_of_envoy(envoys: Any) -> None:
    assert envoys[1] == [envoy.OVERWRITE, envoy.FULL_DUPLEX]
