"""A profile of replicas that copy KV from each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from preble.profiles import load_profile, profile_json

KV_BYTES = 1000


def linked_profile(folder: Path, *, s_per_token: float, bytes_per_s: float, latency_s: float) -> Path:
    """Write a profile of a replica that computes a token in so many seconds, and copies it over such a link."""
    profile = replace(
        load_profile("tiny-cpu"),
        prefill_points=((0, 0.0), (1000, 1000 * s_per_token)),
        kv_bytes_per_token=KV_BYTES,
        link_bytes_per_s=bytes_per_s,
        link_latency_s=latency_s,
    )
    file = folder / "linked.json"
    file.write_text(profile_json(profile))
    return file
