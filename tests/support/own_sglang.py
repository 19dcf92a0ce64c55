"""A real SGLang server of one test's own."""

from __future__ import annotations

from pathlib import Path

from preble.engines.starting.launch import LaunchOptions
from support.replicas import SGLANG, options_of_one, require_sglang


def own_sglang(folder: Path, *extra_args: str) -> LaunchOptions:
    """Options of one server with these arguments besides, and its log in `folder`."""
    require_sglang()
    return options_of_one("sglang", SGLANG, folder, extra_args=extra_args)
