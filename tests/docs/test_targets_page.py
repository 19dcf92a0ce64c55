"""The page about targets shows the kept results."""

from __future__ import annotations

from pathlib import Path

import msgspec

from support.scripts import script

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_kept_results() -> None:
    targets, page = script("benchmarks/repro/targets.py"), script("benchmarks/repro/page.py")
    runs = msgspec.json.decode(targets.RESULT.read_bytes(), type=list[targets.Run])
    assert {(run.workload, run.share, run.how, run.seed, run.wrong_profile) for run in runs} == set(targets.cases())
    text = targets.PAGE.read_text(encoding="utf-8")
    assert page.filled(text, targets.values(runs)) == text, "fill it in: python benchmarks/repro/targets.py --draw"
