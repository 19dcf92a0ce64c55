"""Cost profiles as files, and the shipped ones: how long a replica of a known GPU and model takes.

The shipped profiles are data, made by `benchmarks/repro/make_profiles.py`; each names its origin in `source`.
`preble profile` measures a replica and writes such a file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from preble.core.costs.model import CostProfile
from preble.errors import ConfigError

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


def profile_fields(profile: CostProfile) -> dict[str, Any]:
    """Return the fields to write; a field that was added later only if it is set.

    So the files of older profiles, and the keys of results made with them, stay the same.
    """
    table = asdict(profile)
    for field in ("request_overhead_s", "host_load_s_per_token", "store_load_s_per_token"):
        if not table[field]:
            del table[field]
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
