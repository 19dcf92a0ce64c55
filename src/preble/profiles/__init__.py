"""Cost profiles as files, and the shipped ones: how long a replica of a known GPU and model takes.

The shipped profiles are data, made by `benchmarks/repro/make_profiles.py`; each names its origin in `source`.
`preble profile` measures a replica and writes such a file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from preble.core.costs.model import CostProfile
from preble.errors import ConfigError

_ADDED_LATER = (
    "request_overhead_s",
    "host_load_s_per_token",
    "store_load_s_per_token",
    "kv_bytes_per_token",
    "link_bytes_per_s",
)

_KV_BYTES_PER_TOKEN = MappingProxyType(
    {
        "a100-mistral-7b": 131_072,
        "a100x2-llama-3-70b": 327_680,
        "a6000-llama-2-7b-vllm": 524_288,
        "a6000-mistral-7b": 131_072,
        "h100-llama-3-8b": 131_072,
        "h100-mistral-7b": 131_072,
        "h100x2-llama-3-70b": 327_680,
        "h100x4-llama-3-70b": 327_680,
        "tiny-cpu": 1_024,
    }
)
"""Of the shipped profiles: layers x KV heads x their size x 2, in 16 bits. Not in their files, so that kept results
still name the profiles that they were made with."""

_DATA = resources.files(__name__) / "data"


def profile_names() -> list[str]:
    """Return the names of the shipped profiles, sorted."""
    return sorted(entry.name.removesuffix(".json") for entry in _DATA.iterdir() if entry.name.endswith(".json"))


def load_profile(name_or_path: str) -> CostProfile:
    """Return a shipped profile by name, or one from a JSON file.

    A slash or the ending `.json` marks a path. Raises: ConfigError: no such profile, or a bad file.
    """
    if "/" in name_or_path or name_or_path.endswith(".json"):
        path = Path(name_or_path)
        try:
            return _decode(path.read_bytes(), name_or_path)
        except OSError as error:
            raise ConfigError(f"cannot read profile {name_or_path!r}: {error.strerror}") from error
    if name_or_path not in profile_names():
        raise ConfigError(
            f"no profile is called {name_or_path!r}; choose one of {', '.join(profile_names())}, or give a .json file"
        )
    return _decode((_DATA / f"{name_or_path}.json").read_bytes(), name_or_path)


def with_kv_size(profile: CostProfile) -> CostProfile:
    """Return the profile with `kv_bytes_per_token`, where it is a shipped one that lacks it."""
    if profile.kv_bytes_per_token is not None:
        return profile
    return replace(profile, kv_bytes_per_token=_KV_BYTES_PER_TOKEN.get(profile.name))


def profile_fields(profile: CostProfile) -> dict[str, Any]:
    """Return the fields to write; a field that was added later only if it is set.

    So the files of older profiles, and the keys of results made with them, stay the same.
    """
    table = asdict(profile)
    for field in _ADDED_LATER:
        if not table[field]:
            del table[field]
    if "link_bytes_per_s" not in table:
        del table["link_latency_s"]
    return table


def profile_json(profile: CostProfile) -> str:
    """Return the profile as text that `load_profile` reads, one point per line."""
    table = profile_fields(profile)
    points = ",\n".join(f"    [{n}, {s!r}]" for n, s in table["prefill_points"])
    table["prefill_points"] = "POINTS"
    return json.dumps(table, indent=2).replace('"POINTS"', f"[\n{points}\n  ]") + "\n"


def _decode(data: bytes, origin: str) -> CostProfile:
    """Return the profile in the file, whose fields must be those of `CostProfile`."""
    known = {field.name for field in fields(CostProfile)}
    try:
        profile = msgspec.json.decode(data, type=dict[str, Any])
        if unknown := sorted(profile.keys() - known):
            raise ConfigError(f"profile {origin!r}: unknown field {unknown[0]!r}; use {', '.join(sorted(known))}")
        return msgspec.convert(profile, CostProfile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"profile {origin!r}: {error}") from error
