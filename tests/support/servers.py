"""Programs of other projects that tests run, each in an environment of its own below `.servers/` (dev/setup.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def require_server(name: str, program: str) -> Path:
    """Return the program in the environment `name`, such as `require_server("prometheus", "promtool")`.

    Where it is not set up the test skips; with CI=true that is a failure.
    """
    path = ROOT / ".servers" / name / "bin" / program
    if not (path.parents[1] / "preble-stamp").is_file():
        not_there(f"{name} is not set up here: run `python3 dev/setup.py {name}`")
    return path


def nixl_packages() -> Path:
    """Return the folder of NIXL, for a vLLM's module path."""
    [packages] = (require_server("nixl", "python").parents[1] / "lib").glob("python*/site-packages")
    return packages


def not_there(reason: str) -> None:
    """Skip the test; with CI=true, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
