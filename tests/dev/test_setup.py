"""The set-up of environments beside Preble's own, with recipes that need no package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DEV = Path(__file__).resolve().parents[2] / "dev"
PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "plugin"
version = "{version}"
dependencies = ["nobody-has-this"]
"""
BACKEND = """\
import tomllib, zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    with open("pyproject.toml", "rb") as file:
        version = tomllib.load(file)["project"]["version"]
    name, info = f"plugin-{version}-py3-none-any.whl", f"plugin-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\\nName: plugin\\nVersion: {version}\\nRequires-Dist: nobody-has-this\\n"
    with zipfile.ZipFile(f"{wheel_directory}/{name}", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""
FINDS_ITS_NAME = "import importlib.metadata as m; assert m.version('thing') == '1.0+cpu'"


@pytest.fixture(scope="module")
def setup() -> Any:
    """The program; it finds its modules beside itself."""
    sys.path.insert(0, str(DEV))
    try:
        import setup
    finally:
        sys.path.remove(str(DEV))
    return setup


@pytest.fixture
def wheels(setup: Any) -> ModuleType:
    """The module that installs wheels."""
    return sys.modules["environments.wheels"]


@pytest.fixture
def recipe(setup: Any, tmp_path: Path) -> Any:
    lock = tmp_path / "thing.lock"
    lock.write_text("# nothing to install\n")
    return setup.Wheels(
        name="thing",
        lock=lock,
        python=sys.version_info[:2],
        extra_index="http://127.0.0.1:1/",
        smoke_test=("python", "-c", FINDS_ITS_NAME),
        size="nothing",
        metadata_only=("thing", "1.0+cpu"),
    )


@pytest.mark.slow
def test_an_environment_is_made_once_and_again_when_its_lock_changes(setup: Any, recipe: Any, tmp_path: Path) -> None:
    root = tmp_path / "engines"
    setup.set_up(recipe, root)
    witness = root / "thing" / "witness"
    witness.touch()
    setup.set_up(recipe, root)
    assert witness.exists(), "left as it is"
    recipe.lock.write_text("# nothing to install, said differently\n")
    setup.set_up(recipe, root)
    assert not witness.exists(), "made anew"


@pytest.mark.slow
def test_an_environment_whose_program_does_not_start_is_not_taken_for_ready(
    setup: Any, recipe: Any, tmp_path: Path
) -> None:
    broken = replace(recipe, smoke_test=("python", "-c", "raise SystemExit('no libfoo.so')"))
    with pytest.raises(setup.SetupFailed, match=r"no libfoo\.so") as caught:
        setup.set_up(broken, tmp_path)
    assert caught.value.status == setup.EXIT_FAILED
    assert not (tmp_path / "thing" / "preble-stamp").exists()


@pytest.mark.parametrize("linked", ["engines", "engines/thing"])
def test_what_a_link_leads_to_is_not_removed(setup: Any, recipe: Any, tmp_path: Path, linked: str) -> None:
    real, link = tmp_path / "of-another-checkout", tmp_path / linked
    witness = real / ("thing/witness" if linked == "engines" else "witness")
    witness.parent.mkdir(parents=True)
    witness.touch()
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(real)
    with pytest.raises(setup.SetupFailed, match="remove the link"):
        setup.set_up(recipe, tmp_path / "engines")
    assert witness.exists()


@pytest.mark.parametrize("lines", [["delay = 0"], ["delay = 0", "delay = 0"], []])
def test_an_installed_file_is_edited_or_the_set_up_fails(
    setup: Any, wheels: ModuleType, tmp_path: Path, lines: list[str]
) -> None:
    file = tmp_path / "lib" / "python3.11" / "site-packages" / "thing" / "api.py"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(["before", *lines, "after"]))
    if len(lines) == 1:
        wheels.edit_installed(tmp_path, "thing/api.py", "delay = 0", "delay = 1")
        assert file.read_text() == "before\ndelay = 1\nafter"
    else:
        with pytest.raises(setup.SetupFailed, match=rf"{len(lines)} times instead of once"):
            wheels.edit_installed(tmp_path, "thing/api.py", "delay = 0", "delay = 1")


def test_a_smoke_test_fetches_no_prices(setup: Any, recipe: Any, tmp_path: Path) -> None:
    code = "import os, sys; sys.exit(not os.environ.get('LITELLM_LOCAL_MODEL_COST_MAP'))"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    sys.modules["environments.recipe"]._run_smoke_test(replace(recipe, smoke_test=("python", "-c", code)), tmp_path)


@pytest.fixture
def without_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package index can be reached."""
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.mark.slow
@pytest.mark.usefixtures("without_index")
@pytest.mark.parametrize("constraint", ["", "nobody-has-this<=3"], ids=["alone", "constrained"])
def test_a_wheel_that_cannot_be_had_is_named_with_what_helps_and_the_rest_is_set_up(
    setup: Any,
    recipe: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    constraint: str,
) -> None:
    (tmp_path / "constraints.txt").write_text(constraint)
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    lock = tmp_path / "missing.lock"
    lock.write_text("nobody-has-this==2.13.0+cpu\n")
    missing = replace(recipe, name="missing", lock=lock, without="`ENGINE=emulator` needs none")
    monkeypatch.setattr(setup, "ENGINES", {"missing": missing, "thing": recipe})  # the real ones are gigabytes
    monkeypatch.setattr(setup, "make_model", lambda *_: None)
    assert setup.main(["missing", "thing", "--root", str(tmp_path)]) == setup.EXIT_UNSUPPORTED
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "no wheel" in line]
    for word in ("nobody-has-this==2.13.0+cpu", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "ENGINE=emulator", constraint):
        assert word in line
    assert (tmp_path / "thing" / "preble-stamp").is_file(), "the other one is ready"


@pytest.mark.parametrize(
    ("line", "package"),
    [
        (
            "Collecting torch==2.13.0+cpu (from -r /x/y.lock (line 9))",
            "torch==2.13.0+cpu",
        ),
        (
            "Processing /srv/wheels/numpy-2.4.6-cp311-cp311-linux.whl (from -r /x/y.lock (line 3))",
            "numpy-2.4.6-cp311-cp311-linux.whl",
        ),
        ("Installing collected packages: torch, numpy", None),
    ],
)
def test_progress_names_the_package(wheels: Any, line: str, package: str | None) -> None:
    assert wheels.package_in(line) == package


def test_progress_says_what_is_unpacked_and_how_much_it_is(wheels: Any, tmp_path: Path) -> None:
    lines = [
        "  Downloading torch-2.13.0-cp311-cp311-linux.whl (180.5 MB)",
        "  Using cached numpy-2.4.6-cp311-cp311-linux.whl (16.6 MB)",
        "  Downloading six-1.17.0-py2.py3-none-any.whl (11 kB)",
        "Collecting numpy==2.4.6",
    ]
    assert [wheels.size_mb_in(line) for line in lines] == [180.5, 16.6, 0.011, 0.0]
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    (site / "six-1.17.0.dist-info").mkdir(parents=True)
    assert wheels.unpacking(tmp_path, ["six", "numpy", "torch"], 197.1) == (
        "[1/3] unpacking and compiling numpy, 197 MB in all"
    )


def test_what_takes_long_is_said_again_and_again(
    setup: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speak = sys.modules["environments.speak"]
    monkeypatch.setattr(speak, "SILENCE_S", 0.01)  # ships 10 s
    said = ""
    with speak.still("thing", "unpacking"):
        while said.count("thing: unpacking") < 2:
            said += capsys.readouterr().err


@pytest.mark.parametrize(
    ("statuses", "status"),
    [([0, 0], 0), ([0, 3], 3), ([3, 1], 1), ([1, 3], 1)],
    ids=["ready", "left out", "failed", "both"],
)
def test_a_failure_outweighs_what_cannot_be_had(setup: Any, statuses: list[int], status: int) -> None:
    assert setup.status_of(statuses) == status


def test_another_platform_gets_a_clear_message_and_a_status_of_its_own(
    setup: Any, wheels: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wheels.platform, "machine", lambda: "riscv64")
    assert setup.main(["vllm", "--root", str(tmp_path)]) == setup.EXIT_UNSUPPORTED
    assert "riscv64" in capsys.readouterr().err


def test_a_missing_python_gets_a_clear_message_and_a_status_of_its_own(setup: Any, wheels: Any) -> None:
    with pytest.raises(setup.SetupFailed, match=r"Install python3\.1 and run again") as caught:
        wheels.find_python((3, 1))
    assert caught.value.status == setup.EXIT_UNSUPPORTED


def test_a_python_that_makes_no_environment_says_why(setup: Any, wheels: Any, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'apt install python3-venv'; exit 1\n")
    python.chmod(0o755)
    with pytest.raises(setup.SetupFailed, match="apt install python3-venv"):
        wheels.make_venv(str(python), tmp_path / "thing")


@pytest.mark.parametrize("name", ["prometheus", "chromium"])
def test_a_program_that_no_package_manager_here_has_gets_a_status_of_its_own(
    setup: Any, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup.main([name, "--root", str(tmp_path)]) == setup.EXIT_UNSUPPORTED
    assert f"{name}: no " in capsys.readouterr().err


def test_byte_code_is_compiled_whatever_the_environment_says(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PIP_NO_COMPILE", "1")
    environ = sys.modules["environments.recipe"].caller_environment()
    assert not {"PYTHONDONTWRITEBYTECODE", "PIP_NO_COMPILE"} & set(environ)


@pytest.mark.slow
def test_a_checkout_is_installed_beside_the_engine_and_again_when_its_metadata_changes(
    setup: Any, recipe: Any, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "backend.py").write_text(BACKEND)
    with_project = replace(recipe, project=project)
    for version in ("7", "8"):
        (project / "pyproject.toml").write_text(PROJECT.format(version=version))
        setup.set_up(with_project, tmp_path / "engines")
        assert version_in(tmp_path / "engines" / "thing", "plugin") == version


@pytest.mark.slow
@pytest.mark.usefixtures("without_index")
def test_a_failed_installation_shows_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    shutil.copytree(DEV, project / "dev")
    shutil.copy(DEV.parent / "Makefile", project)
    (project / "requirements").mkdir()
    (project / "requirements" / "constraints.txt").write_text("thing==1\n")
    (project / "src" / "preble" / "core").mkdir(parents=True)
    (project / "backend.py").write_text(BACKEND.replace("nobody-has-this", "thing>=2"))
    (project / "pyproject.toml").write_text(PROJECT.format(version="7"))
    for version in ("1", "2"):
        write_wheel(tmp_path, "thing", version)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    command = ["make", ".venv/.installed-dev", f"PYTHON={sys.executable}"]
    made = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert made.returncode != 0
    for word in ("The conflict is caused by", "thing==1", "thing>=2", "install.log has all of them"):
        assert word in made.stderr


def write_wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def version_in(environment: Path, distribution: str) -> str:
    program = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    found = subprocess.run([environment / "bin" / "python", "-c", program], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.mark.parametrize("lock", ["vllm-cpu.lock", "sglang-cpu.lock"])
def test_every_pin_is_exact(lock: str) -> None:
    lines = [line for line in (DEV / "engines" / lock).read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 90
    assert all(line.count("==") == 1 for line in lines)
