"""The settings of an emulated replica."""

from __future__ import annotations

from pathlib import Path

import msgspec

from preble.core.replica.waiting_queue import QueueOrder
from preble.core.types import KV_LEASE_S, Role
from preble.errors import ConfigError


class EmulatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One emulated replica.

    `profile`: name of a shipped cost profile, or path of a file. `host`, `port`: where it listens; port 0 lets the
    system choose. `kv_tokens`: size of the KV cache, None for the profile's. `events_port`: of KV events, 0 lets the
    system choose, None publishes none; `replay_port`: of their replay. `speed`: how many times faster than the profile.
    `tokenizer`: folder (or file) with `tokenizer.json`, None for the built-in one. `model`: name that it serves, None
    for the profile's. `max_model_len`: longest prompt with its output, in tokens, None for all that the cache holds.
    `metrics_block_size`: what its metrics say of its block size, None for the truth.
    `data_parallel_size`: ranks, each with a cache, events (at the port plus its number) and a queue of its own.
    `host_tokens`: of KV that its host's memory keeps too. `store`: folder in which it shares KV with other replicas,
    None for none. Loading takes the profile's time. `p2p`: it copies KV from others that do, as vLLM's p2p tier does.
    `role`: it only prefills for others or only decodes what they prefilled, as SGLang with `--disaggregation-mode`, and
    answers as SGLang does; None for both. The profile's link sends KV. `bootstrap_port`: where those that decode find
    one that prefills, 0 lets the system choose. `decode_caches`: one that decodes keeps a prefix cache. `failures`: the
    share of transfers to it that fail. `mooncake`: as SGLang sends KV unless told otherwise: after a transfer that has
    failed, nothing comes from the same replica any more.
    `nixl`: one computes a prompt that another one fetches, as vLLM with NIXL does, and keeps it for `lease_s`.
    `replay_batches`: of KV events that can be asked for again.
    `drops_last_block`: computes the last block that it finds cached, as with speculative decoding. `said_events_port`:
    where it says that its KV events are, None for the truth.
    `image_tokens`: what each image, video or sound in a chat counts.
    `max_batch_tokens`, `max_running`: of one iteration. `default_output_tokens`: length of a chat answer for which the
    client gave no limit.
    """

    profile: str
    host: str = "127.0.0.1"
    port: int = 0
    kv_tokens: int | None = None
    events_port: int | None = None
    replay_port: int = 0
    events_topic: str = ""
    speed: float = 1.0
    tokenizer: str | None = None
    model: str | None = None
    max_model_len: int | None = None
    block_size: int = 16
    metrics_block_size: int | None = None
    data_parallel_size: int = 1
    image_tokens: int = 64
    host_tokens: int = 0
    store: str | None = None
    p2p: bool = False
    role: Role = Role.MIXED
    bootstrap_port: int = 0
    decode_caches: bool = False
    failures: float = 0.0
    mooncake: bool = False
    nixl: bool = False
    lease_s: float = KV_LEASE_S
    replay_batches: int = 10_000
    drops_last_block: bool = False
    said_events_port: int | None = None
    max_batch_tokens: int = 2048
    max_running: int = 256
    order: QueueOrder = QueueOrder.FCFS
    default_output_tokens: int = 128

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "max_batch_tokens",
            "max_running",
            "default_output_tokens",
            "data_parallel_size",
            "image_tokens",
            "replay_batches",
        ):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("port", "bootstrap_port", "events_port", "replay_port", "said_events_port"):
            port = getattr(self, name)
            _require(port is None or 0 <= port <= 65535, f"{name} must be from 0 to 65535, got {port}")
        _require(self.host_tokens >= 0, f"host_tokens must be at least 0, got {self.host_tokens}")
        _require(self.store is None or Path(self.store).is_dir(), f"there is no folder {self.store!r} for the store")
        _require(0 <= self.failures <= 1, f"failures must be from 0 to 1, got {self.failures}")
        _require(self.lease_s > 0, f"lease_s must be more than 0, got {self.lease_s}")
        _require(self.speed > 0, f"speed must be more than 0, got {self.speed}")
        _require(
            self.kv_tokens is None or self.kv_tokens >= 2 * self.block_size,
            f"kv_tokens must be at least two blocks of {self.block_size}, got {self.kv_tokens}",
        )
        _require(
            self.max_model_len is None or self.max_model_len >= 2,
            f"max_model_len must be at least 2, got {self.max_model_len}",
        )
        _require(
            self.max_running <= self.max_batch_tokens,
            f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_running ({self.max_running}), "
            "so that every running request has its token",
        )


def _require(is_good: bool, message: str) -> None:
    if not is_good:
        raise ConfigError(f"emulator: {message}")
