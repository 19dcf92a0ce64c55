"""What the plug-ins share, without an engine: settings, the waiting line, answers in turn."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from preble.core.replica.waiting_queue import QueueOrder
from preble.errors import ConfigError
from preble.integrations import sglang_plugin
from preble.integrations.hit_ratio_sampler import HitRatioSampler
from preble.integrations.settings import ANY_VERSION_VARIABLE, OrderSettings, require_version
from preble.integrations.waiting_line import WaitingLine


def test_the_order_is_groups_of_ten_unless_told_otherwise() -> None:
    assert OrderSettings.read({}) == OrderSettings(QueueOrder.GROUPS, 10)


def test_options_go_before_variables() -> None:
    environ = {"PREBLE_QUEUE_ORDER": "lpm", "PREBLE_QUEUE_GROUPS": "4"}
    assert OrderSettings.read(environ) == OrderSettings(QueueOrder.LPM, 4)
    assert OrderSettings.read(environ, {"order": "fcfs", "groups": 7}) == OrderSettings(QueueOrder.FCFS, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "fair"}, "'fair'.*fcfs, lpm, groups"),
        ({"groups": 0}, "0 is not a number"),
        ({"groups": "many"}, "'many' is not a number"),
        ({"gruops": 3}, "unknown option 'gruops'"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OrderSettings.read({}, options)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.7.dev3", "0.32"])
def test_a_known_version_is_accepted(version: str) -> None:
    require_version("vLLM", version, "0.32", {})


@pytest.mark.parametrize("version", ["0.33.0", "0.320.0", "1.0.32", "0.3"])
def test_an_unknown_version_is_refused_unless_it_is_to_be_tried(version: str) -> None:
    with pytest.raises(ConfigError, match=f"this is vLLM {version}.*{ANY_VERSION_VARIABLE}=1"):
        require_version("vLLM", version, "0.32", {})
    require_version("vLLM", version, "0.32", {ANY_VERSION_VARIABLE: "1"})


def line(cached: dict[str, int], gone: list[str]) -> WaitingLine[str]:
    """Requests that are their own ids, of 100 tokens each."""
    return WaitingLine(
        OrderSettings(num_groups=2), num_tokens=lambda _: 100, cached_tokens=cached.__getitem__, on_gone=gone.append
    )


def same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def test_requests_that_have_gone_are_charged_as_served() -> None:
    cached = {"hit1": 90, "hit2": 90, "hit3": 90, "miss1": 0, "miss2": 0}
    gone: list[str] = []
    waiting = line(cached, gone)
    assert waiting.arrange(same("miss1", "hit1", "hit2", "hit3")) == ["hit1", "hit2", "miss1", "hit3"]
    # Two hits of a round of three have been served: the miss is next, whatever comes.
    assert waiting.arrange(same("miss1", "hit3", "miss2")) == ["miss1", "hit3", "miss2"]
    assert gone == ["hit1", "hit2"]


def test_new_requests_come_behind_older_ones_of_their_group() -> None:
    cached = dict.fromkeys("abc", 90)
    waiting = line(cached, [])
    assert waiting.arrange(same("a", "b")) == ["a", "b"]
    assert waiting.arrange(same("c", "b", "a")) == ["a", "b", "c"], "in whatever order the engine shows them"
    assert len(waiting) == 3


def test_an_empty_line_keeps_nothing() -> None:
    gone: list[str] = []
    waiting = line({"a": 0}, gone)
    waiting.arrange(same("a"))
    assert waiting.arrange({}) == []
    assert (len(waiting), gone) == (0, ["a"])


def test_new_requests_and_some_in_turn_are_asked_about_before_each_batch() -> None:
    asked: list[str] = []

    def ask(request: str) -> int:
        asked.append(request)
        return 10 * len(asked)

    turns = HitRatioSampler[str](ask, new_per_batch=2, turns_per_batch=1)
    answers = []
    for _ in range(4):
        turns.new_batch()
        answers.append([turns.of(name, name) for name in "abcd"])
    assert asked == ["a", "b", "a", "c", "d", "b", "a"]
    assert answers == [[10, 20, 0, 0], [30, 20, 40, 50], [30, 60, 40, 50], [70, 60, 40, 50]]
    turns.forget("a")
    assert "a" not in turns and len(turns) == 3


def test_sglangs_plug_in_does_nothing_until_it_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREBLE_QUEUE_ORDER", raising=False)
    sglang_plugin.register()
    monkeypatch.setenv("PREBLE_QUEUE_ORDER", "fcfs")
    sglang_plugin.register()


def test_sglangs_plug_in_ends_the_server_that_cannot_have_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREBLE_QUEUE_ORDER", "fair")
    with pytest.raises(SystemExit, match="unknown order 'fair'"):
        sglang_plugin.register()


def test_plug_ins_need_nothing_but_the_standard_library() -> None:
    """Engines run them in environments of their own."""
    program = (
        "import sys; before = set(sys.modules)\n"
        "import preble.integrations.sglang_plugin, preble.integrations.waiting_line\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - sys.stdlib_module_names - {'preble'}))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
