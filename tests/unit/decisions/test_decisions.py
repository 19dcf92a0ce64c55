"""The decision log's parts by literal examples: names, writer, reader, what is remembered, what is explained."""

from __future__ import annotations

import dataclasses
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from preble.core.policies.preble import Preble
from preble.core.policies.registry import make_policy, policy_names
from preble.core.types import (
    BlocksStored,
    Candidate,
    Placement,
    Reason,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    pack_tokens,
    unpack_tokens,
)
from preble.core.types.events import Stored, TimerEvent
from preble.core.types.life import Ended, FirstToken, Outcome, Started
from preble.decisions.explain import LEAST_DELAY, explain
from preble.decisions.lines import (
    PlaceLine,
    ReportLine,
    StoredLine,
    header_line,
    line_of,
)
from preble.decisions.names import LogNames, unpack_text
from preble.decisions.reader import LogReader
from preble.decisions.recent import CANDIDATES_PER_DECISION, PlacedAt, RecentDecisions
from preble.decisions.settings import SchedulerSettings
from preble.decisions.writer import MAX_PENDING_BYTES, LogFile, LogWriter
from preble.errors import ConfigError, NoReplicaError, TraceFormatError
from preble.lab.replay.replay import Replay
from preble.lab.replay.what_if import logged_outcome, what_if
from support.logs import PROFILE, MemorySink, Recording

SECRET = LogNames(bytes(range(32)))
A, B = ReplicaId("a"), ReplicaId("b")


# names


def test_renaming_tokens_is_a_bijection() -> None:
    ids = np.concatenate([np.arange(200_000, dtype=np.uint32), np.uint32(2**32 - 1) - np.arange(1000, dtype=np.uint32)])
    renamed = unpack_text(SECRET.tokens(ids.tobytes()))
    assert len(set(unpack_tokens(renamed))) == len(ids)


def test_equal_tokens_have_equal_names_wherever_they_are_and_other_keys_give_others() -> None:
    one, other = (unpack_tokens(unpack_text(SECRET.tokens(pack_tokens(ids)))) for ids in ([5, 6, 5], [6, 7]))
    assert one[0] == one[2] != one[1] == other[0]
    assert unpack_text(LogNames(b"x" * 32).tokens(pack_tokens([5]))) != unpack_text(SECRET.tokens(pack_tokens([5])))


def stored_line(names: LogNames, event: BlocksStored) -> StoredLine:
    line = line_of(names, 0.0, Stored(event, located=True))
    assert isinstance(line, StoredLine)
    return line


def test_blocks_and_namespaces_are_never_written_as_they_are() -> None:
    event = BlocksStored(A, (7, b"seven"), 6, pack_tokens([1, 2]), 1, "adapter\x1fsalt")
    line = stored_line(LogNames(), event)
    assert 7 not in line.blocks and line.parent != 6 and "salt" not in line.namespace
    assert len({*line.blocks, line.parent}) == 3
    assert line.namespace != stored_line(SECRET, event).namespace != ""
    assert stored_line(LogNames(), BlocksStored(A, (), None, pack_tokens([]), 1)).namespace == ""


@pytest.mark.parametrize("text", ["!", "AAAA", "", LogNames().tokens(b"12345678")[:-8], "eJxLTEoGAAJNASc="])
def test_an_unreadable_prompt_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="token ids"):
        unpack_text(text)


# writer


class GatedSink(MemorySink):
    """A disk that is slow until the gate opens. `asked`: somebody has tried to write past the header."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.asked = threading.Event()

    def append(self, data: bytes) -> None:
        if self.data.tell():
            self.asked.set()
            assert self.gate.wait(60)
        super().append(data)


def writer(sink: MemorySink, **options: int) -> LogWriter:
    return LogWriter(sink, header_line(LogNames(), 0.0, 0.0, SchedulerSettings(), PROFILE), LogNames(), **options)


def lines_of(tmp_path: Path, sink: MemorySink) -> list[str]:
    """The kinds of lines after the header; all of them are whole."""
    data = sink.data.getvalue()
    assert data.endswith(b"\n")
    path = tmp_path / "log.jsonl"
    path.write_bytes(data)
    return [type(line).__name__ for _, line in LogReader(path)._read()][1:]


def test_what_finds_no_room_is_dropped_counted_and_told_in_the_log(tmp_path: Path) -> None:
    sink = GatedSink()
    log = writer(sink)
    log.write(TimerEvent(), 1.0)
    assert sink.asked.wait(60)
    log.write(TimerEvent(), 2.0, size=MAX_PENDING_BYTES)
    for _ in range(3):
        log.write(TimerEvent(), 3.0)
    assert log.num_dropped == 3
    sink.gate.set()
    wait(lambda: log.num_written == 2)
    log.write(TimerEvent(), 4.0)
    log.close(60.0)
    assert lines_of(tmp_path, sink) == ["TimerLine", "TimerLine", "DroppedLine", "TimerLine"]
    assert (log.num_written, log.num_dropped, sink.is_closed) == (3, 3, True)
    reader = LogReader(tmp_path / "log.jsonl")
    assert [numbered.event.t for numbered in reader] == [1.0, 2.0]
    assert reader.ended_at == "line 4: 3 lines are missing from the log here"


def test_a_writer_that_waits_for_room_drops_nothing(tmp_path: Path) -> None:
    sink = GatedSink()
    log = writer(sink, waits=True)
    log.write(TimerEvent(), 1.0)
    assert sink.asked.wait(60)
    log.write(TimerEvent(), 2.0, size=MAX_PENDING_BYTES)
    simulation = threading.Thread(target=log.write, args=(TimerEvent(), 3.0))
    simulation.start()
    simulation.join(0.05)
    assert simulation.is_alive(), "it waits"
    sink.gate.set()
    simulation.join(60)
    log.close(None)
    assert lines_of(tmp_path, sink) == ["TimerLine"] * 3
    assert (log.num_written, log.num_dropped) == (3, 0)


def wait(condition: Callable[[], bool]) -> None:
    """Wait for another thread's work."""
    ticks = threading.Event()
    for _ in range(6000):
        if condition():
            return
        ticks.wait(0.01)
    raise AssertionError("it did not happen within a minute")


def test_a_disk_that_fails_for_a_while_leaves_a_gap_that_is_reported(tmp_path: Path) -> None:
    sink = MemorySink()
    log = writer(sink)
    log.write(TimerEvent(), 1.0)
    wait(lambda: log.num_written == 1)
    sink.broken = True
    log.write(TimerEvent(), 2.0)
    wait(lambda: log.num_dropped == 1)
    sink.broken = False
    log.write(TimerEvent(), 3.0)
    log.close(60.0)
    assert lines_of(tmp_path, sink) == ["TimerLine", "DroppedLine", "TimerLine"]
    assert (log.num_written, log.num_dropped) == (2, 1)


def test_a_disk_that_is_full_at_first_costs_no_header(tmp_path: Path) -> None:
    sink = MemorySink()
    sink.broken = True
    log = writer(sink)
    log.write(TimerEvent(), 1.0)
    wait(lambda: log.num_dropped == 1)
    sink.broken = False
    log.write(TimerEvent(), 2.0)
    log.close(60.0)
    assert lines_of(tmp_path, sink) == ["DroppedLine", "TimerLine"], "what can be read, and has a header"


def test_a_disk_that_takes_only_small_lines_is_told_once_for_each_cause() -> None:
    class NearlyFull(MemorySink):
        cause = "No space left on device"

        def append(self, data: bytes) -> None:
            if self.data.tell() and log.num_written + log.num_dropped & 1 == 0:
                raise OSError(self.cause)
            super().append(data)

    with structlog.testing.capture_logs() as logged:
        log = writer(sink := NearlyFull())
        for number in range(10):
            if number == 6:
                sink.cause = "Input/output error"
            log.write(TimerEvent(), float(number))
            wait(lambda number=number: log.num_written + log.num_dropped == number + 1)
        log.close(60.0)
    assert log.num_dropped == 5
    warnings = [line["error"] for line in logged if line["log_level"] == "warning"]
    assert warnings == ["No space left on device", "Input/output error"]


@pytest.mark.parametrize("how", ["deleted", "cut"])
def test_a_log_whose_file_is_gone_is_told_and_goes_on_in_a_new_one(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    path = folder / "log.jsonl"
    header = header_line(LogNames(), 0.0, 0.0, SchedulerSettings(), PROFILE)
    with structlog.testing.capture_logs() as logged:
        log = LogWriter(LogFile(path), header, LogNames())
        log.write(TimerEvent(), 1.0)
        wait(lambda: log.num_written == 1)
        if how == "cut":
            path.write_bytes(b"")
        else:
            path.unlink()
            folder.rmdir()
            for number in (2.0, 3.0):
                log.write(TimerEvent(), number)
            wait(lambda: log.num_dropped == 2)
            folder.mkdir()
        log.write(TimerEvent(), 4.0)
        log.close(60.0)
    kinds = [type(line).__name__ for _, line in LogReader(path)._read()]
    assert kinds == ["Header", "DroppedLine", "TimerLine"]
    [warning] = [line["error"] for line in logged if line["log_level"] == "warning"]
    reason = "its file was deleted or cut" if how == "cut" else f"No such file or directory: {str(path)!r}"
    assert warning == f"[Errno 2] {reason}"


def test_a_log_ends_at_its_bound(tmp_path: Path) -> None:
    sink = MemorySink()
    log = writer(sink, max_bytes=1400)
    for i in range(1000):
        log.write(TimerEvent(), float(i))
    log.close(60.0)
    kinds = lines_of(tmp_path, sink)
    assert kinds[-1] == "FullLine" and set(kinds[:-1]) <= {"TimerLine"}
    assert log.num_written == len(kinds) - 1 and log.num_written + log.num_dropped == 1000
    assert sink.data.tell() < 1500
    reader = LogReader(tmp_path / "log.jsonl")
    assert len(list(reader)) == log.num_written and "size limit" in str(reader.ended_at)


def test_a_line_that_cannot_be_made_is_a_gap_and_no_end(tmp_path: Path) -> None:
    broken: Any = Stored(None, located=True)  # type: ignore[arg-type]
    sink = MemorySink()
    log = writer(sink)
    log.write(broken, 0.5)
    log.write(TimerEvent(), 1.0)
    log.close(60.0)
    assert lines_of(tmp_path, sink) == ["DroppedLine", "TimerLine"]


def test_nothing_is_written_after_the_end() -> None:
    sink = MemorySink()
    log = writer(sink)
    log.close(60.0)
    log.close(60.0)
    log.write(TimerEvent(), 1.0)
    assert (log.num_written, log.num_dropped) == (0, 1)


def test_a_log_file_is_its_owners_alone_and_an_older_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for text in (b"first", b"second"):
        file = LogFile(path)
        file.append(text)
        file.close()
    assert (path.read_bytes(), path.with_name("log.jsonl.1").read_bytes()) == (b"second", b"first")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_log_file_that_cannot_be_made_is_the_operators_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decision log .*nowhere.* cannot be written"):
        LogFile(tmp_path / "nowhere" / "log.jsonl")


def test_only_an_earlier_log_is_put_aside_for_a_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"decision log .*folder' cannot be written: it is no file"):
        LogFile(folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_write_that_fails_half_way_leaves_nothing_of_itself(tmp_path: Path) -> None:
    """In a process of its own, whose files may have 100 bytes."""
    path = tmp_path / "log.jsonl"
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from preble.decisions.writer import LogFile\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "file = LogFile(Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))\n"
        "file.append(b'x' * 60)\n"
        "try:\n    file.append(b'y' * 60)\n"
        "except OSError:\n    print('refused')\n"
        "file.append(b'z' * 40)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"
    assert path.read_bytes() == b"x" * 60 + b"z" * 40
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100


# reader


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    """A short log: one replica, one request placed and finished, one that found none."""
    recording = Recording(SchedulerSettings())
    scheduler = recording.scheduler
    with pytest.raises(NoReplicaError):
        scheduler.place(Request.of("early", [1]), 0.0)
    scheduler.add_replica(ReplicaSpec(A, 64), 1.0)
    scheduler.place(Request.of("q", range(40)), 2.0)
    scheduler.on_finish(RequestId("q"), 5, 3.0, cached_tokens=0)
    return recording.written_to(tmp_path / "log.jsonl")


def with_line(path: Path, number: int, text: str) -> Path:
    lines = path.read_text().splitlines()
    lines[number - 1] = text
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("number", "text", "said"),
    [
        (1, '{"kind":"timer","t":0}', 'log.jsonl:1: the first line must be of kind "log"'),
        (3, "{", "log.jsonl:3: "),
        (3, '{"kind":"what","t":1}', "log.jsonl:3: Invalid value 'what'"),
        (3, '{"kind":"timer","t":1,"x":2}', "unknown field `x`"),
        (3, '{"kind":"timer","t":"1"}', "Expected `float`"),
        (4, '{"kind":"timer","t":0.5}', "log.jsonl:4: time goes back, from 1.0 to 0.5"),
        (5, '{"kind":"report","t":3,"id":"other","fact":{"fact":"ended"}}', "request 'other' is not in flight"),
        (5, '{"kind":"place","t":3,"id":"r","prompt":"!","num_prompt_tokens":1}', "log.jsonl:5: the token ids"),
        (3, '{"kind":"report","t":1,"id":"q","fact":{"fact":"moved","replica_id":"b"}}', "log.jsonl:3: cannot move"),
    ],
)
def test_what_is_no_log_is_refused_with_file_and_line(log_path: Path, number: int, text: str, said: str) -> None:
    with pytest.raises(TraceFormatError) as caught:
        Replay(LogReader(with_line(log_path, number, text))).run()
    assert said in str(caught.value)


def test_a_version_that_is_not_known_and_an_empty_file_are_refused(log_path: Path) -> None:
    header = log_path.read_text().splitlines()[0]
    with pytest.raises(TraceFormatError, match="unknown version 1"):
        LogReader(with_line(log_path, 1, header.replace('"version":2', '"version":1')))
    log_path.write_text("")
    with pytest.raises(TraceFormatError, match="the log is empty"):
        LogReader(log_path)


def test_two_logs_in_one_file_are_refused(log_path: Path) -> None:
    log_path.write_text(2 * log_path.read_text())
    with pytest.raises(TraceFormatError, match="a second log begins here"):
        Replay(LogReader(log_path)).run()


def test_a_line_that_is_not_finished_is_left_out(log_path: Path) -> None:
    log_path.write_bytes(log_path.read_bytes()[:-5])
    assert not [numbered for numbered in LogReader(log_path) if isinstance(numbered.event, ReportLine)]
    assert Replay(LogReader(log_path)).run().compared == 2


def test_a_request_that_found_no_replica_is_in_the_log(log_path: Path) -> None:
    places = [numbered.event for numbered in LogReader(log_path) if isinstance(numbered.event, PlaceLine)]
    assert [(line.id, line.error) for line in places] == [("early", "NoReplicaError"), ("q", None)]
    outcome = logged_outcome(log_path)
    assert (outcome.placements, outcome.failed, outcome.moved) == (1, 1, 0)


# what if


def two_prefixes(path: Path) -> Path:
    """Round robin over two replicas that report nothing: two prompts, each asked for four times in pairs."""
    recording = Recording(SchedulerSettings(policy="round_robin"))
    scheduler = recording.scheduler
    for replica_id in (A, B):
        scheduler.add_replica(ReplicaSpec(replica_id), 0.0)
    for i in range(8):
        prompt = range(100 * (i // 2 % 2), 100 * (i // 2 % 2) + 33)
        scheduler.place(Request.of(f"q{i}", prompt), float(i))
        scheduler.on_finish(RequestId(f"q{i}"), 1, i + 0.5)
    return recording.written_to(path)


def test_another_policy_is_explained_with_what_it_would_have_matched_and_moved(tmp_path: Path) -> None:
    path = two_prefixes(tmp_path / "log.jsonl")
    logged = logged_outcome(path)
    assert [share.placements for share in logged.replicas.values()] == [4, 4]
    assert (logged.hit_rate, logged.as_logged) == (4 * 32 / (8 * 33), True)
    again, e2 = what_if(path, "round_robin"), what_if(path, "e2")
    assert (again.moved, again.hit_rate, again.load_imbalance) == (0, logged.hit_rate, logged.load_imbalance)
    assert e2.hit_rate == 6 * 32 / (8 * 33)
    assert e2.moved == len(e2.moves) == sum(logged_at != here for _, logged_at, here in e2.moves) > 0


def test_what_was_lost_with_a_replica_is_lost_under_every_policy(tmp_path: Path) -> None:
    """Requests that only under the other policy ran there have nowhere to go; those of the log are placed again."""
    recording = Recording(SchedulerSettings(policy="round_robin"))
    scheduler = recording.scheduler
    for replica_id in (A, B):
        scheduler.add_replica(ReplicaSpec(replica_id), 0.0)
    for i in range(6):
        scheduler.place(Request.of(f"q{i}", range(33)), 1.0)
    orphans = scheduler.remove_replica(A, 2.0)
    for request in orphans:
        scheduler.place(request, 3.0)
    for i in range(6):
        scheduler.on_finish(RequestId(f"q{i}"), 1, 4.0)
    path = recording.written_to(tmp_path / "log.jsonl")
    for policy in policy_names():
        outcome = what_if(path, policy)
        assert (outcome.placements, outcome.failed) == (6 + len(orphans), 0)


# what is remembered


def placement(request_id: str, candidates: int = 1) -> Placement:
    weighed = tuple(Candidate(ReplicaId(f"r{i}"), 0, 0.1 * i) for i in range(candidates))
    return Placement(RequestId(request_id), ReplicaId("r0"), Reason.EXPLORE, 0, 10, weighed)


def keep(recent: RecentDecisions, placement: Placement, now: float) -> PlacedAt:
    placed = PlacedAt(placement, now)
    recent.on(placed, Started(), now)
    return placed


def test_only_the_last_decisions_are_remembered() -> None:
    recent = RecentDecisions("e2", 3, unix_offset_s=100.0)
    for i in range(5):
        keep(recent, placement(f"q{i}"), float(i))
    assert [decision.request_id for decision in recent.latest(10)] == ["q4", "q3", "q2"]
    assert (recent.of_request("q1"), len(recent.of_request("q2")), len(recent)) == ([], 1, 3)
    assert recent.of_request("q4")[0].placed_at == 104.0
    assert recent.placed(2) == {3.0: "q3", 4.0: "q4"}, "by the scheduler's clock"


def test_a_request_id_that_comes_again_and_again_is_forgotten_in_order() -> None:
    recent = RecentDecisions("e2", 3)
    for i in range(5):
        keep(recent, placement("same"), float(i))
    assert [decision.placed_at for decision in recent.of_request("same")] == [2.0, 3.0, 4.0]
    for _ in range(3):
        keep(recent, placement("other"), 9.0)
    assert recent.of_request("same") == []


def test_a_large_cluster_has_fewer_decisions_remembered() -> None:
    recent = RecentDecisions("e2", 10)
    for i in range(10):
        keep(recent, placement(f"q{i}", candidates=4 * CANDIDATES_PER_DECISION), float(i))
    assert len(recent) == 2
    keep(recent, placement("huge", candidates=1000), 11.0)
    assert len(recent) == 1 and recent.of_request("huge")


# explanations


def explained(
    reason: Reason, replica: str, *candidates: tuple[str, int, float, float, float], policy: str = "e2"
) -> str:
    own = (0.005, 0.05) if policy == LEAST_DELAY else (None, None)
    weighed = tuple(Candidate(ReplicaId(r), m, *costs, None, 0, *own) for r, m, *costs in candidates)
    matched = next((c.matched_tokens for c in weighed if c.replica_id == replica), 0)
    recent = RecentDecisions(policy, 1)
    placed = keep(recent, Placement(RequestId("q"), ReplicaId(replica), reason, matched, 100, weighed), 0.0)
    recent.on(placed, FirstToken(), 0.25)
    recent.on(placed, Ended(Outcome.OK, output_tokens=7, cached_tokens=64), 1.5)
    return " ".join(explain(recent.of_request("q")[0]).split())


def test_a_measured_first_token_is_explained_beside_the_predicted_one() -> None:
    recent = RecentDecisions("round_robin", 1)
    placement = Placement(RequestId("q"), ReplicaId("a"), Reason.POLICY, 0, 100, predicted_ttft_s=0.2)
    recent.on(keep(recent, placement, 0.0), FirstToken(), 0.25)
    [decision] = recent.of_request("q")
    assert decision.predicted_ttft_s == 0.2
    assert "First token after 0.250 s; 0.200 s were predicted." in explain(decision)
    placement = dataclasses.replace(placement, predicted_ttft_p98_s=0.3)
    recent.on(keep(recent, placement, 1.0), FirstToken(), 1.25)
    assert "0.200 s were predicted, 0.300 s for 98 of 100." in explain(recent.of_request("q")[-1])


def test_a_measured_pace_is_explained_beside_the_predicted_one() -> None:
    recent = RecentDecisions("round_robin", 1)
    times = {"predicted_tpot_s": 0.02, "predicted_tpot_p98_s": 0.04}
    placed = keep(recent, Placement(RequestId("q"), ReplicaId("a"), Reason.POLICY, 0, 100, **times), 0.0)
    recent.on(placed, FirstToken(), 0.25)
    recent.on(placed, Ended(Outcome.OK, output_tokens=11), 0.55)
    [decision] = recent.of_request("q")
    said = "A further token every 0.030 s; 0.020 s were predicted, 0.040 s for 98 of 100."
    assert decision.tpot_s == pytest.approx(0.03) and said in explain(decision)


def test_an_exploit_is_explained_with_the_tie_and_the_costs() -> None:
    text = explained(Reason.EXPLOIT, "a", ("a", 80, 0.1, 0.002, 0.05), ("b", 80, 0.1, 0.002, 0.05))
    assert "placed at 0.000 s on a (exploit, policy e2)" in text
    assert "Of 100 prompt tokens, 80 are cached at best and 20 are missing, so the request follows the cache" in text
    assert "of the 2 that hold the cached part and serve it, a shares the lowest L + M + P with 1" in text
    assert "* a 80 100.0 2.0 50.0 152.0 b 80" in text
    assert (
        "First token after 0.250 s. Finished after 1.500 s with 7 output tokens. A further token every 0.208 s." in text
    )
    assert text.endswith("The replica reported 64 tokens cached, 16 fewer than predicted.")


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        (Reason.EXPLORE, "too little to follow the cache; of the 2 that could take it, b has the lowest L + M + P"),
        (Reason.BALANCE, "b mostly decodes, so it has compute to spare for a prefill"),
        (
            Reason.REDIRECT,
            "Its prefix is on a, which caches 48 tokens of it, but that replica is much more loaded than b",
        ),
        (Reason.REPLICATE, "the scheduler replicates it; of the 2 that serve it, b has the lowest L + M + P"),
        (Reason.POLICY, "The rule of e2 chose it"),
    ],
)
def test_every_reason_has_its_sentence(reason: Reason, says: str) -> None:
    assert says in explained(reason, "b", ("a", 48, 0.9, 0.0, 0.05), ("b", 0, 0.1, 0.0, 0.1))


@pytest.mark.parametrize(
    ("reason", "chosen", "says"),
    [
        (
            Reason.EXPLOIT,
            "a",
            "and 52 are missing. Of the 2 replicas a is the one where it adds the least delay, to",
        ),
        (
            Reason.EXPLORE,
            "a",
            "and 52 are missing. Of the 2 replicas a is the one where it adds the least delay, to",
        ),
        (Reason.REPLICATE, "b", "although only 0 are cached there: the replica computes its prefix too."),
    ],
)
def test_the_default_policy_is_explained_by_the_delay_it_adds_not_by_e2s_rule(
    reason: Reason, chosen: str, says: str
) -> None:
    costs = {"a": (48, 0.9, 0.0, 0.05), "b": (0, 0.9, 0.0, 0.06)}
    costs[chosen] = (costs[chosen][0], 0.1, 0.0, 0.05)
    text = explained(reason, chosen, *((name, *cost) for name, cost in costs.items()), policy="preble")
    assert "Of 100 prompt tokens, 48 are cached at best " in text and says in text
    assert "wait prefill to wait to evict to compute sum (ms) * " in text
    assert f"* {chosen} {costs[chosen][0]} 5.0 50.0 " in text, "its own time, which a watch can check"
    assert "L + M + P" not in text


def test_the_default_policy_names_ties_and_of_a_single_replica() -> None:
    one, two = ("a", 48, 0.1, 0.0, 0.05), ("b", 48, 0.1, 0.0, 0.05)
    assert "a is one of 2, drawn by lot, where it adds the least delay" in explained(
        Reason.EXPLOIT, "a", one, two, policy="preble"
    )
    assert "a is the only one that could take it." in explained(Reason.EXPLOIT, "a", one, policy="preble")


def test_the_policy_told_by_delay_is_the_one_of_that_name() -> None:
    assert isinstance(make_policy(LEAST_DELAY), Preble)


def scored(policy: str, reason: Reason, replica: str, *candidates: tuple[str, int, float]) -> str:
    weighed = tuple(Candidate(ReplicaId(r), matched, score=score) for r, matched, score in candidates)
    recent = RecentDecisions(policy, 1)
    keep(recent, Placement(RequestId("q"), ReplicaId(replica), reason, 0, 100, weighed), 0.0)
    return " ".join(explain(recent.of_request("q")[0]).split())


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        (Reason.EXPLOIT, "at best where lmetric looked, enough to follow the cache; of the 2 weighed, a has"),
        (Reason.EXPLORE, "at best where lmetric looked, too little to follow the cache; of the 2 weighed"),
        (Reason.BALANCE, "but load is too uneven to follow the cache; of the 2 weighed"),
        (Reason.REDIRECT, "but the replica that caches most of it is too loaded; of the 2 weighed"),
        (Reason.POLICY, "Of 100 prompt tokens 80 are cached at best where lmetric looked; of the 2 weighed, a has"),
    ],
)
def test_a_rule_with_scores_of_its_own_is_explained_by_them(reason: Reason, says: str) -> None:
    text = scored("lmetric", reason, "a", ("b", 80, 100.0), ("a", 0, 60.5))
    assert says in text
    assert "replica cached score (lower is better) * a 0 60.5 b 80 100" in text
    assert "L load" not in text


def test_ties_and_choices_against_the_score_are_reported() -> None:
    assert "a shares the lowest score with 1." in scored("p", Reason.POLICY, "a", ("a", 0, 1), ("b", 0, 1), ("c", 0, 2))
    assert "a was taken, though its score is not the lowest of the 2 weighed." in scored(
        "p", Reason.POLICY, "a", ("a", 0, 2), ("b", 0, 1)
    )
    assert "a is the only one weighed." in scored("p", Reason.EXPLOIT, "a", ("a", 99, 1))


def test_of_a_large_cluster_the_cheapest_and_the_chosen_are_shown() -> None:
    candidates = [(f"r{i:02}", 0, float(i), 0.0, 0.0) for i in range(40)]
    text = explained(Reason.EXPLORE, "r39", *candidates)
    assert "r11 0" in text and "r12 0" not in text and "* r39 0" in text
    assert "and 27 more that cost more" in text
