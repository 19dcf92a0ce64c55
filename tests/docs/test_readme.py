"""The numbers of README.md are those of the kept results."""

from __future__ import annotations

import pytest

from support.scripts import script

pytest.importorskip("matplotlib", reason="the benchmarks draw with matplotlib (the extra `plot`)")


def test_the_values_of_the_readme_are_those_of_the_kept_results() -> None:
    readme = script("benchmarks/repro/readme.py")
    page, made = readme.PAGE.read_text(encoding="utf-8"), readme.values()
    assert set(script("benchmarks/repro/page.py").names(page)) <= made.keys()
    assert readme.filled(page, made) == page, "fill it in: python benchmarks/repro/readme.py"
