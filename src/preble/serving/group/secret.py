"""What all gateways of a group know and nobody else: the keys of their packets are made from it."""

from __future__ import annotations

from pathlib import Path

from preble.config import GatewayConfig
from preble.config.keys import load_keys, named_key
from preble.errors import ConfigError
from preble.peers.packets import MOST_MACS
from preble.peers.seal import group_key

_LEAST_LETTERS = 16


def packet_keys(config: GatewayConfig) -> tuple[bytes, ...]:
    """Return the keys with which the group's packets are sealed; none is secret where there is nothing to make it from.

    Each line of `peers.secret_file` is a secret. Without that file, all API keys together are one: gateways of a group
    have the same. Raises: ConfigError: the file of secrets, or of API keys, is unusable.
    """
    return tuple(group_key(secret, config.peers.cluster) for secret in _secrets(config))


def has_secret(config: GatewayConfig) -> bool:
    """Return whether there is anything to make a secret key from."""
    auth = config.auth
    return bool(config.peers.secret_file or auth.api_keys or auth.admin_keys or auth.keys_file)


def _secrets(config: GatewayConfig) -> list[bytes]:
    if config.peers.secret_file is not None:
        return _lines(config.peers.secret_file)
    auth = config.auth
    hashes = {named_key(key)[1] for key in (*auth.api_keys, *auth.admin_keys)}
    if auth.keys_file is not None:
        hashes |= {key.sha256 for key in load_keys(auth.keys_file, config.queue.classes).values()}
    return ["\n".join(sorted(hashes)).encode()]


def _lines(path: str) -> list[bytes]:
    try:
        lines = [line.strip() for line in Path(path).expanduser().read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"peers.secret_file {path!r} cannot be read: {error.strerror or error}") from error
    if not 1 <= len(lines) <= MOST_MACS or min(map(len, lines)) < _LEAST_LETTERS:
        text = f"give it one to {MOST_MACS} lines of {_LEAST_LETTERS} letters or more, such as: openssl rand -hex 32"
        raise ConfigError(f"peers.secret_file {path!r} holds no usable secret; {text}")
    return lines
