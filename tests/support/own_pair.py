"""A real SGLang that only prefills and one that only decodes, on this machine's CPU."""

from __future__ import annotations

from pathlib import Path

from preble.core.types import Role
from preble.engines.starting.launch import LaunchOptions
from support.replicas import SGLANG, options_of_one, require_sglang
from support.servers import require_server


def pair_options(folder: Path, *extra_args: str) -> LaunchOptions:
    """Options of both, the prefilling one first, with their logs in `folder`."""
    require_sglang()
    require_server("nixl", "python")
    return options_of_one(
        "sglang", SGLANG, folder, replicas=2, roles=(Role.PREFILL, Role.DECODE), extra_args=extra_args
    )
