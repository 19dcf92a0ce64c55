"""What the page about profiles says of their errors is what the kept results say."""

from __future__ import annotations

import json
import re
from statistics import median, quantiles

import msgspec
import pytest

from preble.core.costs.model import CostModel
from preble.lab.profiling import Measurements, fit_profile
from preble.profiles import load_profile
from support import scripts

RESULTS = scripts.ROOT / "benchmarks" / "results" / "gpu"
PAGE = (scripts.ROOT / "docs" / "reference" / "profiles.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["h100-llama-3-8b", "h100-mistral-7b", "h100x4-llama-3-70b"])
def test_the_errors_on_the_page_are_those_of_the_shipped_profile(name: str) -> None:
    model = CostModel(load_profile(name))
    errors: dict[tuple[bool, bool], list[float]] = {}
    for one in json.loads((RESULTS / f"{name}.unseen.json").read_text(encoding="utf-8")):
        prefills, decodes = [(new, cached) for new, cached in one["prefills"]], one["decodes"]
        fitted_s = model.iteration_s(prefills, len(decodes), sum(decodes))
        errors.setdefault((bool(prefills), bool(decodes)), []).append(abs(fitted_s / one["measured_s"] - 1))
    kinds = (errors[kind] for kind in ((True, False), (False, True), (True, True)))
    cells = " | ".join(f"{median(kind) * 100:.1f} %, {quantiles(kind, n=20)[-1] * 100:.1f} %" for kind in kinds)
    assert re.search(rf"^\| {name} \| {re.escape(cells)} \|$", PAGE, flags=re.MULTILINE), cells


def test_the_published_profile_of_two_h100_is_compared_with_what_was_measured() -> None:
    name = "h100x2-llama-3-70b"
    published = load_profile(name)
    kept = msgspec.json.decode((RESULTS / f"{name}.raw.json").read_bytes(), type=Measurements)
    measured = fit_profile(kept, name=name, source="").profile
    prefills = [CostModel(profile).prefill_s(2048, 0) for profile in (published, measured)]
    steps = [published.decode_base_s, measured.decode_base_s]
    said = (
        f"decode iteration, {steps[0] * 1e3:.1f} ms",
        f"half of the model takes {steps[1] * 1e3:.1f} ms",
        f"2,048 tokens {prefills[1] * 1e3:.0f} ms, where this profile has {prefills[0] * 1e3:.0f}",
        f"2,048 tokens cost {prefills[0] / steps[0]:.1f} decode iterations here, {prefills[1] / steps[1]:.1f} measured",
    )
    assert [words for words in said if words not in PAGE] == []
