from __future__ import annotations

import pytest

from preble.errors import ConfigError
from preble.web.urls import server_url


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("http://a:1/", "http://a:1"),
        ("http://a:1/v1", "http://a:1"),
        ("https://a/base/v1/", "https://a/base"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("HTTP://GPU-1.Example:80", "http://gpu-1.example:80"),
        ("http://a/Case/Counts", "http://a/Case/Counts"),
    ],
)
def test_urls_are_taken_without_what_every_request_adds(given: str, taken: str) -> None:
    assert server_url(given) == taken


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "is not a URL of a server"),
        ("gpu1:8000", "is not a URL of a server"),
        ("ftp://host", "is not a URL of a server"),
        ("http://", "is not a URL of a server"),
        ("//host", "is not a URL of a server"),
        ("http://a:0", "is not a URL of a server"),
        ("http://a:port", "is not a URL"),
        ("http://a:99999", "is not a URL"),
        ("http://[::1", "is not a URL"),
        ("http://a?x=1", "query or fragment"),
        ("http://a/#x", "query or fragment"),
        ("http://user:secret@a", "give it as an API key"),
    ],
)
def test_what_is_no_address_of_a_server_is_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        server_url(given)
    assert "secret" not in str(caught.value)
