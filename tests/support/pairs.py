"""A replica that only prefills and one that only decodes, asked as a router asks them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import SystemRandom
from typing import Any

import aiohttp

from preble.engines.starting.launch import Fleet

COMPLETIONS = "/v1/completions"
NO_TRANSFER = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}


@dataclass(frozen=True)
class Answer:
    """What one leg was answered. `fields`: of a body; of a stream a list of those of its events."""

    status: int
    fields: Any

    @property
    def text(self) -> str:
        return "".join(choice["text"] for choice in self.fields["choices"])

    @property
    def cached_tokens(self) -> int:
        found: int = self.fields["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    @property
    def num_tokens(self) -> int:
        found: int = self.fields["usage"]["completion_tokens"]
        return found


@dataclass(frozen=True)
class Pair:
    """Where both are. `http` is closed by who made it."""

    http: aiohttp.ClientSession
    prefill: str
    decode: str
    bootstrap_port: int
    model: str

    async def num_waiting(self, url: str) -> float:
        """Return how many requests there wait for their other leg, as SGLang counts them."""
        async with self.http.get(url + "/metrics") as answer:
            text = await answer.text()
        kind = "prefill_bootstrap" if url == self.prefill else "decode_transfer"
        [value] = re.findall(rf"^sglang:num_{kind}_queue_reqs\{{.*\}} (\S+)", text, re.MULTILINE)
        return float(value)

    async def has_waiting(self, url: str, number: int = 1) -> bool:
        return await self.num_waiting(url) == number

    def room(self, **others: Any) -> dict[str, Any]:
        """Return the fields of a new room."""
        number = SystemRandom().randrange(1, 2**63 - 1)
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": number,
            **others,
        }

    def body(self, prompt: Any, **others: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, **others}

    async def ask(self, url: str, body: dict[str, Any], path: str = COMPLETIONS) -> Answer:
        async with self.http.post(url + path, json=body) as answer:
            raw = await answer.text()
        if not body.get("stream"):
            return Answer(answer.status, json.loads(raw))
        events = [event.removeprefix("data: ") for event in raw.split("\n\n") if event]
        assert events.pop() == "[DONE]"
        return Answer(answer.status, [json.loads(event) for event in events])

    async def both(self, body: dict[str, Any], path: str = COMPLETIONS) -> tuple[Answer, Answer]:
        """Ask both at once; `body` has the room."""
        return await asyncio.gather(self.ask(self.prefill, body, path), self.ask(self.decode, body, path))

    async def answered(self, prompt: Any, **others: Any) -> tuple[Answer, Answer]:
        """Return what both answer in a new room."""
        return await self.both({**self.body(prompt, **others), **self.room()})


@asynccontextmanager
async def pair_of(fleet: Fleet, model: str) -> AsyncIterator[Pair]:
    """Give the two replicas of a fleet that runs, the prefilling one first."""
    prefill, decode = fleet.urls
    async with aiohttp.ClientSession() as http:
        async with http.get(prefill + "/server_info") as answer:
            port = (await answer.json())["disaggregation_bootstrap_port"]
        yield Pair(http, prefill, decode, port, model)
