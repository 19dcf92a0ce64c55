"""Whatever is wanted, and whenever requests end: what is present becomes that, and nothing that runs is cut off."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from preble.config import ReplicaConfig
from preble.discovery import Member
from preble.rules.reconciler import NOT_WANTED, HoldBack, Join, Present, Remove, Replace, plan

URLS = tuple(f"http://10.0.0.{i}:8000" for i in range(5))
HELD_BACK = st.sampled_from([None, "the pod is terminating", "drained by an operator"])
MEMBERS = st.builds(
    lambda url, engine, incarnation, held_back: Member(ReplicaConfig(url, engine), incarnation, held_back),
    st.sampled_from(URLS),
    st.sampled_from(["vllm", "sglang"]),
    st.sampled_from(["", "uid-1", "uid-2"]),
    HELD_BACK,
)
WANTED = st.lists(MEMBERS, unique_by=lambda member: member.url).map(lambda ms: {m.url: m for m in ms})
WATCHED = st.tuples(MEMBERS, HELD_BACK | st.just(NOT_WANTED), st.booleans())
PRESENT = st.dictionaries(st.sampled_from(URLS), WATCHED).map(
    lambda found: {
        url: Present(replace(member, replica=replace_url(member.replica, url)), held_back, is_idle)
        for url, (member, held_back, is_idle) in found.items()
    }
)


def replace_url(replica: ReplicaConfig, url: str) -> ReplicaConfig:
    return ReplicaConfig(url, replica.engine)


@dataclass
class Done:
    """What is present after some steps, and what was done."""

    present: dict[str, Present]
    joined: int = 0


def carried_out(wanted: dict[str, Member], present: dict[str, Present]) -> Done:
    done = Done(dict(present))
    for step in plan(wanted, present):
        match step:
            case Join(member):
                assert member.url not in done.present
                done.present[member.url] = Present(member, member.held_back, is_idle=True)
                done.joined += 1
            case Replace(member):
                assert not done.present[member.url].member.is_same_replica(member)
                done.present[member.url] = Present(member, member.held_back, is_idle=True)
                done.joined += 1
            case HoldBack(url, reason):
                assert done.present[url].held_back != reason
                done.present[url] = replace(done.present[url], held_back=reason)
            case Remove(url):
                assert done.present[url].is_idle, "requests run there"
                del done.present[url]
    return done


@given(WANTED, PRESENT)
def test_after_the_steps_and_the_end_of_all_requests_what_is_wanted_is_present(
    wanted: dict[str, Member], present: dict[str, Present]
) -> None:
    there = carried_out(wanted, present).present
    assert all(there[url].held_back == NOT_WANTED for url in there.keys() - wanted.keys()), "no new requests at once"
    idle = {url: replace(one, is_idle=True) for url, one in there.items()}
    there = carried_out(wanted, idle).present
    assert there.keys() == wanted.keys()
    for url, member in wanted.items():
        assert there[url].member.is_same_replica(member) and there[url].held_back == member.held_back
    assert plan(wanted, there) == []


@given(WANTED, PRESENT)
def test_a_replica_that_is_wanted_as_it_is_stays_untouched(
    wanted: dict[str, Member], present: dict[str, Present]
) -> None:
    touched = {step.member.url if isinstance(step, Join | Replace) else step.url for step in plan(wanted, present)}
    for url, one in present.items():
        member = wanted.get(url)
        if member is not None and one.member.is_same_replica(member) and one.held_back == member.held_back:
            assert url not in touched


@given(WANTED, WANTED)
def test_one_that_comes_back_while_it_is_drained_is_released_and_does_not_join_anew(
    wanted: dict[str, Member], others: dict[str, Member]
) -> None:
    present = {url: Present(member, member.held_back, is_idle=False) for url, member in wanted.items()}
    draining = carried_out({}, present).present
    assert draining.keys() == wanted.keys()
    back = carried_out(wanted, draining)
    assert back.joined == 0 and {url: one.held_back for url, one in back.present.items()} == {
        url: member.held_back for url, member in wanted.items()
    }


@given(WANTED, PRESENT)
def test_a_replica_changes_its_settings_or_its_program_by_a_replacement_only(
    wanted: dict[str, Member], present: dict[str, Present]
) -> None:
    replaced = {step.member.url for step in plan(wanted, present) if isinstance(step, Replace)}
    changed = {url for url in wanted.keys() & present if not present[url].member.is_same_replica(wanted[url])}
    assert replaced == changed
