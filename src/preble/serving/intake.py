"""From a request's bytes to a placement: every process that has clients has an intake."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from math import inf

from msgspec import Raw

from preble.config import GatewayConfig, TargetsConfig
from preble.core.types import TOKEN_BYTES, PackedTokens, ReplicaId, Request, RequestId, Role
from preble.errors import NoReplicaError, PromptTooLong, RequestError, UnknownResponse
from preble.prompts.endpoints import Endpoint, Fields
from preble.prompts.endpoints.bodies import PromptLimits
from preble.prompts.endpoints.ids import with_ids
from preble.prompts.tokens import TokenSource
from preble.prompts.tokens.pool import approximate_tokens, stand_in_tokens
from preble.rules.callers import ANYBODY, Caller
from preble.serving.placed import Placed
from preble.serving.replica_wait import ReplicaWait
from preble.serving.replicas.live import LiveReplicas, ModelReplicas
from preble.serving.requests import Admission, ParsedRequest, RequestIds, parse_request
from preble.serving.stored_responses import StoredResponses
from preble.serving.telemetry.metrics import Telemetry
from preble.serving.telemetry.readings import of_wait
from preble.serving.telemetry.tracing import Tracing
from preble.serving.terms import Terms, rank_of
from preble.serving.token_answers import TokenAnswers

BY_LOAD = "by load"
"""The namespace of requests without a known prompt, so that they match no other request's."""
_IDS_PAY_FROM = 1000 * TOKEN_BYTES
"""Shorter prompts go as text. Tokenizing this many takes an engine a millisecond or more, writing ids 30 us here
(docs/performance.md)."""
RANK_HEADER = b"x-data-parallel-rank"
_PARSED_AT_ONCE_BYTES = 128 * 1024
"""Larger bodies are decoded in another thread: one of this size holds the event loop for about a millisecond."""


class Intake:
    """Takes requests in and has them placed, by `Serving` in this process or by another process. Carriers use this.

    `ids`: of the requests that are being served. `replicas`: the live ones. `stored`: which of them has stored which
    response. `telemetry`: the metrics; a carrier counts its own in `telemetry.numbers`. `replica_wait`: where a request
    may wait before `tokenize` and `place` while no replica takes requests.
    """

    def __init__(
        self,
        config: GatewayConfig,
        replicas: LiveReplicas,
        telemetry: Telemetry,
        tokens: TokenSource,
        admitted: Callable[[ParsedRequest], Admission],
        place: Callable[[Request, Terms], Awaitable[Placed]],
    ) -> None:
        """`admitted`, `place`: by whoever decides; see below."""
        self.place = place
        """Places a request of these terms on a replica that serves its model, at its tenant's turn. Requests without a
        key do not wait. The caller must end the placement.

        Raises: NoReplicaError, PromptTooLong, UnknownModel. Overloaded: its turn cannot come in time. RequestError: a
        header about its turn is wrong.
        """
        self.admitted = admitted
        """Returns a context in which a request may be placed and answered. What `Admission.enter` raises may come from
        `place` instead."""
        self.replicas = replicas
        self.telemetry = telemetry
        self._config = config
        self._tokens = tokens
        self.ids = RequestIds()
        self._loop = asyncio.get_running_loop()
        self.stored = StoredResponses(replicas)
        self.replica_wait = ReplicaWait(replicas, config.timeouts.no_replica_wait_s)
        telemetry.numbers.read(lambda: of_wait(self.replica_wait.num_waiting))
        self.tracing: Tracing | None = None
        self._token_answers = TokenAnswers(config.tokenizer, tokens, replicas) if config.tokenizer else None

    async def parse(
        self,
        endpoint: Endpoint,
        headers: Mapping[bytes, bytes],
        body: bytes,
        request_id: str,
        caller: Caller = ANYBODY,
    ) -> ParsedRequest:
        """Read a request to one of `ENDPOINTS`. `headers`: names in lower case. Raises: RequestError."""
        config = self._config.limits
        vocabulary = self._tokens.vocabulary if self.replicas.one_model else None
        limits = PromptLimits(config.max_prompts, self.replicas.longest_prompt, config.max_answers, vocabulary)
        now, salts = self._loop.time(), self.replicas.take_cache_salts
        begun = None if endpoint.text_start is None else self._tokens.begin(body, endpoint.text_start)
        given = (endpoint, headers, body, request_id, limits, caller, salts, now, begun)
        is_small = len(body) - (0 if begun is None else begun.known) <= _PARSED_AT_ONCE_BYTES
        parsed = parse_request(*given) if is_small else await asyncio.to_thread(parse_request, *given)
        parsed.of_model = self._targets_of(parsed.fields.model)
        if self.tracing is not None:
            parsed.trace = self.tracing.begin(endpoint.path, parsed.fields.model, headers, request_id, parsed.session)
        return parsed

    def take(
        self, endpoint: Endpoint, headers: Mapping[bytes, bytes], fields: Fields, request_id: str, caller: Caller
    ) -> ParsedRequest:
        """Return the request of a body that the carrier passes on as it comes, having read `fields` itself."""
        now = self._loop.time()
        of_model = self._targets_of(fields.model)
        return ParsedRequest(endpoint, headers, b"", request_id, fields, caller, now, of_model=of_model)

    def _targets_of(self, model: str | None) -> TargetsConfig | None:
        """Return the targets of a model, by the name that the client gave, else by the first one that is served."""
        models = self._config.models
        return models.get(model or self.replicas.label(None)) if models else None

    def priority(self, parsed: ParsedRequest, placed: Placed) -> int | None:
        """Return the `priority` that the body is to have at the replica, by the request's class; None for none.

        Raises: RequestError: there is no such class.
        """
        if not parsed.endpoint.takes_priority:
            return None
        replica = self.replicas.get(placed.placement.replica_id)
        order = None if replica is None else replica.info.priority
        return None if order is None else order.value(rank_of(parsed.terms, self._config.queue.classes))

    def gaps(self, parsed: ParsedRequest) -> Callable[[float], None] | None:
        """Return what counts the gaps between the pieces of a streamed answer, in seconds; None where they are not
        tokens'. Raises: UnknownModel.
        """
        if parsed.endpoint.by_load:
            return None
        return self.telemetry.gaps(self.replicas.of_model(parsed.fields.model).label)

    async def answer_here(self, endpoint: Endpoint, body: bytes) -> bytes | None:
        """Return the answer in JSON to a request that needs only the tokenizer, None if it needs a replica.

        Raises: RequestError, NoReplicaError, UnknownModel.
        """
        if not endpoint.of_tokens or self._token_answers is None:
            return None
        return await self._token_answers.answer(endpoint, body)

    async def tokenize(self, parsed: ParsedRequest, index: int = 0, *, in_pairs: bool = True) -> Request:
        """Return the scheduler's request for one prompt. If there are several prompts, its id is `ID#index`.

        `in_pairs`: whether its carrier can ask two replicas. Raises: RequestError: the prompt has no token ids, or
        continues what no replica can. NoReplicaError: no replica is up, or none that can be asked alone. UnknownModel.
        """
        fields = parsed.fields
        of_model = self.replicas.check_model(fields.model)
        avoid = frozenset[ReplicaId]()
        if (rank := parsed.headers.get(RANK_HEADER)) is not None:
            avoid = self.replicas.of_other_ranks(rank)
        if fields.continues is not None:
            holder = await self.stored.holder(fields.continues, parsed.caller)
            of_model = self.replicas.check_model(fields.model)  # replicas may have left meanwhile
            if holder is not None:
                avoid = self._all_but(holder, of_model)
            elif parsed.caller.name:  # it may be another tenant's, and the replica would not know
                raise UnknownResponse(f"no replica has a response with the id {fields.continues[:200]!r}")
        paired = of_model.paired
        splits = in_pairs and (paired is None or paired.answers_in_pairs(parsed.endpoint.path, parsed.body))
        if not in_pairs and of_model.only_in_pairs and not of_model.answers_alone:
            one = min(of_model.only_in_pairs)
            raise NoReplicaError(f"{one} only decodes: no upload can go there, nor what the gateway does not carry")
        if fields.by_load:
            tokens = stand_in_tokens(int(min(fields.load_tokens, of_model.shortest_prompt)))
            return Request(RequestId(parsed.request_id), tokens, None, BY_LOAD, avoid, keeps_kv=False, splits=splits)
        tokens = await self._token_ids(parsed, index, of_model)
        if fields.truncate_prompt_tokens is not None:
            tokens = fields.truncated(tokens)
        own_id = parsed.request_id if parsed.num_prompts == 1 else f"{parsed.request_id}#{index}"
        of_model = self.replicas.of_model(fields.model)  # tokenizing may have taken a while
        namespace = of_model.namespace(fields.cache_salt)
        model = of_model.base_model
        return Request(RequestId(own_id), tokens, fields.most_output_tokens, namespace, avoid, model, splits=splits)

    def _all_but(self, holder: ReplicaId, of_model: ModelReplicas) -> frozenset[ReplicaId]:
        """Return the replicas that cannot go on with a response of `holder`. Raises: RequestError: nor can that one."""
        if holder in of_model.only_in_pairs:
            text = f"{holder} has the earlier response, but not the replicas that compute its prompts; send the whole"
            raise RequestError(f"{text} conversation in place of `previous_response_id`", param="previous_response_id")
        those = self.replicas.items()
        return frozenset(r for r, one in those if r != holder and one.info.spec.role is not Role.PREFILL)

    async def with_ids(self, parsed: ParsedRequest, request: Request) -> bytes | None:
        """Return the body with token ids in place of a long text, None if the replica gets the client's body.

        It has ids only if each replica of the model answers them as it answers the text (`tokenizing.send_ids`).
        """
        is_one_long = parsed.num_prompts == 1 and len(request.prompt) >= _IDS_PAY_FROM
        if not is_one_long or not self.replicas.of_model(parsed.fields.model).takes_ids:
            return None
        return await with_ids(parsed.endpoint.path, parsed.body, request.prompt)

    async def _token_ids(self, parsed: ParsedRequest, index: int, of_model: ModelReplicas) -> PackedTokens:
        fields = parsed.fields
        started = time.perf_counter()
        is_long = len(parsed.body) > _PARSED_AT_ONCE_BYTES and fields.truncate_prompt_tokens is None
        most_tokens = of_model.longest_prompt if is_long else inf
        if fields.begun is not None:
            tokens = await self._tokens.complete(fields.begun, fields.add_special_tokens, most_tokens)
        elif not fields.prompts:
            tokens = await self._chat_ids(fields, most_tokens, of_model.engine)
        elif isinstance(prompt := fields.prompts[index], (str, Raw)):
            tokens = await self._tokens.completion(prompt, fields.add_special_tokens, fields.model, most_tokens)
        else:
            return prompt
        took_s = time.perf_counter() - started
        self.telemetry.numbers.observe("preble_tokenizing_seconds", of_model.label, value=took_s)
        if parsed.trace is not None:
            parsed.trace.tokenized(took_s, len(tokens) // TOKEN_BYTES)
        return tokens

    async def _chat_ids(self, fields: Fields, most_tokens: float, engine: str) -> PackedTokens:
        chat = fields.chat
        if fields.special_tokens_on_vllm and engine == "vllm":
            chat = chat[:-1] + b',"add_special_tokens":true}'
        try:
            return await self._tokens.chat(chat, fields.model, most_tokens, engine=engine)
        except RequestError as error:
            # The client sent no chat: the replica refuses the body in the words of its own endpoint.
            if not fields.is_translated or isinstance(error, PromptTooLong):
                raise
            return approximate_tokens(fields.chat)

    async def _close_tracing(self) -> None:
        """Send the rest of the spans."""
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    async def place_together(
        self, parsed: ParsedRequest, avoid: Callable[[], frozenset[ReplicaId]] = frozenset
    ) -> list[Placed]:
        """Place all prompts of a request on one replica, for a carrier that sends it whole.

        `avoid`: returns the replicas that must not get it, asked when it is placed.
        Raises: as `tokenize` and `place`.
        """
        placed: list[Placed] = []
        try:
            for index in range(parsed.num_prompts):
                request = await self.tokenize(parsed, index, in_pairs=False)
                others = frozenset(self.replicas) - {placed[0].placement.replica_id} if placed else avoid()
                request = dataclasses.replace(request, avoid=request.avoid | others)
                placed.append(await self.place(request, parsed.terms))
                placed[-1].asked_alone()
        except BaseException:
            for one in placed:
                one.cancelled()
            raise
        return placed
