from __future__ import annotations

import socket
from unittest.mock import Mock

import pytest

from preble.errors import ConfigError
from preble.web.listening import is_open_to_network, listen


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
