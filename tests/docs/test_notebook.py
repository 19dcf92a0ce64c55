"""The notebook `docs/howto/from-python.ipynb` runs from its first cell to its last, and says what it says there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "howto" / "from-python.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
# As Jupyter does: one cell after the other, with the names of those before.
RUN = """
import contextlib, io, json, sys
names, said = {"__name__": "__main__"}, []
for source in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(source, names)
    said.append(out.getvalue())
print(json.dumps(said))
"""


@pytest.mark.slow
def test_each_cell_runs_and_prints_what_the_notebook_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sources = json.dumps(["".join(cell["source"]) for cell in CELLS])
    environment = {**os.environ, "MPLBACKEND": "agg"}
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(
        command, check=False, input=sources, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    shown = ["".join(line for output in cell["outputs"] for line in output.get("text", ())) for cell in CELLS]
    assert json.loads(done.stdout) == shown


def test_each_figure_is_kept() -> None:
    drawing = [cell for cell in CELLS if "plt.show()" in "".join(cell["source"]) or "draw_" in "".join(cell["source"])]
    assert len(drawing) == 3
    assert all(any("image/png" in output.get("data", {}) for output in cell["outputs"]) for cell in drawing)
