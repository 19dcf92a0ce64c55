"""The engines' programs on this machine: those that `dev/setup.py` has installed, or those of the PATH."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from preble.errors import ConfigError

OWN_VLLM = Path(".engines") / "vllm" / "bin" / "vllm"
OWN_SGLANG = Path(".engines") / "sglang" / "bin" / "python"
SGLANG_CPU_LAUNCHER = Path("dev") / "engines" / "sglang_cpu" / "launch.py"


def find_vllm(executable: Path | None) -> Path:
    """Return the vllm program: the one given, else that of `.engines/` here or in a folder above, else the PATH's.

    Raises: ConfigError: there is none.
    """
    if executable is not None:
        if not os.access(executable, os.X_OK):
            raise ConfigError(f"there is no vllm program {str(executable)!r}")
        return executable
    if (own := own_vllm()) is not None:
        return own
    if found := shutil.which("vllm"):
        return Path(found)
    raise ConfigError(
        "vLLM is not installed: run `make engines` (or `python3 dev/setup.py vllm`) in a checkout of Preble, "
        "or put your own vllm on the PATH"
    )


def own_vllm() -> Path | None:
    """Return the vllm program of `.engines/` here or in a folder above."""
    return _own(OWN_VLLM)


def find_sglang(executable: Path | None) -> tuple[tuple[str, ...], bool]:
    """Return how to call SGLang's server, and whether it is that of `.engines/` here or in a folder above, for the CPU.

    The program given goes first, then our own environment, then the PATH. Raises: ConfigError: there is none.
    """
    own = _own(OWN_SGLANG)
    if executable is not None and not os.access(executable, os.X_OK):
        raise ConfigError(f"there is no sglang program {str(executable)!r}")
    if own is not None and executable in (None, own):
        checkout = own.parents[len(OWN_SGLANG.parts) - 1]
        return (str(own), str(checkout / SGLANG_CPU_LAUNCHER)), True
    if found := executable or shutil.which("sglang"):
        return (str(found), "serve"), False
    raise ConfigError(
        "SGLang is not installed: run `make engines` (or `python3 dev/setup.py sglang`) in a checkout of "
        "Preble, or put your own sglang on the PATH"
    )


def _own(program: Path) -> Path | None:
    """Return a program of `.engines/` here or in a folder above."""
    here = Path.cwd()
    return next((folder / program for folder in (here, *here.parents) if (folder / program).is_file()), None)
