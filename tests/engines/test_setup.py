"""The set-up of an engine's environment, with an engine that needs no package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "dev" / "engines" / "setup.py"
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
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("preble_engine_setup", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recipe(setup: Any, tmp_path: Path) -> Any:
    lock = tmp_path / "thing.lock"
    lock.write_text("# nothing to install\n")
    return setup.EngineRecipe(
        name="thing",
        lock=lock,
        python=sys.version_info[:2],
        extra_index="http://127.0.0.1:1/",
        smoke_test=("python", "-c", FINDS_ITS_NAME),
        size="nothing",
        metadata_only=("thing", "1.0+cpu"),
        project=None,
    )


@pytest.mark.slow
def test_an_environment_is_made_once_and_again_when_its_lock_changes(setup: Any, recipe: Any, tmp_path: Path) -> None:
    root = tmp_path / "engines"
    setup.set_up(recipe, root, with_model=False)
    witness = root / "thing" / "witness"
    witness.touch()
    setup.set_up(recipe, root, with_model=False)
    assert witness.exists(), "left as it is"
    recipe.lock.write_text("# nothing to install, said differently\n")
    setup.set_up(recipe, root, with_model=False)
    assert not witness.exists(), "made anew"
    assert setup.is_current(recipe, root / "thing")


@pytest.mark.slow
def test_an_environment_whose_program_does_not_start_is_not_taken_for_ready(
    setup: Any, recipe: Any, tmp_path: Path
) -> None:
    broken = replace(recipe, smoke_test=("python", "-c", "raise SystemExit('no libfoo.so')"))
    with pytest.raises(setup.SetupFailed, match=r"no libfoo\.so") as caught:
        setup.set_up(broken, tmp_path / "engines", with_model=False)
    assert caught.value.status == setup.EXIT_FAILED
    assert not setup.is_current(broken, tmp_path / "engines" / "thing")


def test_another_platform_gets_a_clear_message_and_a_status_of_its_own(
    setup: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup.platform, "machine", lambda: "riscv64")
    assert setup.main(["vllm", "--root", str(tmp_path)]) == setup.EXIT_UNSUPPORTED
    assert "riscv64" in capsys.readouterr().err


def test_a_missing_python_gets_a_clear_message_and_a_status_of_its_own(setup: Any) -> None:
    with pytest.raises(setup.SetupFailed, match=r"Install python3\.1 and run again") as caught:
        setup.find_python((3, 1))
    assert caught.value.status == setup.EXIT_UNSUPPORTED


def test_byte_code_is_compiled_whatever_the_environment_says(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PIP_NO_COMPILE", "1")
    assert not {"PYTHONDONTWRITEBYTECODE", "PIP_NO_COMPILE"} & set(setup.pip_environment())


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
        setup.set_up(with_project, tmp_path / "engines", with_model=False)
        assert version_in(tmp_path / "engines" / "thing", "plugin") == version


def version_in(environment: Path, distribution: str) -> str:
    program = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    found = subprocess.run([environment / "bin" / "python", "-c", program], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.mark.parametrize("lock", ["vllm-cpu.lock", "sglang-cpu.lock"])
def test_every_pin_is_exact(lock: str) -> None:
    lines = [line for line in (SCRIPT.parent / lock).read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 90
    assert all(line.count("==") == 1 for line in lines)
