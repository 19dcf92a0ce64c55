from __future__ import annotations

import socket

import pytest

from preble.errors import ConfigError
from preble.web.listening import listen


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
