"""What an environment is made of, and the one way in which each is made: once, by one run at a time, stamped last."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from environments.speak import say, still

PROJECT = Path(__file__).resolve().parents[2]
STAMP = "preble-stamp"
EXIT_FAILED, EXIT_UNSUPPORTED = 1, 3
LAST_LINES = 15


class SetupFailed(Exception):
    """The message for the user, and the exit status: EXIT_UNSUPPORTED if it cannot be had on this machine."""

    def __init__(self, message: str, status: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Recipe(ABC):
    """How one environment is made.

    `smoke_test`: a command in the environment's `bin` that must succeed. `size`: of what is installed, in words.
    """

    name: str
    smoke_test: tuple[str, ...]
    size: str

    @abstractmethod
    def install(self, target: Path) -> None:
        """Fill the new folder `target`. Raises: SetupFailed."""

    @abstractmethod
    def digest(self) -> str:
        """Of everything that the environment is made from: another one makes it again."""

    def refresh(self, target: Path) -> None:  # noqa: B027 (most have nothing to do)
        """Bring a current environment up to what changes more often than its digest. Raises: SetupFailed."""


def set_up(recipe: Recipe, root: Path) -> None:
    """Make the environment `root/NAME`, unless it is there already. Raises: SetupFailed."""
    target = root / recipe.name
    with only_one(root, recipe.name):
        if not is_current(recipe, target):
            _build(recipe, target)
        recipe.refresh(target)


def is_current(recipe: Recipe, target: Path) -> bool:
    return has_stamp(target / STAMP, recipe.digest())


def has_stamp(stamp: Path, digest: str) -> bool:
    return stamp.is_file() and stamp.read_text() == digest


def digest_of(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _build(recipe: Recipe, target: Path) -> None:
    if target.exists():
        if target.is_symlink() or target.parent.is_symlink():
            text = f"{target} is of other versions and behind a link, so another checkout may use it"
            raise SetupFailed(f"{text}; remove the link, or {target.resolve()} if nobody does")
        say(f"{recipe.name}: {target} is unfinished or of other versions: making it again")
        shutil.rmtree(target)
    started = time.monotonic()
    say(f"{recipe.name}: installing into {target} (about {recipe.size})")
    log_of(target).unlink(missing_ok=True)
    recipe.install(target)
    _run_smoke_test(recipe, target)
    (target / STAMP).write_text(recipe.digest())
    say(f"{recipe.name}: ready after {time.monotonic() - started:.0f} s")


def _run_smoke_test(recipe: Recipe, target: Path) -> None:
    """Raises: SetupFailed: what was installed does not start."""
    program, *args = recipe.smoke_test
    with still(recipe.name, f"trying {program}"):
        command = [str(target / "bin" / program), *args]
        environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else importing it fetches a list of prices
        found = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if found.returncode != 0:
        output = (found.stdout + found.stderr)[-2000:]
        raise SetupFailed(f"installed, but `{' '.join(recipe.smoke_test)}` fails:\n{output}")


def log_of(target: Path) -> Path:
    """Of what its installation printed."""
    return target.with_name(f"{target.name}-install.log")


def last_lines(log: Path) -> str:
    """Return the end of a log, where a program that fails says why."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])


@contextlib.contextmanager
def only_one(root: Path, name: str) -> Iterator[None]:
    """Hold the right to change one environment; waits for another run that has it."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with still(name, "waiting for another run that sets it up"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def caller_environment() -> dict[str, str]:
    """The caller's environment, but byte code is compiled: without it each start of an engine takes twice as long."""
    dropped = {"PYTHONDONTWRITEBYTECODE", "PIP_NO_COMPILE", "PYTHONPATH", "PIP_REQUIRE_VIRTUALENV", "PIP_USER"}
    return {k: v for k, v in os.environ.items() if k not in dropped}
