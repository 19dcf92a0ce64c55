"""What PyPI gets: the pure wheel and its metadata. The compiled wheel: tests/native."""

from __future__ import annotations

import email
import re
import runpy
import shutil
import subprocess
import zipfile
from email.message import Message
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from dev.conftest import COMMIT, build, copy_of_sources
from preble.build import commit

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "preble"


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_file)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


@pytest.mark.slow
def test_the_wheel_has_the_whole_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = {path.relative_to(ROOT / "src") for path in PACKAGE.rglob("*") if path.is_file()}
    assert packed == {"preble/commit.txt", *(str(path) for path in files if "__pycache__" not in path.parts)}


@pytest.mark.slow
def test_it_names_the_commit_that_it_was_built_from_also_by_way_of_the_source_package(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    assert wheel.read("preble/commit.txt").decode() == f"{COMMIT}\n"
    (tmp_path / "checkout").mkdir()
    source = build(copy_of_sources(tmp_path / "checkout"), "sdist", COMMIT)
    (tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", "-xf", source, "-C", tmp_path / "unpacked"], check=True)  # tarfile: 3.11.2 has no filters
    [unpacked] = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(build(unpacked, "wheel", "")) as again:
        assert again.read("preble/commit.txt").decode() == f"{COMMIT}\n"


def test_a_checkout_that_is_used_in_place_asks_git() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("these are the sources of a package, not a repository")
    said = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.startswith(commit().removesuffix("-dirty")) and len(commit()) >= 12


def test_sources_without_a_repository_are_of_an_unknown_commit(tmp_path: Path) -> None:
    copied = shutil.copytree(PACKAGE, tmp_path / "src" / "preble", ignore=shutil.ignore_patterns("__pycache__"))
    assert runpy.run_path(str(copied / "build.py"))["commit"]() == "unknown"


@pytest.mark.slow
def test_its_long_description_has_no_link_that_leads_nowhere_on_pypi(metadata: Message) -> None:
    text = metadata.get_payload()
    assert isinstance(text, str) and text.startswith("# Preble")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 20 and [link for link in links if not link.startswith(("https://", "#"))] == []


@pytest.mark.slow
def test_its_metadata_says_where_everything_is(metadata: Message) -> None:
    urls = dict(value.split(", ", 1) for value in metadata.get_all("Project-URL", []))
    assert urls.keys() == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"


def test_every_pin_can_be_installed_on_the_oldest_python_that_is_promised(metadata: Message) -> None:
    oldest = metadata["Requires-Python"].removeprefix(">=")
    names = re.findall(r"^([\w.-]+)==", (ROOT / "requirements" / "constraints.txt").read_text(), flags=re.MULTILINE)
    installed = [found for name in names for found in distributions(name=name)]
    assert len(installed) > len(names) / 2, "each was installed as it is pinned, but for those of other platforms"
    demands = {found.name: SpecifierSet(found.metadata.get("Requires-Python", "")) for found in installed}
    assert {name: str(demand) for name, demand in demands.items() if not demand.contains(oldest)} == {}


def steps() -> list[str]:
    workflows = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    jobs = [job for workflow in workflows for job in workflow["jobs"].values()]
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def test_workflows_install_what_an_image_lacks_and_run_make() -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert steps()
    for run in steps():
        command, verb = run.split()[:2]
        if command == "apt-get":  # an image of Debian has no Python
            continue
        assert command == "make" and verb in verbs, run
