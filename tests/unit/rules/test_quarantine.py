from __future__ import annotations

from preble.core.types import ReplicaId, Request, RequestId, pack_tokens
from preble.rules.retries import (
    CONFIRMED_WITHIN_S,
    MOST_SUSPECTS,
    ONE_INCIDENT_S,
    QUARANTINE_S,
    SUSPECTED_S,
    Quarantine,
    like_of,
)

DEADLY, OTHER = b"deadly", b"other"
A, B, C = map(ReplicaId, "abc")


def died(quarantine: Quarantine, replica_id: ReplicaId, now: float, *likes: bytes) -> None:
    for like in likes[::2]:
        quarantine.broke(like, replica_id, now - 1.0, now)
    quarantine.left(replica_id, now)
    for like in likes[1::2]:
        quarantine.broke(like, replica_id, now - 1.0, now)


def test_nobody_is_held_after_one_death_however_many_were_there() -> None:
    quarantine = Quarantine()
    likes = [DEADLY, *(b"%d" % number for number in range(50))]
    died(quarantine, A, 10.0, *likes)
    assert not any(quarantine.held(like, 10.0) for like in likes)


def test_the_only_one_at_two_deaths_is_held_for_a_while() -> None:
    quarantine = Quarantine()
    died(quarantine, A, 10.0, DEADLY, OTHER)
    died(quarantine, B, 20.0, DEADLY, b"third")
    assert quarantine.held(DEADLY, 20.0) == [A, B]
    assert not quarantine.held(OTHER, 20.0) and not quarantine.held(b"third", 20.0)
    assert quarantine.held(DEADLY, 20.0 + QUARANTINE_S - 1) and not quarantine.held(DEADLY, 20.0 + QUARANTINE_S)


def test_it_is_held_again_at_the_next_death_alone() -> None:
    quarantine = Quarantine()
    for now, replica_id in ((10.0, A), (20.0, B), (20.0 + QUARANTINE_S, C)):
        died(quarantine, replica_id, now, DEADLY)
    assert quarantine.held(DEADLY, 20.0 + QUARANTINE_S) == [B, C]


def test_of_several_at_the_same_deaths_none_is_held_also_when_others_were_answered() -> None:
    quarantine = Quarantine()
    died(quarantine, A, 10.0, DEADLY, OTHER)
    died(quarantine, B, 20.0, DEADLY, OTHER)
    assert not quarantine.held(DEADLY, 20.0) and not quarantine.held(OTHER, 20.0)
    quarantine.answered(OTHER)
    assert not quarantine.held(DEADLY, 21.0), "it may only be the last one that is asked again"


def test_a_third_death_tells_two_apart() -> None:
    quarantine = Quarantine()
    died(quarantine, A, 10.0, DEADLY, OTHER)
    died(quarantine, B, 20.0, DEADLY, OTHER)
    died(quarantine, C, 30.0, DEADLY)
    assert quarantine.held(DEADLY, 30.0) == [B, C] and not quarantine.held(OTHER, 30.0)


def test_replicas_that_die_together_are_one_death() -> None:
    """A request moves from the first to the second within a moment, and both have lost their host."""
    quarantine = Quarantine()
    died(quarantine, A, 10.0, OTHER)
    died(quarantine, B, 10.0 + ONE_INCIDENT_S / 2, OTHER)
    assert not quarantine.held(OTHER, 11.0)


def test_requests_of_a_kind_at_one_death_count_once() -> None:
    quarantine = Quarantine()
    died(quarantine, A, 10.0, OTHER, OTHER, OTHER)
    assert not quarantine.held(OTHER, 10.0)


def test_a_replica_that_only_breaks_connections_has_not_died() -> None:
    quarantine = Quarantine()
    for now in (10.0, 20.0, 30.0):
        quarantine.broke(OTHER, A, now - 1.0, now)
        quarantine.broke(OTHER, B, now - 1.0, now)
    assert not quarantine.suspects
    quarantine.left(A, 30.0 + CONFIRMED_WITHIN_S)
    assert not quarantine.suspects, "it left for another reason"
    quarantine.broke(OTHER, A, 30.0 + 2 * CONFIRMED_WITHIN_S, 30.0 + 2 * CONFIRMED_WITHIN_S)
    assert not quarantine.suspects


def test_a_replica_that_is_back_at_once_and_dies_again_has_died_twice() -> None:
    quarantine = Quarantine()
    died(quarantine, A, 10.0, OTHER)
    quarantine.broke(OTHER, A, 12.0, 13.0)
    assert not quarantine.held(OTHER, 13.0)
    quarantine.left(A, 13.1)
    assert quarantine.held(OTHER, 13.1) == [A, A]


def test_broken_connections_are_remembered_within_bounds() -> None:
    quarantine = Quarantine()
    for number in range(MOST_SUSPECTS + 1):
        quarantine.broke(b"%d" % number, A, 9.0, 10.0)
    quarantine.left(A, 10.0)
    assert len(quarantine.suspects) == 1


def test_an_answer_clears_a_suspect() -> None:
    quarantine = Quarantine()
    died(quarantine, A, 10.0, OTHER)
    quarantine.answered(OTHER)
    assert not quarantine.suspects
    died(quarantine, B, 20.0, OTHER)
    assert not quarantine.held(OTHER, 20.0)


def test_an_old_death_counts_no_more() -> None:
    quarantine = Quarantine()
    died(quarantine, A, 10.0, OTHER)
    died(quarantine, B, 10.1 + SUSPECTED_S, OTHER)
    assert not quarantine.held(OTHER, 10.1 + SUSPECTED_S)


def test_suspects_of_old_deaths_are_forgotten() -> None:
    quarantine = Quarantine()
    died(quarantine, A, 10.0, DEADLY)
    died(quarantine, B, 20.0, OTHER)
    assert not quarantine.held(b"third", 11.0 + SUSPECTED_S) and len(quarantine.suspects) == 1
    assert not quarantine.held(b"third", 21.0 + SUSPECTED_S) and not quarantine.suspects


def test_of_replicas_that_never_leave_by_themselves_nothing_is_kept() -> None:
    quarantine = Quarantine()
    for number in range(100):
        now = number * (CONFIRMED_WITHIN_S + 1)
        quarantine.broke(DEADLY, ReplicaId(f"replica-{number}"), now - 1.0, now)
    assert sum(len(table) for table in vars(quarantine).values() if isinstance(table, dict)) == 1


def test_as_many_suspects_as_the_table_holds_are_remembered() -> None:
    quarantine = Quarantine()
    died(quarantine, A, 10.0, DEADLY, *(b"%d" % number for number in range(MOST_SUSPECTS)))
    assert len(quarantine.suspects) == MOST_SUSPECTS
    died(quarantine, B, 20.0, DEADLY)
    assert not quarantine.held(DEADLY, 20.0), "it was the first to be forgotten"


def test_requests_are_alike_by_prompt_namespace_and_key() -> None:
    def like(prompt: list[int], namespace: str = "n", key: str = "k") -> bytes:
        return like_of(Request(RequestId("r"), pack_tokens(prompt), None, namespace), key)

    assert like([1, 2]) == like([1, 2])
    others = (like([1, 3]), like([1, 2], namespace="m"), like([1, 2], key="l"), like([1, 2], "nk", ""))
    assert len({like([1, 2]), *others}) == 5
