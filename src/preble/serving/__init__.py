"""From requests to placements: replicas, parity, and each placement's life. Speaks no HTTP towards clients.

Carriers of bytes, such as the gateway, use the names exported here and nothing else of this room.
"""

from preble.serving.group import NewBus
from preble.serving.held import HeldPlacements, HeldRequest
from preble.serving.intake import Intake
from preble.serving.link.front_end import FrontEnd
from preble.serving.link.link import SchedulerAway
from preble.serving.link.protocol import PageAnswer, PageRequest
from preble.serving.parity.report import ParityOutcome, ParityReport
from preble.serving.picture import Picture
from preble.serving.placed import NOT_NOW, Carrier, Placed, ended, share_usage
from preble.serving.replicas.live import LiveReplica
from preble.serving.replicas.rows import MemberRow, SourceRow
from preble.serving.replicas.wanted import UnknownReplica
from preble.serving.requests import SESSION, Admission, ParsedRequest
from preble.serving.serving import Serving
from preble.serving.telemetry.metrics import METRICS_CONTENT_TYPE
from preble.serving.telemetry.tracing import ReplicaSpan, Trace

__all__ = [
    "METRICS_CONTENT_TYPE",
    "NOT_NOW",
    "SESSION",
    "Admission",
    "Carrier",
    "FrontEnd",
    "HeldPlacements",
    "HeldRequest",
    "Intake",
    "LiveReplica",
    "MemberRow",
    "NewBus",
    "PageAnswer",
    "PageRequest",
    "ParityOutcome",
    "ParityReport",
    "ParsedRequest",
    "Picture",
    "Placed",
    "ReplicaSpan",
    "SchedulerAway",
    "Serving",
    "SourceRow",
    "Trace",
    "UnknownReplica",
    "ended",
    "share_usage",
]
