"""A burst of split requests in which sources, targets and clients go, and what must be true of each answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import Random

import aiohttp

from preble.engines.pairs import PairedEngine
from preble.gateway.server import Gateway
from preble.serving.placed import LocalPlaced
from support.nixl_vllm import in_use, num_requests
from support.replicas import MODEL_NAME
from support.waiting import eventually

NUM_CLIENTS = 6
NUM_PROMPTS = 6
TOKENS_OUT = 32
_OF_PAIRS = re.compile(r"^sglang:num_(?:running|\w*queue)_reqs\{.*\} (\S+)", re.MULTILINE)


class SplitBurst:
    """Rounds of requests, in each of which a client leaves and a replica may be killed. The seed of `rng` says when.

    `alive`: the addresses of those that run. `ends`: how many answers were "right", how many clients "left", and how
    many lost the replica that was answering them ("lost"). `num_split`: requests that were split.

    `are_pairs`: of fixed roles, so that nobody answers without either of them.
    """

    def __init__(
        self,
        gateway: Gateway,
        alive: Sequence[str],
        rng: Random,
        kill: Callable[[str], Awaitable[None]],
        length: int,
        *,
        are_pairs: bool = False,
    ) -> None:
        self._gateway, self._rng, self._kill, self._are_pairs = gateway, rng, kill, are_pairs
        self.alive = list(alive)
        self.ends: Counter[str] = Counter()
        self.num_split = 0
        self._prompts = [rng.choices(range(100, 4000), k=length) for _ in range(NUM_PROMPTS)]
        self._right: list[str] = []
        self._num_begun = 0

    async def know(self, url: str) -> None:
        """Have one replica say what is right, before anything can have gone wrong."""
        for prompt in self._prompts:
            body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": TOKENS_OUT, "temperature": 0}
            async with aiohttp.ClientSession(url) as http, http.post("/v1/completions", json=body) as answer:
                self._right.append((await answer.json())["choices"][0]["text"])

    async def round(self, goes: str | None = None) -> bool:
        """Let clients ask, and one of them leave. `goes`: "source" or "target" of a split, which is killed when some
        have seen a token, or none yet, as chance has it. Return False if nobody was split then: a source rests.
        Raises: AssertionError: an answer is wrong, or was lost needlessly.
        """
        up = self._gateway.serving.replicas
        await eventually(lambda: set(map(str, up)) == set(self.alive), "the gateway knows who is up")
        self._num_begun, before = 0, self.ends["lost"]
        chosen = [self._rng.randrange(NUM_PROMPTS) for _ in range(NUM_CLIENTS)]
        asking = [asyncio.create_task(self._ask(i)) for i in chosen]
        leaves, begun = self._rng.choice(asking), self._rng.randrange(NUM_CLIENTS // 2)
        await eventually(lambda: (self._splits() and self._num_begun >= begun) or all(one.done() for one in asking))
        splits = self._splits()
        if goes is not None and splits:
            await self._lose(splits[self._rng.randrange(len(splits))], goes)
        leaves.cancel()
        self.num_split += sum(one.transfer is not None for one in self._gateway.serving.recent.latest(NUM_CLIENTS))
        for end in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(end, asyncio.CancelledError):
                self.ends["left"] += 1
            elif isinstance(end, BaseException):
                raise end
        may_lose = goes == "target" or (goes is not None and self._are_pairs)
        assert may_lose or self.ends["lost"] == before, "only the end of the one that answers ends an answer"
        return bool(splits)

    def _splits(self) -> list[LocalPlaced]:
        placed = self._gateway.serving._placements.in_flight.values()
        return [one for one in placed if isinstance(one.engine, PairedEngine)]

    async def _lose(self, split: LocalPlaced, which: str) -> None:
        transfer = split.placement.transfer
        assert transfer is not None
        url = str(transfer.source if which == "source" else split.placement.replica_id)
        self.alive.remove(url)
        await self._kill(url)

    async def _ask(self, i: int) -> None:
        body = {"model": MODEL_NAME, "prompt": self._prompts[i], "max_tokens": TOKENS_OUT, "temperature": 0}
        text, is_whole = "", False
        asked = {**body, "stream": True}
        async with aiohttp.ClientSession(self._gateway.url) as http, http.post("/v1/completions", json=asked) as answer:
            assert answer.status == 200 or self._are_pairs, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    self._num_begun += not text
                    text += "".join(choice["text"] for choice in json.loads(line[6:]).get("choices", ()))
                is_whole = is_whole or line.startswith(b"data: [DONE]")
        assert self._right[i].startswith(text), "what has come is right, whole or not"
        is_right = is_whole and text == self._right[i]
        self.ends["right" if is_right else "lost"] += 1

    async def nothing_is_left(self, within_s: float) -> float:
        """Return the seconds after which those that run keep nothing. Raises: AssertionError: that is not in time."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for url in self.alive:
            has_nothing = partial(_waits_for_nothing if self._are_pairs else _has_nothing, url)
            await eventually(has_nothing, f"{url} keeps nothing", began + within_s - loop.time())
        return loop.time() - began


async def _has_nothing(url: str) -> bool:
    return await num_requests(url) == 0 and await in_use(url) == 0


async def _waits_for_nothing(url: str) -> bool:
    async with aiohttp.ClientSession(url) as http, http.get("/metrics") as answer:
        return not any(map(float, _OF_PAIRS.findall(await answer.text())))
