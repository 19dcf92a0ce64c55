"""From requests to placements: replicas, parity, and each placement's life. Speaks no HTTP towards clients.

Carriers of bytes, such as the gateway, use the names exported here and nothing else of this room.
"""

from preble.serving.group import NewBus as NewBus
from preble.serving.held import HeldPlacements as HeldPlacements
from preble.serving.held import HeldRequest as HeldRequest
from preble.serving.intake import Intake as Intake
from preble.serving.link.front_end import FrontEnd as FrontEnd
from preble.serving.link.link import SchedulerAway as SchedulerAway
from preble.serving.link.protocol import PageAnswer as PageAnswer
from preble.serving.link.protocol import PageRequest as PageRequest
from preble.serving.parity.report import ParityOutcome as ParityOutcome
from preble.serving.parity.report import ParityReport as ParityReport
from preble.serving.picture import Picture as Picture
from preble.serving.placed import NOT_NOW as NOT_NOW
from preble.serving.placed import Carrier as Carrier
from preble.serving.placed import Placed as Placed
from preble.serving.placed import ended as ended
from preble.serving.placed import share_usage as share_usage
from preble.serving.replicas.live import LiveReplica as LiveReplica
from preble.serving.replicas.rows import MemberRow as MemberRow
from preble.serving.replicas.rows import SourceRow as SourceRow
from preble.serving.replicas.wanted import UnknownReplica as UnknownReplica
from preble.serving.requests import SESSION as SESSION
from preble.serving.requests import Admission as Admission
from preble.serving.requests import ParsedRequest as ParsedRequest
from preble.serving.serving import Serving as Serving
from preble.serving.serving import check_settings as check_settings
from preble.serving.telemetry.metrics import METRICS_CONTENT_TYPE as METRICS_CONTENT_TYPE
from preble.serving.telemetry.tracing import ReplicaSpan as ReplicaSpan
from preble.serving.telemetry.tracing import Trace as Trace
