"""What callers of the selection service send and get, as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from preble.core.types import Candidate
from preble.prompts.endpoints import MOST_TOKENS

WorkerId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
Count = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
Seconds = Annotated[float, Meta(gt=0, le=3600)]
Ignored = Any
"""Fields of Dynamo's service that say what Preble knows by itself, or steer Dynamo's own rules: read and not used."""
DEFAULT = "default"
"""The name that stands for "any model" and for the only routing group."""


class Worker(Struct, frozen=True):
    """One data-parallel rank of a worker."""

    worker_id: WorkerId
    dp_rank: Count = 0


class Scope(Struct, kw_only=True, forbid_unknown_fields=True):
    """For which model. `routing_group`: there is one, `default`; for another group run another service."""

    model_name: str = DEFAULT
    routing_group: Literal["default"] = "default"


class PromptRequest(Scope, kw_only=True):
    """A prompt: either `token_ids`, or the client's request as `path`, `headers` and `body`.

    `body`: a JSON object, or a string with the exact bytes. `headers`: the client's; its key, if it gives one, says
    whose turn it is and whose cache it shares.
    """

    token_ids: list[TokenId] | None = None
    path: str | None = None
    headers: dict[str, str] = {}
    body: Raw | UnsetType = UNSET
    lora_name: str | None = None
    cache_salt: str | None = None
    expected_output_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    block_hashes: Ignored = None
    sequence_hashes: Ignored = None
    isl_tokens: Ignored = None
    is_eagle: Ignored = None
    router_config_override: Ignored = None
    mm_routing_info: None = None
    block_mm_infos: None = None


class SelectRequest(PromptRequest, kw_only=True):
    """Choose a worker. `selection_id`: 1 to 128 letters, digits and `. _ : -`. `lease_s`: of the reservation.

    `allowed_worker_ids`, `pinned_worker`: no other worker may get the request. `explain`: answer with every candidate.
    """

    selection_id: str | None = None
    lease_s: Seconds | None = None
    allowed_worker_ids: Annotated[list[WorkerId], Meta(min_length=1)] | None = None
    pinned_worker: Worker | None = None
    explain: bool = False
    priority_jump: Ignored = None
    strict_priority: Ignored = None
    session_id: Ignored = None
    session_context: Ignored = None
    affinity_target: Ignored = None
    routing_constraints: Ignored = None
    advisory: Ignored = None


class ReservationRequest(PromptRequest, kw_only=True):
    """Reserve what `/select` chose under this id; with `worker_id` and a prompt, a worker of the caller's choice."""

    selection_id: str
    worker_id: WorkerId | None = None
    dp_rank: Count | None = None
    lease_s: Seconds | None = None
    effective_prefill_tokens: Ignored = None
    track_prefill_tokens: Ignored = None


class OutputBlockRequest(Struct, forbid_unknown_fields=True):
    """One more KV block of output."""

    decay_fraction: Ignored = None


class ProgressRequest(Struct, forbid_unknown_fields=True):
    """The answer so far, in all. `cached_tokens`: of the prompt, as the engine reports them."""

    output_tokens: Count
    cached_tokens: Count | None = None


class RenewRequest(Struct, forbid_unknown_fields=True):
    """A sign of life. `lease_s`: the lease from now on."""

    lease_s: Seconds | None = None


class EndRequest(Struct, forbid_unknown_fields=True):
    """The request is over. `output_tokens`: those last reported if not given. `status`: of the engine's answer.

    `error`: why there is none. All but `cancelled` count against the worker.
    """

    output_tokens: Count | None = None
    cached_tokens: Count | None = None
    status: Annotated[int, Meta(ge=100, le=599)] = 200
    retry_after_s: Annotated[float, Meta(ge=0)] = 0.0
    error: Literal["unreachable", "broken", "timeout", "cancelled"] | None = None


class WorkerRequest(Scope, kw_only=True):
    """A worker. Only `worker_id` and `endpoint` are needed: the engine tells the rest."""

    worker_id: WorkerId
    endpoint: str
    kv_events_endpoint: str | None = None
    replay_endpoint: str | None = None
    kv_events_endpoints: Ignored = None
    block_size: Ignored = None
    data_parallel_start_rank: Ignored = None
    data_parallel_size: Ignored = None
    max_num_batched_tokens: Ignored = None
    total_kv_blocks: Ignored = None
    stable_routing_id: Ignored = None
    is_eagle: Ignored = None
    taints: Ignored = None
    topology_domains: Ignored = None


class WorkerRecord(Struct, frozen=True):
    """A worker as it is. `lifecycle`: `incomplete` before its first answer, `unschedulable` while it is down."""

    worker_id: WorkerId
    model_name: str
    routing_group: str
    lifecycle: Literal["incomplete", "schedulable", "draining", "unschedulable"]
    endpoint: str
    block_size: int | None
    data_parallel_start_rank: int
    data_parallel_size: int
    total_kv_blocks: int | None
    not_schedulable_reasons: list[str]


class Overlap(Struct, frozen=True):
    """Leading prompt tokens that the worker has: in its engine's memory, and with those that it can load."""

    longest_matched: int
    gpu: int
    dp: dict[str, int]
    cpu: int
    disk: int


class SelectResponse(Struct, frozen=True, kw_only=True):
    """The worker to send the request to.

    `effective_prefill_tokens`: those that it must compute. `reason`: of the policy. `request_id`: of
    `/debug/decisions/{request_id}`. `lease_s`: within which a report is due; absent where nothing is held. `body`: what
    to send in place of the body given, if it differs.
    """

    selection_id: str | UnsetType = UNSET
    isl_tokens: int
    track_prefill_tokens: bool = True
    model_name: str
    routing_group: str = DEFAULT
    worker_id: WorkerId
    dp_rank: int
    endpoint: str
    block_size: int
    overlap: Overlap
    effective_prefill_tokens: int
    reason: str
    request_id: str
    lease_s: float | UnsetType = UNSET
    body: str | UnsetType = UNSET
    candidates: list[Candidate] | UnsetType = UNSET


class ReservationRow(Struct, frozen=True):
    """A reservation. `lost`: why its worker has left; the answer may still arrive. Absent while the worker is there."""

    selection_id: str
    worker_id: WorkerId
    dp_rank: int
    endpoint: str
    prefill_complete: bool
    output_tokens: int
    lease_s: float
    model_name: str = DEFAULT
    routing_group: str = DEFAULT
    status: Literal["ok"] = "ok"
    lost: str | UnsetType = UNSET


class WorkerLoad(Struct, frozen=True):
    """What a worker has to do. `potential_prefill_tokens`: prompt tokens to compute; `potential_decode_blocks`: KV
    blocks of running requests; with the prompt's own where one was given. `load_s`: seconds of work placed lately."""

    worker_id: WorkerId
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int
    load_s: float


class ModelLoad(Struct, frozen=True):
    """The loads of one model's workers. `pending_count`: prompts that wait in this service for their turn."""

    model_name: str
    routing_group: str
    loads: list[WorkerLoad]
    pending_count: int


class WorkerOverlap(Struct, frozen=True):
    """Leading KV blocks of a prompt that a worker can use."""

    worker_id: WorkerId
    dp_rank: int
    device_blocks: int


class OverlapScores(Struct, frozen=True):
    """Every worker's blocks of one prompt."""

    block_size: int
    num_blocks: int
    workers: list[WorkerOverlap]


class ErrorText(Struct, frozen=True):
    """What is wrong. `param`: the field, null where no one field is."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorAnswer(Struct, frozen=True):
    """Every answer of a status of 400 and above."""

    error: ErrorText
