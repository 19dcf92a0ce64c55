"""Which of a client's headers reach the replica: all but its connection's, those for this gateway, and keys."""

from __future__ import annotations

from preble.config import AuthConfig
from preble.serving import ParsedRequest

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
        return {"content-type": "application/json"} | headers | {"x-request-id": parsed.request_id}
