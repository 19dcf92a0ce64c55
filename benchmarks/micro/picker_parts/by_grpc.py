"""gRPC calls over the library grpcio, with the interface of `preble.picker.calls.CallServer`."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from socket import socket
from typing import Any

import grpc

from preble.picker.calls import CallError, Method, Refusal


class Call:
    """As `preble.picker.calls.PickerCall`."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context

    async def read(self) -> bytes | None:
        message = await self._context.read()
        return None if message is grpc.aio.EOF else message

    num_alike = 0

    async def write(self, message: bytes) -> None:
        await self._context.write(message)


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, methods: Mapping[str, Method]) -> None:
        self._methods = methods

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = self._methods.get(details.method)

        async def serve(messages: AsyncIterator[bytes], context: Any) -> None:
            assert method is not None
            try:
                await method(Call(context))  # type: ignore[arg-type]
            except CallError as error:
                codes = {code.value[0]: code for code in grpc.StatusCode}
                await context.abort(codes[int(error.status)], str(error))

        return None if method is None else grpc.stream_stream_rpc_method_handler(serve)


class CallServer:
    """As `preble.picker.calls.CallServer`."""

    def __init__(self, methods: Mapping[str, Method], told: Callable[[Refusal], None]) -> None:
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((_Handler(methods),))

    async def start(self, sock: socket, tls: ssl.SSLContext | None) -> None:
        host, port = sock.getsockname()
        sock.close()
        self._server.add_insecure_port(f"{host}:{port}")
        await self._server.start()

    async def look_after(self) -> None:
        """Look after nothing. Never returns."""
        await asyncio.Event().wait()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
