"""What the scheduler has learned survives a restart, and no file that may lie there does harm."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from preble.config import DecisionsConfig, GatewayConfig, SchedulerConfig
from preble.core.placing.scheduler import GlobalScheduler
from preble.core.types import NOTHING_LEARNED, Learned, LearnedLength, ReplicaSpec, Request, RequestId, pack_tokens
from preble.decisions.lines import Header
from preble.decisions.reader import LogReader
from preble.errors import ConfigError
from preble.lab.replay.replay import Replay
from preble.serving.learned_file import MOST_BYTES, LearnedFile
from preble.serving.scheduler_setup import DEFAULT_PROFILE, start_scheduling
from support.by_hand import A, B, scheduler_of
from support.logs import rewritten

LEARNED = Learned(1.5, 0.5, 700.0, (LearnedLength("ab" * 16, 50, 8.0, 1600.0),))


async def written(path: Path, profile: str = "profile") -> LearnedFile:
    file = LearnedFile(path, profile)
    file.keep(scheduler_of("preble", A, settings={"learned": LEARNED}))
    await file.close()
    return file


LONG, SHORT = range(50), range(100, 150)


def serve_questions(scheduler: GlobalScheduler) -> None:
    """Long answers to one prefix, short ones to the other; all come at the same moment, to two replicas."""
    now = asyncio.get_running_loop().time()
    for replica in (A, B):
        scheduler.add_replica(ReplicaSpec(replica, block_size=1), now)
    asked = [
        Request(RequestId(f"q{number}"), pack_tokens([*prefix, 1000 + number]))
        for number, prefix in enumerate([LONG, SHORT] * 20)
    ]
    for request in asked:
        scheduler.place(request, now)
    for number, request in enumerate(asked):
        scheduler.on_first_token(request.request_id, now + 1.0 + number)
        scheduler.on_finish(request.request_id, 10 if number % 2 else 2000, now + 1.0 + number)


async def test_what_one_process_has_learned_the_next_one_begins_with_and_its_log_replays(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    config = GatewayConfig(
        scheduler=SchedulerConfig(learned_file=str(tmp_path / "learned.json")),
        decisions=DecisionsConfig(log=str(log), log_tokens="plain"),
    )
    for _ in range(2):
        process = start_scheduling(config)
        serve_questions(process.scheduler)
        await process.close()
    began_with = LogReader(log).header.learned
    assert began_with.answer_tokens == pytest.approx(1005)
    assert {length.end for length in began_with.lengths} == {50}
    replayed = Replay(LogReader(log)).run()
    assert replayed.difference is None and replayed.compared == 40
    cold = rewritten(log, lambda line: replace(line, learned=NOTHING_LEARNED) if isinstance(line, Header) else line)
    assert Replay(LogReader(cold)).run().difference is not None, "else this test shows nothing"


async def test_a_log_whose_tokens_are_renamed_has_no_digests_of_them(tmp_path: Path) -> None:
    path, log = tmp_path / "learned", tmp_path / "log.jsonl"
    await written(path, DEFAULT_PROFILE)
    contents = json.loads(path.read_text())
    contents["learned"]["lengths"] = [{"digest": "ab" * 16, "end": 50, "answers": 8.0, "output_tokens": 1600.0}]
    path.write_text(json.dumps(contents))
    assert LearnedFile(path, DEFAULT_PROFILE).read().lengths
    config = GatewayConfig(scheduler=SchedulerConfig(learned_file=str(path)), decisions=DecisionsConfig(log=str(log)))
    await start_scheduling(config).close()
    header = LogReader(log).header
    assert header.learned.answer_tokens == 700.0 and header.learned.lengths == ()


async def test_the_correction_of_another_profile_is_not_carried_on(tmp_path: Path) -> None:
    path = tmp_path / "learned"
    await written(path)
    assert LearnedFile(path, "profile").read().answer_tokens == 700.0
    data = json.loads(path.read_text())
    data["learned"]["prefill_factor"] = 1.5
    path.write_text(json.dumps(data))
    assert LearnedFile(path, "profile").read().prefill_factor == 1.5
    assert LearnedFile(path, "other").read().prefill_factor == 1.0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b'{"version": 2, "profile": "", "learned": {}}',
        b'{"version": 1}',
        b'{"version": 1, "profile": "", "learned": {"answer_tokens": 1e300}}',
        b'{"version": 1, "profile": "", "learned": {"prefill_factor": -1}}',
        b"0" * (MOST_BYTES + 1),
    ],
    ids=["empty", "cut off", "not text", "a list", "newer", "a part", "too long", "negative", "too large"],
)
def test_a_file_that_cannot_be_used_is_said_and_ignored(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "learned"
    path.write_bytes(data)
    with capture_logs() as logs:
        assert LearnedFile(path, "profile").read() == NOTHING_LEARNED
    assert [entry["event"] for entry in logs] == ["learned_file_ignored"]


def test_without_a_file_nothing_is_known_yet(tmp_path: Path) -> None:
    with capture_logs() as logs:
        assert LearnedFile(tmp_path / "learned", "profile").read() == NOTHING_LEARNED
    assert logs == []


@pytest.mark.parametrize("name", ["missing/learned", "."], ids=["no such folder", "a folder"])
def test_a_place_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.learned_file"):
        LearnedFile(tmp_path / name, "profile").read()


async def test_a_disk_that_fails_later_is_said_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "learned"
    path.parent.mkdir()
    file = LearnedFile(path, "profile")
    file.keep(scheduler_of("preble", A))
    path.parent.rmdir()
    with capture_logs() as logs:
        await file.close()
    assert [entry["event"] for entry in logs] == ["learned_file_not_written"]
