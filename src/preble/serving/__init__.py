"""From requests to placements: replicas, token ids, and each placement's life. Speaks no HTTP towards clients.

Carriers of bytes, such as the gateway, use the names exported here and nothing else of this room.
"""

from preble.serving.callers import ANYBODY, Caller
from preble.serving.endpoints import (
    CHAT,
    COMPLETIONS,
    ENDPOINTS,
    JSON_TYPE,
    MOST_TOKENS,
    OTHER,
    Endpoint,
    ErrorForm,
    ErrorStyle,
    Fields,
    HeaderList,
    Prompt,
    PromptTokensDetails,
    StreamMeter,
    UploadHead,
    Usage,
    endpoint_of,
    error_form,
    in_style,
)
from preble.serving.intake import Admission, Intake
from preble.serving.link.front_end import FrontEnd
from preble.serving.link.link import SchedulerAway
from preble.serving.link.protocol import PageAnswer, PageRequest
from preble.serving.parity.report import Outcome, ParityReport
from preble.serving.peers import NewBus
from preble.serving.picture import Picture
from preble.serving.placed import NOT_NOW, Placed, share_usage
from preble.serving.replicas.live import LiveReplica
from preble.serving.replicas.rows import MemberRow, SourceRow
from preble.serving.replicas.wanted import UnknownReplica
from preble.serving.requests import ParsedRequest
from preble.serving.serving import Serving
from preble.serving.telemetry.metrics import METRICS_CONTENT_TYPE
from preble.serving.telemetry.tracing import ReplicaSpan, Trace

__all__ = [
    "ANYBODY",
    "CHAT",
    "COMPLETIONS",
    "ENDPOINTS",
    "JSON_TYPE",
    "METRICS_CONTENT_TYPE",
    "MOST_TOKENS",
    "NOT_NOW",
    "OTHER",
    "Admission",
    "Caller",
    "Endpoint",
    "ErrorForm",
    "ErrorStyle",
    "Fields",
    "FrontEnd",
    "HeaderList",
    "Intake",
    "LiveReplica",
    "MemberRow",
    "NewBus",
    "Outcome",
    "PageAnswer",
    "PageRequest",
    "ParityReport",
    "ParsedRequest",
    "Picture",
    "Placed",
    "Prompt",
    "PromptTokensDetails",
    "ReplicaSpan",
    "SchedulerAway",
    "Serving",
    "SourceRow",
    "StreamMeter",
    "Trace",
    "UnknownReplica",
    "UploadHead",
    "Usage",
    "endpoint_of",
    "error_form",
    "in_style",
    "share_usage",
]
