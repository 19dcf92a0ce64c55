"""The GPUs of this machine, and how many of them one replica takes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from types import MappingProxyType

from preble.errors import ConfigError

_SIZES = MappingProxyType(
    {
        "tensor": ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
        "pipeline": ("--pipeline-parallel-size", "-pp", "--pp-size", "--pp"),
        "context": ("--prefill-context-parallel-size", "-pcp"),
        "data": ("--data-parallel-size", "-dp", "--dp-size", "--dp"),
        "local data": ("--data-parallel-size-local", "-dpl"),
    }
)
"""The options of vLLM and SGLang that multiply the GPUs of one replica."""

_DATA_WITHIN_TENSOR = "--enable-dp-attention"
"""With it, SGLang's data-parallel ranks share the tensor-parallel GPUs."""


def num_ranks(engine_arguments: Sequence[str]) -> int:
    """Return how many data-parallel ranks one replica with these arguments has. Raises: ConfigError: not a positive
    number.
    """
    return _size_of(_SIZES["data"], engine_arguments) or 1


def num_workers(engine_arguments: Sequence[str]) -> int:
    """Return how many GPUs (or CPU workers) on this machine one replica with these arguments takes.

    >>> num_workers(["--tensor-parallel-size", "2", "-dp=2"]), num_workers(["--tp", "4", "--enable-dp-attention"])
    (4, 4)

    Raises: ConfigError: a size is no positive number.
    """
    sizes = {what: _size_of(names, engine_arguments) for what, names in _SIZES.items()}
    data = sizes["local data"] or (1 if _DATA_WITHIN_TENSOR in engine_arguments else sizes["data"]) or 1
    return data * (sizes["tensor"] or 1) * (sizes["pipeline"] or 1) * (sizes["context"] or 1)


def _size_of(names: Sequence[str], engine_arguments: Sequence[str]) -> int | None:
    """Return the value of the last of these options; None where none of them is given."""
    size = None
    for i, argument in enumerate(engine_arguments):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") in names:
            value = value if equals else next(iter(engine_arguments[i + 1 : i + 2]), "")
            size = _positive(name, value)
    return size


def _positive(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and int(value)):
        raise ConfigError(f"{name} {value!r} is no positive whole number")
    return int(value)


def shared_out(gpus: Sequence[str], replicas: int, each: int) -> list[str]:
    """Return the GPUs of each replica, `each` of them, as CUDA_VISIBLE_DEVICES takes them. Raises: ConfigError: too
    few.
    """
    if len(gpus) < replicas * each:
        fitting = len(gpus) // each
        advice = f"start at most {fitting}" if fitting else f"one replica takes {each}; lower its parallel sizes"
        raise ConfigError(
            f"{replicas} replicas of {each} GPUs each need {replicas * each}, and {len(gpus)} are visible: {advice}"
        )
    return [",".join(gpus[i * each : (i + 1) * each]) for i in range(replicas)]


def visible_gpus() -> list[str]:
    """Return names of the GPUs that we may use, as CUDA_VISIBLE_DEVICES takes them."""
    if (limited := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in limited.split(",") if name.strip()]
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    query = [tool, "--query-gpu=index", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return listed.stdout.split() if listed.returncode == 0 else []
