"""Environments around programs that are no Python packages: unpacked from Debian's archive, or this machine's own."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from environments.recipe import EXIT_UNSUPPORTED, Recipe, SetupFailed, digest_of, last_lines, log_of
from environments.speak import still


@dataclass(frozen=True)
class DebianPackage(Recipe):
    """A package of Debian's archive, unpacked below the environment; it needs no root and changes nothing else.

    `programs`: those of its `/usr/bin` that `bin` links to. They must need nothing but the C library.
    """

    package: str
    programs: tuple[str, ...]

    def digest(self) -> str:
        return digest_of(self.package, self.programs)

    def install(self, target: Path) -> None:
        require_apt(f"apt-get download {self.package}")
        target.mkdir()
        with still(self.name, f"getting Debian's package {self.package}"):
            if not run(["apt-get", "download", self.package], target):
                run(["apt-get", "update"], target)  # a machine that has no lists yet; needs root
                must_run(["apt-get", "download", self.package], target)
            (archive,) = target.glob("*.deb")
            must_run(["dpkg-deb", "--extract", str(archive), str(target)], target)
            archive.unlink()
        link_programs(target, {name: target / "usr" / "bin" / name for name in self.programs})


@dataclass(frozen=True)
class SystemProgram(Recipe):
    """A program with too many libraries to unpack it: this machine's own, or Debian's, which root installs under CI.

    `program`: its name on the PATH. `package`: the Debian package that has it.
    """

    program: str
    package: str

    def digest(self) -> str:
        return digest_of(self.program, shutil.which(self.program))

    def install(self, target: Path) -> None:
        target.mkdir()
        if shutil.which(self.program) is None:
            self._install_package(target)
        found = shutil.which(self.program)
        if found is None:
            raise SetupFailed(f"{self.program} is not on the PATH although {self.package} is installed")
        link_programs(target, {self.program: Path(found)})

    def _install_package(self, target: Path) -> None:
        """Only with CI=true, which says that the machine may be changed for the tests."""
        command = f"apt-get install --no-install-recommends {self.package}"
        if os.environ.get("CI") != "true" or os.geteuid() != 0:
            raise SetupFailed(f"no {self.program} on the PATH; install it, such as by `{command}`", EXIT_UNSUPPORTED)
        require_apt(command)
        with still(self.name, f"installing Debian's package {self.package}"):
            run(["apt-get", "update"], target)
            must_run([*command.split(), "--yes"], target)


@dataclass(frozen=True)
class NodePackages(Recipe):
    """Packages of npm, with this machine's own Node.js. `packages`: with exact versions."""

    packages: tuple[str, ...]

    def digest(self) -> str:
        return digest_of(self.packages, shutil.which("node"))

    def install(self, target: Path) -> None:
        node = shutil.which("node")
        if node is None or shutil.which("npm") is None:
            raise SetupFailed("no node and npm on the PATH; install them", EXIT_UNSUPPORTED)
        target.mkdir()
        with still(self.name, "getting packages of npm"):
            must_run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(target), *self.packages], target)
        link_programs(target, {"node": Path(node)})


def require_apt(command: str) -> None:
    """Raises: SetupFailed (status 3): this is no Debian."""
    if shutil.which("apt-get") is None:
        raise SetupFailed(f"no apt-get here, which `{command}` needs", EXIT_UNSUPPORTED)


def run(command: list[str], target: Path) -> bool:
    """Run it in the folder, its output to the log. Returns whether it succeeded."""
    with log_of(target).open("a") as log:
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        return subprocess.run(command, stdout=log, stderr=log, cwd=target, env=environ, check=False).returncode == 0


def must_run(command: list[str], target: Path) -> None:
    """Raises: SetupFailed (status 3): the archive does not have it or cannot be reached."""
    if not run(command, target):
        raise SetupFailed(f"`{' '.join(command)}` fails:\n{last_lines(log_of(target))}", EXIT_UNSUPPORTED)


def link_programs(target: Path, programs: dict[str, Path]) -> None:
    (target / "bin").mkdir()
    for name, path in programs.items():
        (target / "bin" / name).symlink_to(path)
