"""What is built from this checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789ab"


def copy_of_sources(folder: Path) -> Path:
    """Return a folder with what packages are built from, and no repository."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("src/preble", "dev"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def build(folder: Path, target: str, commit: str) -> Path:
    """Return the package that the libraries of this environment build in a folder. `commit`: of it; "" for unknown."""
    shutil.rmtree(folder / "dist", ignore_errors=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", "dist"]
    environ = {**os.environ, "BUILD_COMMIT": commit}
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=environ)
    [path] = (folder / "dist").iterdir()
    return path


@pytest.fixture(scope="session")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pure wheel."""
    path = build(copy_of_sources(tmp_path_factory.mktemp("package")), "wheel", COMMIT)
    assert path.name.endswith("-py3-none-any.whl")
    return path
