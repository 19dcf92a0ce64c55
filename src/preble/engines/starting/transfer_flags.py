"""The flags and variables with which a vLLM replica on this machine sends KV to others, and takes it from them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from preble.errors import ConfigError

TransferWay = Literal["p2p", "nixl"]
"""`p2p`: replicas copy prefixes from each other, through a tier in their hosts' memory. `nixl`: one also computes
prompts that another one decodes."""

OWN_NIXL = Path(".servers") / "nixl" / "lib"
"""Where `dev/setup.py` puts NIXL for the vLLM on CPUs. Other vLLM have their own."""
_HOST = "127.0.0.1"


def transfer_config(
    way: TransferWay, port: int, replicas: int, *, is_on_cpu: bool, own_nixl: Path | None
) -> tuple[list[str], Mapping[str, str]]:
    """Return the arguments and the environment variables of a replica. `replicas`: how many share the machine. `port`:
    where the others find it. `own_nixl`: the folder of NIXL for a vLLM on a CPU, which has none.

    Raises: ConfigError: vLLM cannot do so on a CPU.
    """
    if way == "p2p" and is_on_cpu:
        raise ConfigError("vLLM has its p2p tier on GPUs alone; --transfer nixl copies prefixes on a CPU, too")
    transfer = _p2p(port, replicas) if way == "p2p" else _nixl(is_on_cpu=is_on_cpu)
    both = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return ["--kv-transfer-config", json.dumps(transfer | both)], _variables(way, port, own_nixl if is_on_cpu else None)


def _variables(way: TransferWay, port: int, own_nixl: Path | None) -> Mapping[str, str]:
    common = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONHASHSEED": "0"}  # it says how it is configured; blocks have one name
    if way == "p2p":
        return {**common, "VLLM_P2P_HANDSHAKE_TIMEOUT_S": "2"}
    found = {**common, "VLLM_NIXL_SIDE_CHANNEL_HOST": _HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    if own_nixl is None:
        return found
    return {**found, "PYTHONPATH": str(own_nixl), "UCX_TLS": "tcp,self,sm", "TORCH_COMPILE_DISABLE": "1"}


def _nixl(*, is_on_cpu: bool) -> dict[str, Any]:
    return {"kv_connector": "NixlConnector", **({"kv_buffer_device": "cpu"} if is_on_cpu else {})}


def _p2p(port: int, replicas: int) -> dict[str, Any]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": memory // 2 // replicas,
        "self_describing_kv_events": True,
        "secondary_tiers": [{"type": "p2p", "host": _HOST, "port": port, "backends": ["UCX"]}],
    }
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
