"""Bodies that are not JSON, such as sound files: the replica gets them as they come, once their model is known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from preble.config import GatewayConfig
from preble.errors import BodyTooLarge, BodyTooSlow, EngineRefused, EngineTimeout
from preble.gateway.http.bodies import BodyShare, check_encoding
from preble.gateway.http.headers import PassedHeaders
from preble.gateway.http.page_client import PageClient
from preble.gateway.requests.relay import Placing
from preble.gateway.requests.replies import pass_on
from preble.prompts.endpoints import Endpoint, Fields, UploadHead
from preble.serving import Intake, ParsedRequest, Placed


class Upload:
    """One body. Iterate over it once a replica is sure to take it: before that, it can go to another replica."""

    def __init__(self, client: PageClient, limit: int, body_s: float, memory: BodyShare) -> None:
        """`limit`: of all of it, in bytes. `body_s`: the longest wait for its beginning, and then for each piece."""
        self._pieces = client.pieces(body_s)
        self._body_s = body_s
        self._client = client
        self._head = UploadHead(client.headers.get(b"content-type", b""), client.head.declared_bytes)
        self._limit = limit
        self._memory = memory
        self.has_begun = False
        """Whether some of it was sent, so that it cannot be sent again."""
        self.failure: Exception | None = None
        """Why the rest of it could not be read."""

    async def read_fields(self) -> Fields:
        """Read as much as it takes to know the model, which the gateway keeps: so all of it within `body_s`.

        Raises: RequestError: that is too much. BodyEncoded, BodyTooLarge, BodyTooSlow, ClientGone, Overloaded.
        """
        check_encoding(self._client.head)
        self._check(self._client.head.declared_bytes)
        try:
            async with asyncio.timeout(self._body_s):
                return await self._fields()
        except TimeoutError as error:
            text = f"the beginning of the body, with its model, did not arrive within {self._body_s:g} s"
            raise BodyTooSlow(text) from error

    async def _fields(self) -> Fields:
        async for piece in self._pieces:
            self._memory.grow(len(piece))
            fields = self._head.add(piece)
            self._check(len(self._head.bytes))
            if fields is not None:
                return fields
        return self._head.whole()

    def _check(self, size: int) -> None:
        if size > self._limit:
            text = f"the body has {size} bytes or more; the limit is {self._limit} (`limits.max_upload_bytes`)"
            raise BodyTooLarge(text)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self.has_begun = True
        size = len(self._head.bytes)
        try:
            yield bytes(self._head.bytes)
            async for piece in self._pieces:
                size += len(piece)
                self._check(size)
                yield piece
        except Exception as error:
            self.failure = error
            raise


class Uploads:
    """Answers requests whose bodies are no JSON. They move to another replica only before anything was sent."""

    def __init__(self, serving: Intake, config: GatewayConfig) -> None:
        self._serving = serving
        self._limits = config.limits
        self._timeouts = config.timeouts
        self._passed = PassedHeaders(config.auth, of_body=True)

    async def answer(self, endpoint: Endpoint, client: PageClient, memory: BodyShare) -> None:
        """Answer one request. Raises: PrebleError. ClientGone: the client has left."""
        with self._serving.ids.taken(client.headers) as request_id:
            client.request_id = request_id
            upload = Upload(client, self._limits.max_upload_bytes, self._timeouts.body_s, memory)
            fields = await upload.read_fields()
            parsed = self._serving.take(endpoint, client.headers, fields, request_id, client.caller)
            client.model = self._serving.replicas.label(parsed.fields.model)
            total_s = self._timeouts.total_s
            async with self._serving.admitted(parsed) as parsed:
                client.request_id = parsed.request_id
                try:
                    with client.unless_gone():
                        async with asyncio.timeout(total_s):
                            await self._place(client, parsed, upload)
                except TimeoutError as error:
                    raise EngineTimeout(f"the answer took longer than {total_s:g} s") from error

    async def _place(self, client: PageClient, parsed: ParsedRequest, upload: Upload) -> None:
        headers = self._passed.of(parsed)
        await self._serving.replica_wait.over()
        placing = Placing(self._serving, await self._serving.tokenize(parsed, in_pairs=False), parsed)
        placed = await placing.place()
        while True:
            try:
                await self._carry(client, placed, parsed.endpoint, headers, upload)
                return
            except EngineRefused:
                if upload.has_begun:
                    raise
                placed = await placing.place_again(placed, is_gone=True)

    async def _carry(
        self, client: PageClient, placed: Placed, endpoint: Endpoint, headers: Mapping[str, str], upload: Upload
    ) -> None:
        placed.asked_alone()
        try:
            async with placed.engine.http.forward("POST", endpoint.path, headers, upload) as response:
                await pass_on(client, response, placed.placement)
            placed.end(status=400 if endpoint.is_unsupported(response.status) else response.status)
        except BaseException as error:
            if upload.failure is not None:  # the client's, not the replica's
                placed.cancelled()
                raise upload.failure from None
            placed.end(error)
            raise
