"""A virtual environment with Preble's wheel and the libraries that it asks for, and no others; nothing is fetched."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

WITHOUT_DEPENDENCIES = ("--no-deps", "--no-index", "--quiet")


def install_wheel(wheel: Path, folder: Path, extras: Iterable[str]) -> Path:
    """Return the folder of programs of a new environment: pip installs the wheel, the libraries are copied from ours.

    Raises: PackageNotFoundError: an extra needs a library that is not here. CalledProcessError: pip finds one missing.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    [site] = (folder / "lib").glob("python*/site-packages")
    for needed in closure("preble", frozenset(extras)).values():
        copy_distribution(needed, site)
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *WITHOUT_DEPENDENCIES, wheel], check=True)
    subprocess.run([*pip, "check"], check=True, stdout=subprocess.DEVNULL)
    return folder / "bin"


def closure(name: str, extras: frozenset[str]) -> dict[str, Distribution]:
    """Return what a distribution needs, directly or not, by canonical name."""
    found: dict[str, Distribution] = {}
    todo = [(name, extras)]
    seen = set(todo)
    while todo:
        name, extras = todo.pop()
        for text in distribution(name).requires or ():
            needed = Requirement(text)
            if not any(needed.marker is None or needed.marker.evaluate({"extra": e}) for e in ("", *extras)):
                continue
            found[canonicalize_name(needed.name)] = distribution(needed.name)
            if (step := (needed.name, frozenset(needed.extras))) not in seen:
                seen.add(step)
                todo.append(step)
    return found


def copy_distribution(needed: Distribution, site: Path) -> None:
    for file in needed.files or ():
        if ".." not in file.parts and file.suffix != ".pyc":  # programs, which nobody here calls
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), target)
