"""What a vLLM replica says of itself: its version, where it publishes events, its cache, and how it transfers KV."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from preble.core.types import KV_LEASE_S

CACHE_CONFIG_METRIC = "vllm:cache_config_info"
DEFAULT_BLOCK_SIZE = 16
_P2P_HOST, _P2P_PORT = "localhost", 5710


class VersionAnswer(msgspec.Struct):
    version: str


class VllmEventSource(msgspec.Struct):
    """Where one data-parallel rank publishes its KV events."""

    endpoint: str | None = None
    enable_kv_cache_events: bool = True
    publisher: str | None = "zmq"
    replay_endpoint: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What the replica says of its KV cache. `num_blocks`: those of one data-parallel rank that can hold tokens.
    `data_type`: as its flag has it, so "auto" is that of the model.
    """

    block_size: int
    num_blocks: int | None
    num_ranks: int = 1
    data_type: str = ""

    @property
    def capacity_tokens(self) -> int | None:
        return None if self.num_blocks is None else self.num_blocks * self.block_size


class SecondaryTier(msgspec.Struct):
    """One of the secondary tiers in `kv_connector_extra_config`."""

    type: str = ""
    host: str = _P2P_HOST
    port: int = _P2P_PORT


class TierConfig(msgspec.Struct):
    secondary_tiers: list[SecondaryTier] = []
    kv_lease_duration: float = KV_LEASE_S
    bidirectional_kv_xfer: bool = False


class TransferConfig(msgspec.Struct):
    kv_connector: str | None = None
    kv_role: str | None = None
    kv_load_failure_policy: str = "fail"
    kv_connector_extra_config: TierConfig = msgspec.field(default_factory=TierConfig)

    def against_splits(self) -> str | None:
        """Return why a replica with NIXL must not split requests with others; None if it may.

        >>> TransferConfig("NixlConnector", "kv_both").against_splits()
        'kv_load_failure_policy is not recompute: a source that is gone would fail its requests'
        """
        if self.kv_role != "kv_both":
            return "kv_role is not kv_both: any of them may compute or decode"
        if self.kv_load_failure_policy != "recompute":
            return "kv_load_failure_policy is not recompute: a source that is gone would fail its requests"
        if self.kv_connector_extra_config.bidirectional_kv_xfer:
            return "bidirectional_kv_xfer is on: it would keep what it has decoded for minutes"
        return None if self.kv_connector_extra_config.kv_lease_duration > 0.0 else "kv_lease_duration is not positive"


class ModelConfig(msgspec.Struct):
    dtype: str = ""


class VllmConfig(msgspec.Struct):
    kv_transfer_config: TransferConfig | None = None
    model_config: ModelConfig = msgspec.field(default_factory=ModelConfig)


class VllmServerInfo(msgspec.Struct):
    """What matters of `/server_info`, which vLLM has in its development mode."""

    vllm_config: VllmConfig


def read_cache_config(metrics: str, *, has_null_block: bool) -> CacheConfig:
    """Return what Prometheus text says of it; defaults where they are missing.

    `has_null_block`: one of the reported blocks is a placeholder that never holds tokens, as in vLLM.
    Raises: ValueError: a line of it is malformed, or a number has more digits than Python reads.
    """
    # Only this metric's lines: parsing all of a busy engine's histograms would take tens of milliseconds.
    lines = [line for line in metrics.splitlines() if line.startswith(CACHE_CONFIG_METRIC)]
    samples = [s for family in text_string_to_metric_families("\n".join(lines) + "\n") for s in family.samples]
    if not samples:
        return CacheConfig(DEFAULT_BLOCK_SIZE, None)
    labels = samples[0].labels
    num_ranks = len({sample.labels.get("engine") for sample in samples})
    blocks = (positive(labels.get("num_gpu_blocks")) or 0) // num_ranks  # each rank's series has the sum of all
    usable = blocks - 1 if blocks and has_null_block else blocks
    block_size = positive(labels.get("block_size")) or DEFAULT_BLOCK_SIZE
    return CacheConfig(block_size, usable or None, num_ranks, labels.get("cache_dtype", ""))


def positive(label: str | None) -> int | None:
    """Return a label's value if it is a positive whole number.

    >>> positive("32"), positive("None"), positive("0"), positive(None)
    (32, None, None, None)
    """
    return int(label) if label and label.isascii() and label.isdigit() and int(label) > 0 else None
