"""The page of failures: each row names a test that exists, and its figures are those of the kept result."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from support.scripts import script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "failures.md").read_text(encoding="utf-8")
HOW = ("as they come", "in turns")
TESTS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def test_every_row_of_an_attack_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
    attacks = [row for row in rows if row.count("|") == 6 and "::" in row]
    assert len(attacks) == len(TESTS) >= 18


@pytest.mark.parametrize(("path", "name"), TESTS)
def test_the_test_of_a_row_exists(path: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_the_figures_are_those_of_the_kept_result() -> None:
    runs = msgspec.json.decode((ROOT / "benchmarks" / "results" / "bad_replica.json").read_bytes())
    without = [run["failed"] for run in runs if not run["guarded"]]
    default = [(run["failed"], run["tried"], f"{run['slowest_s']} s") for run in runs if run["guarded"]]
    rows = re.findall(r"^\| [^|]+ \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+ s) \|$", PAGE, re.MULTILINE)
    assert [int(row[0]) for row in rows] == without
    assert [(int(row[1]), int(row[2]), row[3]) for row in rows] == default
    assert all(failed <= 0.02 * 200 for failed, _, _ in default), "the bar"


def test_the_figures_of_upgrades_are_those_of_the_kept_result() -> None:
    upgrades = script("benchmarks/repro/upgrades.py")
    kept = msgspec.json.decode(upgrades.RESULT.read_bytes(), type=upgrades.Result)
    made = {"upgrades": upgrades.table(kept)}
    assert upgrades.filled(PAGE, made) == PAGE, "fill it in: python benchmarks/repro/upgrades.py --fill"
    assert made.keys() <= set(script("benchmarks/repro/page.py").names(PAGE))
    assert kept.upgrades == 5


def test_the_figures_of_the_flood_are_those_of_the_kept_result() -> None:
    runs = msgspec.json.decode((ROOT / "benchmarks" / "results" / "noisy_neighbour.json").read_bytes())
    row = r"^\| (simulated|gateway-simulated|gateway) \| ([\w ]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| (\d+) \|$"
    rows = re.findall(row, PAGE, re.MULTILINE)
    assert len(rows) == 9
    for where, how, p50, p99, hit_rate, failed in rows:
        found = [run for run in runs if "seed" in run and (run["where"], run["how"]) == (where, how)]
        assert p50 == ", ".join(f"{run['ttft_p50_s']:.2f}" for run in found)
        assert p99 == ", ".join(f"{run['ttft_p99_s']:.2f}" for run in found)
        assert hit_rate == ", ".join(f"{100 * run['hit_rate']:.1f}" for run in found)
        assert int(failed) == sum(run["failed"] for run in found)


def test_a_flood_costs_no_hits() -> None:
    runs = msgspec.json.decode((ROOT / "benchmarks" / "results" / "noisy_neighbour.json").read_bytes())
    simulated = [run for run in runs if "seed" in run and run["where"].endswith("simulated")]
    rates = {how: [run["hit_rate"] for run in simulated if run["how"] == how] for how in HOW}
    for as_they_come, in_turns in zip(rates["as they come"], rates["in turns"], strict=True):
        assert in_turns >= as_they_come - 0.02


def test_a_flood_costs_another_tenant_what_the_page_says_and_not_more_than_the_bar() -> None:
    kept = msgspec.json.decode((ROOT / "benchmarks" / "results" / "noisy_neighbour.json").read_bytes())
    for each in (entry for entry in kept if "seeds" in entry):
        assert f"| {each['ttft_p99_s']:.2f} s | {each['times_alone']:.2f} |" in PAGE
        is_simulated = each["where"].endswith("simulated")
        assert not is_simulated or each["how"] != "in turns" or each["times_alone"] <= 1.5


def test_the_figures_of_giants_are_those_of_the_kept_result_and_memory_goes_back() -> None:
    kept = msgspec.json.decode((ROOT / "benchmarks" / "results" / "giant_requests.json").read_bytes())
    for lag in (entry for entry in kept if "giant" in entry):
        assert f"| {lag['giant']} | {lag['status']} | {lag['took_s']} s | {lag['longest_s']} s |" in PAGE
    for burst in (entry for entry in kept if "kind" in entry):
        assert f"| {burst['before_mb']} MB | {burst['most_mb']} MB | {burst['after_mb']} MB |" in PAGE
        assert burst["after_mb"] <= burst["before_mb"] + 20
