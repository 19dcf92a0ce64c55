"""Real vLLM replicas of one test's own, with folders of its own on their module path."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from preble.engines.starting.launch import LaunchOptions
from support.replicas import ROOT, SGLANG, VLLM, options_of_one, require_sglang, require_vllm

SUPPORT = ROOT / "tests" / "support"


def own_vllm(
    folder: Path, *extra_args: str, path: Sequence[Path] = (), environ: Mapping[str, str] | None = None, **changes: Any
) -> LaunchOptions:
    """Options of one vLLM replica with these folders on its PYTHONPATH, and its logs in `folder`."""
    require_vllm()
    program = folder / "vllm"
    variables = {**(environ or {}), "PYTHONPATH": os.pathsep.join(map(str, path))}
    words = shlex.join(["env", *(f"{name}={value}" for name, value in variables.items()), str(VLLM)])
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o755)
    more = {"device": "cpu", "dev_endpoints": True, "extra_args": extra_args, **changes}
    return options_of_one("vllm", program, folder, **more)


def with_torchvision(folder: Path) -> tuple[Path, Path]:
    """Folders that give vLLM the torchvision of SGLang's environment; it has none, because PyPI's is for CUDA."""
    require_sglang()
    [packages] = (SGLANG.parents[1] / "lib").glob("python*/site-packages")
    for found in packages.glob("torchvision*"):
        (folder / found.name).symlink_to(found)
    return folder, SUPPORT / "torchvision_on_cpu"


def make_tiny_llava(target: Path, path: Sequence[Path]) -> Path:
    """Make the model, and return its folder."""
    program = [str(VLLM.with_name("python")), str(SUPPORT / "make_tiny_llava.py"), str(target)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(program, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(done.stderr[-4000:])
    return target
