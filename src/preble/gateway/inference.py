"""`/v1/completions` and `/v1/chat/completions`: one request from its body to the end of its answer."""

from __future__ import annotations

import asyncio

from preble.errors import EngineTimeout
from preble.gateway.client import Client
from preble.gateway.intake import Intake
from preble.gateway.many import answer_many
from preble.gateway.single import answer_one


class Inference:
    """Answers requests for completions. `total_s`: the longest that one may take."""

    def __init__(self, intake: Intake, *, total_s: float) -> None:
        self._intake = intake
        self._total_s = total_s

    async def answer(self, path: str, client: Client, body: bytes) -> None:
        """Answer one request. Raises: PrebleError. ClientGone: the client has left, and its work is aborted."""
        with self._intake.request_id(client) as request_id:
            asked = self._intake.decoded(path, client, body, request_id)
            with self._intake.admission(max(1, len(asked.prompts))):
                async with client.watched():
                    answer = answer_many if len(asked.prompts) > 1 else answer_one
                    try:
                        async with asyncio.timeout(self._total_s):
                            await answer(self._intake, client, asked)
                    except TimeoutError as error:
                        raise EngineTimeout(f"the answer took longer than {self._total_s:g} s") from error
