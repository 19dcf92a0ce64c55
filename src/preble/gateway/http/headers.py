"""Which headers pass between clients and replicas, and those that say where a request was placed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from preble.config import AuthConfig
from preble.core.types import Placement
from preble.prompts.endpoints import HeaderList
from preble.rules.callers import Caller
from preble.serving import SESSION, ParsedRequest

REPLICA, REASON, MATCHED_TOKENS = b"x-preble-replica", b"x-preble-reason", b"x-preble-matched-tokens"
PREDICTED = (
    *(b"x-preble-predicted-ttft-ms", b"x-preble-predicted-ttft-p98-ms"),
    *(b"x-preble-predicted-tpot-ms", b"x-preble-predicted-tpot-p98-ms"),
)
_predicted_s: Callable[[Placement], tuple[float | None, ...]] = attrgetter(
    *("predicted_ttft_s", "predicted_ttft_p98_s", "predicted_tpot_s", "predicted_tpot_p98_s")
)
"""Return the times for these headers."""
_OURS = b"x-preble-"


def placement_headers(placements: Sequence[Placement]) -> HeaderList:
    """Return the headers for the placements of one request's prompts: every replica and reason, all matched tokens, and
    the longest of the predicted times.
    """
    [one, *others] = placements
    replicas: str = one.replica_id
    reasons: str = one.reason
    matched_tokens, predicted_s = one.matched_tokens, _predicted_s(one)
    if others:  # hardly ever
        replicas = ",".join(sorted({p.replica_id for p in placements}))
        reasons = ",".join(sorted({p.reason for p in placements}))
        matched_tokens = sum(p.matched_tokens for p in placements)
        of_all = zip(*map(_predicted_s, placements), strict=True)
        predicted_s = tuple(max((s for s in each if s is not None), default=None) for each in of_all)
    headers = [(REPLICA, replicas.encode()), (REASON, reasons.encode()), (MATCHED_TOKENS, b"%d" % matched_tokens)]
    for name, seconds in zip(PREDICTED, predicted_s, strict=True):
        if seconds is not None:
            headers.append((name, b"%.1f" % (1000 * seconds)))
    return headers


def shown_headers(headers: HeaderList, caller: Caller, request_id: str | None) -> HeaderList:
    """Return the headers that a caller may see, and the request's id.

    Placements reveal what is cached, so what others have sent, and the addresses of replicas.
    """
    if not caller.is_admin:
        headers = [header for header in headers if not header[0].startswith(_OURS)]
    return headers if request_id is None else [*headers, (b"x-request-id", request_id.encode())]


_NOT_PASSED_BACK = frozenset(
    {
        b"connection",
        b"content-length",
        b"date",
        b"keep-alive",
        b"location",
        b"proxy-authenticate",
        b"proxy-connection",
        b"server",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-request-id",
        *(REPLICA, REASON, MATCHED_TOKENS, *PREDICTED),
        *(b"access-control-allow-origin", b"access-control-allow-credentials", b"access-control-expose-headers"),
    }
)
"""Headers of one connection only; ours, for a replica may be such a gateway itself; `location`, an address; and what
browsers must hear, which the gateway's own settings say."""


def answer_headers(headers: HeaderList, *placements: Placement) -> HeaderList:
    """Return the headers of a replica's answer that are for the client, and those that name its placements."""
    ours = placement_headers(placements) if placements else []
    return [header for header in headers if header[0] not in _NOT_PASSED_BACK] + ours


_OF_THE_CONNECTION = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"host", b"content-length"),
    }
)
_NOT_PASSED = _OF_THE_CONNECTION | {
    *(b"accept-encoding", b"content-encoding", b"content-type", b"x-request-id"),  # the replica gets its own
    *(b"cookie", b"x-api-key", b"api-key", b"authorization"),  # between the client and this gateway
}
_OF_ROUTERS = (b"x-preble-", b"x-override-", b"x-smg-routing-key", b"x-vllm-priority")
"""How headers begin that are for this gateway, or by which an engine takes what only a router may set (SGLang 0.5.23,
vLLM 0.32.0): its own fields of the body are `Reserved`."""


def is_not_passed(name: bytes) -> bool:
    """Return whether no replica may get this header of a client.

    >>> is_not_passed(b"x-override-priority"), is_not_passed(b"x-request-id")
    (True, False)
    """
    return name.startswith(_OF_ROUTERS)


class PassedHeaders:
    """The headers for a replica. `of_body`: with the type and length of the client's own body."""

    def __init__(self, auth: AuthConfig, *, of_body: bool = False) -> None:
        self._not_passed = _NOT_PASSED - ({b"authorization"} if auth.forward_authorization else set())
        if of_body:
            self._not_passed -= {b"content-type", b"content-length"}

    def of(self, parsed: ParsedRequest) -> dict[str, str]:
        """Return the headers of one request, by name."""
        named: list[bytes] = []
        if (connection := parsed.headers.get(b"connection")) is not None:
            named = connection.lower().replace(b" ", b"").split(b",")
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in parsed.headers.items()
            if name not in self._not_passed and name not in named and not is_not_passed(name)
        }
        if (session := parsed.session) is not None:
            headers[SESSION.decode()] = session
        return {"content-type": "application/json"} | headers | {"x-request-id": parsed.request_id}
