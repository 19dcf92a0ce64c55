"""Clients of three tenants at a steady rate, who know what each answer has to be.

An emulated answer is a function of its prompt's token ids, and each event names the request's id. So an answer that is
cut short, mixed up with another or made up is noticed.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice
from zlib import crc32

import aiohttp

from chaos.replica import MODEL
from preble.core.types import pack_tokens
from preble.emulator.answers.tokenizer import EmulatedTokenizer

TENANTS = ("alice", "bob", "carol")
FLOOD, ADMIN = "flood", "admin"
PREFIXES, PREFIX_TOKENS, VOCABULARY = 6, 96, 4000
KEEP_ALIVE_S = 1.0
MOST_EXAMPLES = 20
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Question:
    """One request. `prompts`: token ids, a list for each prompt. `leaves`: the client goes away after a byte."""

    request_id: str
    tenant: str
    prompts: list[list[int]]
    max_tokens: int
    stream: bool
    text: str | None
    leaves: bool

    def body(self) -> dict[str, object]:
        prompt = self.text or (self.prompts if len(self.prompts) > 1 else self.prompts[0])
        fields = {"model": MODEL, "prompt": prompt, "max_tokens": self.max_tokens, "stream": self.stream}
        return fields | {"temperature": 0, "ignore_eos": True}


class Questions:
    """The requests of a seed by number: always the same."""

    def __init__(self, seed: int, tokenizer: EmulatedTokenizer) -> None:
        self._seed = seed
        self._tokenizer = tokenizer
        rng = random.Random(seed)
        self._prefixes = {
            tenant: [[rng.randrange(VOCABULARY) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)]
            for tenant in (*TENANTS, FLOOD)
        }

    def make(self, number: int, tenant: str) -> Question:
        rng = random.Random(f"{self._seed}:{tenant}:{number}")
        text, num_prompts = None, 3 if rng.random() < 0.02 else 1
        if rng.random() < 0.05:
            text, num_prompts = f"Tool {rng.randrange(PREFIXES)} of {tenant}. Question {number}?", 1
            prompts = [self._tokenizer.encode(text, add_special_tokens=True)]
        else:
            tail = [number % VOCABULARY, number // VOCABULARY % VOCABULARY]
            prompts = [[*rng.choice(self._prefixes[tenant]), *tail, i] for i in range(num_prompts)]
        stream = rng.random() < 0.5
        return Question(
            request_id=f"chaos-{tenant}-{number}",
            tenant=tenant,
            prompts=prompts,
            max_tokens=rng.randrange(100, 200) if rng.random() < 0.05 else rng.randrange(2, 9),
            stream=stream,
            text=text,
            leaves=stream and rng.random() < 0.02,
        )

    def answers(self, question: Question) -> list[str]:
        """What an emulated replica says to each prompt."""
        pieces = self._tokenizer.output_pieces
        places = [crc32(pack_tokens(prompt)) % len(pieces) for prompt in question.prompts]
        return ["".join(islice(cycle(pieces), place, place + question.max_tokens)) for place in places]


@dataclass(frozen=True, slots=True)
class Cut:
    """An answer that began and did not end. `replica`: by its fingerprint, "" if it is one of several, or unnamed."""

    request_id: str
    replica: str
    began_at: float
    ended_at: float
    why: str


@dataclass
class Tally:
    """What became of the requests so far. `first_s`, `whole_s`: to the first byte of streams, to the end of all."""

    ends: Counter[str] = field(default_factory=Counter)
    cuts: list[Cut] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    latest_s: float = 0.0

    @property
    def num_ended(self) -> int:
        return sum(self.ends.values())

    def fault(self, kind: str, what: str) -> str:
        if len(self.examples) < MOST_EXAMPLES:
            self.examples.append(f"{kind}: {what[:500]}")
        return kind


class Unusable(Exception):
    """An answer that is not what the request asked for."""


class Clients:
    """Sends requests and checks their answers. An async context manager: leaving it closes the connections."""

    def __init__(self, url: str, keys: dict[str, str], questions: Questions, emulated: Sequence[str]) -> None:
        """`emulated`: the fingerprints of the replicas whose answers are known beforehand."""
        self.tally = Tally()
        self.num_in_flight = 0
        self._url, self._keys, self._questions = url, keys, questions
        self._emulated = frozenset(emulated)

    async def __aenter__(self) -> Clients:
        self._stack = AsyncExitStack()
        self.renew()
        return self

    def renew(self) -> None:
        """Use no connection again that is open now, as clients do when their gateway is about to end.

        Otherwise a request could be sent in the moment in which the gateway closes its idle connection.
        """
        self._http = {name: self._session(key) for name, key in self._keys.items()}

    def _session(self, key: str) -> aiohttp.ClientSession:
        session = aiohttp.ClientSession(
            self._url,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            headers={"x-api-key": key},
            timeout=aiohttp.ClientTimeout(total=PATIENCE_S),
        )
        self._stack.push_async_callback(session.close)
        return session

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def session(self, name: str) -> aiohttp.ClientSession:
        return self._http[name]

    async def run(self, rate: float, at_once: int) -> None:
        """Send `rate` requests a second, `at_once` in flight at most, until cancelled; what runs then goes on. See
        `finish`.
        """
        loop = asyncio.get_running_loop()
        room = asyncio.Semaphore(at_once)
        self._tasks: set[asyncio.Task[None]] = set()
        started, number = loop.time(), 0
        while True:
            due = started + number / rate
            await asyncio.sleep(max(0.0, due - loop.time()))
            await room.acquire()
            self.tally.latest_s = max(self.tally.latest_s, loop.time() - due)
            question = self._questions.make(number, TENANTS[number % len(TENANTS)])
            task = asyncio.create_task(self._ask(question))
            self._tasks.add(task)
            task.add_done_callback(lambda done: (self._tasks.discard(done), room.release()))
            number += 1

    async def finish(self) -> None:
        """Wait for what still runs."""
        await asyncio.gather(*self._tasks)

    async def flood(self, count: int, first: int) -> Counter[str]:
        """Send that many requests at once as the tenant that floods; return how they ended."""
        questions = [self._questions.make(first + i, FLOOD) for i in range(count)]
        return Counter(await asyncio.gather(*(self.ask(question) for question in questions)))

    async def _ask(self, question: Question) -> None:
        self.num_in_flight += 1
        end = "failed"
        try:
            end = await self.ask(question)
        finally:
            self.num_in_flight -= 1
            self.tally.ends[end] += 1

    async def ask(self, question: Question) -> str:
        """Return how the request ended: ok, left, refused, lost (its answer had begun), wrong or failed."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        received = bytearray()
        headers = {"x-request-id": question.request_id}
        try:
            async with self._http[question.tenant].post(
                "/v1/completions", json=question.body(), headers=headers
            ) as reply:
                if reply.status in (429, 503) and "retry-after" in reply.headers:
                    await reply.read()
                    return "refused"
                if reply.status != 200:
                    return self.tally.fault("failed", f"{question.request_id} {reply.status} {await reply.text()}")
                async for piece in reply.content.iter_any():
                    if not received:
                        self.tally.first_s.append(loop.time() - began_at)
                    received += piece
                    if question.leaves:
                        reply.close()
                        return "left"
            self._check(question, bytes(received))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return self._broken(question, bytes(received), began_at, repr(error))
        except (Unusable, ValueError) as problem:
            return self.tally.fault("wrong", f"{question.request_id} {problem} in {bytes(received)!r}")
        except EndedEarly as end:
            return self._broken(question, bytes(received), began_at, str(end))
        self.tally.whole_s.append(loop.time() - began_at)
        return "ok"

    def _broken(self, question: Question, received: bytes, began_at: float, why: str) -> str:
        if not (question.stream and received):
            return self.tally.fault("failed", f"{question.request_id} {why} {received!r}")
        _, _, rest = received.partition(b'"system_fingerprint":"')
        replica = rest.partition(b'"')[0].decode() if len(question.prompts) == 1 else ""
        ended_at = asyncio.get_running_loop().time()
        self.tally.cuts.append(Cut(question.request_id, replica, began_at, ended_at, why))
        return "lost"

    def _check(self, question: Question, received: bytes) -> None:
        """Raises: Unusable, EndedEarly."""
        events = _events(received) if question.stream else [json.loads(received)]
        texts = ["" for _ in question.prompts]
        for event in events:
            if event["id"] != f"cmpl-{question.request_id}":
                raise Unusable(f"the id is {event['id']}")
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        if events[0].get("system_fingerprint") in self._emulated and texts != self._questions.answers(question):
            raise Unusable(f"{texts} in place of {self._questions.answers(question)}")
        if not question.stream:
            usage, asked = events[0]["usage"], sum(map(len, question.prompts))
            made = question.max_tokens * len(question.prompts)
            if (usage["prompt_tokens"], usage["completion_tokens"]) != (asked, made):
                raise Unusable(f"usage is {usage}")


class EndedEarly(Exception):
    """A stream that ends with an error event, or without its last line."""


def _events(received: bytes) -> list[dict[str, object]]:
    if not received.endswith(b"data: [DONE]\n\n") or b'"error":' in received:
        raise EndedEarly(f"ends with {received[-200:]!r}")
    lines = [line.removeprefix(b"data: ") for line in received.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines[:-1]]
