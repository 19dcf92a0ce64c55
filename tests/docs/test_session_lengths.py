"""The page about the policy shows what lengths by session would bring, as kept."""

from __future__ import annotations

import msgspec

from support.scripts import script


def test_the_page_shows_the_kept_results() -> None:
    lengths, page = script("benchmarks/repro/session_lengths.py"), script("benchmarks/repro/page.py")
    runs = msgspec.json.decode(lengths.RESULT.read_bytes(), type=list[lengths.Run])
    assert len(runs) == len(lengths.SIGMAS) * len(lengths.WAYS) * len(lengths.SEEDS)
    text = lengths.PAGE.read_text(encoding="utf-8")
    assert page.filled(text, lengths.values(runs)) == text, (
        "fill it in: python benchmarks/repro/session_lengths.py --draw"
    )
