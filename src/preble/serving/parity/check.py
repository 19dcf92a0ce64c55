"""Parity: whether a replica makes the token ids that the gateway makes, and caches what the gateway predicts.

Placement by prefix needs both. If one fails, answers stay right and only the hits disappear, so nobody notices. The
check asks each replica for the ids of a few texts (`/tokenize` computes nothing) and sends it a prompt of a few blocks
twice, with one output token each. The scheduler does not see that prompt as load; the replica reports it in its KV
events as any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from preble.config import ParityConfig
from preble.core.cluster.replicas import longest_prompt
from preble.core.types import PackedTokens, Request, RequestId, Role, pack_tokens, unpack_tokens
from preble.engines.adapter import Engine
from preble.errors import EngineError, EngineRefused, RequestError
from preble.prompts.endpoints import COMPLETIONS
from preble.prompts.endpoints.bodies import Text
from preble.prompts.tokens import PromptEncoder
from preble.serving.parity.answers import PROSE, SPECIAL, answered_text, answers_alike, completed, copy_prefix
from preble.serving.parity.report import Check, Finding, ParityOutcome, compare_ids, mismatch, unchecked
from preble.serving.replicas.live import LiveReplica, ProbePrompt
from preble.serving.replicas.rotation import Rotation

MIN_TOKENS = 64
"""Of the prompt that is sent twice, where blocks are small."""

NEVER_SEEN_TOKENS = 16
"""More of a prompt of random tokens is not cached by chance, even where blocks are single tokens."""

ATTEMPTS = 3
"""Prompts sent twice before a wrong count is believed: a busy replica can evict a prompt as soon as it is computed."""

COPY_TOKENS = 16
"""Of the answers that are compared after a copy."""

MIN_DISTINCT_IDS = 16
"""Enough different ids for prompts that nobody has sent before."""

REPORTING = "start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
POLL_S = 0.05


class EngineIds:
    """The token ids that another replica makes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def completion(
        self, text: Text, add_special_tokens: bool, model: str | None, most_tokens: float = math.inf
    ) -> PackedTokens:
        fields = {"model": model, "prompt": text, "add_special_tokens": add_special_tokens}
        return pack_tokens(await self._engine.tokenize(msgspec.json.encode(fields)))

    async def chat(
        self, body: bytes, model: str | None, most_tokens: float = math.inf, *, engine: str = ""
    ) -> PackedTokens:
        return pack_tokens(await self._engine.tokenize(body))


@dataclass(frozen=True, slots=True)
class TextProbe:
    """A prompt as a client would send it. `fields`: of the body, without the model."""

    check: Check
    fields: dict[str, Any]


def text_probes() -> tuple[TextProbe, ...]:
    """Return the prompts whose token ids are compared, one of each kind that clients send."""
    question = {"role": "user", "content": "Where is the fox? 🦊"}
    answer = {"role": "assistant", "content": "Over the dog."}
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    tool = {"name": "find", "description": "Find a text in the files.", "parameters": schema}
    call_id = "call00001"  # some templates want nine letters or digits
    call = {"id": call_id, "type": "function", "function": {"name": "find", "arguments": '{"text": "fox"}'}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call_id, "content": "line 1"}
    return (
        TextProbe(Check.COMPLETION, {"prompt": PROSE}),
        TextProbe(Check.SPECIAL, {"prompt": SPECIAL}),
        TextProbe(Check.CHAT, {"messages": [question, answer, {"role": "user", "content": "And now?"}]}),
        TextProbe(
            Check.TOOLS,
            {"messages": [question, calling, result], "tools": [{"type": "function", "function": tool}]},
        ),
    )


@dataclass(slots=True)
class ParityCheck:
    """The checks of one replica. Run them once.

    `reference`: whose ids are compared; None where the gateway uses this replica's own. `sends_ids`: whether the
    replica may get ids in place of texts. `rng`: makes the prompt that nobody has sent before.
    `source`: from which a prompt is copied, or which computes prompts for a replica that only decodes; None for none.
    """

    replica: LiveReplica
    rotation: Rotation
    reference: PromptEncoder | None
    settings: ParityConfig
    sends_ids: bool
    rng: Random
    source: LiveReplica | None = None

    async def run(self) -> list[Finding]:
        """Return every check that applies, in the order of `Check`. Each ends within its time, whatever the replica
        does.
        """
        if self._decodes and self.source is None:
            return [unchecked(Check.CACHED_TOKENS, "it only decodes, and no replica that prefills is up")]
        num_unindexed = self.rotation.scheduler.num_unindexed
        findings = [await self._bounded(probe.check, self._compared(probe)) for probe in text_probes()]
        if self.sends_ids and self.reference is not None and self.replica.engine.takes_ids:
            alike = answers_alike(self._engine, self._model, self.reference, self._longest)
            findings.append(await self._bounded(Check.IDS, alike))
        sent: list[PackedTokens] = []
        findings.append(await self._bounded(Check.CACHED_TOKENS, self._cached(sent)))
        if self.replica.info.spec.reports_events:
            findings.append(await self._events(sent, num_unindexed))
        if self.source is not None and not self._decodes:
            findings.append(await self._bounded(Check.COPY, self._copied(self.source)))
        return findings

    @property
    def _decodes(self) -> bool:
        return self.replica.info.spec.role is Role.DECODE

    @property
    def _engine(self) -> Engine:
        """Whom to ask for answers: of one that only decodes, the pair."""
        engine = self.replica.engine
        return engine.paired(self.source.engine) or engine if self._decodes and self.source is not None else engine

    @property
    def _model(self) -> str:
        return self.replica.info.models[0]

    @property
    def _longest(self) -> float:
        return longest_prompt(self.replica.info.spec)

    async def _bounded(self, check: Check, work: Coroutine[Any, Any, Finding]) -> Finding:
        """Return what `work` finds. A replica that fails or takes too long could not be checked."""
        try:
            async with asyncio.timeout(self.settings.answer_s):
                return await work
        except (EngineError, RequestError) as error:
            return unchecked(check, str(error))
        except TimeoutError:
            return unchecked(check, f"no answer within {self.settings.answer_s:g} s (`parity.answer_s`)")

    # -- token ids ----------------------------------------------------------------------------------------------------

    async def _compared(self, probe: TextProbe) -> Finding:
        """Return our token ids of a prompt against the replica's. Raises: EngineError."""
        body = msgspec.json.encode({"model": self._model, **probe.fields})
        theirs = await _or_refusal(self.replica.engine.tokenize(body))
        ours = theirs if self.reference is None else await _or_refusal(self._ours(self.reference, probe, body))
        if isinstance(theirs, RequestError):
            if isinstance(ours, RequestError):
                return Finding(check=probe.check, outcome=ParityOutcome.VERIFIED, detail="both refuse it")
            return unchecked(probe.check, f"the replica does not tokenize it: {theirs}")
        if isinstance(ours, RequestError):
            return mismatch(probe.check, f"the gateway refuses what the replica takes: {ours}")
        return compare_ids(probe.check, ours, theirs)

    async def _ours(self, reference: PromptEncoder, probe: TextProbe, body: bytes) -> Sequence[int]:
        if "messages" in probe.fields:
            engine = self.rotation.replicas.of_model(self._model).engine  # as for requests of clients
            return unpack_tokens(await reference.chat(body, self._model, engine=engine))
        return unpack_tokens(await reference.completion(probe.fields["prompt"], True, self._model))

    # -- the cache ----------------------------------------------------------------------------------------------------

    @property
    def _num_tokens(self) -> int:
        """Length of the prompt that is sent twice: whole blocks, so that all but the last one can be found again."""
        block_size = self.replica.info.spec.block_size
        return max(self.settings.blocks, math.ceil(MIN_TOKENS / block_size)) * block_size

    @property
    def _predicted(self) -> int:
        return self._num_tokens - self.replica.info.spec.block_size

    async def _cached(self, sent: list[PackedTokens]) -> Finding:
        """Send a prompt twice and compare the cached tokens that the replica reports. Raises: EngineError.

        `sent`: gets the prompts that the replica has computed.
        """
        if self._num_tokens >= self._longest:
            return unchecked(Check.CACHED_TOKENS, f"the replica has no room for {self._num_tokens} tokens")
        ids = await self._plain_ids()
        if len(ids) < MIN_DISTINCT_IDS:
            return unchecked(Check.CACHED_TOKENS, "the replica's token ids are not known, it has no /tokenize")
        for _ in range(ATTEMPTS):
            prompt = self.rng.choices(ids, k=self._num_tokens)
            self.replica.probe_prompt = ProbePrompt(pack_tokens(prompt))
            finding = self._judged(await self._sent(prompt), await self._sent(prompt))
            sent.append(self.replica.probe_prompt.tokens)
            if finding.outcome is not ParityOutcome.MISMATCH:
                break
        return finding

    async def _plain_ids(self) -> list[int]:
        """Return ids that the replica has for ordinary text, none of them special. Empty if it reports none."""
        body = msgspec.json.encode({"model": self._model, "prompt": PROSE, "add_special_tokens": False})
        try:
            return sorted(set(await self.replica.engine.tokenize(body)))
        except (EngineRefused, RequestError):
            return []

    async def _sent(self, prompt: list[int]) -> int | None:
        """Have the replica compute a prompt; how many of its tokens it says it had cached. Raises: EngineError."""
        fields = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        usage = COMPLETIONS.usage(await completed(self._engine, msgspec.json.encode(fields)))
        return usage.cached_tokens if usage is not None else None

    def _judged(self, first: int | None, again: int | None) -> Finding:
        check, block_size = Check.CACHED_TOKENS, self.replica.info.spec.block_size
        if again is None:
            return unchecked(check, f"the replica does not report cached tokens; {REPORTING}")
        if first is not None and first >= NEVER_SEEN_TOKENS:
            return mismatch(check, f"it reports {first} cached tokens of a prompt that it never had", misleads=True)
        missing = self._predicted - again
        # vLLM serves all that it loads from a tier. Of what its own memory has, it computes the last block again.
        has_loaded_all = again == self._num_tokens and self.replica.engine.kv_peer is not None
        if missing == 0 or has_loaded_all:
            return Finding(check=check, outcome=ParityOutcome.VERIFIED)
        said = (
            f"of a repeated prompt of {self._num_tokens} tokens it reports {again} as cached, {self._predicted} were"
            f" predicted with blocks of {block_size}"
        )
        return mismatch(check, said, misleads=missing > block_size)

    async def _copied(self, source: LiveReplica) -> Finding:
        """Return whether a prompt that is copied here is answered as where it was computed. Raises: EngineError."""
        ids = await self._plain_ids()
        has_room = self._num_tokens + COPY_TOKENS < self._longest
        if len(ids) < MIN_DISTINCT_IDS or source.engine.kv_peer is None or not has_room:
            return unchecked(Check.COPY, "no prompt could be made for it")
        cached: int | None = None
        for _ in range(ATTEMPTS):
            prompt = self.rng.choices(ids, k=self._num_tokens)
            wanted = await self._text(source.engine, prompt)
            target = self.replica.engine.paired(source.engine) or self.replica.engine
            cached = await copy_prefix(target, self._model, pack_tokens(prompt), source.engine)
            if (text := await self._text(target, prompt)) == wanted:
                break
        else:
            return mismatch(
                Check.COPY, f"after a copy from {source.engine.replica_id} it answers {text!r}, not {wanted!r}"
            )
        if (cached or 0) < self._predicted:
            said = f"{cached} of {self._predicted} tokens were cached after a copy from {source.engine.replica_id}"
            return unchecked(Check.COPY, said)
        return Finding(check=Check.COPY, outcome=ParityOutcome.VERIFIED)

    async def _text(self, engine: Engine, prompt: list[int]) -> str:
        fields = {"model": self._model, "prompt": prompt, "max_tokens": COPY_TOKENS, "temperature": 0}
        return answered_text(await completed(engine, msgspec.json.encode(fields)))

    # -- KV events ----------------------------------------------------------------------------------------------------

    async def _events(self, sent: list[PackedTokens], num_unindexed: int) -> Finding:
        """Return whether the index hears what the replica has stored of the last prompt sent."""
        if not sent:
            return unchecked(Check.EVENTS, "no prompt could be sent whose events might be waited for")
        believed, replica = 0, self.replica
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.events_s):
                while not replica.has_lost_events:
                    believed = max(self._believed(sent[-1]), self._reported(sent[-1]))
                    if believed >= self._predicted:
                        break
                    await asyncio.sleep(POLL_S)
        if believed >= self._predicted:
            return Finding(check=Check.EVENTS, outcome=ParityOutcome.VERIFIED)
        if replica.has_lost_events:
            return unchecked(Check.EVENTS, "its KV events cannot be reached, so its cache is estimated (`kv_events`)")
        if self.rotation.scheduler.num_unindexed > num_unindexed:
            return unchecked(Check.EVENTS, "the prefix index takes in nothing new (`scheduler.index_budget_mib`)")
        return mismatch(
            Check.EVENTS,
            f"its KV events reported {believed} of {self._predicted} tokens within {self.settings.events_s:g} s",
            misleads=True,
        )

    def _reported(self, prompt: PackedTokens) -> int:
        """Return tokens that events have reported, though they may be evicted by now."""
        probe = self.replica.probe_prompt
        return probe.reported_tokens if probe is not None and probe.tokens == prompt else 0

    def _believed(self, prompt: PackedTokens) -> int:
        replica_id = self.replica.engine.replica_id
        if replica_id not in self.rotation.replicas:
            return 0
        return self.rotation.scheduler.matched_tokens(replica_id, Request(RequestId("parity"), prompt))


async def _or_refusal(work: Awaitable[Sequence[int]]) -> Sequence[int] | RequestError:
    try:
        return await work
    except RequestError as refusal:
        return refusal
