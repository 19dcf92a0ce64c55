"""One request with a JSON body, from its body to the end of its answer."""

from __future__ import annotations

from preble.config import GatewayConfig
from preble.gateway.requests.one_prompt import answer_one_prompt
from preble.gateway.requests.passed_headers import PassedHeaders
from preble.gateway.requests.placed_client import PlacedClient
from preble.gateway.requests.prompt_list import answer_prompt_list
from preble.gateway.requests.relay import Relay
from preble.gateway.requests.tracing import tracing
from preble.serving import JSON_TYPE, Intake, ParsedRequest


class JsonRequests:
    """Answers requests whose bodies are JSON, to every endpoint of the table."""

    def __init__(self, serving: Intake, config: GatewayConfig) -> None:
        self._serving = serving
        self._total_s = config.timeouts.total_s
        self._limits = config.limits
        self._passed = PassedHeaders(config.auth)

    async def answer(self, client: PlacedClient, body: bytes) -> None:
        """Answer one request. Raises: PrebleError."""
        headers = client.head.headers
        with self._serving.request_id(headers) as request_id:
            client.request_id = request_id
            parsed = await self._serving.parse(client.endpoint, headers, body, request_id, client.caller)
            client.model = self._serving.replicas.label(parsed.model)
            with tracing(parsed, client):
                async with self._serving.admitted(parsed) as parsed:
                    client.request_id = parsed.request_id
                    client.limit(self._total_s)
                    own = await self._serving.answer_here(client.endpoint, body) if client.endpoint.of_tokens else None
                    if own is not None:
                        client.reply(200, [JSON_TYPE], own)
                    else:
                        await self._answer(client, parsed)
                    if not client.response_complete:  # a whole answer takes memory until most of it has been read
                        await client.until_writable()

    async def _answer(self, client: PlacedClient, parsed: ParsedRequest) -> None:
        headers = self._passed.of(parsed)

        async def relay(index: int = 0, body: bytes | None = None) -> Relay:
            request = await self._serving.tokenize(parsed, index)
            with_ids = await self._serving.with_ids(parsed, request)
            most = self._limits.max_answer_bytes
            return Relay(self._serving, request, parsed, body or parsed.body, with_ids, headers, most, client.under_way)

        if parsed.num_prompts > 1:
            await answer_prompt_list(client, parsed, relay, at_once=self._limits.prompts_at_once)
        else:
            await answer_one_prompt(client, await relay(), stream=parsed.fields.stream)
