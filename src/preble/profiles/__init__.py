"""Cost profiles as files, and those that come with Preble: how long a replica of a known GPU and model takes.

The shipped ones are data, made by `benchmarks/repro/make_profiles.py`; each says in `source` what it was made from.
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
    """The names of the shipped profiles, sorted."""
    return sorted(entry.name.removesuffix(".json") for entry in _DATA.iterdir() if entry.name.endswith(".json"))


def load_profile(name_or_path: str) -> CostProfile:
    """A shipped profile by name, or one from a JSON file.

    What contains a slash or ends in `.json` is a path. Raises: ConfigError: there is none, or it is not a profile.
    """
    if "/" in name_or_path or name_or_path.endswith(".json"):
        path = Path(name_or_path)
        try:
            return _decode(path.read_bytes(), name_or_path)
        except OSError as error:
            raise ConfigError(f"cannot read profile {name_or_path!r}: {error.strerror}") from error
    if name_or_path not in profile_names():
        raise ConfigError(
            f"no profile is called {name_or_path!r}; there are {', '.join(profile_names())}, or give a .json file"
        )
    return _decode((_DATA / f"{name_or_path}.json").read_bytes(), name_or_path)


def profile_fields(profile: CostProfile) -> dict[str, Any]:
    """Its fields as they are written: what was added later only where it says something.

    So the files of profiles that do not have it, and the keys of results that were made with them, stay the same.
    """
    table = asdict(profile)
    if not profile.request_overhead_s:
        del table["request_overhead_s"]
    return table


def profile_json(profile: CostProfile) -> str:
    """The profile's file, as `load_profile` reads it; one point a line."""
    table = profile_fields(profile)
    points = ",\n".join(f"    [{n}, {s!r}]" for n, s in table["prefill_points"])
    table["prefill_points"] = "POINTS"
    return json.dumps(table, indent=2).replace('"POINTS"', f"[\n{points}\n  ]") + "\n"


def _decode(data: bytes, origin: str) -> CostProfile:
    """The file has the fields of `CostProfile`: the same names, units and meanings, and no others."""
    known = {field.name for field in fields(CostProfile)}
    try:
        profile = msgspec.json.decode(data, type=dict[str, Any])
        if unknown := sorted(profile.keys() - known):
            raise ConfigError(f"profile {origin!r}: unknown field {unknown[0]!r}; there are {', '.join(sorted(known))}")
        return msgspec.convert(profile, CostProfile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"profile {origin!r}: {error}") from error
