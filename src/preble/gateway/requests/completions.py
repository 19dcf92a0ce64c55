"""One placed request, from its body to the end of its answer."""

from __future__ import annotations

from preble.config import GatewayConfig
from preble.gateway.requests.one_prompt import answer_one_prompt
from preble.gateway.requests.placed_client import PlacedClient
from preble.gateway.requests.prompt_list import answer_prompt_list
from preble.gateway.requests.relay import Relay
from preble.serving import Intake, ParsedRequest

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
_OURS = (b"x-preble-", b"x-override-")
"""Of headers for this gateway, and of those by which SGLang takes what only a router may set."""


class Completions:
    """Answers requests to the endpoints of the table."""

    def __init__(self, serving: Intake, config: GatewayConfig) -> None:
        self._serving = serving
        self._total_s = config.timeouts.total_s
        self._limits = config.limits
        self._not_passed = _NOT_PASSED - ({b"authorization"} if config.auth.forward_authorization else set())

    async def answer(self, client: PlacedClient, body: bytes) -> None:
        """Answer one request. Raises: PrebleError."""
        headers = client.head.headers
        with self._serving.request_id(headers) as request_id:
            client.request_id = request_id
            parsed = await self._serving.parse(client.endpoint, headers, body, request_id, client.caller)
            async with self._serving.admitted(parsed) as parsed:
                client.request_id = parsed.request_id
                client.limit(self._total_s)
                await self._answer(client, parsed)
                await client.until_read()

    async def _answer(self, client: PlacedClient, parsed: ParsedRequest) -> None:
        headers = self._engine_headers(parsed)

        async def relay(index: int = 0, body: bytes = parsed.body) -> Relay:
            request = await self._serving.tokenize(parsed, index)
            most = self._limits.max_answer_bytes
            return Relay(self._serving, request, parsed, body, headers, most, client.under_way)

        if parsed.num_prompts > 1:
            await answer_prompt_list(client, parsed, relay, at_once=self._limits.prompts_at_once)
        else:
            await answer_one_prompt(client, await relay(), stream=parsed.fields.stream)

    def _engine_headers(self, parsed: ParsedRequest) -> dict[str, str]:
        """Every header of the client but those of its connection, those for this gateway, and its keys."""
        named = parsed.headers.get(b"connection", b"").lower().replace(b" ", b"").split(b",")
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in parsed.headers.items()
            if name not in self._not_passed and name not in named and not name.startswith(_OURS)
        }
        return headers | {"content-type": "application/json", "x-request-id": parsed.request_id}
