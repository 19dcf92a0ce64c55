"""The script that profiles a GPU, tried out on the CPU with a tiny shape, wherever PyTorch is."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from preble.lab.profiling import Measurements
from preble.profiles import load_profile

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "repro" / "gpu_profile.py"
ENGINE_PYTHON = ROOT / ".engines" / "vllm" / "bin" / "python"


def python_with_torch() -> str:
    """PyTorch is no dependency; the engines' environment brings it."""
    if find_spec("torch") is not None:
        return sys.executable
    if ENGINE_PYTHON.exists():
        return str(ENGINE_PYTHON)
    pytest.skip("PyTorch is neither here nor in .engines/vllm (made by `make engines`)")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [python_with_torch(), str(SCRIPT), *arguments], capture_output=True, text=True, env=environ, check=False
    )


def test_a_tiny_shape_on_the_cpu_gives_a_profile_and_its_measurements(tmp_path: Path) -> None:
    result = run("--shape", "tiny", "--quick", "--max-tokens", "600", "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    profile = load_profile(str(tmp_path / "cpu-tiny.json"))
    assert "random weights" in profile.source
    raw = msgspec.json.decode((tmp_path / "cpu-tiny.raw.json").read_bytes(), type=Measurements)
    assert not raw.over_http
    assert {times.new_tokens for times in raw.prefill if not times.cached_tokens} == {1, 64, 256, 599}
    assert {times.cached_tokens for times in raw.prefill} == {0, 299}
    assert {times.num_sequences for times in raw.decode} == {1, 4, 16}
    assert [times.tokens for times in raw.loads] == [299, 599]
    unseen = msgspec.json.decode((tmp_path / "cpu-tiny.unseen.json").read_bytes())
    assert {(bool(one["prefills"]), bool(one["decodes"])) for one in unseen} == {(1, 0), (0, 1), (1, 1)}
    assert all(one["measured_s"] > 0 and one["fitted_s"] > 0 for one in unseen)


def test_a_part_of_a_model_says_what_is_assumed_of_the_links(tmp_path: Path) -> None:
    result = run("--shape", "tiny", "--gpus", "2", "--quick", "--max-tokens", "300", "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    profile = load_profile(str(tmp_path / "cpux2-tiny.json"))
    assert "one of 2 GPUs' part" in profile.source
    assert "assumed, not measured" in profile.source


def test_without_a_gpu_a_large_shape_is_refused() -> None:
    result = run("--shape", "mistral-7b")
    assert result.returncode == 2
    assert "there is no GPU here" in result.stderr
