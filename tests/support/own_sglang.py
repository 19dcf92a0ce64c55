"""A real SGLang server of one test's own."""

from __future__ import annotations

from pathlib import Path

from preble.engines.launch import LaunchOptions
from support.replicas import (
    KV_TOKENS,
    MAX_MODEL_LEN,
    MODEL_NAME,
    READY_TIMEOUT_S,
    SGLANG,
    TINY_MODEL,
    require_sglang,
)


def own_sglang(folder: Path, *extra_args: str) -> LaunchOptions:
    """Options of one server with these arguments besides, and its log in `folder`."""
    require_sglang()
    return LaunchOptions(
        engine="sglang",
        replicas=1,
        threads=1,
        log_dir=folder,
        model=str(TINY_MODEL),
        served_model_name=MODEL_NAME,
        kv_tokens=KV_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        executable=SGLANG,
        ready_timeout_s=READY_TIMEOUT_S,
        extra_args=extra_args,
    )
