"""A TCP relay that can be cut: a network that fails while both ends live."""

from __future__ import annotations

import asyncio
import contextlib


class TcpRelay:
    """Forwards connections to `target` (tcp://host:port) from an address of its own."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._port = int(port)
        self._is_cut = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def __aenter__(self) -> TcpRelay:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        await self.cut()

    async def cut(self) -> None:
        """Break every connection, and each new one until `mend`."""
        self._is_cut = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def mend(self) -> None:
        self._is_cut = False

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.close()
            return
        task = asyncio.create_task(self._forward(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.close())

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_copy(reader, there_writer))
                tasks.create_task(_copy(there_reader, writer))
        finally:
            there_writer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while chunk := await source.read(65536):
            target.write(chunk)
            await target.drain()
