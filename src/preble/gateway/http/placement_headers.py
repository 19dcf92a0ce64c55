"""The headers that say where a request was placed and why, which only admins see."""

from __future__ import annotations

from collections.abc import Sequence

from preble.core.types import Placement
from preble.prompts.endpoints import HeaderList
from preble.rules.callers import Caller

REPLICA, REASON, MATCHED_TOKENS = b"x-preble-replica", b"x-preble-reason", b"x-preble-matched-tokens"
_OURS = b"x-preble-"


def placement_headers(placements: Sequence[Placement]) -> HeaderList:
    """Return the headers for the placements of one request's prompts: every replica and reason, all matched tokens."""
    [one, *others] = placements
    replicas: str = one.replica_id
    reasons: str = one.reason
    matched_tokens = one.matched_tokens
    if others:  # hardly ever
        replicas = ",".join(sorted({p.replica_id for p in placements}))
        reasons = ",".join(sorted({p.reason for p in placements}))
        matched_tokens = sum(p.matched_tokens for p in placements)
    return [(REPLICA, replicas.encode()), (REASON, reasons.encode()), (MATCHED_TOKENS, b"%d" % matched_tokens)]


def shown_headers(headers: HeaderList, caller: Caller, request_id: str | None) -> HeaderList:
    """Return the headers that a caller may see, and the request's id.

    Placements reveal what is cached, so what others have sent, and the addresses of replicas.
    """
    if not caller.is_admin:
        headers = [header for header in headers if not header[0].startswith(_OURS)]
    return headers if request_id is None else [*headers, (b"x-request-id", request_id.encode())]
