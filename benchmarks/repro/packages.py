"""Install the wheels of `dist/` into empty environments without a network, use them, and measure sizes and starts.

    make wheels PYTHONS="python3.11 python3.12 python3.13"
    python benchmarks/repro/packages.py python3.11 python3.12 python3.13    # each must serve, complete and compare
    … --json benchmarks/results/packages.json && python benchmarks/repro/performance.py
    … --extras                            # and with the first of these Pythons each extra alone

The libraries are fetched from the index into a folder first, as a mirror would have them. `make test-wheels` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from page import ROOT, markdown

from preble.lab.report import Table

DIST, WORK = ROOT / "dist", ROOT / "build" / "packages"
COMPARE = "compare --workload tool_use --policy preble,round_robin --replicas 2 --rps 4 --requests 40 --seed 0 --jobs 1"
STARTS, COLD_STARTS = 7, 3
PATIENCE_S = 120.0
NEEDS_EXTRA = {
    "dns": "import preble.discovery.dns",
    "epp": "import preble.picker.server",
    "ha": "from preble.serving.group import nats; nats._new_client()",
    "k8s": "import preble.discovery.kubernetes",
    "otel": "from preble.config import TracingConfig as C; from preble.serving.telemetry.tracing import Tracing; "
    "Tracing(C(endpoint='http://127.0.0.1:1'))",
    "plot": "from preble.lab.report.drawing import draw; draw(lambda figure: figure.subplots())",
    "ray": "import preble.integrations.ray.router",
}
"""What each extra enables: fails without it."""
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


class Tried(msgspec.Struct, frozen=True):
    """One Python. Sizes in MB (10^6 bytes). Starts in milliseconds: the least CPU time, and the least time with no file
    of the environment in memory.
    """

    python: str
    wheel: str
    wheel_mb: float
    installed_mb: float
    own_mb: float
    import_cpu_ms: float
    import_cold_ms: float
    help_cpu_ms: float
    help_cold_ms: float


class Packages(msgspec.Struct, frozen=True):
    """What is in `dist/`, in MB by file name, and each Python that was tried."""

    files: dict[str, float]
    tried: list[Tried]


def table(packages: Packages) -> Table:
    """Return the starts as a table."""
    columns = (
        "Python",
        "wheel",
        "size",
        "with libraries",
        "import, CPU",
        "import, cold",
        "`--help`, CPU",
        "`--help`, cold",
    )
    rows = [
        (
            one.python,
            one.wheel,
            f"{one.wheel_mb:g} MB",
            f"{one.installed_mb:g} MB",
            *(f"{ms:.0f} ms" for ms in (one.import_cpu_ms, one.import_cold_ms, one.help_cpu_ms, one.help_cold_ms)),
        )
        for one in packages.tried
    ]
    [source] = [f"{mb:g} MB" for name, mb in packages.files.items() if name.endswith(".tar.gz")]
    return Table(columns, rows, caption=f"The source package has {source}.")


def install(python: str, wanted: str = "preble") -> Path:
    """Return the folder of an environment in which only pip has put something, and only from folders."""
    folder = WORK / re.sub(r"\W+", "-", python + wanted.removeprefix("preble")).strip("-")
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip, index = [folder / "bin" / "python", *PIP], WORK / "index"
    subprocess.run([*pip, "download", "--pre", "--find-links", DIST, "--dest", index, wanted], check=True)
    for own in index.glob("preble-*"):
        own.unlink()  # those of dist/ count
    local = ["--no-index", "--find-links", index, "--find-links", DIST]
    subprocess.run([*pip, "install", "--pre", *local, wanted], check=True)
    subprocess.run([*pip, "check"], check=True)
    return folder


def try_extras(python: str) -> None:
    """Install each extra alone and do what it enables, which fails without it.

    Raises: AssertionError: an extra is not among these, or is not needed. CalledProcessError: it does not work.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.keys() - {"dev", "docs"} == NEEDS_EXTRA.keys()
    plain = install(python)
    for extra, statement in NEEDS_EXTRA.items():
        without = subprocess.run([plain / "bin" / "python", "-c", statement], capture_output=True, check=False)
        assert without.returncode == 1, extra
        folder = install(python, f"preble[{extra}]")
        subprocess.run([folder / "bin" / "python", "-c", statement], check=True)
        print(f"preble[{extra}] works", flush=True)
        shutil.rmtree(folder)


def use(folder: Path) -> None:
    """Emulate a replica, serve it, ask for a completion, and compare two policies. Raises: AssertionError."""
    run = WORK / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    with (
        listening(folder, run, "emulate", "--profile", "tiny-cpu", "--port", "0") as replica,
        listening(folder, run, "serve", "--replica", replica, "--port", "0") as url,
    ):
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": 3}).encode()
        asked = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
            assert answer.headers["x-preble-replica"] == replica
    compare = [folder / "bin" / "preble", *COMPARE.split(), "--json", "compared.json"]
    subprocess.run(compare, cwd=run, check=True, capture_output=True)
    assert len(json.loads((run / "compared.json").read_text())["runs"]) == 2


@contextmanager
def listening(folder: Path, run: Path, *command: str) -> Iterator[str]:
    """Run a command of the installed package; the context is the URL at which it listens."""
    program = [folder / "bin" / "preble", *command]
    process = subprocess.Popen(program, cwd=run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        said = [process.stdout.readline()]
        while not (found := re.search(r"listening on (http://[\d.:]+)$", said[-1].rstrip())):
            assert said[-1], "".join(said)
            said.append(process.stdout.readline())
        yield found[1]
    finally:
        process.terminate()
        process.communicate()


def measure(python: str, folder: Path) -> Tried:
    """Measure the environment that `install` made."""
    [site] = (folder / "lib").glob("python*/site-packages")
    version = subprocess.run([folder / "bin" / "python", "-V"], check=True, capture_output=True, text=True).stdout
    metadata = next(site.glob("preble-*.dist-info/WHEEL")).read_text()
    tag = re.findall(r"^Tag: (\S+)", metadata, re.MULTILINE)[0]
    [wheel] = [file for file in DIST.glob("*.whl") if tag.split("-")[0] in file.name]
    libraries = [path for path in site.iterdir() if not path.name.startswith(("pip", "setuptools"))]
    own = [path for path in libraries if path.name.startswith("preble")]
    os.sync()  # what is not yet written stays in memory
    imports, helps = [folder / "bin" / "python", "-c", "import preble"], [folder / "bin" / "preble", "--help"]
    return Tried(
        version.split()[1],
        "compiled" if "none" not in tag else "pure",
        round(wheel.stat().st_size / 1e6, 1),
        round(sum(map(size, libraries)) / 1e6, 1),
        round(sum(map(size, own)) / 1e6, 1),
        round(min(cpu_ms(imports) for _ in range(STARTS)), 1),
        round(min(cold_ms(imports, folder) for _ in range(COLD_STARTS)), 1),
        round(min(cpu_ms(helps) for _ in range(STARTS)), 1),
        round(min(cold_ms(helps, folder) for _ in range(COLD_STARTS)), 1),
    )


def size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def cpu_ms(command: list[str | Path]) -> float:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return (used.ru_utime + used.ru_stime) * 1e3


def cold_ms(command: list[str | Path], folder: Path) -> float:
    """Return the time of a command when no file of its environment is in memory."""
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.monotonic()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return (time.monotonic() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+")
    parser.add_argument("--extras", action="store_true", help="install each extra alone, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there, too")
    options = parser.parse_args()
    tried = []
    for python in options.pythons:
        folder = install(python)
        use(folder)
        tried.append(measure(python, folder))
    files = {path.name: round(path.stat().st_size / 1e6, 2) for path in sorted(DIST.glob("preble-*"))}
    packages = Packages(files, tried)
    print(markdown(table(packages)))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(packages), indent=1) + b"\n")
    if options.extras:
        try_extras(options.pythons[0])


if __name__ == "__main__":
    main()
