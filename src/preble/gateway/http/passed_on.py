"""Requests that a front-end process has passed on: its clients are answered there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from preble.prompts.endpoints import HeaderList
from preble.serving import PageAnswer, PageRequest
from preble.web.messages import by_name
from preble.web.server.answering import RequestHead

_NOT_PASSED_BACK = frozenset({b"content-length", b"connection"})


class PassedOn:
    """One such request, with the methods of `AwaitedRequest`. Its client never goes before it has the answer."""

    def __init__(self, request: PageRequest) -> None:
        self.head = RequestHead(request.method, request.path, by_name(list(request.headers)), request.query)
        self._number = request.number
        self._body = request.body
        self._status = 500
        self._headers: HeaderList = []
        self._answer = bytearray()

    async def piece(self) -> bytes:
        body, self._body = self._body, b""
        return body

    def unless_gone(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def drained(self) -> None:
        """Nobody reads it yet."""

    def reply(self, status: int, headers: HeaderList, body: bytes) -> None:
        self.begin(status, headers)
        self.write(body)

    def begin(self, status: int, headers: HeaderList) -> None:
        self._status, self._headers = status, headers

    def write(self, data: bytes) -> None:
        self._answer += data

    def end(self) -> None:
        """The answer is complete."""

    def page_answer(self) -> PageAnswer:
        """Return the answer for the process that has passed the request on."""
        headers = [header for header in self._headers if header[0] not in _NOT_PASSED_BACK]
        return PageAnswer(self._number, self._status, headers, bytes(self._answer))
