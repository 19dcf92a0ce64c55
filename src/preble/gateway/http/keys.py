"""API keys: who sends a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256

from preble.config import AuthConfig
from preble.config.keys import KeyConfig, load_keys, named_key
from preble.prompts.endpoints import ErrorForm
from preble.rules.callers import ANYBODY, Caller

UNAUTHORIZED = ErrorForm(
    401,
    "authentication_error",
    "invalid_api_key",
    "give a valid API key, as `Authorization: Bearer KEY` or `x-api-key: KEY`",
)

NOBODY = Caller(is_admin=False)
"""The caller whose key is missing or wrong."""


class KeyRing:
    """The keys that are accepted. Without any, everybody is let in and may do everything.

    `has_keys`: whether anybody is asked for a key.

    Keys are compared by their hashes, so the time of a check reveals nothing about a key.
    """

    def __init__(self, config: AuthConfig, classes: tuple[str, ...] = ()) -> None:
        """`classes`: of priority, which keys may name. Raises: ConfigError: the file of keys is unusable."""
        self._config = config
        self._classes = classes
        callers: dict[str, Caller] = {}
        for is_admin, given in ((False, self._config.api_keys), (True, self._config.admin_keys)):
            for name, digest in map(named_key, given):
                callers[digest] = _caller(name, KeyConfig(digest, admin=is_admin))
        if self._config.keys_file is not None:
            named = load_keys(self._config.keys_file, self._classes)
            callers |= {key.sha256: _caller(name, key) for name, key in named.items()}
        # The same in every gateway that has these keys, also after a restart: what is cached stays usable.
        secrets = {callers[digest].tenant: digest for digest in sorted(callers, reverse=True)}
        self._callers: Mapping[str, Caller] = {
            digest: replace(caller, secret=secrets[caller.tenant]) for digest, caller in callers.items()
        }
        self.has_keys = bool(callers) or config.keys_file is not None

    @property
    def num_keys(self) -> int:
        """How many keys are accepted."""
        return len(self._callers)

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller | None:
        """Return who sends a request with these headers; None if the key is missing or wrong."""
        if not self.has_keys:
            return ANYBODY
        return self._callers.get(sha256(_given(headers)).hexdigest())


def _given(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    return bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()


def _caller(name: str, key: KeyConfig) -> Caller:
    return Caller(
        name=name,
        tenant=key.tenant or name,
        is_admin=key.admin,
        shares_cache=key.share_cache,
        weight=key.weight,
        limits=key,
    )
