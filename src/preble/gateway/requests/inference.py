"""`/v1/completions` and `/v1/chat/completions`: one request from its body to the end of its answer."""

from __future__ import annotations

import asyncio

from preble.errors import EngineTimeout
from preble.gateway.http.client import Client
from preble.gateway.requests.intake import Intake
from preble.gateway.requests.one_prompt import answer_one_prompt
from preble.gateway.requests.prompt_list import answer_prompt_list


class Inference:
    """Answers requests for completions. `total_s`: the longest that one may take."""

    def __init__(self, intake: Intake, *, total_s: float) -> None:
        self._intake = intake
        self._total_s = total_s

    async def answer(self, path: str, client: Client, body: bytes) -> None:
        """Answer one request. Raises: PrebleError. ClientGone: the client has left, and its work is aborted."""
        with self._intake.request_id(client) as request_id:
            parsed = self._intake.decoded(path, client, body, request_id)
            with self._intake.admission(max(1, len(parsed.prompts))):
                async with client.watched():
                    answer = answer_prompt_list if len(parsed.prompts) > 1 else answer_one_prompt
                    try:
                        async with asyncio.timeout(self._total_s):
                            await answer(self._intake, client, parsed)
                    except TimeoutError as error:
                        raise EngineTimeout(f"the answer took longer than {self._total_s:g} s") from error
