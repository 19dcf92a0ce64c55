"""Shipped cost profiles: made by the committed script, close to the fits that they come from, refused when wrong."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from preble.core.costs.model import CostModel
from preble.errors import ConfigError
from preble.profiles import load_profile, profile_json, profile_names
from support import scripts


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return scripts.script("benchmarks/repro/make_profiles.py")


def model(name: str) -> CostModel:
    return CostModel(load_profile(name))


def valid() -> dict[str, Any]:
    text = (resources.files("preble.profiles") / "data" / "tiny-cpu.json").read_text(encoding="utf-8")
    fields: dict[str, Any] = json.loads(text)
    return fields


def test_the_shipped_profiles_are_these() -> None:
    assert profile_names() == [
        "a100-mistral-7b",
        "a100x2-llama-3-70b",
        "a6000-llama-2-7b-vllm",
        "a6000-mistral-7b",
        "h100-llama-3-8b",
        "h100-mistral-7b",
        "h100x2-llama-3-70b",
        "h100x4-llama-3-70b",
        "tiny-cpu",
    ]


def test_the_shipped_files_are_what_the_script_makes(script: ModuleType) -> None:
    made = {profile.name: profile_json(profile) for profile in (make() for make in script.PROFILES)}
    folder = resources.files("preble.profiles") / "data"
    assert made == {name: (folder / f"{name}.json").read_text(encoding="utf-8") for name in profile_names()}


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_bears_its_name_and_says_where_it_comes_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert len(profile.source) > 50


@pytest.mark.parametrize(
    ("num_tokens", "milliseconds"),
    [(50, 25), (512, 67), (1024, 128), (2048, 269), (4096, 553), (8192, 1183), (16384, 2688), (32000, 6461)],
)
def test_the_a6000_takes_what_was_published_of_it(num_tokens: int, milliseconds: float) -> None:
    assert model("a6000-mistral-7b").prefill_s(num_tokens) * 1000 == pytest.approx(milliseconds, rel=0.01)


def test_the_a6000_decode_step_has_the_published_floor_and_attention() -> None:
    a6000 = model("a6000-mistral-7b")
    assert a6000.iteration_s((), 1, 0) * 1000 == pytest.approx(24.8, abs=0.05)
    published = (22 + 1.86e-4 * 100_000 + 0.159) / 0.9
    assert a6000.iteration_s((), 100, 100_000) * 1000 == pytest.approx(published, rel=0.01)


def test_the_dip_of_the_published_fit_is_gone(script: ModuleType) -> None:
    assert script.a6000_mistral_7b_ms(383, 383) < 0
    a6000 = model("a6000-mistral-7b")
    assert a6000.prefill_s(383) > a6000.prefill_s(320) > 0.03


def test_a_cached_context_costs_what_the_fit_says(script: ModuleType) -> None:
    published = script.a100_llama_3_70b_ms(64, 64 + 20_000) / 1000
    assert model("a100x2-llama-3-70b").prefill_s(64, 20_000) == pytest.approx(published, rel=0.001)


def test_the_page_about_profiles_lists_those_that_ship() -> None:
    page = (scripts.ROOT / "docs" / "reference" / "profiles.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", page, flags=re.MULTILINE)) == profile_names()


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no profile is called 'h200'; choose one of a100-mistral-7b, .*tiny-cpu"):
        load_profile("h200")


def test_a_file_is_loaded_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(valid() | {"name": "mine"}), encoding="utf-8")
    assert load_profile(str(path)).name == "mine"


def test_what_a_request_costs_is_in_a_file_only_where_it_costs_something(tmp_path: Path) -> None:
    free = load_profile("tiny-cpu")
    dear = replace(free, request_overhead_s=0.005)
    assert "request_overhead_s" not in profile_json(free)
    path = tmp_path / "dear.json"
    path.write_text(profile_json(dear), encoding="utf-8")
    assert load_profile(str(path)) == dear != free


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read profile .*gone\.json.*No such file"):
        load_profile(str(tmp_path / "gone.json"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefil_points": []}, "unknown field 'prefil_points'; use "),
        ({"decode_base_s": "fast"}, r"Expected `float`, got `str` - at `\$.decode_base_s`"),
        ({"decode_base_s": -1.0}, "no time may be negative"),
        ({"request_overhead_s": -0.001}, "no time may be negative"),
        ({"prefill_points": [[0, 0.1], [10, 0.05]]}, "prefill_points must grow"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(valid() | change), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_profile(str(path))


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b""])
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"wrong\.json"):
        load_profile(str(path))
