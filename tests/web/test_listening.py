from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from preble.errors import ConfigError
from preble.web.server import listening
from preble.web.server.listening import is_open_to_network, listen, listen_shared


def test_a_port_in_use_is_reported_with_the_remedy() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .* choose another port"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 70, "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_reported_with_the_remedy(host: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on .*; give (a name or|an) address of this machine"):
        listen(host, 0)


def test_a_listening_socket_says_that_it_is_tcp() -> None:
    """Or asyncio would leave Nagle's algorithm on for every connection that it accepts."""
    with listen("127.0.0.1", 0) as sock:
        assert sock.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize(
    ("family", "address", "is_open"),
    [
        (socket.AF_INET, ("0.0.0.0", 1), True),
        (socket.AF_INET, ("127.0.0.1", 1), False),
        (socket.AF_INET6, ("::", 1, 0, 0), True),
        (socket.AF_INET6, ("::1", 1, 0, 0), False),
        (socket.AF_INET6, ("fe80::1%eth0", 1, 0, 2), True),
    ],
)
def test_a_socket_that_other_machines_can_reach_is_known(
    family: int, address: tuple[object, ...], is_open: bool
) -> None:
    listener = Mock(spec=socket.socket, family=family)
    listener.getsockname.return_value = address
    assert is_open_to_network(listener) == is_open


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not share connections out")
def test_sockets_that_share_a_port_get_a_part_of_the_connections_each() -> None:
    sockets = listen_shared("127.0.0.1", 0, 2)
    with contextlib.ExitStack() as stack:
        for sock in sockets:
            stack.enter_context(sock)
        [address] = {sock.getsockname() for sock in sockets}
        for _ in range(64):
            stack.enter_context(socket.create_connection(address))
        counts = [len(list(accepted(sock, stack))) for sock in sockets]
        assert sum(counts) == 64 and min(counts) > 0
        with pytest.raises(ConfigError, match="choose another port"):
            listen_shared("127.0.0.1", address[1], 2)


def accepted(sock: socket.socket, stack: contextlib.ExitStack) -> Iterator[socket.socket]:
    with contextlib.suppress(BlockingIOError):
        while True:
            yield stack.enter_context(sock.accept()[0])


@pytest.mark.skipif(sys.platform != "linux", reason="others share one socket")
def test_no_other_gateway_gets_in_while_one_opens_its_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    first = listen("127.0.0.1", 0)
    port = first.getsockname()[1]
    monkeypatch.setattr(listening, "listen", lambda *_: first)
    make, tried = socket.socket, []

    def make_after_another_has_tried(*kind: int) -> socket.socket:
        with make() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
        tried.append(kind)
        return make(*kind)

    monkeypatch.setattr(listening.socket, "socket", make_after_another_has_tried)
    sockets = listen_shared("127.0.0.1", port, 3)
    assert len(sockets) == 3 and len(tried) == 2
    for one in sockets:
        one.close()
