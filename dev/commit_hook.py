"""Put the commit into packages: hatchling runs this for each that it builds (pyproject.toml).

BUILD_COMMIT names the commit where a build does not see the repository, as in a container.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface[Any]):
    """Adds the file that `preble.build.commit` reads."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the file, unless a source package brought it, or the checkout is used in place and may change."""
        package = Path(self.root) / "src" / "preble"
        build = runpy.run_path(str(package / "build.py"))
        if version == "editable" or (package / build["COMMIT_FILE"]).exists():
            return
        commit = os.environ.get("BUILD_COMMIT") or build["commit"]()
        if commit == build["UNKNOWN"]:
            return
        with NamedTemporaryFile("w", delete=False) as file:
            file.write(f"{commit}\n")
        self._file = Path(file.name)
        self._file.chmod(0o644)
        folder = "preble" if self.target_name == "wheel" else "src/preble"
        build_data["force_include"][file.name] = f"{folder}/{build['COMMIT_FILE']}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what `initialize` wrote."""
        if hasattr(self, "_file"):
            self._file.unlink(missing_ok=True)
